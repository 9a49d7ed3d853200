"""LlamaExecutor: runs steps on llama.cpp's low-level functions.

Owns the native context: KV memory, compute buffers, the batch. Checks what llama.cpp would abort on.
Knows nothing of requests, prefixes or why a step looks as it does.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as L
from numpy.typing import NDArray

from edgelm.core import Copy, Drop, ExecutorInfo, Load, Masks, Op, Ready, Save, Step, Store, Trim
from edgelm.errors import EngineError, ModelError, RequestError, SnapshotError
from edgelm.executors.llama_api import Batch, fill_struct, logits_view, native_log
from edgelm.executors.llama_memory import KV_MODES, MAX_ROWS, KVMode, kv_head_bytes, micro_batch, whole_blocks
from edgelm.executors.llama_model import LlamaModel
from edgelm.executors.snapshots import SnapshotStore
from edgelm.sampling.chunks import HostSampler

UNBOUNDED = 2**62  # bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaOptions:
    """How a context is made. `context` tokens are shared by all sequences."""

    context: int
    kv: str = "f16"
    flash: bool | None = None  # None: as the KV mode has it
    max_sequences: int = 8
    max_tokens: int = 512
    max_rows: int = MAX_ROWS
    threads: int = 1
    batch_threads: int = 1


class LlamaExecutor:
    """An `Executor` over one llama.cpp context, with idle sequences in `snapshots`.

    Takes the model over: `close` frees it. Raises ModelError for a KV mode that the model cannot have, or when there is
    no memory for the context.
    """

    def __init__(self, model: LlamaModel, options: LlamaOptions, snapshots: SnapshotStore | None = None) -> None:
        mode = KV_MODES[options.kv]
        key_dim, value_dim = model.head_dims
        _check_head_dims(options.kv, mode, key_dim, value_dim)
        self._model = model
        native_log.clear()
        params = context_params(options, model.num_heads)
        self._context: Any = L.llama_init_from_model(model.native, params)
        if not self._context:
            reason = native_log.first_error() or "llama.cpp gives no reason"
            raise ModelError(
                f"no context of {options.context:,} tokens could be made: {reason}",
                "lower --ctx, or choose a smaller --kv",
            )
        self._memory = L.llama_get_memory(self._context)
        max_tokens = min(options.max_tokens, L.llama_n_batch(self._context))
        layer_bytes = model.num_kv_heads * kv_head_bytes(options.kv, key_dim, value_dim)
        self._info = ExecutorInfo(
            engine="llama",
            device="cpu",
            num_vocab=model.num_vocab,
            context=options.context,
            capacity=L.llama_n_ctx(self._context),
            max_tokens=max_tokens,
            max_rows=options.max_rows,
            max_sequences=options.max_sequences,
            kv_bytes_per_token=int(model.num_layers * layer_bytes),
            can_trim=not (model.recurrent or model.hybrid),
            can_copy=not model.hybrid,
            keeps_all=L.llama_model_n_swa(model.native) == 0,
        )
        self._batch = Batch(max_tokens)
        self._logits = np.empty((0, model.num_vocab), np.float32)
        self._snapshots = snapshots or SnapshotStore(UNBOUNDED)
        self._snapshots.divisible = self._info.can_trim and self._info.keeps_all
        self._sampler = HostSampler(model.num_vocab)

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def forward(self, step: Step) -> None:
        """Do the ops, run the chunks. Raises EngineError when llama.cpp refuses one."""
        for op in step.ops:
            self._apply(op)
        if not step.chunks:
            return
        last = 0
        for chunk in step.chunks:
            assert isinstance(chunk.kv, int)
            assert 0 <= chunk.kv < self._info.max_sequences
            assert last + len(chunk.tokens) <= self._info.max_tokens
            last = self._batch.set(last, chunk.tokens, chunk.start, chunk.kv, chunk.rows)
        self._check_batch(last, step)
        self._batch.native.n_tokens = last
        native_log.clear()
        result = L.llama_decode(self._context, self._batch.native)
        if result == 1:
            raise EngineError("the KV cache has no room for this step", "lower the number of parallel requests")
        if result != 0:
            raise EngineError(f"llama.cpp could not run a step ({result}): {native_log.first_error()}")
        if step.num_rows:
            self._logits = logits_view(self._context, step.num_rows, self._info.num_vocab)

    def sample(self, step: Step, masks: Masks | None) -> Ready:
        """Sample the rows of each chunk, up to the first that differs from the draft."""
        return Ready(self._sampler.sample(step, self._logits, masks))

    def logits(self, step: Step) -> NDArray[np.float32]:
        """Return the logits of the sampled rows, valid until the next `forward`: [rows, vocabulary]."""
        return self._logits[: step.num_rows]

    def embed(self, step: Step) -> NDArray[np.float32]:
        """Refuse: a context for text gives no embeddings (they need one of their own, see llama.cpp's pooling)."""
        raise RequestError("this engine was started for text, not for embeddings")

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            self._snapshots.close()
            L.llama_free(context)
            self._model.close()

    # -- memory ----------------------------------------------------------------------------------------------------

    def _apply(self, op: Op) -> None:
        match op:
            case Trim(slot, length):
                start = length or -1  # the whole of a slot can always go
                if not L.llama_memory_seq_rm(self._memory, slot, start, -1):
                    raise EngineError(f"llama.cpp cannot cut the cache of this model at {length}")
            case Copy(src, dst, length):
                L.llama_memory_seq_cp(self._memory, src, dst, 0, length)
            case Save(slot, key):
                self._save(slot, key)
            case Load(key, slot):
                state = self._snapshots.get(key)
                native_log.clear()
                if L.llama_state_seq_set_data(self._context, _bytes(state), state.size, slot) == 0:
                    self._snapshots.refuse(key)
                    raise SnapshotError(f"llama.cpp could not load a sequence: {native_log.first_error()}")
            case Drop(key):
                self._snapshots.drop(key)  # a failed step may not have come to save it
            case Store():
                self._snapshots.store(op)

    def _save(self, slot: int, key: int) -> None:
        """Copy a sequence's state out, if there is room: the bookkeeper asks afterwards."""
        size = L.llama_state_seq_get_size(self._context, slot)
        if not self._snapshots.has_room(size):
            log.info("a snapshot of %d bytes finds no room", size)
            return
        try:
            state = np.empty(size, np.uint8)
        except MemoryError:
            log.warning("there is no memory for a snapshot of %d bytes", size)
            return
        native_log.clear()
        if L.llama_state_seq_get_data(self._context, _bytes(state), size, slot) == size:
            self._snapshots.put(key, state)
        else:
            log.warning("llama.cpp could not save a sequence: %s", native_log.first_error())

    def _check_batch(self, num_tokens: int, step: Step) -> None:
        """Assert what llama.cpp answers with an abort, or with wrong logits."""
        tokens = self._batch.token[:num_tokens]
        assert 0 < num_tokens <= self._info.max_tokens
        assert step.num_rows <= self._info.max_rows
        assert tokens.min() >= 0
        assert tokens.max() < self._info.num_vocab
        assert all(chunk.start >= 0 and chunk.end <= self._info.context for chunk in step.chunks)


def context_params(options: LlamaOptions, num_heads: int) -> Any:
    """Return llama.cpp's parameters of a context for a model with so many attention heads."""
    mode = KV_MODES[options.kv]
    flash = mode.flash if options.flash is None else options.flash
    return fill_struct(
        L.llama_context_default_params(),
        n_ctx=max(options.context, 256),  # it is rounded up to that; less would cut n_batch
        n_batch=max(options.max_tokens, options.max_rows),
        n_ubatch=micro_batch(options.context, num_heads, flash),
        n_seq_max=options.max_sequences,
        n_outputs_max=options.max_rows,
        n_threads=options.threads,
        n_threads_batch=options.batch_threads,
        flash_attn_type=L.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else L.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        type_k=mode.type_k,
        type_v=mode.type_v,
        kv_unified=True,  # prefixes can be shared
        swa_full=True,  # sliding windows can be cut
        no_perf=True,
    )


def _check_head_dims(name: str, mode: KVMode, key_dim: int, value_dim: int) -> None:
    """Refuse quantized heads that are no multiple of a block: llama.cpp would compute NaN, without a word."""
    for what, kind, dim in (("key", mode.type_k, key_dim), ("value", mode.type_v, value_dim)):
        if not whole_blocks(kind, dim):
            raise ModelError(
                f"--kv {name} needs {what} heads of a multiple of 32, this model's have {dim}", "use --kv f16"
            )


def _bytes(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
