"""Asks llama.cpp for the buffer sizes of a context. It lays out the context but allocates nothing.

Owns the reading of llama.cpp's log. Takes some 80 ms for a model of any size (the vocabulary is left out), then 3 ms
for a context. Damaged files may crash llama.cpp: call it in a worker, or after the file was checked.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any, Self

from edgelm.backends.llama.api import fill_struct, native_log, start_backend
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.devices import NativePlacement
from edgelm.backends.llama.executor import LlamaOptions, context_params
from edgelm.backends.llama.heads import heads_params
from edgelm.backends.llama.memory import CELLS, MIB, Buffers
from edgelm.backends.llama.placement import ON_CPU
from edgelm.base.errors import ModelError
from edgelm.checkpoints.summary import ModelSummary

_SIZES = {
    "kv": re.compile(r"^llama_(?:kv_cache|memory_recurrent)\w*: size = +([\d.]+) MiB"),
    "compute": re.compile(r"compute buffer size = +([\d.]+) MiB"),
}


class LlamaBuffers:
    """A model without weights and vocabulary: a `BufferSource`. `heads` is the file of those that draft, if any do.

    Raises ModelError for a file that llama.cpp refuses.
    """

    def __init__(
        self,
        path: Path,
        model: ModelSummary,
        *,
        sequences: int,
        repack: bool = True,
        rollback: int = 0,
        heads: Path | None = None,
    ) -> None:
        start_backend()
        self._sequences, self._rollback, self._heads = sequences, rollback, heads
        self._model: Any = None
        self._heads_model: Any = None
        self._placement = NativePlacement(ON_CPU)
        self._model = self._load(path, model, repack)
        self._num_heads: int = L.llama_model_n_head(self._model)
        if heads and heads != path:
            self._heads_model = self._load(heads, model, repack)

    def _load(self, path: Path, model: ModelSummary, repack: bool) -> Any:
        overrides = (L.llama_model_kv_override * 3)()  # an empty one ends the list
        no_vocabulary: Any = overrides[0]
        no_vocabulary.key, no_vocabulary.tag = b"tokenizer.ggml.model", L.LLAMA_KV_OVERRIDE_TYPE_STR
        no_vocabulary.value.val_str = b"none"
        vocab_size: Any = overrides[1]
        vocab_size.key, vocab_size.tag = f"{model.architecture}.vocab_size".encode(), L.LLAMA_KV_OVERRIDE_TYPE_INT
        vocab_size.value.val_i64 = model.vocab_size
        params = fill_struct(
            L.llama_model_default_params(),
            load_mode=L.LLAMA_LOAD_MODE_NONE,
            no_alloc=True,
            use_extra_bufts=repack,
            load_mtp=path == self._heads,
        )
        params.kv_overrides = ctypes.cast(overrides, type(params.kv_overrides))
        self._placement.fill(params)
        native_log.clear()
        native = L.llama_model_load_from_file(os.fsencode(path), params)
        if not native:
            self.close()
            raise ModelError(f"{path.name} cannot be loaded: {native_log.first_error()}")
        return native

    def __call__(self, kv: str, context: int) -> Buffers:
        sizes = dict.fromkeys(_SIZES, 0.0)
        for heads in (False, True) if self._heads else (False,):
            L.llama_free(self._lay_out(kv, context, heads=heads))
            for name, pattern in _SIZES.items():
                sizes[name] += sum(float(match[1]) for line in native_log.lines if (match := pattern.search(line)))
        return Buffers(**{name: int(size * MIB) for name, size in sizes.items()})

    def rollback(self, kv: str) -> int:
        """Return how many of the wished tokens llama.cpp can take back in recurrent states of this architecture."""
        native = self._lay_out(kv, CELLS)
        length: int = L.llama_n_rs_seq(native)
        L.llama_free(native)
        return length

    def _lay_out(self, kv: str, context: int, *, heads: bool = False) -> Any:
        native_log.clear()
        options = LlamaOptions(context=context, kv=kv, max_sequences=self._sequences, rollback=self._rollback)
        params = context_params(options, self._num_heads)
        if heads:
            params = heads_params(params, self._sequences)
        native = L.llama_init_from_model((heads and self._heads_model) or self._model, params)
        if not native:
            raise ModelError(f"llama.cpp could not lay out a context of {context:,} tokens: {native_log.first_error()}")
        return native

    def close(self) -> None:
        models, self._model, self._heads_model = (self._model, self._heads_model), None, None
        for model in filter(None, models):
            L.llama_model_free(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
