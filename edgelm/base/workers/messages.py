"""The messages of every worker that loads a model, and of a front; a worker's own are beside their users."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edgelm.base.config import Settings
from edgelm.base.passages import Passage
from edgelm.base.workers.grammars import GrammarSpec

Thinking = Literal["auto", "off", "low", "medium", "high"]
# By the value of `reasoning_effort`, the APIs' name of it.
EFFORTS: dict[object, Thinking] = {"none": "off", "low": "low", "medium": "medium", "high": "high"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """A job for which a worker loads a model."""

    model: Path
    settings: Settings
    repack: bool = True  # whether llama.cpp may rearrange the weights for this processor
    least_context: int = 0  # tokens of context without --ctx, if the model has them
    prefixes: Path | None = None  # folder of idle conversations; None: they end with the worker
    drafts: bool = False  # whether to use and extend the drafter's data on disk
    memory_bytes: int | None = None  # that the model may take; None: as much as is free
    gpu_bytes: int | None = None  # the same of llama.cpp's GPUs
    held_gpu_bytes: int = 0  # by other engines of the same server
    cuda_problem: str = ""  # why CUDA is not to be used, although it is there: it failed before


@dataclass(frozen=True, slots=True)
class Said:
    """A message before the prompt, of a chat that goes on."""

    role: str  # "system", "user" or "assistant"
    text: str
    reasoning: str = ""
    images: tuple[str, ...] = ()  # data URLs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob(EngineJob):
    """Complete one prompt."""

    prompt: str
    images: tuple[str, ...] = ()  # before the prompt, as data URLs
    before: tuple[Said, ...] = ()
    raw: bool = False  # no chat template
    stop: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None  # of the answer, without its reasoning
    grammar_file: str = ""  # where the grammar was read, for errors
    think: Thinking = "auto"  # auto: as the chat template decides
    passages: tuple[Passage, ...] | None = None  # that fit the prompt, best first; None: no knowledge was named


@dataclass(frozen=True, slots=True)
class EvalSide:
    """A model, and the KV mode and engine it is evaluated with."""

    model: Path
    kv: str
    engine: str = ""  # empty: the same as the other side's


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob(EngineJob):
    """Evaluate a model on a text, alone or against a reference."""

    text: Path
    kv: str
    against: EvalSide | None = None
    window: int | None = None  # tokens; None: the default
    stride: int | None = None
    limit: int | None = None  # windows
    state: dict[str, Any] | None = None  # of an interrupted evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob(EngineJob):
    """Serve a model over HTTP."""

    key: str  # that requests must carry
    socket: Path | None = None  # None: a free port of the loopback interface


@dataclass(frozen=True, slots=True)
class Loading:
    """The model is being loaded."""

    share: float  # 0 to 1


@dataclass(frozen=True, slots=True)
class Status:
    """A line for the person who waits."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line about the job that stays in sight."""

    text: str


@dataclass(frozen=True, slots=True)
class Read:
    """The passages that the model gets with the prompt."""

    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class EvalState:
    """State from which the same evaluation can continue later."""

    state: dict[str, Any]
    total: int  # windows, estimated


@dataclass(frozen=True, slots=True)
class EvalRestarted:
    """The given state came from another engine or device: the evaluation starts from the beginning."""


@dataclass(frozen=True, slots=True)
class Result:
    """The job is done; `document` is what `--json` prints."""

    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Predict:
    """Predict the memory of a model's engine before it is loaded; the reply is a Footprint.

    It may take `usable_bytes` of this machine's memory, None: all; `limited`: because of --max-memory.
    `freed_gpu_bytes` of the GPU's are going to be free. `cuda_problem`: why CUDA is not going to be used.
    """

    model: Path
    settings: Settings
    draft: Path | None
    repack: bool
    usable_bytes: int | None
    limited: bool
    freed_gpu_bytes: int
    cuda_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of a model's engine as it was planned before loading, in bytes."""

    device: str  # "cuda": the bytes are those of a GPU
    context: int
    kv: str
    weights_bytes: int
    kv_bytes: int  # of a full cache
    workspace_bytes: int
    draft_bytes: int  # of a draft model, all together
    total_bytes: int
    load_peak_bytes: int  # while it loads, with pages of the mapped file
    spare_bytes: int  # for idle conversations
    is_preferred: bool  # with more memory, context and KV cache would be the same
    note: str = ""  # that the context is shorter than the one for every model, and why
    offloaded_bytes: int = 0  # of llama.cpp on GPUs with memory of their own, beside the others

    @property
    def gpu_bytes(self) -> int:
        """The bytes on GPUs with memory of their own."""
        return self.total_bytes if self.device == "cuda" else self.offloaded_bytes

    @property
    def ram_bytes(self) -> int:
        return 0 if self.device == "cuda" else self.total_bytes

    def with_bytes(self, context_bytes: int) -> Footprint:
        """Return it with those of a CUDA context, which the plan leaves out: it was there when memory was read."""
        return replace(
            self,
            workspace_bytes=self.workspace_bytes + context_bytes,
            total_bytes=self.total_bytes + context_bytes,
            load_peak_bytes=self.load_peak_bytes + context_bytes,
        )

    @property
    def promise_bytes(self) -> int:
        """The bytes that other engines leave to it, beside `offloaded_bytes`."""
        return self.total_bytes + self.spare_bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and served."""

    name: str
    engine: str
    device: str
    context: int
    port: int | None = None  # None: on the socket of the job
    footprint: Footprint | None = None
    unused_gpu: str = ""  # the line about a GPU that stands here and is not used


@dataclass(frozen=True, slots=True)
class Serving:
    """A front serves at this address. The rest is for the process that started it, see `runtime.FrontRecord`."""

    address: str
    key: str = ""
    certificate: str = ""
