"""LlamaHeads: the heads of a model that predict the token after the next one, in a llama.cpp context of their own.

Owns that context. What they read and have computed is that of `FollowedHeads`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.followed_heads import HEADS_WINDOW, NOTHING, Followed, FollowedHeads
from edgelm.backends.llama.api import Batch, fill_struct, logits_view, native_function, native_log
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.errors import ModelError
from edgelm.engine.core import Chunk, Step

Hidden = NDArray[np.float32]  # of one position


class LlamaHeads(FollowedHeads[Hidden]):
    """The `Heads` of an executor. `model` holds them, alone or with the layers of the model whose context is `target`.

    `params` are those of the heads' own context.

    Raises ModelError where llama.cpp refuses them.
    """

    def __init__(self, model: LlamaModel, target: Any, params: Any) -> None:
        assert _functions is not None
        self._set_outputs, self._outputs = _functions
        native_log.clear()
        self._context: Any = L.llama_init_from_model(model.native, params)
        if not self._context:
            raise ModelError(
                f"llama.cpp cannot use the heads of this model: {native_log.first_error()}", "--draft ngram"
            )
        self._memory = L.llama_get_memory(self._context)
        self._model = model
        self._target = target
        self._num_vocab = model.num_vocab
        self._width: int = L.llama_model_n_embd_out(model.native)
        self._batch = Batch(L.llama_n_batch(self._context), self._width)
        super().__init__(L.llama_n_seq_max(self._context), max_len=L.llama_n_ctx(self._context))
        self._all_rows = False  # whether the model gives the hidden states of all tokens, not only of sampled rows
        self._set_outputs(target, True, True)
        self._set_outputs(self._context, True, False)  # with sampled rows only, the states are those of the first ones

    # -- for the executor ------------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Let the model give the hidden states of a step: of all tokens only where the end of a prompt is read."""
        self._all_rows = any(self.wanted(chunk) for chunk in step.chunks)
        self._set_outputs(self._target, True, not self._all_rows)

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Keep the hidden states of chunks that the model has run. Heads begin anew behind a picture."""
        num_rows = sum(len(chunk.tokens) if self._all_rows else chunk.rows for chunk in chunks)
        if not num_rows or not any(map(self.follows, chunks)):
            return
        hidden, start = self._states(self._target, num_rows), 0
        for chunk in chunks:
            count = len(chunk.tokens) if self._all_rows else chunk.rows
            if self.follows(chunk):
                self.keep(chunk, list(hidden[start : start + count][-HEADS_WINDOW:].copy()))
            start += count

    def set_threads(self, count: int) -> None:
        L.llama_set_n_threads(self._context, count, count)

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            L.llama_free(context)

    # -- the heads' context ----------------------------------------------------------------------------------------

    def _run(
        self, followed: Followed[Hidden], tokens: list[int], start: int, hidden: Sequence[Hidden]
    ) -> tuple[int, float]:
        count = self._batch.set(0, tokens, start, followed.slot, 1)
        self._batch.embedding[:count] = hidden
        self._batch.native.n_tokens = count
        native_log.clear()
        result = L.llama_decode(self._context, self._batch.native)
        if result == 1:  # no room in the cache
            return NOTHING
        if result != 0:
            raise self._model.step_error("run the heads", result)
        followed.state = self._states(self._context, count)[-1].copy()
        logits = logits_view(self._context, 1, self._num_vocab)[0]
        token = int(logits.argmax())
        probability = 1 / float(np.exp(logits - logits[token]).sum())
        return (token, probability) if np.isfinite(probability) else NOTHING

    def _forget(self, followed: Followed[Hidden], length: int) -> None:
        L.llama_memory_seq_rm(self._memory, followed.slot, length or -1, -1)

    def _states(self, context: Any, rows: int) -> Hidden:
        memory = (ctypes.c_float * (rows * self._width)).from_address(self._outputs(context))
        view: NDArray[np.float32] = np.ctypeslib.as_array(memory).reshape(rows, self._width)
        return view


def heads_params(params: Any, sequences: int) -> Any:
    """Return the parameters of the heads' context, from those of the model's."""
    return fill_struct(
        params,
        ctx_type=L.LLAMA_CONTEXT_TYPE_MTP,
        n_batch=max(HEADS_WINDOW, sequences),
        n_ubatch=HEADS_WINDOW,
        n_outputs_max=sequences,
        n_rs_seq=0,
    )


def _find_functions() -> tuple[Any, Any] | None:
    """Return llama.cpp's functions for hidden states, which are C++ and undeclared; None: this build has none."""
    try:
        return (
            native_function(
                "_Z26llama_set_embeddings_nextnP13llama_contextbb", None, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool
            ),
            native_function("_Z26llama_get_embeddings_nextnP13llama_context", ctypes.c_void_p, ctypes.c_void_p),
        )
    except AttributeError:
        return None


_functions = _find_functions()


def has_heads_api() -> bool:
    """Whether this build of llama.cpp can run heads."""
    return _functions is not None
