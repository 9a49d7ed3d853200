"""A plain one-sequence loop over llama.cpp's functions: the reference for the executor's text and for its speed.

Uses llama.cpp alone, nothing of edgelm but the loaded context.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.binding import L

KV_TYPES = {"f16": (1, 1), "k8v16": (8, 1), "int8": (8, 8)}


class BareLoop:
    """A context of its own over a loaded model, for greedy decoding."""

    def __init__(
        self, model: Any, context: int, *, kv: str = "f16", flash: bool = False, threads: int = 2, sequences: int = 1
    ) -> None:
        params = L.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_outputs_max = max(sequences, 8)
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash else 0
        params.type_k, params.type_v = KV_TYPES[kv]
        params.kv_unified = True
        params.no_perf = True
        self.context = L.llama_init_from_model(model, params)
        assert self.context
        self.num_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
        self.batch = L.llama_batch_init(512, 0, 1)

    def close(self) -> None:
        L.llama_batch_free(self.batch)
        L.llama_free(self.context)

    def clear(self) -> None:
        L.llama_memory_clear(L.llama_get_memory(self.context), False)

    def decode(self, tokens: list[int], start: int) -> int:
        """Run tokens of sequence 0; return the most likely next one."""
        self.fill([(token, start + i, 0, i == len(tokens) - 1) for i, token in enumerate(tokens)])
        return int(self.run(1)[0])

    def fill(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Set the batch to (token, position, sequence, whether it gives logits)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, out) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, out
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence

    def run(self, rows: int) -> NDArray[np.intp]:
        """Decode the batch; return the most likely token of each row."""
        assert L.llama_decode(self.context, self.batch) == 0
        logits = np.ctypeslib.as_array(L.llama_get_logits(self.context), (rows, self.num_vocab))
        return logits.argmax(axis=1)

    def greedy(self, prompt: list[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
        """Return `count` greedy tokens after a prompt, fewer if one of `stop` (which is the last) comes."""
        self.clear()
        token, answer = self.decode(prompt, 0), []
        while True:
            answer.append(token)
            if len(answer) == count or token in stop:
                return answer
            token = self.decode([token], len(prompt) + len(answer) - 1)


def tokenize(model: Any, text: str) -> list[int]:
    """Return the tokens of a text with BOS."""
    raw = text.encode()
    ids = (ctypes.c_int32 * (len(raw) + 16))()
    count = L.llama_tokenize(L.llama_model_get_vocab(model), raw, len(raw), ids, len(ids), True, False)
    return list(ids[:count])
