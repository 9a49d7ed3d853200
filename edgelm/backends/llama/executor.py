"""LlamaExecutor: runs steps on llama.cpp's low-level functions.

Owns the native context: KV memory, compute buffers, the batch, and the identity of the states that it saves. Checks
the inputs on which llama.cpp would abort. Knows nothing of requests, prefixes, or the reasons behind a step.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.api import Batch, fill_struct, logits_view, metadata, native_log
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.heads import LlamaHeads, heads_params
from edgelm.backends.llama.memory import CELLS, MAX_ROWS, head_refusal, kv_head_bytes, kv_types, micro_batch, padded
from edgelm.backends.llama.model import LlamaModel, memory_error
from edgelm.backends.llama.pace import NativeThreads, Pace
from edgelm.backends.snapshots import SnapshotStore
from edgelm.base.errors import EngineError, ModelError, SnapshotError
from edgelm.base.kv_modes import LLAMA_KV
from edgelm.checkpoints.files import file_identity
from edgelm.engine.core import (
    Chunk,
    CompletedSamples,
    Copy,
    Drop,
    ExecutorInfo,
    Load,
    Masks,
    Op,
    Save,
    Step,
    Store,
    Trim,
)
from edgelm.engine.sampling.host import HostSampler

if TYPE_CHECKING:
    from edgelm.backends.llama.projector import Projector

UNBOUNDED = 2**62  # bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaOptions:
    """The options of a context. Its `context` tokens are shared by all sequences."""

    context: int
    kv: str = "f16"
    flash: bool | None = None  # None: as the KV mode needs it
    repeatable_rows: int = 0  # rows of a micro-batch that have equal bits (repeatable.py); 0: bits may differ
    max_sequences: int = 8
    max_tokens: int = 512
    max_rows: int = MAX_ROWS
    threads: int = 1
    heads: bool = False  # heads that predict several tokens were loaded, with the model or from a file of their own
    rollback: int = 0  # tokens that a recurrent state can go back, where llama.cpp can for the architecture
    picture_tokens: int = 0  # of a picture that has to be in one micro-batch

    @property
    def flash_attention(self) -> bool:
        needed = LLAMA_KV[self.kv].flash or self.repeatable_rows > 0
        return needed if self.flash is None else self.flash


class LlamaExecutor:
    """An `Executor` over one llama.cpp context, with idle sequences in `snapshots`.

    Takes ownership of the model, its projector and the file of its heads: `close` frees them. Raises ModelError for a
    KV mode that the model cannot have, and when there is no memory for the context (DeviceMemoryError where it is a
    device's).
    """

    def __init__(
        self,
        model: LlamaModel,
        options: LlamaOptions,
        snapshots: SnapshotStore | None = None,
        projector: Projector | None = None,
        heads: LlamaModel | None = None,
    ) -> None:
        key_len, value_len = model.head_lens
        if refusal := head_refusal(options.kv, key_len, value_len):
            raise ModelError(f"--kv {options.kv} {refusal}", "use --kv f16")
        self._model = model
        self._projector = projector
        native_log.clear()
        params = context_params(options, model.num_heads)
        fill_struct(params, **yarn_ramp(model))
        self._context: Any = L.llama_init_from_model(model.native, params)
        if not self._context and (error := memory_error(model.placement)):
            raise error
        if not self._context:
            reason = native_log.first_error() or "it gives no reason"
            raise ModelError(
                f"llama.cpp could not make a context of {options.context:,} tokens: {reason}",
                "lower --ctx, or choose a smaller --kv",
            )
        model.apply_adapters(self._context)
        self._memory = L.llama_get_memory(self._context)
        max_tokens = min(options.max_tokens, L.llama_n_batch(self._context))
        layer_bytes = model.num_kv_heads * kv_head_bytes(options.kv, key_len, value_len)
        self._info = ExecutorInfo(
            engine="llama",
            device=model.placement.describe(model.num_layers),
            num_vocab=model.num_vocab,
            context=options.context,
            capacity=L.llama_n_ctx(self._context),
            max_tokens=max_tokens,
            max_rows=options.max_rows,
            max_sequences=options.max_sequences,
            kv_bytes_per_token=int(model.num_layers * layer_bytes),
            rollback_len=L.llama_n_rs_seq(self._context),
            can_trim=not (model.recurrent or model.hybrid),
            can_copy=not model.hybrid and not options.repeatable_rows,
            keeps_all=L.llama_model_n_swa(model.native) == 0,
            repeatable=options.repeatable_rows > 0,
        )
        self._options = options
        self._batch = Batch(max_tokens)
        self._threads = NativeThreads(self._context)
        self._pace = Pace(self._threads, options.threads, model.other_load)
        self._logits = np.empty((0, model.num_vocab), np.float32)
        self._snapshots = snapshots or SnapshotStore(UNBOUNDED)
        self._snapshots.divisible = self._info.can_trim and self._info.keeps_all
        self._sampler = HostSampler(model.num_vocab)
        self._heads_model = heads or model
        self._heads = self._load_heads(options) if options.heads else None

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def heads(self) -> LlamaHeads | None:
        return self._heads

    def forward(self, step: Step) -> None:
        """Do the ops, then run the chunks. Raises EngineError when llama.cpp refuses one."""
        for op in step.ops:
            self._apply(op)
        if not step.chunks:
            return
        assert step.num_rows <= self._info.max_rows
        for chunk in step.chunks:
            assert isinstance(chunk.kv, int)
            assert 0 <= chunk.kv < self._info.max_sequences
            if chunk.is_picture:
                self._read_picture(chunk, chunk.kv)
        if self._heads:
            self._heads.prepare(step)
        passes = self._passes(step)
        if len(passes) == 1:
            self._logits = self._run(passes[0])
        elif passes:
            logits = {chunk.kv: rows for chunks in passes for chunk, rows in self._run_and_copy(chunks)}
            self._logits = np.concatenate([logits[chunk.kv] for chunk in step.chunks if chunk.rows])
        if self._heads:
            self._heads.set_threads(self._pace.num_threads)

    def _passes(self, step: Step) -> list[list[Chunk]]:
        """Return the chunks of text in the order in which they run.

        llama.cpp computes recurrent layers for sequences of equal length at once. A later such pass may move the state
        of a sequence, but not the earlier states that a rejected draft goes back to; one of a single sequence moves
        nothing. So drafts come last: in one pass, or where it needs neighbouring slots, each in its own.

        A micro-batch of more sequences than its rows would have one row too many.
        """
        others, drafts = list[Chunk](), list[Chunk]()
        for chunk in step.chunks:
            if not chunk.is_picture:
                (others if chunk.rows <= 1 or self._info.can_trim else drafts).append(chunk)
        assert len({chunk.rows for chunk in drafts}) <= 1, "the drafts of a step have one length"
        apart = [[chunk] for chunk in drafts] if self._info.repeatable else [drafts]
        most = self._options.repeatable_rows or max(1, len(others))
        few = [others[at : at + most] for at in range(0, len(others), most)]
        return [chunks for chunks in (*few, *apart) if chunks]

    def _run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Compute chunks of text, and return the logits of their rows, valid until the next call."""
        last = 0
        for chunk in chunks:
            assert isinstance(chunk.kv, int)
            assert last + len(chunk.tokens) <= self._info.max_tokens
            last = self._batch.set(last, chunk.tokens, chunk.seq.position(chunk.start), chunk.kv, chunk.rows)
        self._check_batch(last, chunks)
        self._batch.native.n_tokens = last
        self._decode(self._batch.native, last)
        if self._heads:
            self._heads.take(chunks)
        num_rows = sum(chunk.rows for chunk in chunks)
        if not num_rows:
            return self._logits[:0]
        logits = logits_view(self._context, num_rows, self._info.num_vocab)
        self._model.check_outputs()
        return logits

    def _run_and_copy(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, NDArray[np.float32]]]:
        logits, start = self._run(chunks).copy(), 0
        for chunk in chunks:
            yield chunk, logits[start : start + chunk.rows]
            start += chunk.rows

    def _decode(self, batch: Any, num_tokens: int) -> None:
        native_log.clear()
        began = self._pace.begin(num_tokens)
        result = L.llama_decode(self._context, batch)
        self._pace.end(num_tokens, began)
        if result == 1:
            raise EngineError("the KV cache has no room for this step", "lower the number of parallel requests")
        if result != 0:
            raise self._model.step_error("run a step", result)

    def _read_picture(self, chunk: Chunk, slot: int) -> None:
        """Run the tokens of a picture, or some of them, which is encoded first if it was not yet."""
        span, count = chunk.seq.picture_at(chunk.start), len(chunk.tokens)
        assert span is not None
        assert chunk.rows == 0
        assert chunk.end <= span.end
        assert count <= max(self._info.max_tokens, self._options.picture_tokens)
        assert self._projector is not None
        from edgelm.backends.llama.projector import PictureBatch, Tile  # most models see nothing

        assert isinstance(span.source, Tile)
        embeddings = self._projector.embeddings(span.source)
        first, begin = chunk.start - span.start, chunk.seq.position(span.start)
        if self._projector.mrope:
            positions = span.source.positions(begin)
        else:
            positions = np.arange(begin, begin + span.num_tokens, dtype=np.int32)
        batch = PictureBatch(embeddings[first : first + count], positions[..., first : first + count], slot)
        if not span.whole:
            self._decode(batch.native, count)
            return
        assert count == span.num_tokens <= self._options.picture_tokens, "llama.cpp aborts on a part"
        L.llama_set_causal_attn(self._context, False)
        try:
            self._decode(batch.native, count)
        finally:
            L.llama_set_causal_attn(self._context, True)

    def sample(self, step: Step, masks: Masks | None) -> CompletedSamples:
        """Sample the rows of each chunk, up to the first that differs from the draft."""
        return CompletedSamples(self._sampler.sample(step, self._logits, masks))

    def logits(self, step: Step) -> NDArray[np.float32]:
        """Return the logits of the sampled rows, valid until the next `forward`: [rows, vocab]."""
        return self._logits[: step.num_rows]

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            self._snapshots.close()
            self._threads.close()
            if self._heads:
                self._heads.close()
            L.llama_free(context)
            if self._projector:
                self._projector.close()
            if self._heads_model is not self._model:
                self._heads_model.close()
            self._model.close()

    def _load_heads(self, options: LlamaOptions) -> LlamaHeads:
        params = heads_params(context_params(options, self._model.num_heads), options.max_sequences)
        try:
            return LlamaHeads(self._heads_model, self._context, params)
        except ModelError:
            context, self._context = self._context, None
            L.llama_free(context)
            raise

    # -- memory ----------------------------------------------------------------------------------------------------

    def _apply(self, op: Op) -> None:
        match op:
            case Trim(slot, length):
                start = length or -1  # llama.cpp can always empty a slot, but not every model's cache can be cut
                if not L.llama_memory_seq_rm(self._memory, slot, start, -1):
                    raise EngineError(f"llama.cpp cannot cut the cache of this model at {length}")
            case Copy(src, dst, length):
                L.llama_memory_seq_cp(self._memory, src, dst, 0, length)
            case Save(int(slot), key):
                self._save(slot, key)
            case Load(key, int(slot)):
                state = self._snapshots.get(key)
                native_log.clear()
                if L.llama_state_seq_set_data(self._context, _bytes(state), state.size, slot) == 0:
                    self._snapshots.refuse(key)
                    raise SnapshotError(f"llama.cpp could not load a sequence: {native_log.first_error()}")
            case Drop(key):
                self._snapshots.drop(key)  # it may not exist: a failed step did not save it
            case Store():
                self._snapshots.store(op)

    def _save(self, slot: int, key: int) -> None:
        """Copy a sequence's state out, if there is room. `SlotKV` checks later whether it was saved."""
        size = L.llama_state_seq_get_size(self._context, slot)
        state = self._snapshots.new_state(size)
        if state is None:
            return
        native_log.clear()
        if L.llama_state_seq_get_data(self._context, _bytes(state), size, slot) == size:
            self._snapshots.put(key, state)
        else:
            log.warning("llama.cpp could not save a sequence: %s", native_log.first_error())

    def _check_batch(self, num_tokens: int, chunks: Sequence[Chunk]) -> None:
        """Assert the conditions without which llama.cpp aborts, or computes wrong logits."""
        assert 0 < num_tokens <= self._info.max_tokens
        for chunk in chunks:
            assert min(chunk.tokens) >= 0
            assert max(chunk.tokens) < self._info.num_vocab
            assert chunk.start >= 0
            assert chunk.end <= self._info.context


def context_params(options: LlamaOptions, num_heads: int) -> Any:
    """Return llama.cpp's parameters of a context for a model with `num_heads` attention heads."""
    key_type, value_type = kv_types(options.kv)
    flash, rows = options.flash_attention, options.repeatable_rows
    context = max(options.context, CELLS)  # llama.cpp rounds it up to that; a smaller one would cut n_batch
    return fill_struct(
        L.llama_context_default_params(),
        n_ctx=padded(context) * options.max_sequences if rows else context,
        n_batch=max(options.max_tokens, options.max_rows, options.picture_tokens),
        n_ubatch=rows or max(micro_batch(options.context, num_heads, flash), options.picture_tokens),
        n_seq_max=options.max_sequences,
        n_outputs_max=options.max_rows,
        n_rs_seq=options.rollback,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        flash_attn_type=L.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else L.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        type_k=key_type.id,
        type_v=value_type.id,
        kv_unified=not rows,  # so that sequences can share prefixes; sums go by cells, and those of others come between
        swa_full=True,  # so that sliding windows can be cut
        no_perf=True,
    )


def yarn_ramp(model: LlamaModel) -> dict[str, float]:
    """Return the ramp of YaRN in the file, as parameters of a context: llama.cpp reads it for a few architectures only.

    A number that cannot be true is left out.
    """
    arch = metadata(model.native, "general.architecture")
    ramp = {}
    for name in ("yarn_beta_fast", "yarn_beta_slow"):
        try:
            value = float(metadata(model.native, f"{arch}.rope.scaling.{name}") or 0)
        except ValueError:  # the file has a text there
            continue
        if 0 < value < math.inf:
            ramp[name] = value
    return ramp


def state_identity(model: LlamaModel, files: Sequence[Path], options: LlamaOptions) -> bytes:
    """Return 16 bytes that identify all that a saved state depends on: weights, adapters, build of llama.cpp, KV types.

    A state is valid only under the same identity; llama.cpp stores no hash of the model with it. Of the weights' files,
    the size, the time, the first bytes and samples count. Raises OSError where they cannot be read.
    """
    key_type, value_type = kv_types(options.kv)
    library = Path(L._lib._name).stat()  # noqa: SLF001 - the version alone does not identify a build
    facts: list[object] = [L.llama_version(), library.st_size, library.st_mtime_ns]
    facts += [key_type.id, value_type.id, options.flash_attention]
    if options.repeatable_rows:
        facts.append("repeatable")
    if model.placement.devices:  # its numbers are rounded otherwise
        facts.append(model.placement)
    if model.adapters:
        facts.append([adapter.state_fact for adapter in model.adapters])
    arch = metadata(model.native, "general.architecture")
    if metadata(model.native, f"{arch}.rope.scaling.original_context_length") is not None:
        facts.append(options.context)  # some models rotate keys by other factors in a long context
    if ramp := yarn_ramp(model):
        facts.append(ramp)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for part in file_identity(files):
        digest.update(part)
    return digest.digest()


def _bytes(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
