"""The types of the engine: requests, sequences, steps, and the protocols between scheduler, KV cache and executor.

Owns types only, made of integers, strings and plain arrays. Knows nothing of tensors, text, devices or threads.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from edgelm.base.errors import EdgeLMError
from edgelm.base.sampling import SamplingParams

if TYPE_CHECKING:  # the front reads this module, and has no arrays
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "context", "abort", "error"]
Masks: TypeAlias = "NDArray[np.int32]"  # [sampled rows of the step, ceil(vocab / 32)]; a set bit allows its token

NOT_A_TOKEN = -1  # the id of a `Sampled` without a token: a logit is NaN or +inf, or none is finite
LAST = -2  # in a chunk: the token that the previous step sampled for its sequence, still unread by the host


class Matcher(Protocol):
    """The grammar state of one sequence. Only `accept` changes it."""

    @property
    def done(self) -> bool:
        """Whether the answer is complete: nothing but a stop token could follow."""

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; the request has to end."""

    @property
    def unrestricted(self) -> bool:
        """Whether the masks of this row and of the next allow every token, whichever token comes between."""

    def allowed(self, draft: list[int]) -> int:
        """Return how many leading draft tokens the grammar allows."""

    def forced(self, most: int) -> list[int]:
        """Return the next tokens as far as the grammar leaves no choice, at most so many."""

    def fill(self, draft: list[int], rows: Masks) -> None:
        """Write the masks of `len(draft) + 1` rows.

        Rows after the first forbidden draft token are left as they are. A row whose mask cannot be computed allows no
        token, and if it is the first, `error` has the reason.
        """

    def accept(self, token: int) -> None:
        """Advance by one token, which the last masks allowed."""


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """The place of a picture, or of a tile of one, in the tokens of a sequence.

    Its tokens are negative numbers made from its hash, below LAST: equal ones stand for equal pictures, so that the
    prefix cache compares them as it does others.
    """

    start: int
    num_tokens: int
    num_positions: int  # of the model; fewer than tokens where rows and columns have positions of their own (M-RoPE)
    whole: bool  # its tokens attend to each other: one chunk has them all
    source: object = field(repr=False, compare=False)  # what the executor encodes

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class PicturePart:
    """Tokens of a picture in a prompt: of the picture, of a tile of it, or, without a source, of the text around it."""

    tokens: tuple[int, ...]
    num_positions: int
    whole: bool = False
    source: object = field(default=None, repr=False, compare=False)


def in_prompt(parts: Seq[PicturePart], tokens: list[int]) -> tuple[list[int], tuple[PictureSpan, ...]]:
    """Append the parts of a picture to the tokens of a prompt; return these, and the places of the picture's own."""
    spans = []
    for part in parts:
        if part.source is not None:
            spans.append(PictureSpan(len(tokens), len(part.tokens), part.num_positions, part.whole, part.source))
        tokens += part.tokens
    return tokens, tuple(spans)


class PictureReader(Protocol):
    """Makes tokens of pictures, for one model. For any thread."""

    def read(self, data: bytes) -> tuple[PicturePart, ...]:
        """Return the parts of a picture from the bytes of its file. Raises RequestError, BusyError."""

    @property
    def encode_ms(self) -> float:
        """The time for all pictures that were encoded until now."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One request while it is decoded."""

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    computed: int = 0  # tokens[:computed] have valid KV
    draft: list[int] = field(default_factory=list)  # proposed, not verified
    num_forced: int = 0  # leading tokens of the draft that the grammar forces
    drafted_by: str = ""  # the drafter of the last draft: ngram, mtp or model
    matcher: Matcher | None = None
    kv: object = None  # block table or slot; only its KVCache looks inside
    cached: int | None = None  # prompt tokens found in the prefix cache at the first admission
    past: Seq[int] = ()  # the part of the conversation that is no longer in the context; drafters read it
    cache_namespace: str = ""  # stands for the API key: namespaces share no cached prefixes and no learnt drafts
    client: str = ""  # who sent it; clients take turns
    interactive: bool = False  # somebody waits in an editor; it overtakes others, also within their prompts
    turn: int | None = None  # number of its first admission; None: it has not run yet
    drafted: int = 0  # without those that the grammar forced, as is the next one
    accepted: int = 0
    forced: int = 0  # accepted draft tokens that the grammar forced
    pictures: tuple[PictureSpan, ...] = ()  # in the order of their places

    @property
    def completion_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    def position(self, length: int) -> int:
        """Return the position of the model behind the first `length` tokens, which end outside of pictures."""
        if not self.pictures:
            return length
        return length - sum(span.num_tokens - span.num_positions for span in self.pictures if span.end <= length)

    def picture_at(self, index: int) -> PictureSpan | None:
        """Return the picture that has the token at `index`."""
        return next((span for span in self.pictures if span.start <= index < span.end), None)

    def chunk_end(self, end: int) -> int:
        """Return where the next chunk has to end that could end at `end`: a picture has chunks of its own."""
        if span := self.picture_at(self.computed):
            return span.end if span.whole else min(end, span.end)
        return min((span.start for span in self.pictures if self.computed < span.start < end), default=end)


class StateSpan(NamedTuple):
    """How a chunk moves the state of recurrent layers in `slot`: from behind `start` tokens to behind `goal`."""

    slot: int
    start: int
    goal: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Run `tokens` from number `start` on of a sequence, and sample the last `rows` of them."""

    seq: Sequence
    start: int
    tokens: list[int]  # or LAST alone
    rows: int
    kv: tuple[int, ...] | int  # block table, or slot
    state: StateSpan | None = None  # None: the model has none beside its KV

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_picture(self) -> bool:
        return self.tokens[0] < LAST

    @property
    def draft(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.rows + 1 :] if self.rows else []


class Copy(NamedTuple):
    """Share the first `length` positions of slot `src` with the empty slot `dst`."""

    src: int
    dst: int
    length: int


class CopyState(NamedTuple):
    """Copy the state of recurrent layers from one slot to another."""

    src: int
    dst: int


class Trim(NamedTuple):
    """Keep only the first `length` positions of a slot."""

    slot: int
    length: int


class Save(NamedTuple):
    """Keep a snapshot of a slot, or of these blocks, under `key`, outside the cache.

    `state` is the slot of the state behind the last block; None: the model has none beside its KV.
    """

    kv: tuple[int, ...] | int
    key: int
    state: int | None = None


class Load(NamedTuple):
    """Load the snapshot `key` into an empty slot, or its blocks from number `first` on into these; it stays.

    Its state goes to the slot `state`.
    """

    key: int
    kv: tuple[int, ...] | int
    first: int = 0
    state: int | None = None


class Drop(NamedTuple):
    """Forget the snapshot `key`. It may not exist: the step that should save it may have failed."""

    key: int


class Store(NamedTuple):
    """Write the snapshot `key` to a file in the background. The snapshot stays; it may not exist."""

    key: int
    tokens: NDArray[np.int32]  # of the snapshot
    cache_namespace: str
    shared: bool = False  # several conversations begin with it: it is deleted last


Op = Copy | CopyState | Trim | Save | Load | Drop | Store


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. The ops run in order, before the chunks; there may be no chunks."""

    chunks: tuple[Chunk, ...]
    ops: tuple[Op, ...] = ()
    num_tokens: int = field(init=False)
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum([len(chunk.tokens) for chunk in self.chunks]))
        object.__setattr__(self, "num_rows", sum([chunk.rows for chunk in self.chunks]))


class Sampled(NamedTuple):
    """A sampled token. Log-probabilities, if requested, are those of the model's own distribution."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PendingSamples(Protocol):
    """The samples of a step, which the device may still be computing."""

    def read(self) -> list[list[Sampled]]:
        """Wait for the sampled rows of each chunk, in order. Raises EngineError.

        Rows after the first that differs from the draft may be missing.
        """


@dataclass(frozen=True, slots=True)
class CompletedSamples:
    """`PendingSamples` that are on the host."""

    rows: list[list[Sampled]]

    def read(self) -> list[list[Sampled]]:
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Token counts and times of one request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted: int  # without those that a grammar forced, as is the next one
    accepted: int
    forced: int = 0  # accepted draft tokens that a grammar forced
    queue_ms: float  # from submit to the first step
    prompt_ms: float  # from the first step to the first token
    first_token_ms: float  # from submit to the first token
    decode_ms: float  # from the first token to the last

    @property
    def decode_tokens_per_second(self) -> float:
        """The tokens after the first, divided by their time; 0: there are none."""
        return 1000 * (self.completion_tokens - 1) / self.decode_ms if self.decode_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """The new tokens of one sequence after one step; the last event of a sequence has a finish reason."""

    seq_id: int
    sampled: tuple[Sampled, ...] = ()
    finish_reason: FinishReason | None = None
    error: EdgeLMError | None = None
    stats: Stats | None = None
    accepted: int = 0  # how many leading tokens of `sampled` were drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """Limits and abilities of an executor. Lengths and sizes are in tokens unless stated otherwise."""

    engine: str  # "llama" or "torch"
    device: str
    num_vocab: int
    context: int  # the longest sequence
    capacity: int  # positions of the KV cache, for all sequences together
    max_tokens: int  # of all chunks of a step
    max_rows: int  # sampled rows of a step
    max_sequences: int  # slots
    kv_bytes_per_token: int
    # Draft tokens of a sequence that the executor verifies as it decodes; 0: no limit of its own. Not in the repr:
    # that names the files with measured times.
    max_draft: int = field(default=0, repr=False)
    # Tokens at the end of a chunk, but not its first, that can be cut off again, once, where `can_trim` is False.
    rollback_len: int = field(default=0, repr=False)
    can_trim: bool = True  # the KV of a sequence can be cut after any position
    can_copy: bool = True  # another sequence can share a prefix
    # Slots for states of recurrent layers beside the KV of a block table, of running sequences and of prefixes; 0: the
    # model has no such layers. `state_bytes` is the size of one. Neither is in the repr.
    num_states: int = field(default=0, repr=False)
    state_bytes: int = field(default=0, repr=False)
    block_len: int = 0  # positions of a block, if a chunk's `kv` is a block table; 0: it is a slot
    keeps_all: bool = True  # the KV of a sequence loses no position while it grows; False: a prefix is reused whole
    # Equal requests with equal seeds get equal answers, to the last bit; `max_chunk` limits the tokens of a sequence in
    # a step for that, 0: it does not. Neither is in the repr.
    repeatable: bool = field(default=False, repr=False)
    max_chunk: int = field(default=0, repr=False)
    runs_ahead: bool = False  # a step may be launched before the previous one is read; its tokens are then LAST

    @property
    def can_draft(self) -> bool:
        """Whether a rejected draft can be cut off."""
        return self.can_trim or self.rollback_len > 0


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """A snapshot in a file."""

    name: str
    tokens: NDArray[np.int32]
    cache_namespace: str
    shared: bool = False


OnSaving = Callable[[int], None]  # called on progress while states are saved at the end: how many are left


class Snapshots(Protocol):
    """The store of snapshots, as a `KVCache` sees it. Keys identify snapshots in memory, names those in files."""

    keeps_files: bool

    def nbytes(self, key: int) -> int | None:
        """Return the size of a snapshot in memory; None: it was not saved."""

    def files(self) -> tuple[StoredPrefix, ...]:
        """Return the snapshots in files: the same object as last time, if nothing changed."""

    def prefetch(self, name: str) -> bool:
        """Begin to read a file in the background, in place of another one; True: now `fetch` does not wait for it."""

    def drop_prefetched(self) -> None:
        """Forget a file that `prefetch` read: nobody fetches it."""

    def fetch(self, name: str, key: int) -> bool:
        """Read a file into memory under a new key; False: it is damaged or missing, and no longer one of `files`."""

    def flush(self, on_saving: OnSaving) -> None:
        """Wait until all pending snapshots are in files: within a time limit, and while the disk makes progress."""


@dataclass(frozen=True, slots=True)
class KVRegion:
    """A part of the KV cache, or a saved state of one.

    In the cache are `running`, `idle` (a prefix that can be reused) and `shared` (one that several conversations begin
    with); in memory beside it are `snapshot` and `shared_snapshot`; on disk is `file`.
    """

    kind: Literal["running", "idle", "shared", "snapshot", "shared_snapshot", "file"]
    num_tokens: int
    nbytes: int
    cache_namespace: str
    seq_id: int | None = None  # of a running sequence


class KVCache(Protocol):
    """Bookkeeping of the KV cache: which sequences hold which positions, and which prefixes can be reused."""

    @property
    def usage(self) -> float:
        """The share of the cache that running sequences hold, 0 to 1. For any thread."""

    def regions(self) -> tuple[KVRegion, ...]:
        """Return the regions of the cache and the saved states outside of it. For the engine's thread."""

    def attach(self, seq: Sequence) -> bool:
        """Bind the longest cached prefix and set `computed` (at most `len(tokens) - 1`); False: no room now."""

    def grow(self, seq: Sequence, length: int) -> bool:
        """Make room for positions up to `length`, evicting idle prefixes; False: nothing is left to evict.

        A second call for the same step may need less room.
        """

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Return where a chunk that could end at `end` has to end: there, or at an earlier position worth saving."""

    def kv_location(self, seq: Sequence) -> tuple[int, ...] | int:
        """Return where the KV of a sequence is, as chunks need it: its block table, or its slot."""

    def state_span(self, seq: Sequence, start: int, num_tokens: int, rows: int) -> StateSpan | None:
        """Return how a chunk moves the state of a sequence, and count that as done; None: there is none."""

    def commit(self, seq: Sequence) -> None:
        """Make the positions below `computed` final, and forget those after them."""

    def keeps(self, seq: Sequence) -> bool:
        """Tell whether a running sequence that is released now can go on later without computing its prefix again."""

    def release(self, seq: Sequence, resumes: bool = False) -> None:
        """Unbind a sequence that is finished, or preempted: then it `resumes`. Its prefix stays reusable."""

    def reset(self) -> None:
        """Forget everything and unbind all sequences: a step failed, and the content of the device is unknown."""

    def flush_idle(self, ends: bool) -> None:
        """Make ops that store idle prefixes beyond this process: those worth it now, or all as the engine `ends`.

        No sequence runs now.
        """

    def take_ops(self) -> tuple[Op, ...]:
        """Return the device effects since the last call, in order."""

    def close(self, on_saving: OnSaving) -> None:
        """Wait for the background work of the ops that `flush_idle` made."""


class Heads(Protocol):
    """Heads of a model that predict the tokens after the next one, from hidden states that its executor keeps for them.

    A result is the most likely token and its probability; NOT_A_TOKEN: there is none. Raises EngineError.
    """

    def begin(self, seq_id: int) -> None:
        """Keep the hidden states of a sequence from now on."""

    def first(self, seq_id: int, tokens: list[int]) -> tuple[int, float]:
        """Return the token behind `tokens`, of which the executor has computed all but the last."""

    def next(self, seq_id: int, token: int) -> tuple[int, float]:
        """Return the token behind one that the last call returned."""

    def end(self, seq_id: int) -> None:
        """Forget a sequence. Idempotent."""


class Executor(Protocol):
    """Owns the weights, the KV memory and the device."""

    @property
    def info(self) -> ExecutorInfo: ...

    def forward(self, step: Step) -> None:
        """Do the ops, then run the chunks. CUDA returns at once, llama.cpp when done. Raises EngineError."""

    def sample(self, step: Step, masks: Masks | None) -> PendingSamples:
        """Start to sample the rows of each chunk. CUDA returns at once, llama.cpp when done. Raises EngineError."""

    def logits(self, step: Step) -> NDArray[np.float32]:
        """Return the logits of the sampled rows: [rows, vocab]."""

    def close(self) -> None: ...


Pooling = Literal["mean", "cls", "last", "rank"]  # the vector of an input: of its hidden states, or its scores


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderInfo:
    """The limits of an embedder."""

    width: int  # of a vector; with the pooling "rank", the number of scores
    context: int  # tokens of the longest input
    max_inputs: int  # of a batch


class EmbeddingBatch(Protocol):
    """The vectors of some inputs while they are computed."""

    def step(self, max_tokens: int) -> int:
        """Compute the next tokens, about so many, and return how many; 0: all vectors are complete. Raises EngineError.

        A model without causal attention computes an input as a whole, however long it is.
        """

    def vectors(self) -> NDArray[np.float32]:
        """Return the vectors as the model computes them, not normalized: [inputs, width]."""


class Embedder(Protocol):
    """Computes vectors. For the engine's thread only: it shares the weights and the processor with the steps."""

    @property
    def info(self) -> EmbedderInfo: ...

    def begin(self, inputs: Seq[Seq[int]]) -> EmbeddingBatch:
        """Start a batch; the one before is lost. Each input has 1 to `context` tokens.

        Raises EngineError if there is not enough memory for the longest input.
        """

    def close(self) -> None: ...


class Drafter(Protocol):
    """Proposes draft tokens."""

    def begin(self, seq: Sequence) -> None:
        """Prepare for a sequence that was admitted."""

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        """Return at most `len(marginal_cost)` draft tokens; `marginal_cost[k]` is the cost of extra row k, in steps.

        The draft continues the sequence's tokens and then those that its grammar forces.
        """

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None: ...

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        """Return the expected cost, in steps, of launching the step after the next token without a draft.

        The device is still computing that token; `marginal_cost` is as for `propose`.
        """

    def end(self, seq: Sequence) -> None:
        """Learn from a finished sequence, and free its state."""

    def work(self, seconds: float) -> bool:
        """Spend at most about `seconds` on pending background work; True: there is more."""

    def close(self) -> None:
        """Save the learnt state."""
