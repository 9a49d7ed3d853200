"""Machine facts: what is tried once on this machine with the installed llama.cpp, and kept in the cache folder.

Owns one decision: which of llama.cpp's kernels are safe here. A worker (the canary) does all native work; this module
imports none of it, so that the front process can call it.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from edgelm.base.atomic import atomic_json, read_json
from edgelm.base.errors import EdgeLMError, EngineError
from edgelm.base.machine.cpu import Cores, processor_flags, read_text, sysctl_text, usable_cores
from edgelm.base.machine.llama_build import COMPILED, SUPPORTED, find_build
from edgelm.base.places import has_pip, own_places
from edgelm.base.workers.parent import Worker, WorkerDiedError, ask

Canary = Literal["ok", "no_amx", "no_repack", "failed"]

CANARY = "edgelm.backends.llama.canary"
TIME_LIMIT_S = 60
FORMAT = 2  # of the file, and of the canary's checks: part of the key
MAX_FILE_BYTES = 65_536
SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
NO_AMX = {"EDGELM_NO_AMX": "1"}  # packaging/llama_source.py; another build of llama.cpp ignores it
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP)
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"  # GCC before 14 miscompiles AMX (packaging/llama_source.py)


@dataclass(frozen=True, slots=True)
class CheckKernels:
    """Decode with every kernel family of llama.cpp. `folder` is for the canary's models."""

    folder: Path
    threads: int
    repack: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check; the reason is empty if the numbers are right."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts that an engine needs before it loads llama.cpp."""

    canary: Canary
    reason: str = ""  # why it is not "ok"

    @property
    def repack(self) -> bool:
        """Whether llama.cpp may rearrange the weights for this processor (`use_extra_bufts`)."""
        return self.canary in ("ok", "no_amx")

    @property
    def environment(self) -> dict[str, str | None]:
        """The environment variables that keep a process from the kernels that are wrong here."""
        return dict(NO_AMX) if self.canary == "no_amx" else {}

    def require_working(self) -> None:
        """Raise EngineError if llama.cpp does not work at all."""
        if self.canary == "failed":
            raise EngineError(f"llama.cpp {self.reason}", reinstall())


def facts(cache_dir: Path, *, notify: Callable[[str], None], command: tuple[str, ...] = ()) -> MachineFacts:
    """Return the facts from the cache folder, or measure and keep them; `notify` takes a line for the user.

    The first call takes 2 seconds, later calls 2 ms. Concurrent first calls each measure. Raises EngineError if
    llama.cpp could not be tried; if it was tried and does not work, the facts say so.
    """
    cores = usable_cores()
    path = cache_dir / "machine" / f"{machine_key(cores)}.json"
    kept = _read(path)
    if kept is not None:
        return kept
    notify("checking llama.cpp on this machine, once")
    try:
        temporary = tempfile.TemporaryDirectory(prefix="edgelm-canary-", ignore_cleanup_errors=True)
    except OSError as error:
        raise EngineError(f"cannot make a temporary folder: {error}", "set TMPDIR to one with 50 MB free") from None
    with temporary as folder:
        measured, lasting = measure(CanaryRunner(Path(folder), cores.physical, command), notify)
    if lasting:
        atomic_json(path, asdict(measured))
    return measured


def measure(canary: CanaryRunner, notify: Callable[[str], None]) -> tuple[MachineFacts, bool]:
    """Return the facts about llama.cpp, and whether they are worth keeping. Raises EngineError."""
    fast = canary.check(repack=True)
    if fast is None:
        return MachineFacts(canary="ok"), True
    if has_amx() and canary.check(repack=True, amx=False) is None:
        notify(f"with AMX llama.cpp {fast.reason}: it is switched off, and long prompts take longer; {reinstall()}")
        return MachineFacts(canary="no_amx", reason=fast.reason), fast.lasting
    plain = canary.check(repack=False)
    if plain is not None:  # not kept, so that a repair takes effect at once
        return MachineFacts(canary="failed", reason=plain.reason), False
    cost = "the plain ones are used, at about 0.6 times the speed"
    notify(f"with its fastest kernels llama.cpp {fast.reason}: {cost}; {reinstall()}")
    return MachineFacts(canary="no_repack", reason=fast.reason), fast.lasting


def reinstall() -> str:
    """Return the command that compiles llama.cpp for this machine again, into this environment."""
    flags = f"CFLAGS='{WITHOUT_AMX}' CXXFLAGS='{WITHOUT_AMX}' " if has_amx() else ""
    python, release = shlex.quote(sys.executable), f"--no-deps --no-binary {COMPILED} {COMPILED}=={SUPPORTED}"
    if has_pip():
        command = f"{python} -m pip install --force-reinstall --no-cache-dir {release}"
    else:  # an environment of uv's
        command = f"uv pip install --python {python} --reinstall --no-cache {release}"
    return f"compile llama.cpp here: {flags}{command}"


def has_amx() -> bool:
    """Tell whether the processor has the instructions for which llama.cpp has AMX kernels."""
    return {"amx_tile", "amx_int8"} <= processor_flags()


def machine_key(cores: Cores, root: Path = Path("/")) -> str:
    """Return a key of the llama.cpp build, the machine and the cores: facts hold only under their key.

    Raises EngineError if there is no llama.cpp.
    """
    build = find_build()
    libraries = sorted(build.lib_dir.glob("*"))
    stats = [(library.name, library.stat().st_size, library.stat().st_mtime_ns) for library in libraries]
    identity: tuple[object, ...]
    identity = (FORMAT, build.package, build.version, str(build.lib_dir), stats, _processor(root), tuple(cores))
    if own_places().no_amx:
        identity = (*identity, *NO_AMX)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


class Failure(NamedTuple):
    """Why llama.cpp failed in the canary: the reason continues a sentence that begins with "llama.cpp"."""

    reason: str
    lasting: bool  # a property of machine and build, not of this moment


@dataclass(frozen=True, slots=True)
class CanaryRunner:
    """Starts the canary, a worker that llama.cpp may crash, once for each request."""

    folder: Path  # for its models
    threads: int
    command: tuple[str, ...] = ()  # in place of the canary's own

    def check(self, *, repack: bool, amx: bool = True) -> Failure | None:
        """Return why llama.cpp must not be used in this way; None: it works. Raises EngineError."""
        reply = self._ask(CheckKernels(self.folder, self.threads, repack), SLEEP if amx else SLEEP | NO_AMX)
        if isinstance(reply, Failure):
            return reply
        if reply.reason:
            return Failure(f"computes wrongly on this machine ({reply.reason})", lasting=True)
        return None

    def _ask(self, request: object, environment: dict[str, str]) -> Checked | Failure:
        """Return the canary's reply. Raises EngineError for an end that says nothing about llama.cpp's kernels."""
        try:
            worker = Worker(CANARY, replies=(Checked,), environment=environment, command=self.command)
            reply: Checked = ask(worker, request, TIME_LIMIT_S)
            return reply
        except TimeoutError:
            return Failure(f"did not decode a few tokens within {TIME_LIMIT_S} seconds on this machine", lasting=False)
        except WorkerDiedError as error:
            end = error.end
            if -end.code in CRASHES:
                detail = f": {end.last_line}" if end.last_line else ""
                return Failure(f"crashes on this machine ({end.signal_name}){detail}", lasting=True)
            if end.error:
                raise EngineError(end.error) from None
            reason = end.last_line or f"the process {end.how}"
        except EdgeLMError as error:
            reason = error.message
        raise EngineError(f"llama.cpp could not be tried: {reason}", "see `edgelm doctor`, or reinstall edgelm")


def _processor(root: Path) -> list[str]:
    """Return the lines that identify the processor's model and instruction sets."""
    described = read_text(root / "proc/cpuinfo") or sysctl_text("machdep.cpu.brand_string")  # the latter on macOS
    first = described.partition("\n\n")[0]
    changing = ("processor", "cpu MHz", "bogomips", "BogoMIPS", "apicid", "initial apicid", "core id", "physical id")
    lines = [line for line in first.splitlines() if line.partition(":")[0].strip() not in changing]
    return [platform.machine(), platform.processor(), *lines]


def _read(path: Path) -> MachineFacts | None:
    """Return the facts in a file; None if there is no file, or not one that we wrote."""
    document = read_json(path, MAX_FILE_BYTES)
    try:
        kept = MachineFacts(**document)
    except TypeError:
        return None
    return kept if kept.canary in ("ok", "no_amx", "no_repack") and isinstance(kept.reason, str) else None
