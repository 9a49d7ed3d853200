"""Ends a server that a check or a benchmark started. Knows nothing of what the server does."""

from __future__ import annotations

import subprocess

LIMIT_S = 60.0  # a server that ends writes conversations to disk before


def end_server(process: subprocess.Popen[bytes]) -> None:
    """End a server as a user does, with SIGTERM; kill one that does not end; close its pipes."""
    process.terminate()
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream
        stream.close()
