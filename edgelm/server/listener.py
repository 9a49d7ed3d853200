"""The sockets that we bind ourselves, the folder of the private ones, and uvicorn without its habits.

Owns modes and lengths of socket paths. Knows nothing of what is served.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from edgelm.errors import EdgeLMError
from edgelm.server.runtime import is_alive

MAX_PATH_BYTES = 100  # of a Unix socket: Linux takes 107, macOS 103
BACKLOG = 512
PREFIX = "engines-"  # of a front's folder of sockets; its process id follows
KEEP_ALIVE_S = 30


class Server(uvicorn.Server):
    """Serves on sockets of ours; signals are the caller's."""

    def __init__(self, app: ASGIApp, *, grace_s: int | None = None) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class PortTakenError(EdgeLMError):
    """Another process listens at the address."""


def bind_tcp(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises PortTakenError, or EdgeLMError for another reason."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EdgeLMError(f"{host} is no address to listen at: {error.strerror}", "give another --host") from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restart at once; still one listener a port
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"port {port} of {host} is in use", "choose another with --port") from None
        message = f"cannot listen at {host} port {port}: {error.strerror}"
        raise EdgeLMError(message, "choose another with --host and --port") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a TCP listener, as a client on this machine calls it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind_unix(path: Path) -> socket.socket:
    """Return a listening socket at a path that nobody else may connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    return listener


def private_folder(path: Path) -> Path:
    """Make a folder of mode 0700, or see that it is one of ours. Raises EdgeLMError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
            raise EdgeLMError(f"{path} is not a folder of yours", "remove it, or set EDGELM_RUNTIME_DIR to another")
        if stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise EdgeLMError(
            f"the folder {path} cannot be made: {error.strerror}", "set EDGELM_RUNTIME_DIR to another"
        ) from None
    return path


@contextlib.contextmanager
def socket_folder(runtime: Path) -> Iterator[Path | None]:
    """Give a folder for the sockets of this process, removed at the end; None: there are no Unix sockets.

    It is in the runtime folder, or in the temporary one where the path of a socket would be too long.
    """
    if not hasattr(socket, "AF_UNIX"):
        yield None
        return
    _remove_stale(runtime)
    for parent in (runtime, Path(tempfile.gettempdir())):
        if len(os.fsencode(parent / f"{PREFIX}{os.getpid()}-xxxxxxxx" / "9999.sock")) <= MAX_PATH_BYTES:
            break
    else:
        yield None
        return
    prefix = f"{PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as made:  # mode 0700
        yield Path(made)


def _remove_stale(runtime: Path) -> None:
    """Remove what fronts that were killed left behind."""
    for folder in runtime.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
