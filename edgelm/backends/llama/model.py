"""Loading a GGUF into llama.cpp: weights and vocabulary, without a context.

Owns the native model, and the progress and errors of loading. Knows nothing of steps or the KV cache.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from edgelm.backends.llama.api import fill_struct, metadata, native_log, start_backend
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.devices import NativePlacement
from edgelm.backends.llama.placement import ON_CPU, Placement
from edgelm.base.errors import DeviceError, EngineError, ModelError
from edgelm.base.machine.cpu import OtherLoad

if TYPE_CHECKING:
    from edgelm.backends.llama.adapter import LlamaAdapter

AGAIN = "try again: the model is loaded anew"

_COMPUTE_FAILED = -3  # of llama_decode: a graph was not computed
_MADV_DONTNEED = 4


class DeviceMemoryError(ModelError):
    """A device has no memory for its part of a model, or of a context."""


class LlamaModel:
    """A loaded model. `native` is llama.cpp's pointer, valid until `close`.

    `files` are all parts of a split model, and `path` is the first. `adapters` fit the model: `adapter.find_adapters`
    has checked it. With `heads`, those that predict several tokens are loaded. `progress` gets the loaded share, 0 to
    1, and returns False to cancel. Raises DeviceMemoryError where a device of the placement has too little memory,
    ModelError for a file that llama.cpp refuses, and for a cancelled load.
    """

    def __init__(
        self,
        path: Path,
        *,
        files: Sequence[Path] = (),
        repack: bool = True,
        heads: bool = False,
        placement: Placement = ON_CPU,
        adapters: Sequence[LlamaAdapter] = (),
        progress: Callable[[float], bool] | None = None,
    ) -> None:
        self.other_load = OtherLoad()  # while the model is loaded, for the first step
        start_backend()
        native_log.clear()
        self.path = path
        self.placement = placement
        self.adapters = tuple(adapters)
        self._users = 1
        self._progress = _Progress(progress)
        self._native_placement = NativePlacement(placement)
        params = fill_struct(
            L.llama_model_default_params(),
            load_mode=L.LLAMA_LOAD_MODE_MMAP,
            use_extra_bufts=repack,
            load_mtp=heads,
            progress_callback=self._progress.callback,
        )
        self._native_placement.fill(params)
        self.native: Any = L.llama_model_load_from_file(os.fsencode(path), params)
        if not self.native:
            if self._progress.cancelled:
                raise ModelError(f"loading {path.name} was cancelled")
            if error := memory_error(placement):
                raise error
            reason = native_log.first_error() or "llama.cpp gives no reason"
            raise ModelError(
                f"{path.name} cannot be loaded: {reason}", "check the file, or replace it: edgelm pull --verify MODEL"
            )
        self._native_adapters = [self._load_adapter(adapter) for adapter in self.adapters]
        self.vocab: Any = L.llama_model_get_vocab(self.native)
        self.num_vocab: int = L.llama_vocab_n_tokens(self.vocab)
        self.train_context: int = L.llama_model_n_ctx_train(self.native)
        self.num_layers: int = L.llama_model_n_layer(self.native)
        self.num_heads: int = L.llama_model_n_head(self.native)
        self.num_kv_heads: int = L.llama_model_n_head_kv(self.native)
        self.recurrent: bool = L.llama_model_is_recurrent(self.native)
        self.hybrid: bool = L.llama_model_is_hybrid(self.native)
        if repack or placement.devices:
            _give_back_pages(files or [path])

    @property
    def head_lens(self) -> tuple[int, int]:
        """The lengths of a key head and of a value head."""
        arch = metadata(self.native, "general.architecture")
        default = L.llama_model_n_embd(self.native) // max(self.num_heads, 1)
        key, value = (metadata(self.native, f"{arch}.attention.{name}_length") for name in ("key", "value"))
        return int(key or default), int(value or default)

    def apply_adapters(self, context: Any) -> None:
        """Let a context of this model compute with its adapters."""
        if not self.adapters:
            return
        count = len(self.adapters)
        pointers = (L.llama_adapter_lora_p_ctypes * count)(*self._native_adapters)
        scales = (ctypes.c_float * count)(*(adapter.scale for adapter in self.adapters))
        result = L.llama_set_adapters_lora(context, pointers, count, scales)
        assert result == 0, native_log.first_error()

    def _load_adapter(self, adapter: LlamaAdapter) -> Any:
        """Load an adapter, before any context: llama.cpp sizes its graphs by them. It is freed with the model."""
        native_log.clear()
        native = L.llama_adapter_lora_init(self.native, os.fsencode(adapter.path))
        if not native:
            reason = native_log.first_error() or "llama.cpp gives no reason"
            error = memory_error(self.placement)
            L.llama_model_free(self.native)
            self.native = None
            raise error or ModelError(
                f"the adapter {adapter.name} cannot be loaded: {reason}", "train it on this model"
            )
        return native

    def step_error(self, what: str, result: int) -> EngineError:
        """Return the error of a `llama_decode` that gave `result`: a device that cannot compute does not recover."""
        message = f"llama.cpp could not {what} ({result}): {native_log.first_error()}"
        if result == _COMPUTE_FAILED and self.placement.devices:
            return DeviceError(message, AGAIN)
        return EngineError(message)

    def check_outputs(self) -> None:
        """Raise DeviceError where a device failed while the outputs of a step were read: they are those of another.

        Metal computes on when `llama_decode` has returned, and tells by the log alone.
        """
        if self.placement.devices and any("command buffer" in line for line in native_log.errors):
            raise DeviceError(f"the GPU failed: {native_log.first_error()}", AGAIN)

    def share(self) -> Self:
        """Return the model for one more user. It is freed when all users have closed it."""
        self._users += 1
        return self

    def close(self) -> None:
        """Free the weights and the vocabulary, unless they are shared."""
        self._users -= 1
        if self._users <= 0 and self.native:
            L.llama_model_free(self.native)
            self.native = None


def memory_error(placement: Placement) -> DeviceMemoryError | None:
    """Return the error of a failed allocation on a device, by llama.cpp's log; None: it was something else."""
    failures = (line for line in native_log.errors if "alloc" in line or "memory" in line.lower())
    line = next((line for line in failures if any(name in line for name in placement.devices)), None)
    if line is None:
        return None
    return DeviceMemoryError(
        f"{' and '.join(placement.devices)} has no memory for {placement.gpu_layers} layers ({line})",
        "use --gpu-layers auto or a smaller number, a shorter --ctx, or --device cpu",
    )


class _Progress:
    """The progress callback. It returns False to cancel, because ctypes ignores exceptions and loading would go on."""

    def __init__(self, progress: Callable[[float], bool] | None) -> None:
        self._progress = progress
        self.cancelled = False
        self.callback = L.llama_progress_callback(self._call)

    def _call(self, share: float, _: object) -> bool:
        if self._progress and not self.cancelled:
            self.cancelled = not self._progress(share)
        return not self.cancelled


def _give_back_pages(files: Sequence[Path]) -> None:
    """Drop the files' pages from resident memory: llama.cpp works on its repacked copy. A page is read again on use."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    names = {str(path.resolve()) for path in files}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in names:
            start, end = (int(address, 16) for address in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
