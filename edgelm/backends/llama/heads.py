"""LlamaHeads: the heads of a model that predict the token after the next one, in a llama.cpp context of their own.

Owns that context, and the hidden states of the model that its heads read. A head computes, at position p, what follows
token p, from that token and the hidden state of position p - 1:

    model      h0    h1    h2    h3        hidden states, of tokens that the model has computed
                 ↘     ↘     ↘     ↘
    heads    t0   t1    t2    t3    t4     t4 is sampled; then come t5 by h3, t6 by the head's own state, …

Only the last HEADS_WINDOW positions are computed: the heads see less of a long prompt, but cost next to nothing there.
Knows nothing of what a draft is worth.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.api import Batch, fill_struct, logits_view, native_function, native_log
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.memory import HEADS_WINDOW
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.errors import EngineError, ModelError
from edgelm.engine.core import NOT_A_TOKEN, Chunk, Step

NOTHING = NOT_A_TOKEN, 0.0


class _Followed:
    """What is kept of one sequence."""

    def __init__(self, slot: int, width: int) -> None:
        self.slot = slot
        self.first = 0  # the position of the first hidden state
        self.hidden = np.empty((0, width), np.float32)
        self.length = 0  # positions that the heads have computed by the model's hidden states; 0: none
        self.num_ahead = 0  # positions behind these, by the heads' own
        self.state: NDArray[np.float32] | None = None  # the heads' own, of the last position

    @property
    def end(self) -> int:
        return self.first + len(self.hidden)

    def take(self, position: int, hidden: NDArray[np.float32]) -> None:
        """Take the hidden states from a position on, in place of older ones."""
        if self.first <= position <= self.end:
            hidden = np.concatenate((self.hidden[: position - self.first], hidden))
            position = self.first
        excess = max(len(hidden) - HEADS_WINDOW, 0)
        self.first, self.hidden = position + excess, hidden[excess:].copy()


class LlamaHeads:
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
        self._target = target
        self._num_vocab = model.num_vocab
        self._width: int = L.llama_model_n_embd_out(model.native)
        self._batch = Batch(L.llama_n_batch(self._context), self._width)
        self._followed: dict[int, _Followed] = {}  # by the id of the sequence
        self._free_slots = list(range(L.llama_n_seq_max(self._context)))
        self._all_rows = False  # whether the model gives the hidden states of all tokens, not only of sampled rows
        self._set_outputs(target, True, True)
        self._set_outputs(self._context, True, False)  # with sampled rows only, the states are those of the first ones

    # -- for the executor ------------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Let the model give the hidden states of a step: of all tokens only where the end of a prompt is read."""
        self._all_rows = any(
            chunk.rows < len(chunk.tokens)
            and chunk.end > len(chunk.seq.tokens) - HEADS_WINDOW
            and chunk.seq.id in self._followed
            for chunk in step.chunks
        )
        self._set_outputs(self._target, True, not self._all_rows)

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Keep the hidden states of chunks that the model has run. Heads begin anew behind a picture."""
        num_rows = sum(len(chunk.tokens) if self._all_rows else chunk.rows for chunk in chunks)
        if not num_rows or not self._followed:
            return
        hidden, start = self._states(self._target, num_rows), 0
        for chunk in chunks:
            count = len(chunk.tokens) if self._all_rows else chunk.rows
            if count and (followed := self._followed.get(chunk.seq.id)):
                followed.take(chunk.end - count, hidden[start : start + count])
            start += count

    def set_threads(self, count: int) -> None:
        L.llama_set_n_threads(self._context, count, count)

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            L.llama_free(context)

    # -- for a drafter ---------------------------------------------------------------------------------------------

    def begin(self, seq_id: int) -> None:
        if self._free_slots and seq_id not in self._followed:
            self._followed[seq_id] = _Followed(self._free_slots.pop(), self._width)

    def first(self, seq_id: int, tokens: list[int]) -> tuple[int, float]:
        followed = self._followed.get(seq_id)
        last = len(tokens) - 1
        if followed is None or followed.end < last:
            return NOTHING
        start = min(followed.length, last)
        if start <= followed.first:  # they begin, or states before the window are needed
            self._trim(followed, 0)
            start = followed.first + 1
        elif followed.length + followed.num_ahead > start:
            self._trim(followed, start)
        if start > last:
            return NOTHING
        hidden = followed.hidden[start - 1 - followed.first : last - followed.first]
        result = self._run(followed, tokens[start:], start, hidden)
        followed.length = len(tokens) if result != NOTHING else 0
        return result

    def next(self, seq_id: int, token: int) -> tuple[int, float]:
        followed = self._followed[seq_id]
        assert followed.state is not None
        position = followed.length + followed.num_ahead
        result = self._run(followed, [token], position, followed.state[None])
        followed.num_ahead += result != NOTHING
        return result

    def end(self, seq_id: int) -> None:
        if followed := self._followed.pop(seq_id, None):
            self._trim(followed, 0)
            self._free_slots.append(followed.slot)

    # -- the heads' context ----------------------------------------------------------------------------------------

    def _run(
        self, followed: _Followed, tokens: list[int], start: int, hidden: NDArray[np.float32]
    ) -> tuple[int, float]:
        """Compute positions from `start` on; return the token behind the last one, and its probability."""
        count = self._batch.set(0, tokens, start, followed.slot, 1)
        self._batch.embedding[:count] = hidden
        self._batch.native.n_tokens = count
        native_log.clear()
        result = L.llama_decode(self._context, self._batch.native)
        if result == 1:  # no room in the cache
            return NOTHING
        if result != 0:
            raise EngineError(f"llama.cpp could not run the heads ({result}): {native_log.first_error()}")
        followed.state = self._states(self._context, count)[-1].copy()
        logits = logits_view(self._context, 1, self._num_vocab)[0]
        token = int(logits.argmax())
        probability = 1 / float(np.exp(logits - logits[token]).sum())
        return (token, probability) if np.isfinite(probability) else NOTHING

    def _trim(self, followed: _Followed, length: int) -> None:
        L.llama_memory_seq_rm(self._memory, followed.slot, length or -1, -1)
        followed.length, followed.num_ahead = length, 0

    def _states(self, context: Any, rows: int) -> NDArray[np.float32]:
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
