"""The check of our kernels on the user's GPU, before a model is first used there: its worker and its verdict.

Owns the rules: how long an op may take, and what a crash means. The worker does all work on the
GPU, since a wrong kernel may end it; this module imports no torch. Knows nothing of how an op is checked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgelm.base.errors import CompiledKernelError, DeviceError, EdgeLMError, EngineError
from edgelm.base.workers.parent import Worker

WORKER = "edgelm.backends.torch.check_worker"
START_S = 120.0  # for torch to start, and the first compile
OP_S = 90.0  # for one op, with its compile
WHOLE_S = 900.0
NO_NUMBER = 1e9  # in place of a difference, which may be infinite
PDL = "programmatic dependent launch"  # kernels.choice.PDL, which stands in the place of an op
MAX_CRASHES = 3  # of one check; each costs an op

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpVerdict:
    """Whether an op is right with one kind of arguments. `off`: worst difference, as a part of the largest value."""

    op: str
    detail: str  # formats and shapes
    right: bool = True
    off: float = 0.0
    error: str = ""  # "fails: ..." or the like, as the end of a sentence
    unknown: bool = False  # there was not enough memory to compare it: it counts as right

    @property
    def problem(self) -> str:
        """The problem, as the end of a sentence about the kernel; empty: there is none."""
        if self.right:
            return ""
        if self.error:
            return self.error
        return f"is off by {self.off:.2g} of the largest value" if self.off < NO_NUMBER else "gives no numbers"


@dataclass(frozen=True, slots=True)
class CheckGpu:
    """Check the GPU, and the ops of a model on it; None: with all formats. The ops in `plain` are not tried.

    `short`: those of a prompt and of a token only, for which a load waits. `heads` is the file that drafts for it.
    """

    model: Path | None
    modes: tuple[str, ...]
    quantize: str
    plain: tuple[str, ...] = ()
    short: bool = False
    heads: Path | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of kernels that are tried for the model that comes next, of so many."""

    kernels: int
    model: int
    models: int


@dataclass(frozen=True, slots=True)
class Begun:
    """An op is tried from now on; "" is the small kernel with which the check begins."""

    op: str
    detail: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The end of a check; `device` is the GPU's name."""

    device: str
    verdicts: tuple[OpVerdict, ...]


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """The result of a check. With a problem, no model can use our kernels here.

    `lasts`: the problem is of the machine, and will be the same at the next start.
    """

    device: str = ""
    problem: str = ""
    hint: str = ""
    verdicts: tuple[OpVerdict, ...] = field(default=())
    took_s: float = 0.0
    lasts: bool = False

    @property
    def wrong(self) -> dict[str, str]:
        """The ops that are wrong, each with what is wrong in the worst case."""
        worst: dict[str, OpVerdict] = {}
        for verdict in self.verdicts:
            if not verdict.right and (verdict.op not in worst or verdict.off > worst[verdict.op].off):
                worst[verdict.op] = verdict
        return {op: f"{verdict.problem} ({verdict.detail})" for op, verdict in worst.items()}

    @property
    def reasons(self) -> tuple[str, ...]:
        """A line for each op that is replaced."""
        return tuple(
            f"each kernel waits for the end of the one before it: {PDL} {text}"
            if op == PDL
            else f"{op} is computed by plain torch: its kernel {text}"
            for op, text in self.wrong.items()
        )


Notify = Callable[[str], None]


def run_check(request: CheckGpu, notify: Notify = lambda _: None, *, command: tuple[str, ...] = ()) -> GpuVerdict:
    """Run a check in a child process. A crash or a hang costs the op that was tried; the others are checked again.

    Where a kernel cannot be read from Triton's cache on disk, all are compiled anew, which replaces damaged ones.
    `notify` takes a line of progress. Never raises for what it finds.
    """
    began = time.monotonic()
    lost: list[OpVerdict] = []
    anew = False
    while True:
        plain = tuple(verdict.op for verdict in lost)
        try:
            outcome = _attempt(replace(request, plain=plain), notify, began + WHOLE_S, command, anew=anew)
        except CompiledKernelError as error:
            if anew:
                return GpuVerdict("", error.message, error.hint, lasts=False)
            log.warning("%s: all are compiled anew", error.message)
            anew = True
            continue
        if isinstance(outcome, GpuVerdict):
            verdicts = (*outcome.verdicts, *lost)
            return replace(outcome, verdicts=verdicts, took_s=round(time.monotonic() - began, 1))
        lost.append(outcome)
        log.warning("the kernel of %s %s on this GPU", outcome.op, outcome.error)
        if len(lost) == MAX_CRASHES:
            message = f"kernels fail on this GPU: {', '.join(verdict.op for verdict in lost)}"
            took_s = round(time.monotonic() - began, 1)
            return GpuVerdict("", message, "use --engine llama", tuple(lost), took_s)


def _attempt(
    request: CheckGpu, notify: Notify, until: float, command: tuple[str, ...], *, anew: bool
) -> GpuVerdict | OpVerdict:
    """Run the worker once; an OpVerdict is that of the op during which it crashed or hung.

    `anew`: without what Triton has compiled before. Raises CompiledKernelError.
    """
    current, count, limit_s, counted = Begun("", ""), 0, START_S, Counted(0, 1, 1)
    once = ", once for a kind of model" if request.short else ""  # whoever loads a model did not ask for it
    with Worker(
        WORKER,
        replies=(Begun, Checked, Counted),
        errors=(CompiledKernelError, DeviceError, EngineError),
        environment={"TRITON_ALWAYS_COMPILE": "1"} if anew else None,
        command=command,
    ) as worker:
        worker.send(request)
        try:
            while not isinstance(reply := worker.receive(min(limit_s, max(until - time.monotonic(), 0.0))), Checked):
                if reply is None:
                    end = worker.exit()
                    return _lost(current, f"crashes: its process {end.how}")
                if isinstance(reply, Counted):
                    counted, count = reply, 0
                    continue
                if not reply.op:
                    current, limit_s = reply, START_S
                    if not (count or counted.kernels):
                        notify(f"checking the GPU{once}: a first kernel is compiled and tried")
                    continue
                current, count, limit_s = reply, count + 1, OP_S
                notify(f"checking the GPU's kernels{once}: {_place(count, counted)}{reply.op} of {reply.detail}")
        except TimeoutError:
            worker.kill_group()
            return _lost(current, f"hangs: it is not done after {limit_s:.0f} s")
        except CompiledKernelError:
            raise
        except EdgeLMError as error:
            if current.op == PDL:  # the ops may well run without
                return _lost(current, f"fails: {error.message}")
            lasts = isinstance(error, DeviceError) and not current.op  # the small kernel
            return GpuVerdict("", error.message, error.hint, lasts=lasts)
    return GpuVerdict(reply.device, verdicts=reply.verdicts)


def _place(count: int, counted: Counted) -> str:
    """Return which kernel it is of how many; empty before the first model."""
    if not counted.kernels:
        return ""
    model = f" of model {counted.model} of {counted.models}" if counted.models > 1 else ""
    return f"{count} of {max(counted.kernels, count)}{model}, "


def _lost(begun: Begun, error: str) -> GpuVerdict | OpVerdict:
    if not begun.op:
        return GpuVerdict("", f"a small kernel {error} on this GPU", "use --engine llama")
    return OpVerdict(begun.op, begun.detail, right=False, off=NO_NUMBER, error=error)
