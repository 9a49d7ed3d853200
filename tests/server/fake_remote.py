"""Servers of other makes, as threads of a test: the first part of a request's path chooses what one does.

`http://127.0.0.1:PORT/NAME/v1` is an endpoint that does what the test's function NAME says.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STREAM = {"Content-Type": "text/event-stream", "Connection": "close"}
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


class Asked(BaseHTTPRequestHandler):
    """One request. A behaviour reads `body` and `headers`, and writes with `say`, `start` and `event`."""

    protocol_version = "HTTP/1.1"
    behaviours: dict[str, Callable[[Asked], None]]
    seen: list[Asked]
    body: Any = None
    left: threading.Event

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._serve()

    def _serve(self) -> None:
        self.left = threading.Event()
        name = self.path.split("/")[1]
        if self.command == "POST":
            self.seen.append(self)
        if self.command == "GET" and f"{name} models" not in self.behaviours:
            self.say(200, {"data": [{"id": name, "max_model_len": 4096}]})
            return
        with suppress(OSError):
            self.behaviours[name if self.command == "POST" else f"{name} models"](self)

    def say(self, status: int, document: Any, **headers: str) -> None:
        """Answer at once, with JSON or with bytes."""
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        for key, value in ({"Content-Type": "application/json", "Content-Length": str(len(data))} | given).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def start(self) -> None:
        """Begin a stream of events that ends with the connection."""
        self.send_response(200)
        for key, value in STREAM.items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection = True

    def event(self, data: Any) -> None:
        self.wfile.write(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")
        self.wfile.flush()

    def chunk(self, reason: str | None = None, index: int = 0, **delta: Any) -> None:
        self.event({"choices": [{"index": index, "delta": delta, "finish_reason": reason}]})

    def end(self, reason: str = "stop") -> None:
        """End a stream as OpenAI does."""
        self.chunk(reason)
        self.event({"choices": [], "usage": USAGE})
        self.event(b"[DONE]")

    def wait_until_left(self) -> None:
        """Write until the client is gone."""
        while True:
            self.chunk(content="more ")
            threading.Event().wait(0.02)


@contextmanager
def remote_server(behaviours: dict[str, Callable[[Asked], None]]) -> Iterator[tuple[str, list[Asked]]]:
    """Give the address of a server and the requests that it gets, while the block runs."""
    seen: list[Asked] = []
    handler = type("Handler", (Asked,), {"behaviours": behaviours, "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def config_of(tables: dict[str, dict[str, Any]]) -> str:
    """Return a config.toml with a table for each model."""
    lines = []
    for name, table in tables.items():
        lines += [f'[models."{name}"]', *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {_toml(one)}' for key, one in value.items()) + " }"
    return json.dumps(value)
