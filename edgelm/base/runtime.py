"""The files by which running servers ("fronts") are found: `front.json` in the runtime folder, and `front-PID.json`.

Owns these files, which only their user can read: `{"pid", "address"}`, and `key`, `certificate`, `of`, `library` and
`ollama` of a front that has them. A file or a folder of another user tells of no front. The first front has
`front.json`. A front that was killed does not remove its file; readers ignore it, and the next front removes it.
`agent-PID` is the file of a program that `edgelm launch` became, with its birth.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgelm.base.atomic import atomic_json, atomic_write, read_json
from edgelm.base.errors import EdgeLMError

if TYPE_CHECKING:  # the chat imports this module before its first paint
    import ssl

log = logging.getLogger(__name__)

FILE = "front.json"
MORE_FILES = "front-*.json"
AGENT_FILES = "agent-*"
MAX_BYTES = 4096


NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python does not name


class FrontRecord(NamedTuple):
    """The process of a front, and how the user who started it reaches it."""

    pid: int
    address: str
    key: str = ""  # for this user's own commands; empty: the front needs no key
    certificate: str = ""  # file of the front's certificate; empty: it speaks HTTP
    of: str = ""  # "chat": it ends with that chat; "launch": when no agent is left
    library: str = ""  # as `Config.library`; empty: of an older version, which does not tell it
    ollama: str = ""  # the second address, for clients that know only Ollama's port; empty: there is none

    def serves(self, library: str) -> bool:
        """Return whether it has the models of a library, as far as it tells."""
        return "" in (library, self.library) or library == self.library

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def tls(self) -> ssl.SSLContext | bool:
        """Return the argument `verify` of a client that trusts the front's own certificate, whatever name it has.

        Raises EdgeLMError if the file cannot be read.
        """
        return trusting(Path(self.certificate)) if self.certificate else True


def trusting(certificate: Path) -> ssl.SSLContext:
    """Return the context of a client that trusts the certificates of a file only, at any time. Raises EdgeLMError."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    try:
        context.load_verify_locations(certificate)
    except OSError as error:
        raise EdgeLMError(f"the certificate {certificate} cannot be read: {error.strerror}") from None
    return context


def find_front(runtime: Path, library: str = "") -> FrontRecord | None:
    """Return the first of the fronts that `find_fronts` returns."""
    return next(iter(find_fronts(runtime, library)), None)


def find_fronts(runtime: Path, library: str = "") -> list[FrontRecord]:
    """Return the recorded fronts whose processes are alive, those of a library first: all homes may share a folder.

    The caller finds out whether they answer.
    """
    if not _is_ours(runtime):
        return []
    found = (_read(file) for file in (runtime / FILE, *sorted(runtime.glob(MORE_FILES))))
    return sorted((record for record in found if record is not None), key=lambda record: not record.serves(library))


def _is_ours(path: Path) -> bool:
    """Return whether this user owns a file or folder, and nobody else may write to it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_link = stat.S_ISLNK(status.st_mode)
    return not is_link and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _read(file: Path) -> FrontRecord | None:
    """Return the front of a file of this user if its process is alive."""
    if not _is_ours(file):
        return None
    try:
        data = read_json(file, MAX_BYTES)
        own = (str(data.get(name, "")) for name in ("key", "certificate", "of", "library", "ollama"))
        record = FrontRecord(int(data["pid"]), str(data["address"]), *own)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if is_alive(record.pid) else None


@contextmanager
def announced(runtime: Path, record: FrontRecord) -> Iterator[None]:
    """Record this front while the block runs."""
    for stale in runtime.glob(MORE_FILES):
        if _read(stale) is None:
            _remove(stale)
    announce(runtime, record)
    if not _is_ours(runtime):
        log.warning("no chat or command will find this server: %s is a link, or others may write to it", runtime)
    try:
        yield
    finally:
        for file in _files(runtime, record):
            if _read(file) == record:
                _remove(file)


def announce(runtime: Path, record: FrontRecord) -> None:
    """Record this front, unless its file is there: a cleaner of temporary folders or a log-out may have removed it."""
    first, own = _files(runtime, record)
    if record in (_read(first), _read(own)):
        return
    document = {name: value for name, value in record._asdict().items() if value}
    # Mode 0600. On a full disk the front runs, but is not found.
    atomic_json(first if _read(first) is None else own, document)


def _files(runtime: Path, record: FrontRecord) -> tuple[Path, Path]:
    """Return the files that may have the record of a front: the one of the first front, and its own."""
    return runtime / FILE, runtime / MORE_FILES.replace("*", str(record.pid))


def note_agent(runtime: Path) -> None:
    """Record that this process is an agent, or becomes one: a front that `edgelm launch` started waits for its end.

    Raises OSError.
    """
    atomic_write(runtime / AGENT_FILES.replace("*", str(os.getpid())), birth(os.getpid()).encode())


def agents_run(runtime: Path, *, besides: int | None = None) -> bool:
    """Return whether a recorded agent is alive, other than `besides`; remove the files of those that are not."""
    alive = False
    for file in runtime.glob(AGENT_FILES):
        if not _is_agent(file):
            _remove(file)
        elif file.name != AGENT_FILES.replace("*", str(besides)):
            alive = True
    return alive


def _is_agent(file: Path) -> bool:
    """Return whether the process of a file is alive; by its id alone where its birth is unknown.

    Earlier versions noted none on macOS.
    """
    pid = file.name.rpartition("-")[2]
    if not (pid.isascii() and pid.isdecimal() and is_alive(int(pid))):
        return False
    try:
        noted = file.read_bytes().decode(errors="replace")
    except OSError:
        return False
    born = birth(int(pid))
    return not noted or not born or noted == born


def birth(pid: int, proc: Path = Path("/proc")) -> str:
    """Return when a process began, which tells it from a later one with its id; empty where that cannot be read."""
    try:
        status = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return _birth_by_ps(pid)
    return status.rpartition(")")[2].split()[19]  # starttime of proc(5), in ticks since the system began


def _birth_by_ps(pid: int) -> str:
    """Return the time at which a process began; on macOS, which has no /proc."""
    import subprocess

    command = ["/bin/ps", "-o", "lstart=", "-p", str(pid)]
    environment = {"LC_ALL": "C", "TZ": "UTC"}  # two processes are to read the same
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return " ".join(done.stdout.split())


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Return whether a process with this id exists."""
    if pid <= 0:  # os.kill would signal a group of processes
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
