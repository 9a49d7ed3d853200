"""The nodes of llama.cpp's graph, read while it is computed: which matrix is multiplied with which activations.

Owns ggml's structure of a tensor. Its offsets are compared with tensors that ggml makes itself, before the first use:
the header that describes the structure is not installed everywhere.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.api import Arena
from edgelm.backends.llama.binding import BUILD
from edgelm.base.errors import EngineError

MAX_NAME = 64
NUM_SOURCES = 10
F32, I32 = 0, 26  # of enum ggml_type


class Node(ctypes.Structure):
    """struct ggml_tensor. The sizes are in ggml's order: the columns first."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_size_t * 4),  # bytes
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("sources", ctypes.c_void_p * NUM_SOURCES),
        ("view_of", ctypes.c_void_p),
        ("view_offset", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("label", ctypes.c_char * MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )

    @property
    def name(self) -> str:
        """The name, without a device before it and a copy's number after it: `CUDA0#blk.0.attn_k.weight#0`."""
        parts: list[str] = self.label.decode("utf-8", "replace").split("#")
        return parts[1] if len(parts) > 1 else parts[0]

    def source(self, index: int) -> Node:
        return Node.from_address(self.sources[index])


class _Library:
    """The functions of ggml that llama-cpp-python does not declare."""

    def __init__(self) -> None:
        folder = BUILD.lib_dir
        library = ctypes.CDLL(str(next(path for path in sorted(folder.glob("libggml-base.*")) if path.is_file())))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t

        def function(name: str, result: Any, *arguments: Any) -> Any:
            return ctypes.CFUNCTYPE(result, *arguments)((name, library))

        self.init = function("ggml_init", pointer, Arena)
        self.free = function("ggml_free", None, pointer)
        self.overhead = function("ggml_tensor_overhead", size)
        self.new = function("ggml_new_tensor_3d", pointer, pointer, ctypes.c_int, *[ctypes.c_int64] * 3)
        self.set_name = function("ggml_set_name", pointer, pointer, ctypes.c_char_p)
        self.multiply = function("ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.multiply_id = function("ggml_mul_mat_id", pointer, pointer, pointer, pointer, pointer)
        self.view = function("ggml_view_1d", pointer, pointer, pointer, ctypes.c_int64, size)
        self.is_host = function("ggml_backend_buffer_is_host", ctypes.c_bool, pointer)
        self.read = function("ggml_backend_tensor_get", None, pointer, pointer, size, size)


class GraphReader:
    """Reads nodes of a graph. `mul_mat` and `mul_mat_id` are the numbers of these ops in the installed library."""

    def __init__(self, library: _Library, mul_mat: int, mul_mat_id: int) -> None:
        self.mul_mat, self.mul_mat_id = mul_mat, mul_mat_id
        self._library = library

    def values(self, node: Node) -> NDArray[Any]:
        """Return the numbers of an F32 or I32 node: [size 3, size 2, size 1, columns].

        They are valid until the node is computed again. They are copied if the node is on a device.
        """
        assert node.type in (F32, I32)
        sizes, strides = tuple(node.sizes), tuple(node.strides)
        num_bytes = 4 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        memory: Any
        if node.buffer is None or self._library.is_host(node.buffer):
            memory = (ctypes.c_char * num_bytes).from_address(node.data)
        else:
            memory = ctypes.create_string_buffer(num_bytes)
            self._library.read(ctypes.addressof(node), memory, 0, num_bytes)
        return np.ndarray(sizes[::-1], np.float32 if node.type == F32 else np.int32, memory, strides=strides[::-1])


@functools.cache
def graph_reader() -> GraphReader:
    """Return the reader for the installed library. Raises EngineError if its tensors are laid out otherwise."""
    try:
        library = _Library()
    except (OSError, AttributeError, StopIteration) as error:
        raise EngineError(f"ggml's library cannot be used: {error}", "reinstall edgelm") from None
    arena = library.init(Arena(2**20, None, False))
    try:
        matrix = library.new(arena, F32, 8, 6, 4)
        experts = library.new(arena, F32, 8, 2, 3)
        ids = library.new(arena, I32, 2, 3, 1)
        library.set_name(matrix, b"CUDA0#matrix#0")
        product = library.multiply(arena, matrix, library.new(arena, F32, 8, 5, 4))
        routed = library.multiply_id(arena, matrix, experts, ids)
        view = library.view(arena, matrix, 8, 64)
        first, second, third, part = (Node.from_address(node) for node in (matrix, product, routed, view))
        right = (
            ctypes.sizeof(Node) < library.overhead() <= ctypes.sizeof(Node) + 64,
            (first.name, first.type, tuple(first.sizes), tuple(first.strides))
            == ("matrix", F32, (8, 6, 4, 1), (4, 32, 192, 768)),
            tuple(second.sizes) == (6, 5, 4, 1),
            second.sources[0] == matrix and tuple(third.sources)[:4] == (matrix, experts, ids, None),
            Node.from_address(ids).type == I32 and 0 != second.op != third.op != 0,
            part.view_of == matrix and part.view_offset == 64 and part.data == first.data + 64,
        )
        numbers = second.op, third.op
    finally:
        library.free(arena)
    if not all(right):
        raise EngineError("llama.cpp's tensors are laid out otherwise than edgelm expects", "reinstall edgelm")
    return GraphReader(library, *numbers)
