"""Plans a model on a machine before it is loaded: its memory, and the context and KV cache that it gets.

    facts = model_facts(open_gguf(path))        # checkpoints/summary.py; any header will do, see below
    plan(facts, settings, machine, engine) -> Plan

Everything is data. `ModelFacts` may come from a local file, or from the first megabytes of a remote one.
`MachineMemory` is numbers; `EngineMemory` says how an engine lays out its memory (memory.py of each backend). The
engines take their own choices from here, so `edgelm plan` prints what happens.

Owns the choices: the KV cache, the context, what is refused, and the expected speed. Opens nothing, loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from edgelm.base.config import DEFAULT_CONTEXT, Settings
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.machine.memory import USABLE
from edgelm.base.workers.messages import Footprint
from edgelm.checkpoints.summary import ModelFacts, ModelSummary, WeightBytes

MIN_CONTEXT = 512  # the least without --ctx
MIN_PROPOSED = 256  # the shortest context that an error line proposes
SHOWN_CONTEXTS = tuple(2**n for n in range(11, 18))  # of the table of options
DRAFT_KV = "f16"  # of a draft model's cache: it is small
SNAPSHOT_SHARE = 0.1  # of the free memory, for idle prefixes, if that much is left
FAST_SHARE = 0.5  # of the context that fits with a slow KV mode: a fast one is taken where it has at least so much
COMFORTABLE = 0.8  # of the usable memory: a plan below it does not depend on the last megabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """The memory and the cores that the machine offers."""

    free_bytes: int  # available without swapping, within the control group's limit
    cores: int  # physical ones that may be used
    read_bytes_per_s: float = 0.0  # memory bandwidth, with the threads that will decode; 0: not measured
    others: float | None = None  # cores that other processes kept busy while it was measured; None: not known
    limit_bytes: int | None = None  # the model's share of it; None: as much as is free

    @property
    def usable_bytes(self) -> int:
        usable = int(USABLE * self.free_bytes)
        return usable if self.limit_bytes is None else min(usable, self.limit_bytes)

    @property
    def is_limited(self) -> bool:
        """Whether the limit is less than what is free."""
        return self.limit_bytes is not None and self.limit_bytes <= int(USABLE * self.free_bytes)


class DeviceMemory(NamedTuple):
    """The part of a model that lies on one device, in bytes."""

    name: str
    layers: int
    weights: int
    kv: int
    workspace: int
    free_bytes: int  # before the model is loaded
    shared: bool = False  # it is main memory, where these bytes count too
    attends: bool = True  # False: it has no kernel for attention in the KV mode, which the processor then computes

    @property
    def total_bytes(self) -> int:
        return self.weights + self.kv + self.workspace

    @property
    def usable_bytes(self) -> int:
        return int(USABLE * self.free_bytes)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.usable_bytes


class EngineMemory(Protocol):
    """The memory layout of an engine for one model."""

    @property
    def weights(self) -> WeightBytes: ...

    @property
    def process_bytes(self) -> int:
        """The part of every workspace that two models in one process share: the process itself."""

    @property
    def kv_modes(self) -> Sequence[str]:
        """The KV modes, the most exact first."""

    def refusal(self, kv: str) -> str:
        """Return why the model cannot have a KV mode; empty: it can."""

    def kv_bytes_per_token(self, kv: str) -> float: ...

    def kv_bytes(self, kv: str, context: int) -> int:
        """Return the size of a KV cache for `context` positions."""

    def workspace_bytes(self, kv: str, context: int) -> int:
        """Return all that is neither weights nor KV cache: compute buffers, vocabulary, the process itself."""

    def resident_bytes(self, kv: str, context: int) -> int:
        """Return the weights in the planned memory: all of them, or those that lie on none of `devices`."""

    def devices(self, kv: str, context: int) -> Sequence[DeviceMemory]:
        """Return the parts that lie elsewhere, as on a GPU of llama.cpp; the other sizes leave them out."""

    def token_seconds(self, machine: MachineMemory, kv: str, context: int) -> float:
        """Estimate the time of one token of one sequence after `context` tokens."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A smaller model that is loaded beside another one, to draft for it."""

    name: str
    context: int  # the most that it has; 0: unknown
    memory: EngineMemory

    @classmethod
    def of(cls, model: ModelFacts, memory: EngineMemory) -> DraftModel:
        return cls(model.summary.name, model.summary.context, memory)

    def context_beside(self, context: int) -> int:
        """Return the context that it gets beside a model with this one."""
        return min(context, self.context or context)

    def total_bytes(self, context: int) -> int:
        """Return the bytes of weights, full cache and workspace beside a model with this context."""
        own, memory = self.context_beside(context), self.memory
        workspace = memory.workspace_bytes(DRAFT_KV, own) - memory.process_bytes
        return memory.weights.resident + memory.kv_bytes(DRAFT_KV, own) + workspace


@dataclass(frozen=True, slots=True)
class Option:
    """A KV mode and a context, and the bytes of weights, full cache, workspace and draft model together.

    Parts on devices with memory of their own are not among these bytes.
    """

    kv: str
    context: int
    kv_bytes: int
    workspace_bytes: int
    total_bytes: int
    fits: bool
    draft_bytes: int = 0  # of a draft model
    weights_bytes: int = 0
    projector_bytes: int = 0  # of the part that reads pictures
    devices: tuple[DeviceMemory, ...] = ()  # beside the bytes above

    @property
    def slow(self) -> str:
        """Why the KV mode is slow with these devices; empty: it is not."""
        names = [device.name for device in self.devices if device.kv and not device.attends]
        return f"{' and '.join(names)} cannot compute its attention, so the processor does" if names else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan for a model on a machine, or why there is none."""

    name: str
    context: int  # the model's own
    usable_bytes: int
    weights: WeightBytes
    kv_bytes_per_token: dict[str, float]
    chosen: Option | None
    load_peak_bytes: int  # while the choice is loaded, with pages of the mapped file; 0: nothing is chosen
    draft: str  # the draft model's name; empty: there is none
    reason: str  # of the choice
    note: str  # that the context is shorter than the one for every model; empty: it is not
    warning: str  # of the choice; empty: there is none
    refusal: ModelError | None  # where nothing is chosen
    options: tuple[Option, ...]
    threads: int
    snapshot_bytes: int  # for idle prefixes, within the remaining memory
    tokens_per_second: tuple[float, float] | None  # estimated, in an empty and a full context; None: not measured
    comfortable: bool  # the choice would be the same if the sizes were some percent off
    preferred: bool  # with more memory, the choice would be the same
    heads: bool = False  # whether the model's heads draft; they have a context of their own, among the bytes
    rollback: int = 0  # tokens that the states of recurrent layers can go back, among the bytes of the cache

    def require(self) -> Option:
        """Return the choice. Raises ModelError where nothing fits."""
        if self.chosen is None:
            assert self.refusal is not None
            raise self.refusal
        return self.chosen

    def footprint(self, device: str, spare_bytes: int = 0) -> Footprint:
        """Return the memory of the choice on a device. Raises ModelError where nothing fits."""
        option = self.require()
        return Footprint(
            device=device,
            context=option.context,
            kv=option.kv,
            weights_bytes=option.weights_bytes,
            kv_bytes=option.kv_bytes,
            workspace_bytes=option.workspace_bytes,
            draft_bytes=option.draft_bytes,
            total_bytes=option.total_bytes,
            load_peak_bytes=self.load_peak_bytes,
            spare_bytes=spare_bytes,
            is_preferred=self.preferred,
            note=self.note,
            offloaded_bytes=sum(part.total_bytes for part in option.devices if not part.shared),
        )


def plan(
    model: ModelFacts,
    settings: Settings,
    machine: MachineMemory,
    engine: EngineMemory,
    *,
    draft: DraftModel | None = None,
    projector_bytes: int = 0,
    least_context: int = 0,
    with_options: bool = False,
) -> Plan:
    """Choose context and KV mode, with room for a draft model and a projector if there are any.

    Without --ctx there are at least `least_context` tokens if the model has them.

    Raises EdgeLMError for a context that the model cannot have, ModelError for such a KV mode. Where nothing fits, the
    plan holds the refusal. `with_options` adds the table of all combinations.
    """
    summary = model.summary
    trained = summary.context or DEFAULT_CONTEXT
    if settings.ctx is not None and settings.ctx > trained and not settings.ctx_is_default:
        raise EdgeLMError(
            f"--ctx {settings.ctx:,} is more than the {trained:,} tokens that this model was made for",
            f"give at most {trained}",
        )
    writes_text = summary.kind == "text"
    sizer = _Sizer(engine, machine.usable_bytes, draft, projector_bytes)
    if not writes_text:
        del sizer.modes[1:]  # an embedder has one kind of cache, or none
    if settings.kv != "auto" and (reason := engine.refusal(settings.kv)):
        raise ModelError(f"--kv {settings.kv} {reason}", f"use --kv {sizer.modes[0]}" if sizer.modes else "")
    if not sizer.modes:
        kv = engine.kv_modes[0]
        raise ModelError(f"--repeatable needs another KV cache: --kv {kv} {engine.refusal(kv)}", "omit --repeatable")
    modes = sizer.modes if settings.kv == "auto" else [settings.kv]
    contexts = list(_contexts(settings, trained, least_context))
    fitting = (option for option in sizer.options(modes, contexts) if option.fits)
    chosen = largest = next(fitting, None)
    if settings.kv == "auto" and largest and largest.slow:
        least = FAST_SHARE * largest.context
        chosen = next((option for option in fitting if not option.slow and option.context >= least), largest)
    shown: list[int] = []
    if with_options:
        shown = sorted({*(context for context in SHOWN_CONTEXTS if context < trained), contexts[0], trained})
    first = sizer.option(modes[0], contexts[0])
    remaining = sizer.usable - (chosen.total_bytes if chosen else 0)
    return Plan(
        name=summary.name,
        context=trained,
        usable_bytes=sizer.usable,
        weights=engine.weights,
        kv_bytes_per_token={kv: engine.kv_bytes_per_token(kv) for kv in sizer.modes},
        chosen=chosen,
        load_peak_bytes=_load_peak(chosen, engine, draft) if chosen else 0,
        draft=draft.name if draft else "",
        reason=_reason(chosen, largest, settings, trained, modes, contexts),
        note=_note(chosen, settings, trained),
        warning=_warning(chosen, largest, settings),
        refusal=None if chosen else _refusal(summary, sizer, modes, contexts, limited=machine.is_limited),
        options=tuple(sizer.options(sizer.modes, shown)),
        threads=settings.threads or machine.cores,
        snapshot_bytes=max(0, min(int(SNAPSHOT_SHARE * machine.usable_bytes / USABLE), remaining)) * writes_text,
        tokens_per_second=_speed(machine, engine, chosen) if writes_text else None,
        comfortable=first.total_bytes <= COMFORTABLE * sizer.usable and not first.devices,
        preferred=chosen is first,
    )


def draft_layouts(rollback: int, heads: bool) -> list[tuple[int, bool]]:
    """Return what drafts may take memory for, the most first: how far states go back, and whether heads draft."""
    return [(rollback, True)] * heads + [(rollback, False)] * (rollback > 0)


class _Sizer:
    """Computes the size of each option once."""

    def __init__(self, engine: EngineMemory, usable: int, draft: DraftModel | None, projector_bytes: int) -> None:
        self.usable = usable
        self.draft = draft
        self.projector_bytes = projector_bytes
        self.modes = [kv for kv in engine.kv_modes if not engine.refusal(kv)]
        self._engine = engine
        self._cached: dict[tuple[str, int], Option] = {}

    def option(self, kv: str, context: int) -> Option:
        option = self._cached.get((kv, context))
        if option is None:
            cache, workspace = self._engine.kv_bytes(kv, context), self._engine.workspace_bytes(kv, context)
            beside = self.draft.total_bytes(context) if self.draft else 0
            weights, devices = self._engine.resident_bytes(kv, context), tuple(self._engine.devices(kv, context))
            total = weights + cache + workspace + beside + self.projector_bytes
            total += sum(part.total_bytes for part in devices if part.shared)
            fits = total <= self.usable and all(device.fits for device in devices)
            parts = (beside, weights, self.projector_bytes)
            option = Option(kv, context, cache, workspace, total, fits, *parts, devices)
            self._cached[kv, context] = option
        return option

    def options(self, modes: Iterable[str], contexts: Iterable[int]) -> Iterator[Option]:
        """Yield the combinations: all modes of a context before the next context."""
        modes = list(modes)
        return (self.option(kv, context) for context in contexts for kv in modes)


def _contexts(settings: Settings, trained: int, least: int) -> Iterator[int]:
    """Yield the contexts to try, in order."""
    if settings.ctx is not None and not settings.ctx_is_default:
        yield settings.ctx
        return
    context = min(trained, settings.ctx or max(DEFAULT_CONTEXT, least))
    yield context
    while context // 2 >= MIN_CONTEXT:
        context //= 2
        yield context


def _load_peak(chosen: Option, engine: EngineMemory, draft: DraftModel | None) -> int:
    """Return the most bytes while loading: the model comes first, the draft model when the rest is in place."""
    second = chosen.total_bytes - chosen.draft_bytes + draft.memory.weights.load_peak if draft else 0
    return max(engine.weights.load_peak, chosen.total_bytes, second)


def _reason(
    chosen: Option | None,
    largest: Option | None,
    settings: Settings,
    trained: int,
    modes: list[str],
    contexts: list[int],
) -> str:
    """Return why this context and this KV mode were chosen; `largest` is the first that fits, which may be slow."""
    if chosen is None or largest is None:
        return ""
    if settings.ctx is not None and chosen.context == settings.ctx:
        context = "the context is --ctx"
    elif chosen.context < largest.context:
        context = f"{largest.context:,} tokens of context fit with --kv {largest.kv}, but {largest.slow}"
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


def _note(chosen: Option | None, settings: Settings, trained: int) -> str:
    """Return that a context for every model is more than this one has; empty: it is not."""
    if chosen is None or settings.ctx is None or chosen.context >= settings.ctx:
        return ""
    reason = "the model was made for no more" if chosen.context == trained else "more does not fit"
    return f"the context is {chosen.context:,} tokens, not the {settings.ctx:,} of ctx: {reason}"


def _warning(chosen: Option | None, largest: Option | None, settings: Settings) -> str:
    """Return what the user should know of a choice; empty: nothing. `largest`: as for the reason."""
    if chosen is None or largest is None:
        return ""
    if not chosen.slow:
        if settings.ctx is not None or chosen.context == largest.context:
            return ""
        return (
            f"the context is {chosen.context:,} tokens; {largest.context:,} fit with --kv {largest.kv}, "
            f"but {largest.slow}"
        )
    instead = "--kv auto takes a faster mode where one fits"
    if settings.kv == "auto":
        instead = "no other mode fits" if settings.ctx is not None else "others leave less than half of the context"
    return f"--kv {chosen.kv} is slow: {chosen.slow}; {instead}"


def _refusal(
    summary: ModelSummary, sizer: _Sizer, modes: list[str], contexts: list[int], *, limited: bool
) -> ModelError:
    """Return the error where nothing fits, with an option that would."""
    smallest = min(sizer.options(modes, contexts), key=lambda option: option.total_bytes)
    names = f"{summary.name} with the draft model {sizer.draft.name}" if sizer.draft else summary.name
    full = next((device for device in smallest.devices if not device.fits), None)
    if full and smallest.total_bytes <= sizer.usable:
        return ModelError(
            f"{full.layers} layers of {summary.name} need {_gib(full.total_bytes)} GiB on {full.name} with "
            f"--ctx {smallest.context} --kv {smallest.kv}, {_gib(full.usable_bytes)} GiB are free",
            "use --gpu-layers auto, which takes as many as fit, or a smaller number",
        )
    message = (
        f"{names} needs {_gib(smallest.total_bytes)} GiB of memory with --ctx {smallest.context} "
        f"--kv {smallest.kv}, {_gib(sizer.usable)} GiB {'are left of --max-memory' if limited else 'are free'}"
    )
    shorter = [contexts[-1] >> n for n in range(1, contexts[-1].bit_length()) if contexts[-1] >> n >= MIN_PROPOSED]
    fitting = next((option for option in sizer.options(sizer.modes, [*contexts, *shorter]) if option.fits), None)
    if fitting is None:
        omit = "omit --draft, " * (sizer.draft is not None) + "--mmproj off, " * bool(sizer.projector_bytes)
        more = "raise --max-memory" if limited else "close other programs"
        return ModelError(message, f"{omit}take a smaller model, or {more}")
    return ModelError(message, f"--ctx {fitting.context} --kv {fitting.kv} would fit")


def _speed(machine: MachineMemory, engine: EngineMemory, chosen: Option | None) -> tuple[float, float] | None:
    """Estimate tokens per second in an empty and in a full context."""
    if chosen is None or not machine.read_bytes_per_s or chosen.devices:  # a device's bandwidth is not measured
        return None
    empty, full = (engine.token_seconds(machine, chosen.kv, depth) for depth in (0, chosen.context))
    return 1 / empty, 1 / full


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
