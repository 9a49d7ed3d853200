"""A port for a server that must know it before it listens."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)  # below those that Linux and macOS give to connections, and to servers that ask for any


def free_port() -> int:
    """Return a port of the loopback interface where nothing listens; another process will hardly take it meanwhile."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
