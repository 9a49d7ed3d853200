"""A door before the server that notes the shape of each request and of its answer. It keeps no text of an agent.

It announces itself as the front, so that `edgelm launch` finds it.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.clients.programs import LIMIT_S

NOTED = ("/v1/", "/api/", "/chat/completions")  # in paths: APIs of OpenAI and Anthropic, Ollama, llama.cpp
NOTE_LIMIT_S = 120.0
ENDS = ("finish_reason", "stop_reason", "status", "done_reason")


@dataclass(slots=True)
class Exchange:
    """A request and its answer, by shape."""

    path: str
    keyed: bool
    status: int
    messages: int = 0
    tools: list[str] = field(default_factory=list)
    body_bytes: int = 0
    max_tokens: int | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    reasoned: bool = False
    ended: str = ""

    def line(self) -> str:
        tools = f"{len(self.tools)} tools" if self.tools else "no tools"
        limit = f", at most {self.max_tokens:,} tokens" if self.max_tokens else ""
        shape = f"{self.messages} messages, {tools}, {self.body_bytes:,} bytes{limit}"
        used = ", ".join(f"{name} {count}" for name, count in self.usage.items())
        reasoned = "reasoning, " if self.reasoned else ""
        return f"POST {self.path}: {shape} -> {self.status} {reasoned}{self.ended} ({used})"


class Record:
    """The exchanges so far, and how many requests have no answer yet."""

    def __init__(self, address: str) -> None:
        self.address = address  # of the door
        self._changed = threading.Condition()
        self._exchanges: list[Exchange] = []
        self._open = 0

    def begin(self) -> None:
        with self._changed:
            self._open += 1

    def end(self, exchange: Exchange | None) -> None:
        with self._changed:
            self._open -= 1
            self._exchanges += [exchange] if exchange else []
            self._changed.notify_all()

    def take(self) -> list[Exchange]:
        """Return the exchanges since the last call.

        A program can end before its last answer is noted here, so this waits until no request is open.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open, NOTE_LIMIT_S):
                raise TimeoutError(f"{self._open} requests without an end")
            taken, self._exchanges = self._exchanges, []
        return taken


@contextmanager
def recording(address: str) -> Iterator[Record]:
    """Forward to the server at an address while the block runs; yield what is noted."""

    class Door(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # the end of the connection ends a body

        def do_GET(self) -> None:
            self._forward()

        def do_HEAD(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def log_message(self, *_: object) -> None:
            pass

        def _forward(self) -> None:
            exchange = None
            record.begin()
            try:
                exchange = self._answer()
            finally:
                record.end(exchange)

        def _answer(self) -> Exchange | None:
            """Forward a request and its answer; return the exchange if it is one with a model."""
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            parts = urlsplit(address)
            server = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT_S)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            server.request(self.command, self.path, body, kept)
            answer = server.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            self.end_headers()
            sent = bytearray()
            try:
                while part := answer.read1(65_536):
                    sent += part
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:  # the agent is gone
                pass
            finally:
                server.close()
            if self.command != "POST" or not any(part in self.path for part in NOTED):
                return None
            keyed = any(name.lower() in ("authorization", "x-api-key") for name in self.headers)
            return _exchange(Exchange(self.path, keyed, answer.status), body, bytes(sent))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    server.daemon_threads = True
    record = Record(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield record
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _exchange(found: Exchange, body: bytes, sent: bytes) -> Exchange:
    """Note the shape of a request and of its answer."""
    request = json.loads(body or b"{}")
    entries = request.get("messages") or request.get("input") or []
    found.body_bytes = len(body)
    found.messages = len(entries) if isinstance(entries, list) else 1
    found.tools = [_tool_name(tool) for tool in request.get("tools") or []]
    limits = (request.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
    found.max_tokens = next((limit for limit in limits if limit), None)
    found.reasoned = b"I look at the file first" in sent
    for document in _documents(sent):
        _read(document, found)
    return found


def _tool_name(tool: dict[str, Any]) -> str:
    return str(tool.get("name") or (tool.get("function") or {}).get("name") or tool.get("type"))


def _documents(sent: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents of a body, of its events (SSE), or of its lines (Ollama)."""
    text = sent.decode(errors="replace")
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")] or [text, *text.splitlines()]
    for line in lines:
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            yield document


def _read(document: dict[str, Any], found: Exchange) -> None:
    """Note the usage and the end that a document tells."""
    places = [document, document.get("response"), document.get("message"), document.get("delta")]
    places += document.get("choices") or []
    for place in places:
        if not isinstance(place, dict):
            continue
        for name in ENDS:
            if isinstance(place.get(name), str) and place[name] != "in_progress":
                found.ended = place[name]
        counts = {name: place[name] for name in ("prompt_eval_count", "eval_count") if place.get(name)}  # Ollama's
        found.usage |= counts
        if isinstance(usage := place.get("usage"), dict):
            found.usage |= {name: count for name, count in usage.items() if isinstance(count, int) and count}
            for details in ("prompt_tokens_details", "input_tokens_details"):
                cached = (usage.get(details) or {}).get("cached_tokens")
                found.usage |= {"cached": cached} if cached else {}
