"""Listening sockets, the folder of the private ones, and uvicorn on sockets that we bound.

Owns the modes and lengths of socket paths. Knows nothing of the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import socket
import ssl
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from edgelm.base.errors import EdgeLMError
from edgelm.base.places import take_variables
from edgelm.base.runtime import is_alive
from edgelm.server.protocol import KEEP_ALIVE_S, LimitedProtocol, max_connections

MAX_PATH_BYTES = 100  # of a Unix socket: Linux takes 107, macOS 103
FIRST_FD = 3  # of the sockets that systemd passes
BACKLOG = 1024  # connections that wait to be accepted
ACCEPTED = 64  # at once; between two such rounds the limit on open connections is applied
PREFIX = "engines-"  # of a front's folder of sockets; its process id follows
NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
NOTICE_S = 60.0  # between two log lines on connections that cannot be accepted

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Serves on our own sockets, and leaves signals to the caller."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace_s: int | None = None,
        protocol: type[LimitedProtocol] = LimitedProtocol,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED,
            limit_concurrency=max_connections(),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
            ssl_context_factory=(lambda *_: tls) if tls else None,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptNotices())
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set it to ACCEPTED

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AcceptNotices:
    """Exception handler of an event loop: one line, and only sometimes, while no connection can be accepted.

    asyncio reports each attempt with a traceback, many thousands a second.
    """

    def __init__(self) -> None:
        self._noticed = -NOTICE_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in NO_RESOURCES and "socket" in context):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._noticed >= NOTICE_S:
            self._noticed = time.monotonic()
            log.warning("connections cannot be accepted: %s; raise the limit with `ulimit -n`", error.strerror)


class PortTakenError(EdgeLMError):
    """Another process listens on the address."""


def bind_tcp(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises PortTakenError, or EdgeLMError for another failure."""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(candidates, key=lambda candidate: candidate[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EdgeLMError(f"cannot listen on {host}: {error.strerror}", "give another --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restart at once; still one listener a port
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"port {port} of {host} is in use", "choose another with --port") from None
        message = f"cannot listen on {host} port {port}: {error.strerror}"
        raise EdgeLMError(message, "choose another with --host and --port") from None
    return listener


def inherited_listener() -> socket.socket | None:
    """Return the listening socket that systemd passed to this process, by sd_listen_fds(3); None: it passed none.

    Its variables are removed, so that no child takes the socket for its own. Raises EdgeLMError for several sockets,
    and for one that does not listen at a TCP port.
    """
    given = take_variables("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
    if given.get("LISTEN_PID") != str(os.getpid()) or "LISTEN_FDS" not in given:
        return None
    if given["LISTEN_FDS"] != "1":
        raise EdgeLMError(f"systemd passed {given['LISTEN_FDS']} sockets", "give one ListenStream in edgelm.socket")
    os.set_inheritable(FIRST_FD, False)
    try:
        listener = socket.socket(fileno=FIRST_FD)
        is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
        listens = is_tcp and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise EdgeLMError(f"the socket that systemd passed cannot be used: {error.strerror}") from None
    if not listens:
        listener.close()
        raise EdgeLMError("systemd passed a socket that listens at no TCP port", "correct ListenStream of the unit")
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a TCP listener for clients on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def bind_unix(path: Path) -> socket.socket:
    """Return a listening socket at a path; only this user may connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    return listener


def private_folder(path: Path) -> Path:
    """Make a folder of mode 0700, or check that an existing one is ours. Raises EdgeLMError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise EdgeLMError(f"{path} is not a folder of yours", "remove it, or set EDGELM_RUNTIME_DIR to another")
        if stat.S_IMODE(status.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise EdgeLMError(
            f"the folder {path} cannot be made: {error.strerror}", "set EDGELM_RUNTIME_DIR to another"
        ) from None
    return path


@contextlib.contextmanager
def socket_folder(runtime: Path) -> Iterator[Path | None]:
    """Give a folder for the sockets of this process and remove it at the end; None: no path is short enough.

    The folder is in the runtime folder, or in the temporary folder if the path of a socket would be too long.
    """
    _remove_stale(runtime)
    for parent in (runtime, Path(tempfile.gettempdir())):
        if len(os.fsencode(parent / f"{PREFIX}{os.getpid()}-xxxxxxxx" / "9999.sock")) <= MAX_PATH_BYTES:
            break
    else:
        yield None
        return
    prefix = f"{PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as folder:  # mode 0700
        yield Path(folder)


def _remove_stale(runtime: Path) -> None:
    """Remove the socket folders of fronts that were killed."""
    for folder in runtime.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
