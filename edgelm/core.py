"""The words of the engine: requests, sequences, steps, and the protocols between scheduler, cache and executor.

Owns types only. Everything here is integers, strings and plain arrays: no tensor, no text, no device, no thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgelm.errors import EdgeLMError, RequestError

FinishReason = Literal["stop", "length", "context", "abort", "error"]
Masks = NDArray[np.int32]  # [sampled rows of the step, ceil(vocabulary / 32)]; a set bit allows its token

NOT_A_TOKEN = -1  # the id of a `Sampled` whose logits were not numbers
LAST = -2  # in a chunk: the token that the step before sampled for its sequence, which the host has not read yet
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The defaults change nothing about the model's own distribution.

    Raises RequestError for a value outside its range.
    """

    max_tokens: int | None = None  # None: until the model stops or its context is full
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1): relative to the most likely token
    repetition_penalty: float = 1.0  # over prompt and answer; 1: off
    frequency_penalty: float = 0.0  # over the answer, times the count
    presence_penalty: float = 0.0  # over the answer
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0  # which of several answers to one prompt: a random stream of its own
    num_logprobs: int | None = None  # None: no log-probabilities; N: the token's own and the N most likely
    stop_ids: frozenset[int] = frozenset()  # end the sequence; the stop token is its last

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, value: object, what: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {value}", f"give {what}")

        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "a number of at least 0")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0 and at most 1")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "at least 0 and less than 1")
        require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "more than 0")
        for name in ("frequency_penalty", "presence_penalty"):
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        for token, bias in self.logit_bias:
            require(token >= 0, "a token id of logit_bias", token, "0 or more")
            require(not math.isnan(bias), "a value of logit_bias", bias, "a number")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, "0 to 2**64 - 1")
        require(0 <= self.choice < 2**32, "choice", self.choice, "0 or more")
        most = self.num_logprobs
        require(most is None or 0 <= most <= MAX_LOGPROBS, "num_logprobs", most, f"0 to {MAX_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


class Matcher(Protocol):
    """The state of a grammar along one sequence."""

    def fill(self, draft: list[int], rows: Masks) -> int:
        """Write the masks of `len(draft) + 1` rows; return how many draft tokens the grammar allows.

        The state is the same afterwards. Rows behind the first forbidden draft token are left as they are.
        """

    def accept(self, token: int) -> None:
        """Advance by one token that the last masks allowed."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One request while it is decoded."""

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    computed: int = 0  # tokens[:computed] have valid KV
    draft: list[int] = field(default_factory=list)  # proposed, not verified
    matcher: Matcher | None = None
    kv: object = None  # block table or slot; only its KVCache looks inside
    cached: int | None = None  # prompt tokens found in the prefix cache at the first admission
    past: Seq[int] = ()  # the conversation before `tokens` that is not in the context: drafters read it
    owner: str = ""  # whose request it is (an API key's name): what one owner wrote serves no other
    drafted: int = 0
    accepted: int = 0

    @property
    def completion_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Chunk:
    """Run `tokens` at positions `start`.., and sample the last `rows` of them."""

    seq: Sequence
    start: int
    tokens: list[int]  # or LAST alone
    rows: int
    kv: tuple[int, ...] | int  # block table, or slot

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def draft(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.rows + 1 :] if self.rows else []


class Copy(NamedTuple):
    """Let slot `dst`, which is empty, share the first `length` positions of slot `src`."""

    src: int
    dst: int
    length: int


class Trim(NamedTuple):
    """Keep only the first `length` positions of a slot."""

    slot: int
    length: int


class Save(NamedTuple):
    """Keep a snapshot of a slot under `key`, outside of the cache."""

    slot: int
    key: int


class Load(NamedTuple):
    """Bring the snapshot `key`, which stays, into an empty slot."""

    key: int
    slot: int


class Drop(NamedTuple):
    """Forget the snapshot `key`, which may not exist: the step that was to save it may have failed."""

    key: int


class Store(NamedTuple):
    """Write the snapshot `key` to a file, in the background; it stays where it is, and may not exist."""

    key: int
    tokens: NDArray[np.int32]  # what it is the KV of
    owner: str


Op = Copy | Trim | Save | Load | Drop | Store


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. The ops are done in order before the chunks; there may be no chunk."""

    chunks: tuple[Chunk, ...]
    ops: tuple[Op, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)


class Sampled(NamedTuple):
    """A sampled token; the log-probabilities are those of the model's own distribution, where asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Samples(Protocol):
    """What a step samples, perhaps still on its way."""

    def read(self) -> list[list[Sampled]]:
        """Wait for the rows of each chunk, in order. Raises EngineError.

        Rows behind one that differs from the draft may be left out.
        """


@dataclass(frozen=True, slots=True)
class Ready:
    """`Samples` that are there."""

    rows: list[list[Sampled]]

    def read(self) -> list[list[Sampled]]:
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What one request cost."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted: int
    accepted: int
    queue_ms: float  # from submit to the first step
    prompt_ms: float  # from the first step to the first token
    first_token_ms: float  # from submit to the first token
    decode_ms: float  # from the first token to the last

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first by the time they took; 0 where there are none."""
        return 1000 * (self.completion_tokens - 1) / self.decode_ms if self.decode_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """What one step did for one sequence; the last event of a sequence has a finish reason."""

    seq_id: int
    sampled: tuple[Sampled, ...] = ()
    finish_reason: FinishReason | None = None
    error: EdgeLMError | None = None
    stats: Stats | None = None
    accepted: int = 0  # how many of `sampled`, from the first on, were drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """What an executor can do. Lengths and sizes are in tokens unless they say otherwise."""

    engine: str  # "llama" or "torch"
    device: str
    num_vocab: int
    context: int  # the longest sequence
    capacity: int  # positions that the KV cache holds for all sequences together
    max_tokens: int  # in the chunks of a step
    max_rows: int  # sampled rows of a step
    max_sequences: int  # slots
    kv_bytes_per_token: int
    can_trim: bool = True  # a cache can be cut behind any position
    can_copy: bool = True  # a prefix of a cache can be shared by another sequence
    block_len: int = 0  # positions of a block, where a chunk's `kv` is a block table; 0: it is a slot
    keeps_all: bool = True  # no position of a cache is lost while it grows; False: a prefix serves whole or not at all
    runs_ahead: bool = False  # a step may be launched before the one before it is read; its tokens are LAST then


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """A snapshot in a file."""

    name: str
    tokens: NDArray[np.int32]
    owner: str


class Snapshots(Protocol):
    """What a bookkeeper asks of the memory that holds snapshots. Keys are of ops, names of files."""

    keeps_files: bool

    def nbytes(self, key: int) -> int | None:
        """Return what a snapshot takes in memory; None: it was not saved."""

    def files(self) -> tuple[StoredPrefix, ...]:
        """Return what there is in files: the same object as the last time if it is the same."""

    def fetch(self, name: str, key: int) -> bool:
        """Bring a file into memory under a new key; False: it is damaged or gone, and none of `files` any more."""

    def flush(self) -> None:
        """Wait until all that was to be stored is in files, within a limit."""


class KVCache(Protocol):
    """Bookkeeping of the KV cache: who holds which positions, and what of the past can be used again."""

    def attach(self, seq: Sequence) -> bool:
        """Bind the longest cached prefix and set `computed` (at most `len(tokens) - 1`); False: no place now."""

    def grow(self, seq: Sequence, length: int) -> bool:
        """Make room for positions up to `length`, evicting idle prefixes; False: none is left to evict."""

    def place(self, seq: Sequence) -> tuple[int, ...] | int:
        """Return what a chunk needs to find the sequence's KV: block table, or slot."""

    def commit(self, seq: Sequence) -> None:
        """Take the positions below `computed` as final, and forget those behind."""

    def release(self, seq: Sequence) -> None:
        """Unbind a sequence that is done or preempted; its prefix stays reusable."""

    def reset(self) -> None:
        """Forget everything: a step failed, and what the device holds is unknown. No sequence is bound any more."""

    def rest(self) -> None:
        """Make ops that let idle prefixes outlive the process: nothing runs, and perhaps nothing will."""

    def take_ops(self) -> tuple[Op, ...]:
        """Return the device effects since the last call, in order."""

    def close(self) -> None:
        """Wait for what the ops of `rest` do in the background."""


class Executor(Protocol):
    """Owns the weights, the KV memory and the device."""

    @property
    def info(self) -> ExecutorInfo: ...

    def forward(self, step: Step) -> None:
        """Do the ops, run the chunks. CUDA returns at once, llama.cpp when done. Raises EngineError."""

    def sample(self, step: Step, masks: Masks | None) -> Samples:
        """Start to sample the rows of each chunk. CUDA returns at once, llama.cpp when done. Raises EngineError."""

    def logits(self, step: Step) -> NDArray[np.float32]:
        """Return the logits of the sampled rows: [rows, vocabulary]."""

    def embed(self, step: Step) -> NDArray[np.float32]:
        """Return one vector a chunk: [chunks, width]. Raises RequestError where the model has none."""

    def close(self) -> None: ...


class Drafter(Protocol):
    """Proposes tokens that may follow."""

    def begin(self, seq: Sequence) -> None:
        """Get ready for a sequence that was admitted."""

    def propose(self, seq: Sequence, marginal_cost: Seq[float]) -> list[int]:
        """Return at most `len(marginal_cost)` tokens; the k-th cost is that of the k-th extra row, in steps."""

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None: ...

    def stake(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        """Return what is lost on average, in steps, where the step behind the next token has no draft.

        That token is on its way and not known; the costs are as for `propose`.
        """

    def end(self, seq: Sequence) -> None:
        """Learn from a sequence that is finished, and forget what was kept for it."""

    def work(self, seconds: float) -> bool:
        """Do at most about so many seconds of indexing that waits; True: there is more."""

    def close(self) -> None:
        """Save what was learnt."""
