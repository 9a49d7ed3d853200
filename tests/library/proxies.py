"""A proxy on loopback that speaks HTTP (forwarding and CONNECT) or SOCKS5, and records the requested addresses."""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

Address = tuple[str, int]


class Proxy(socketserver.ThreadingTCPServer):
    """Use as a context manager. With `reply`, it sends that instead of its first answer, and closes.

    One that `refuses` connects nowhere.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, kind: str, reply: bytes | None = None, *, refuses: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), {"http": _HTTPProxy, "socks5": _SOCKSProxy}[kind])
        self.url = f"{kind}://127.0.0.1:{self.server_address[1]}"
        self.reply = reply
        self.refuses = refuses
        self.addresses: list[Address] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()
        self.server_close()


class _Tunnel(socketserver.BaseRequestHandler):
    server: Proxy
    request: socket.socket

    def take(self, count: int) -> bytes:
        return self.request.recv(count, socket.MSG_WAITALL)

    def join(self, address: Address, reply: bytes, first: bytes = b"") -> None:
        """Connect, send `reply`, and forward the bytes of both sides until one of them ends."""
        self.server.addresses.append(address)
        if self.server.refuses:
            self.request.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
            return
        with socket.create_connection(address) as target:
            self.request.sendall(reply)
            target.sendall(first)
            back = threading.Thread(target=_pass_on, args=(target, self.request), daemon=True)
            back.start()
            _pass_on(self.request, target)
            back.join()


class _HTTPProxy(_Tunnel):
    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = self.request.recv(65536)
            if not piece:
                return
            head += piece
        method, target, _ = head.split(b" ", 2)
        place = urlsplit(f"//{target.decode()}" if method == b"CONNECT" else target.decode())
        address = place.hostname or "", place.port or 80
        if method == b"CONNECT":
            self.join(address, b"HTTP/1.1 200 Connected\r\n\r\n")
        else:
            self.join(address, b"", head)  # servers take a whole address as well


class _SOCKSProxy(_Tunnel):
    """RFC 1928, without a login."""

    def handle(self) -> None:
        self.take(self.take(2)[1])
        if self.server.reply is not None:
            self.request.sendall(self.server.reply)
            return
        self.request.sendall(b"\x05\x00")
        kind = self.take(4)[3]
        host = socket.inet_ntoa(self.take(4)) if kind == 1 else self.take(self.take(1)[0]).decode()
        port = int.from_bytes(self.take(2))
        self.join((host, port), b"\x05\x00\x00\x01" + bytes(6))


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(65536):
            target.sendall(piece)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
