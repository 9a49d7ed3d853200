"""LlamaEmbedder: vectors by llama.cpp, in a context of their own on the weights of a loaded model.

Owns that context and its size, which follows the longest input. Checks the inputs on which llama.cpp would abort: it
does so where a model without causal attention gets more tokens at a time than its micro-batch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.api import Batch, fill_struct, metadata, native_log
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.executor import yarn_ramp
from edgelm.backends.llama.memory import GGML_TYPES, LlamaMemory
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.pooling import CausalBatch, Piece
from edgelm.base.errors import EngineError
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.checkpoints.summary import ModelFacts
from edgelm.engine.core import EmbedderInfo, Pooling

FIRST_SIZE = 512  # tokens of the first context
MAX_INPUTS = 64  # of a batch
PIECE = 512  # tokens of causal models that llama.cpp gets at a time, at most
FLASH_FROM = 2048  # tokens; the scores of a larger context take gigabytes
USABLE = 0.9  # of the free memory
POOLINGS: dict[Pooling, int] = {
    "mean": L.LLAMA_POOLING_TYPE_MEAN,
    "cls": L.LLAMA_POOLING_TYPE_CLS,
    "last": L.LLAMA_POOLING_TYPE_LAST,
    "rank": L.LLAMA_POOLING_TYPE_RANK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderOptions:
    """The options of an embedder."""

    pooling: Pooling
    context: int  # tokens of the longest input
    threads: int = 1


class LlamaEmbedder:
    """An `Embedder` over llama.cpp. It shares the model, which it closes with itself.

    A causal model is run in pieces with a KV cache, and its hidden states are pooled here; other models are pooled by
    llama.cpp, a whole batch at a time.
    """

    def __init__(self, model: LlamaModel, memory: LlamaMemory, options: EmbedderOptions) -> None:
        self._model = model
        self._memory = memory
        self._options = options
        self._causal = is_causal(model)
        self._pooled_natively = not self._causal or options.pooling == "rank"
        self._context: Any = None
        self._size = 0
        self._tokens = Batch(1)
        ranks = options.pooling == "rank"
        one_by_one = model.recurrent or model.hybrid  # their states take much memory
        self._info = EmbedderInfo(
            width=L.llama_model_n_cls_out(model.native) if ranks else L.llama_model_n_embd_out(model.native),
            context=options.context,
            max_inputs=1 if one_by_one else MAX_INPUTS,
        )

    @property
    def info(self) -> EmbedderInfo:
        return self._info

    def begin(self, inputs: Sequence[Sequence[int]]) -> CausalBatch | _WholeBatch:
        assert 0 < len(inputs) <= self._info.max_inputs
        assert all(0 < len(tokens) <= self._info.context for tokens in inputs)
        assert all(0 <= min(tokens) <= max(tokens) < self._model.num_vocab for tokens in inputs)
        self._make_room(sum(map(len, inputs)))
        if self._causal:
            L.llama_memory_clear(L.llama_get_memory(self._context), True)
            return CausalBatch(inputs, self._info.width, self._options.pooling, PIECE, self._run)
        return _WholeBatch(self, inputs)

    def close(self) -> None:
        self._free()
        self._model.close()

    # -- for the batches -------------------------------------------------------------------------------------------

    def decode(self, pieces: Sequence[Piece]) -> None:
        """Run pieces together. Raises EngineError."""
        last = 0
        for seq, start, tokens in pieces:
            last = self._tokens.set(last, list(tokens), start, seq, len(tokens))
        assert 0 < last <= L.llama_n_ubatch(self._context)
        self._tokens.native.n_tokens = last
        native_log.clear()
        result = L.llama_decode(self._context, self._tokens.native)
        if result != 0:
            raise self._model.step_error("compute an embedding", result)

    def pooled(self, seq: int) -> NDArray[np.float32]:
        """Return a copy of the vector of a sequence in the last decode."""
        return self._copy(L.llama_get_embeddings_seq(self._context, seq), (self._info.width,))

    def _run(self, pieces: Sequence[Piece]) -> NDArray[np.float32]:
        """Run pieces of causal inputs; return the hidden states of their tokens. Raises EngineError."""
        self.decode(pieces)
        num_tokens = sum(len(piece.tokens) for piece in pieces)
        if not self._pooled_natively:
            return self._copy(L.llama_get_embeddings(self._context), (num_tokens, self._info.width))
        scores = np.zeros((num_tokens, self._info.width), np.float32)
        lengths = np.cumsum([len(piece.tokens) for piece in pieces])
        for piece, end in zip(pieces, lengths, strict=True):
            scores[end - 1] = self.pooled(piece.seq)
        return scores

    def _copy(self, pointer: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if not pointer:
            raise EngineError("llama.cpp computed no embedding", "this model may not support it")
        self._model.check_outputs()
        # Not as_array(): ctypes keeps a type for each shape for ever.
        data = ctypes.string_at(pointer, np.dtype(np.float32).itemsize * math.prod(shape))
        return np.frombuffer(data, np.float32).reshape(shape).copy()

    # -- the context -----------------------------------------------------------------------------------------------

    def _make_room(self, num_tokens: int) -> None:
        """Make a context for a batch, unless the one that exists is large enough. Raises EngineError."""
        if num_tokens <= self._size:
            return
        self._free()
        size = FIRST_SIZE
        while size < num_tokens:
            size *= 2
        # llama.cpp aborts in a pooled context whose micro-batch is no multiple of the number of sequences.
        size = min(size, -(-max(num_tokens, self._info.context) // MAX_INPUTS) * MAX_INPUTS)
        flash = size >= FLASH_FROM
        ubatch = min(size, PIECE) if self._causal else size
        needed = self._memory.embedding_bytes(size, ubatch, flash=flash, cached=self._causal)
        if (free := available_memory_bytes()) * USABLE < needed:
            raise EngineError(
                f"embeddings of {num_tokens:,} tokens need {needed / 2**30:.2f} GiB of memory, "
                f"{free / 2**30:.2f} GiB are free",
                "send shorter texts, or close other programs",
            )
        native_log.clear()
        kv_type = GGML_TYPES["F16" if flash else "F32"].id
        pooling = POOLINGS[self._options.pooling] if self._pooled_natively else L.LLAMA_POOLING_TYPE_NONE
        params = fill_struct(
            L.llama_context_default_params(),
            n_ctx=size,
            n_batch=ubatch,  # more tokens than the micro-batch would abort without causal attention
            n_ubatch=ubatch,
            n_seq_max=self._info.max_inputs,
            n_threads=self._options.threads,
            n_threads_batch=self._options.threads,
            flash_attn_type=L.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else L.LLAMA_FLASH_ATTN_TYPE_DISABLED,
            type_k=kv_type,
            type_v=kv_type,
            embeddings=True,
            pooling_type=pooling,
            kv_unified=True,
            swa_full=True,
            no_perf=True,
        )
        fill_struct(params, **yarn_ramp(self._model))
        self._context = L.llama_init_from_model(self._model.native, params)
        if not self._context:
            reason = native_log.first_error() or "it gives no reason"
            raise EngineError(f"llama.cpp could not make a context for embeddings: {reason}", "send shorter texts")
        self._model.apply_adapters(self._context)
        self._size = size
        self._tokens = Batch(L.llama_n_batch(self._context))

    def _free(self) -> None:
        context, self._context, self._size = self._context, None, 0
        if context:
            L.llama_free(context)


class _WholeBatch:
    """Inputs of a model without causal attention: one decode."""

    def __init__(self, embedder: LlamaEmbedder, inputs: Sequence[Sequence[int]]) -> None:
        self._embedder = embedder
        self._inputs = inputs
        self._vectors: list[NDArray[np.float32]] = []

    def step(self, max_tokens: int) -> int:
        if self._vectors:
            return 0
        self._embedder.decode([Piece(seq, 0, tokens) for seq, tokens in enumerate(self._inputs)])
        self._vectors = [self._embedder.pooled(seq) for seq in range(len(self._inputs))]
        return sum(map(len, self._inputs))

    def vectors(self) -> NDArray[np.float32]:
        return np.stack(self._vectors)


def is_causal(model: LlamaModel) -> bool:
    """Return whether tokens attend to earlier ones only. llama.cpp keeps no memory of models where they do not."""
    params = fill_struct(L.llama_context_default_params(), n_ctx=256, n_batch=32, n_ubatch=32, no_perf=True)
    context = L.llama_init_from_model(model.native, params)
    if not context:
        return True
    has_memory = bool(L.llama_get_memory(context))
    L.llama_free(context)
    arch = metadata(model.native, "general.architecture")
    return has_memory and metadata(model.native, f"{arch}.attention.causal") != "false"


def embedder_of(model: LlamaModel, facts: ModelFacts, context: int, threads: int) -> LlamaEmbedder:
    """Make the embedder of a loaded model, on the same weights."""
    options = EmbedderOptions(pooling=facts.summary.pooling, context=context, threads=threads)
    return LlamaEmbedder(model.share(), LlamaMemory(facts, sequences=1), options)
