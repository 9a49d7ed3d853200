"""What is measured once about this machine and the installed llama.cpp, and kept in the cache folder.

Owns the decisions: which of llama.cpp's kernels are safe here, and how its threads wait. All native work is done by
child processes (`canary`); this module imports none of it, so that the front process can call it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from edgelm.errors import EngineError
from edgelm.executors.cgroup import read_text
from edgelm.executors.cores import Cores, usable_cores
from edgelm.executors.kept import keep_json

Canary = Literal["ok", "no_repack", "failed"]
WaitPolicy = Literal["passive", "brief", "default"]

CANARY_COMMAND = (sys.executable, "-P", "-m", "edgelm.executors.canary")  # -P: nothing of the current folder
HAS_OPENMP = sys.platform != "darwin"
TIME_LIMIT_S = 60
ALTERNATIONS = 3
FORMAT = 1  # of the file, and of what the canary tries: part of the key
LARGEST_FILE_BYTES = 65_536
# How OpenMP's threads wait for each other: sleeping at once, spinning for about the time that waking takes, or
# OpenMP's own way, which is to spin for milliseconds. Quiet: the last is the fastest. Beside busy processes it
# takes their victims' time slices away: 4 to 50 times slower than the other two (tests/bench/bench_wait_policy.py).
POLICIES: dict[WaitPolicy, dict[str, str]] = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "brief": {"GOMP_SPINCOUNT": "1000"},
    "default": {},
}
WORTH: dict[WaitPolicy, float] = {"passive": 1.10, "brief": 1.25, "default": 1.0}  # times the fastest's time
CRASHES = (
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
)
REINSTALL = (
    "reinstall llama-cpp-python so that it is compiled here: "
    "pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What the engine must know before it loads llama.cpp."""

    canary: Canary
    reason: str = ""  # why it is not "ok"
    wait_policy: WaitPolicy = "passive"
    token_ms: dict[WaitPolicy, float] = field(default_factory=dict)  # as measured; empty: not measured

    @property
    def repack(self) -> bool:
        """Whether llama.cpp may rearrange the weights for this processor (`use_extra_bufts`)."""
        return self.canary == "ok"

    def require_working(self) -> None:
        """Raise EngineError where llama.cpp does not work at all."""
        if self.canary == "failed":
            raise EngineError(f"llama.cpp {self.reason}", REINSTALL)


def child_environment(facts: MachineFacts) -> dict[str, str]:
    """Return what to set for a process that will load llama.cpp; both are read only once, while it loads."""
    return _environment(facts.wait_policy)


def choose_wait_policy(token_ms: Mapping[WaitPolicy, float]) -> WaitPolicy:
    """Choose the policy that yields most to other processes among those that are fast enough."""
    return next(policy for policy in POLICIES if token_ms[policy] <= WORTH[policy] * min(token_ms.values()))


def facts(cache_dir: Path, *, notify: Callable[[str], None], command: Sequence[str] = CANARY_COMMAND) -> MachineFacts:
    """Return the facts from the cache folder, or find them and keep them; `notify` takes a line for the user.

    Takes 7 seconds at first use, then 2 ms. Concurrent first uses each measure. Raises EngineError where
    llama.cpp could not be tried; a llama.cpp that was tried and does not work is in the facts.
    """
    cores = usable_cores()
    path = cache_dir / "machine" / f"{machine_key(cores)}.json"
    known = _read(path)
    if known is not None:
        return known
    notify("checking llama.cpp on this machine, once")
    try:
        temporary = tempfile.TemporaryDirectory(prefix="edgelm-canary-", ignore_cleanup_errors=True)
    except OSError as error:
        raise EngineError(f"cannot make a temporary folder: {error}", "set TMPDIR to one with 50 MB free") from None
    with temporary as folder:
        found, lasting = measure([*command], [folder, "--threads", str(cores.physical)], cores, notify)
    if lasting:
        keep_json(path, asdict(found))
    return found


def measure(
    command: list[str], arguments: list[str], cores: Cores, notify: Callable[[str], None]
) -> tuple[MachineFacts, bool]:
    """Try llama.cpp in children: the facts, and whether they are worth keeping."""
    fast = _ask(command, "check", arguments)
    if not isinstance(fast, Failure):
        return _with_wait_policy(MachineFacts(canary="ok"), command, arguments, cores), True
    plain = _ask(command, "check", [*arguments, "--no-repack"])
    if isinstance(plain, Failure):  # not kept: whatever the user repairs holds at once
        return MachineFacts(canary="failed", reason=plain.reason), False
    notify(f"with its fastest kernels llama.cpp {fast.reason}: the plain ones are used, at about 0.6 times the speed")
    safe = MachineFacts(canary="no_repack", reason=fast.reason)
    return _with_wait_policy(safe, command, [*arguments, "--no-repack"], cores), fast.lasting


def machine_key(cores: Cores, root: Path = Path("/")) -> str:
    """Return a name for (llama.cpp build, machine, cores): facts found under one hold under it alone."""
    package = find_spec("llama_cpp")
    try:
        build = version("llama_cpp_python")
    except PackageNotFoundError:
        build = "unknown"
    if package is None or package.origin is None:
        raise EngineError("llama-cpp-python is not installed", "pip install llama-cpp-python")
    libraries = sorted((Path(package.origin).parent / "lib").glob("*"))
    stats = [(library.name, library.stat().st_size, library.stat().st_mtime_ns) for library in libraries]
    identity = (FORMAT, build, package.origin, stats, _processor(root), tuple(cores))
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


class Failure(NamedTuple):
    """A child that did not do its work: the reason continues a sentence that begins with "llama.cpp"."""

    reason: str
    lasting: bool  # tells of machine and build, not of this moment


def _ask(
    command: list[str], mode: str, arguments: list[str], policy: WaitPolicy = "passive"
) -> dict[str, object] | Failure:
    """Run one canary child. Raises EngineError for an end that says nothing of llama.cpp's kernels."""
    try:
        child = subprocess.run(
            [*command, mode, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_S,
            env=_inherited() | _environment(policy),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Failure(f"did not decode a few tokens within {TIME_LIMIT_S} seconds on this machine", lasting=False)
    except OSError as error:
        raise EngineError(f"llama.cpp could not be tried: {error}") from None
    said = child.stderr.strip().splitlines()
    if -child.returncode in CRASHES:
        why = f": {said[-1]}" if said else ""
        return Failure(f"crashes on this machine ({signal.Signals(-child.returncode).name}){why}", lasting=True)
    if child.returncode != 0:
        why = said[-1] if said else f"the child ended with {child.returncode}"
        raise EngineError(f"llama.cpp could not be tried: {why}", "see `edgelm doctor`, or reinstall llama-cpp-python")
    result = json.loads(child.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    if result.get("ok") is False:
        return Failure(f"computes wrongly on this machine ({result['reason']})", lasting=True)
    return result


def _with_wait_policy(safe: MachineFacts, command: list[str], arguments: list[str], cores: Cores) -> MachineFacts:
    """Return the facts with the wait policy measured, where there is one."""
    if cores.physical == 1 or not HAS_OPENMP:  # nothing waits
        return safe
    times: dict[WaitPolicy, list[float]] = {policy: [] for policy in POLICIES}
    order = list(POLICIES)
    try:
        for _ in range(ALTERNATIONS):
            for policy in order:
                times[policy].append(time_token(command, arguments, policy))
            order.reverse()  # so that a drift of the machine favours none
    except EngineError:  # such as no room for the larger model: speed is not worth a failure
        return safe
    medians = {policy: statistics.median(measured) for policy, measured in times.items()}
    return replace(safe, wait_policy=choose_wait_policy(medians), token_ms=medians)


def time_token(command: list[str], arguments: list[str], policy: WaitPolicy) -> float:
    """Return the milliseconds of one token in a new process with that policy. Raises EngineError."""
    result = _ask(command, "speed", arguments, policy)
    if isinstance(result, Failure):
        raise EngineError(f"llama.cpp {result.reason}")
    return float(str(result["token_ms"]))


def _environment(policy: WaitPolicy) -> dict[str, str]:
    return {"GGML_NO_BACKTRACE": "1"} | POLICIES[policy]  # or an abort starts a debugger and prints a page


def _inherited() -> dict[str, str]:
    """Return our environment, passed on without being looked at but for what is being measured."""
    return {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}


def _processor(root: Path) -> list[str]:
    """Return what tells this processor's kind and instruction sets from another's."""
    first = (read_text(root / "proc/cpuinfo") or "").partition("\n\n")[0]
    changing = ("processor", "cpu MHz", "bogomips", "BogoMIPS", "apicid", "initial apicid", "core id", "physical id")
    lines = [line for line in first.splitlines() if line.partition(":")[0].strip() not in changing]
    return [platform.machine(), platform.processor(), *lines]


def _read(path: Path) -> MachineFacts | None:
    """Return the facts that were kept; None where there are none, or the file is not one that we wrote."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_FILE_BYTES:
            return None
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kept = MachineFacts(**said)
        known = kept.canary in ("ok", "no_repack") and kept.wait_policy in POLICIES
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    times = said.get("token_ms")
    if not (known and isinstance(said.get("reason"), str) and isinstance(times, dict)):
        return None
    return kept if all(key in POLICIES and isinstance(value, int | float) for key, value in times.items()) else None
