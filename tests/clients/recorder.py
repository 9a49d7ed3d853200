"""A door before the server that notes the shape of each request and of its answer: no text of an agent is kept.

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


@contextmanager
def recording(address: str) -> Iterator[tuple[str, list[Exchange]]]:
    """Forward to the server at an address while the block runs; yield our address, and the list that grows."""
    seen: list[Exchange] = []

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
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            parts = urlsplit(address)
            server = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
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
            if self.command == "POST" and "/v1/" in self.path:
                keyed = any(name.lower() in ("authorization", "x-api-key") for name in self.headers)
                seen.append(_exchange(Exchange(self.path, keyed, answer.status), body, bytes(sent)))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _exchange(found: Exchange, body: bytes, sent: bytes) -> Exchange:
    """Note the shape of a request and of its answer."""
    request = json.loads(body)
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
    """Yield the JSON documents of a body or of its events."""
    text = sent.decode(errors="replace")
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")] or [text]
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
        if isinstance(usage := place.get("usage"), dict):
            found.usage |= {name: count for name, count in usage.items() if isinstance(count, int) and count}
            for details in ("prompt_tokens_details", "input_tokens_details"):
                cached = (usage.get(details) or {}).get("cached_tokens")
                found.usage |= {"cached": cached} if cached else {}
