"""The devices of llama.cpp: names, free memory, slow KV modes; and a placement as llama.cpp's parameters.

Owns the pointers of devices and buffer types. Does not choose: placement.py does.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from edgelm.backends.llama.api import fill_struct, native_function, start_backend
from edgelm.backends.llama.attention import slow_modes
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.placement import CPU, Device, Placement
from edgelm.checkpoints.summary import ModelFacts

_CPU, _GPU, _INTEGRATED_GPU = 0, 1, 2  # of enum ggml_backend_dev_type


class _Properties(ctypes.Structure):
    """struct ggml_backend_dev_props."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 64),  # fewer in llama.cpp
    )


class _BufferOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override; one without a pattern ends a list."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


_device_count = native_function("ggml_backend_dev_count", ctypes.c_size_t)
_device_at = native_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
_get_properties = native_function("ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.POINTER(_Properties))
_device_buffer_type = native_function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
_device_backend = native_function("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)
_function_of = native_function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_buffer_type_name = native_function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
_cpu_buffer_type = native_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)


def weight_buffers() -> tuple[str, ...]:
    """Return the names of the buffers in which ggml rearranges weights for this processor, the preferred one first."""
    start_backend()
    device = next(handle for handle, properties in _all_devices() if properties.type == _CPU)
    function = _function_of(_device_backend(device), b"ggml_backend_dev_get_extra_bufts")
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(function)(device)
    return tuple(_buffer_type_name(kind).decode() for kind in takewhile(bool, types))


def llama_devices(model: ModelFacts | None = None) -> tuple[Device, ...]:
    """Return the GPUs that this build of llama.cpp can use; integrated ones only where there is no other.

    A GPU that two backends know is listed once. With a model, each has its slow KV modes. Those of Macs with an Intel
    processor are left out: Metal computes wrong numbers there (llama.cpp's issues 19563 and 25518), and llama.cpp's own
    releases for them have none.
    """
    start_backend()
    if (sys.platform, platform.machine()) == ("darwin", "x86_64"):
        return ()
    found: dict[int, list[Device]] = {_GPU: [], _INTEGRATED_GPU: []}
    ids = set()
    for handle, properties in _all_devices():
        if properties.type not in found or (properties.device_id and properties.device_id in ids):
            continue
        ids.add(properties.device_id)
        shared = properties.type == _INTEGRATED_GPU or sys.platform == "darwin"
        found[properties.type].append(
            Device(
                properties.name.decode(),
                properties.description.decode(errors="replace"),
                properties.memory_total,
                properties.memory_free,
                shared,
                slow_modes(handle, model.summary) if model else (),
            )
        )
    return tuple(found[_GPU] or found[_INTEGRATED_GPU])


class NativePlacement:
    """A placement as llama.cpp's parameters of a model. llama.cpp keeps pointers to it: keep it with the model."""

    def __init__(self, placement: Placement) -> None:
        start_backend()
        handles = {properties.name.decode(): handle for handle, properties in _all_devices()}
        buffer_types = {name: _device_buffer_type(handle) for name, handle in handles.items()}
        buffer_types[CPU] = _cpu_buffer_type()
        chosen = [handles[name] for name in placement.devices]
        self._layers = placement.gpu_layers
        self._devices = (ctypes.c_void_p * (len(chosen) + 1))(*chosen)  # empty: no device at all, not all of them
        self._split = (ctypes.c_float * L.LLAMA_MAX_DEVICES)(*placement.counts)
        overrides = [_BufferOverride(item.pattern.encode(), buffer_types[item.device]) for item in placement.patterns]
        self._overrides = (_BufferOverride * (len(overrides) + 1))(*overrides)

    def fill(self, params: Any) -> None:
        """Set the fields of `llama_model_params`."""
        fill_struct(
            params,
            devices=ctypes.cast(self._devices, ctypes.c_void_p),
            tensor_split=ctypes.cast(self._split, ctypes.POINTER(ctypes.c_float)),
            n_gpu_layers=self._layers,
        )
        if len(self._overrides) > 1:
            fill_struct(params, tensor_buft_overrides=ctypes.cast(self._overrides, ctypes.c_void_p))


def _all_devices() -> Iterator[tuple[int, _Properties]]:
    for index in range(_device_count()):
        handle, properties = _device_at(index), _Properties()
        _get_properties(handle, properties)
        yield handle, properties
