"""What a model will take on this machine, and which context and KV cache it will get: known before it is loaded.

    facts = model_facts(open_gguf(path))        # weights/facts.py; any header will do, see below
    plan(facts, settings, machine, engine) -> Plan

Everything is data. `ModelFacts` may come from a file here, or from one that has only the first megabytes of a remote
file (and its length, as a sparse file has it). `MachineMemory` is numbers; `EngineMemory` says how an engine lays out
its memory (executors/llama_memory.py for llama.cpp). The engine takes its own choices from here, so that what `edgelm
plan` prints is what happens.

Owns the choices: the KV cache, the context, what is refused, and what speed to expect. Opens nothing, loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgelm.config import Settings
from edgelm.errors import EdgeLMError, ModelError
from edgelm.weights.facts import ModelFacts, WeightBytes
from edgelm.weights.summary import ModelSummary

DEFAULT_CONTEXT = 8192  # at most, where --ctx does not say
LEAST_CONTEXT = 512  # that is worth starting with, where it does not
SMALLEST_CONTEXT = 256  # that is proposed where nothing else fits
SHOWN_CONTEXTS = tuple(2**n for n in range(11, 18))  # of the table of options
USABLE = 0.95  # of the free memory: other programs run as well, and no prediction is exact
SNAPSHOT_SHARE = 0.1  # of the free memory: idle prefixes, as far as the rest leaves room
COMFORTABLE = 0.8  # of the usable memory: a plan below it does not depend on the last megabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """What the machine has to give."""

    free_bytes: int  # that can be taken without swapping, within the control group's limit
    cores: int  # physical ones that may be used
    read_bytes_per_s: float = 0.0  # of memory, by as many threads as will decode; 0: not measured


class EngineMemory(Protocol):
    """How an engine lays out its memory for one model."""

    @property
    def weights(self) -> WeightBytes: ...

    @property
    def kv_modes(self) -> Sequence[str]:
        """The KV modes, the best first."""

    def refusal(self, kv: str) -> str:
        """Return why the model cannot have a KV mode; empty: it can."""

    def kv_bytes_per_token(self, kv: str) -> float:
        """Return what one more position takes."""

    def kv_bytes(self, kv: str, context: int) -> int:
        """Return what the KV cache takes for `context` positions."""

    def workspace_bytes(self, kv: str, context: int) -> int:
        """Return all that is neither weights nor KV cache: compute buffers, vocabulary, the process itself."""

    def token_seconds(self, read_bytes_per_s: float, kv: str, context: int) -> float:
        """Estimate the time of one token of one sequence at that depth."""


@dataclass(frozen=True, slots=True)
class Option:
    """A KV mode and a context, and what a full one takes: weights, cache and workspace, in bytes."""

    kv: str
    context: int
    kv_bytes: int
    workspace_bytes: int
    total_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be done with a model on a machine, or why nothing can be."""

    name: str
    context: int  # that the model was made for
    usable_bytes: int
    weights: WeightBytes
    kv_bytes_per_token: dict[str, float]
    chosen: Option | None
    reason: str  # why this one was chosen
    refusal: ModelError | None  # why none was
    options: tuple[Option, ...]
    threads: int
    snapshot_bytes: int  # for idle prefixes, within what is left
    tokens_per_second: tuple[float, float] | None  # estimated, in an empty and a full context; None: not measured
    comfortable: bool  # the choice would be the same if sizes were some percent off

    def require(self) -> Option:
        """Return the choice. Raises ModelError where nothing fits."""
        if self.chosen is None:
            assert self.refusal is not None
            raise self.refusal
        return self.chosen


def plan(
    model: ModelFacts,
    settings: Settings,
    machine: MachineMemory,
    engine: EngineMemory,
    *,
    least_context: int = 0,
    with_options: bool = False,
) -> Plan:
    """Choose what a model gets. Without --ctx there are `least_context` tokens if the model has them.

    Raises EdgeLMError for a context that the model cannot have, ModelError for such a KV mode. What does not fit is
    in the plan. `with_options` adds the table of all combinations.
    """
    summary = model.summary
    trained = summary.context or DEFAULT_CONTEXT
    if settings.ctx is not None and settings.ctx > trained:
        raise EdgeLMError(
            f"--ctx {settings.ctx:,} is more than the {trained:,} tokens that this model was made for",
            f"give at most {trained}",
        )
    sizer = _Sizer(engine, int(USABLE * machine.free_bytes))
    if settings.kv != "auto" and (why := engine.refusal(settings.kv)):
        raise ModelError(f"--kv {settings.kv} {why}", "use --kv f16")
    modes = sizer.modes if settings.kv == "auto" else [settings.kv]
    contexts = list(_contexts(settings.ctx, trained, least_context))
    chosen = next((each for each in sizer.options(modes, contexts) if each.fits), None)
    shown = sorted({*(each for each in SHOWN_CONTEXTS if each < trained), contexts[0], trained}) if with_options else []
    first = sizer.option(modes[0], contexts[0])
    left = sizer.usable - (chosen.total_bytes if chosen else 0)
    return Plan(
        name=summary.name,
        context=trained,
        usable_bytes=sizer.usable,
        weights=engine.weights,
        kv_bytes_per_token={kv: engine.kv_bytes_per_token(kv) for kv in sizer.modes},
        chosen=chosen,
        reason=_reason(chosen, settings, trained, modes, contexts),
        refusal=None if chosen else _refusal(summary, sizer, modes, contexts),
        options=tuple(sizer.options(sizer.modes, shown)),
        threads=settings.threads or machine.cores,
        snapshot_bytes=max(0, min(int(SNAPSHOT_SHARE * machine.free_bytes), left)),
        tokens_per_second=_speed(machine, engine, chosen),
        comfortable=first.total_bytes <= COMFORTABLE * sizer.usable,
    )


class _Sizer:
    """Sizes of options, each asked for once."""

    def __init__(self, engine: EngineMemory, usable: int) -> None:
        self.usable = usable
        self.modes = [kv for kv in engine.kv_modes if not engine.refusal(kv)]
        self._engine = engine
        self._known: dict[tuple[str, int], Option] = {}

    def option(self, kv: str, context: int) -> Option:
        known = self._known.get((kv, context))
        if known is None:
            cache, workspace = self._engine.kv_bytes(kv, context), self._engine.workspace_bytes(kv, context)
            total = self._engine.weights.resident + cache + workspace
            known = Option(kv, context, cache, workspace, total, total <= self.usable)
            self._known[kv, context] = known
        return known

    def options(self, modes: Iterable[str], contexts: Iterable[int]) -> Iterator[Option]:
        """Yield the combinations, all modes of a context before the next context."""
        modes = list(modes)
        return (self.option(kv, context) for context in contexts for kv in modes)


def _contexts(asked: int | None, trained: int, least: int) -> Iterator[int]:
    """Yield the contexts to try in order."""
    if asked is not None:
        yield asked
        return
    context = min(trained, max(DEFAULT_CONTEXT, least))
    yield context
    while context // 2 >= LEAST_CONTEXT:
        context //= 2
        yield context


def _reason(chosen: Option | None, settings: Settings, trained: int, modes: list[str], contexts: list[int]) -> str:
    """Say why this context and this KV mode."""
    if chosen is None:
        return ""
    if settings.ctx is not None:
        context = "the context is --ctx"
    elif chosen.context < contexts[0]:
        context = f"{contexts[0]:,} tokens of context do not fit"
    elif chosen.context == trained:
        context = "the context is all that the model was made for"
    else:
        context = "the context is the default, --ctx changes it"
    if settings.kv != "auto":
        return f"{context}; the KV cache is --kv"
    if chosen.kv == modes[0]:
        return f"{context}; the KV cache is the exact one"
    return f"{context}; the KV cache is the most exact one that fits"


def _refusal(summary: ModelSummary, sizer: _Sizer, modes: list[str], contexts: list[int]) -> ModelError:
    """Return why nothing fits, with what would."""
    least = min(sizer.options(modes, contexts), key=lambda option: option.total_bytes)
    message = (
        f"{summary.name} needs {_gib(least.total_bytes)} GiB of memory with --ctx {least.context} --kv {least.kv}, "
        f"{_gib(sizer.usable)} GiB are free"
    )
    smaller = [contexts[-1] >> n for n in range(1, contexts[-1].bit_length()) if contexts[-1] >> n >= SMALLEST_CONTEXT]
    fitting = next((each for each in sizer.options(sizer.modes, [*contexts, *smaller]) if each.fits), None)
    if fitting is None:
        return ModelError(message, "take a smaller model, or close other programs")
    return ModelError(message, f"--ctx {fitting.context} --kv {fitting.kv} would fit")


def _speed(machine: MachineMemory, engine: EngineMemory, chosen: Option | None) -> tuple[float, float] | None:
    """Estimate tokens per second in an empty and in a full context."""
    if chosen is None or not machine.read_bytes_per_s:
        return None
    empty, full = (engine.token_seconds(machine.read_bytes_per_s, chosen.kv, depth) for depth in (0, chosen.context))
    return 1 / empty, 1 / full


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
