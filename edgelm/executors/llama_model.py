"""Loading a GGUF into llama.cpp: weights and vocabulary, without a context.

Owns the native model, its progress and its errors. Knows nothing of steps or of the KV cache.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from llama_cpp import llama_cpp as L

from edgelm.errors import ModelError
from edgelm.executors.llama_api import fill_struct, metadata, native_log, start_backend

_MADV_DONTNEED = 4


class LlamaModel:
    """A loaded model. `native` is llama.cpp's pointer, valid until `close`.

    `files` are all parts of a split model, of which `path` is the first. `progress` gets the loaded share, 0 to 1, and
    returns False to cancel. Raises ModelError for a file that llama.cpp refuses, and when it was cancelled.
    """

    def __init__(
        self,
        path: Path,
        *,
        files: Sequence[Path] = (),
        repack: bool = True,
        gpu_layers: int = 0,
        progress: Callable[[float], bool] | None = None,
    ) -> None:
        start_backend()
        native_log.clear()
        self.path = path
        self._users = 1
        self._watch = _Watch(progress)
        params = fill_struct(
            L.llama_model_default_params(),
            n_gpu_layers=gpu_layers,
            load_mode=L.LLAMA_LOAD_MODE_MMAP,
            use_extra_bufts=repack,
            progress_callback=self._watch.callback,
        )
        self.native: Any = L.llama_model_load_from_file(os.fsencode(path), params)
        if not self.native:
            if self._watch.cancelled:
                raise ModelError(f"loading {path.name} was cancelled")
            reason = native_log.first_error() or "llama.cpp gives no reason"
            raise ModelError(f"{path.name} cannot be loaded: {reason}", "check the file, or pull the model again")
        self.vocab: Any = L.llama_model_get_vocab(self.native)
        self.num_vocab: int = L.llama_vocab_n_tokens(self.vocab)
        self.train_context: int = L.llama_model_n_ctx_train(self.native)
        self.num_layers: int = L.llama_model_n_layer(self.native)
        self.num_heads: int = L.llama_model_n_head(self.native)
        self.num_kv_heads: int = L.llama_model_n_head_kv(self.native)
        self.recurrent: bool = L.llama_model_is_recurrent(self.native)
        self.hybrid: bool = L.llama_model_is_hybrid(self.native)
        if repack:
            _give_back_pages(files or [path])

    @property
    def head_dims(self) -> tuple[int, int]:
        """The size of a key and of a value head."""
        arch = metadata(self.native, "general.architecture")
        default = L.llama_model_n_embd(self.native) // max(self.num_heads, 1)
        key, value = (metadata(self.native, f"{arch}.attention.{name}_length") for name in ("key", "value"))
        return int(key or default), int(value or default)

    def share(self) -> Self:
        """Return the model for one more user: it is freed when each has closed it."""
        self._users += 1
        return self

    def close(self) -> None:
        """Free the weights, unless they are shared. The vocabulary is gone as well."""
        self._users -= 1
        if self._users <= 0 and self.native:
            L.llama_model_free(self.native)
            self.native = None


class _Watch:
    """The progress callback: an exception in it would be ignored by ctypes, and loading would go on."""

    def __init__(self, progress: Callable[[float], bool] | None) -> None:
        self._progress = progress
        self.cancelled = False
        self.callback = L.llama_progress_callback(self._call)

    def _call(self, share: float, _: object) -> bool:
        if self._progress and not self.cancelled:
            self.cancelled = not self._progress(share)
        return not self.cancelled


def _give_back_pages(files: Sequence[Path]) -> None:
    """Unmap from resident memory the files' pages, of which llama.cpp made a repacked copy. They come back on use."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    names = {str(path.resolve()) for path in files}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in names:
            start, end = (int(each, 16) for each in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
