"""What llama.cpp itself says that a context of a model takes: it lays everything out and allocates nothing.

    python -m edgelm.executors.llama_buffers FILE --sequences N [--no-repack]
    standard input: lines "KV CONTEXT"; standard output: a line "KV_BYTES COMPUTE_BYTES" for each

Owns that exchange and the reading of llama.cpp's log. Takes some 80 ms for a model whatever its size (the vocabulary is
left out), then 3 ms for a context. Damaged files may crash llama.cpp: in this process, or in one that has checked them.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import re
import resource
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llama_cpp import llama_cpp as L

from edgelm.errors import ModelError
from edgelm.executors.llama import LlamaOptions, context_params
from edgelm.executors.llama_api import fill_struct, native_log, start_backend
from edgelm.executors.llama_memory import MIB, Buffers
from edgelm.weights.gguf import open_gguf
from edgelm.weights.summary import ModelSummary, model_summary

_SIZES = {
    "kv": re.compile(r"^llama_(?:kv_cache|memory_recurrent)\w*: size = +([\d.]+) MiB"),
    "compute": re.compile(r"compute buffer size = +([\d.]+) MiB"),
}


class LlamaBuffers:
    """A model without weights and vocabulary: a `BufferSource`. Raises ModelError for what llama.cpp refuses."""

    def __init__(self, path: Path, model: ModelSummary, *, sequences: int, repack: bool = True) -> None:
        start_backend()
        self._sequences = sequences
        overrides = (L.llama_model_kv_override * 3)()  # the last one ends them
        no_vocabulary: Any = overrides[0]
        no_vocabulary.key, no_vocabulary.tag = b"tokenizer.ggml.model", L.LLAMA_KV_OVERRIDE_TYPE_STR
        no_vocabulary.value.val_str = b"none"
        its_size: Any = overrides[1]
        its_size.key, its_size.tag = f"{model.architecture}.vocab_size".encode(), L.LLAMA_KV_OVERRIDE_TYPE_INT
        its_size.value.val_i64 = model.vocab_size
        params = fill_struct(
            L.llama_model_default_params(),
            n_gpu_layers=0,
            load_mode=L.LLAMA_LOAD_MODE_NONE,
            no_alloc=True,
            use_extra_bufts=repack,
        )
        params.kv_overrides = ctypes.cast(overrides, type(params.kv_overrides))
        native_log.clear()
        self._model: Any = L.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelError(f"{path.name} cannot be loaded: {native_log.first_error()}")
        self._num_heads: int = L.llama_model_n_head(self._model)

    def __call__(self, kv: str, context: int) -> Buffers:
        native_log.clear()
        options = LlamaOptions(context=context, kv=kv, max_sequences=self._sequences)
        native = L.llama_init_from_model(self._model, context_params(options, self._num_heads))
        if not native:
            raise ModelError(f"no context of {context:,} tokens could be laid out: {native_log.first_error()}")
        L.llama_free(native)
        found = {
            name: sum(float(match[1]) for line in native_log.lines if (match := pattern.search(line)))
            for name, pattern in _SIZES.items()
        }
        return Buffers(**{name: int(size * MIB) for name, size in found.items()})

    def close(self) -> None:
        model, self._model = self._model, None
        if model:
            L.llama_model_free(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def main() -> None:
    """Answer the lines of standard input, until it closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--no-repack", action="store_true")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is no news: the formulas answer
    logging.getLogger("llama.cpp").addHandler(logging.NullHandler())
    with open_gguf(given.file) as gguf:
        summary = model_summary(gguf)
    with LlamaBuffers(given.file, summary, sequences=given.sequences, repack=not given.no_repack) as buffers:
        for line in sys.stdin:
            kv, context = line.split()
            sys.stdout.write("{} {}\n".format(*buffers(kv, int(context))))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
