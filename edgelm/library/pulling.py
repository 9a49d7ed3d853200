"""A pull in a process of its own: for the chat, which goes on meanwhile and imports neither the hub client nor us.

    python -m edgelm.library.pulling
    standard input    one line of JSON, the job; when it closes, the process ends at once and keeps what came
        {"model": "qwen3:4b" or "OWNER/NAME:QUANT", "revision": null or "main", "connections": null or 4}
        all but "model" may be left out
    standard output   one line of JSON an event:
        {"event": "listed", "repository", "commit", "files": [{"path", "size", "here"}]}       bytes; once, at first
        {"event": "progress", "done", "total", "files_done", "files", "rate", "seconds_left"}   bytes, bytes/s; often
        {"event": "waiting", "path"}                     another process fetches this file
        {"event": "retrying", "path", "reason", "wait_s"}
        {"event": "checking", "path"}                    complete, its hash is being computed
        {"event": "wrong", "path"}                       the hash is wrong: this file is fetched again
        {"event": "fetched", "path"}                     this file is done
        {"event": "done", "path", "bytes", "fetched", "seconds"}     last; "path" is what `edgelm run` takes
        {"event": "error", "message", "hint"}                        last; exit code 1
    standard error    nothing but what goes wrong in Python itself

`rate` is 0 where nothing comes, `seconds_left` null where it is not known. Fields may be added, none renamed.

Owns that protocol. What a pull is, is in pull.py.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict, replace
from typing import Any

from edgelm.config import load_config
from edgelm.errors import EdgeLMError
from edgelm.library.catalog import hub_reference
from edgelm.library.events import Event, Pulled
from edgelm.library.hub import Hub
from edgelm.library.pull import CONNECTIONS, pull
from edgelm.library.source import CancelledTransferError


def main() -> int:
    """Do the one job that standard input names; return the exit code."""
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _pull(json.loads(line))
    except EdgeLMError as error:
        _emit({"event": "error", "message": error.message, "hint": error.hint})
        return 1
    except (KeyboardInterrupt, CancelledTransferError):
        return 130
    return 0


def event_json(event: Event) -> dict[str, Any]:
    """Return an event as its line has it."""
    if isinstance(event, Pulled):
        done = {"path": str(event.path), "bytes": event.nbytes, "fetched": event.fetched}
        return {"event": "done", **done, "seconds": round(event.seconds, 3)}
    return {"event": type(event).__name__.lower(), **asdict(event)}


def _pull(job: dict[str, Any]) -> None:
    places = load_config({}).places
    reference = hub_reference(job["model"])
    if job.get("revision"):
        reference = replace(reference, revision=job["revision"])
    hub = Hub(places.hub_endpoint, places.hub)
    pull(reference, hub, lambda event: _emit(event_json(event)), connections=job.get("connections") or CONNECTIONS)


def _emit(event: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent is gone


def _end_with_parent() -> None:
    """End this process when its parent closes standard input or dies: every byte that came is in its file already."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
