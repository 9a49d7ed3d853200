"""Helpers over llama.cpp's C functions: structures that reject unknown fields, a batch over numpy, the captured log.

Owns the process-wide state of llama.cpp (its log callback, its backend). Knows nothing of models or steps.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.binding import L

T = TypeVar("T", bound=ctypes.Structure)
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # llama_cpp's own table is wrong
_CONTINUED = 5  # the level of the previous piece

log = logging.getLogger("llama.cpp")


class NativeLog:
    """The last lines of llama.cpp's log. Each also goes to the logger `llama.cpp`."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=200)
        self._part = ""
        self._level = logging.INFO
        self.listen: Callable[[str], None] | None = None  # called with each piece

    def add(self, level: int, text: str) -> None:
        """Add a piece of the log, which may be part of a line."""
        if level != _CONTINUED:
            self._level = _LEVELS.get(level, logging.INFO)
        if self._level < logging.INFO:
            return
        if self.listen:
            self.listen(text)
        self._part += text
        if not self._part.endswith("\n"):
            return
        for line in filter(None, map(str.strip, self._part.splitlines())):
            self._lines.append((self._level, line))
            log.log(self._level, "%s", line)
        self._part = ""

    def clear(self) -> None:
        self._lines.clear()

    @property
    def lines(self) -> list[str]:
        """The lines since `clear`, or the last 200 of them."""
        return [line for _, line in self._lines]

    @property
    def errors(self) -> list[str]:
        """The errors since `clear`, without the functions' names. The first is the most specific."""
        lines = []
        for level, line in self._lines:
            if level >= logging.ERROR:
                name, colon, rest = line.partition(": ")
                lines.append(rest if colon and " " not in name else line)
        return lines

    def first_error(self) -> str:
        return next(iter(self.errors), "")


native_log = NativeLog()


@L.llama_log_callback  # type: ignore[untyped-decorator]
def on_log(level: int, text: bytes, _: object) -> None:
    """Take a piece of the log of llama.cpp or libmtmd."""
    native_log.add(level, text.decode("utf-8", "replace"))


@functools.cache
def start_backend() -> None:
    """Initialise llama.cpp once in this process, and replace the log callback that its import installs."""
    L.llama_log_set(on_log, None)
    L.llama_backend_init()


def native_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of llama.cpp or of ggml, on which it depends, that llama-cpp-python does not declare."""
    return ctypes.CFUNCTYPE(result, *arguments)((name, L._lib))  # noqa: SLF001 - the binding has no other door


class Arena(ctypes.Structure):
    """struct ggml_init_params: where ggml puts tensors; with `no_data`, their descriptions only."""

    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_data", ctypes.c_bool))


def fill_struct(struct: T, **fields: Any) -> T:
    """Set fields of a ctypes structure. ctypes itself accepts unknown names silently."""
    names = {field[0] for field in struct._fields_}
    for name, value in fields.items():
        assert name in names, f"{type(struct).__name__} has no field {name}"
        setattr(struct, name, value)
    return struct


class Batch:
    """A llama_batch over numpy's memory, with one sequence per token. Built once, filled for every step.

    With a `width`, each token comes with a hidden state, a row of `embedding`.
    """

    def __init__(self, capacity: int, width: int = 0) -> None:
        self.token = np.zeros(capacity, np.int32)
        self.pos = np.zeros(capacity, np.int32)
        self.seq = np.zeros(capacity, np.int32)
        self.out = np.zeros(capacity, np.int8)
        self.embedding = np.zeros((capacity, width), np.float32)
        self._num_seqs = np.ones(capacity, np.int32)
        offsets = 4 * np.arange(capacity, dtype=np.uint64)
        self._seq_pointers = (self.seq.ctypes.data + offsets).astype(np.uint64)  # int32 *[capacity]
        self.native = L.llama_batch()
        fill_struct(
            self.native,
            token=_pointer(self.token, ctypes.c_int32),
            pos=_pointer(self.pos, ctypes.c_int32),
            n_seq_id=_pointer(self._num_seqs, ctypes.c_int32),
            logits=_pointer(self.out, ctypes.c_int8),
            embd=_pointer(self.embedding, ctypes.c_float) if width else None,
            seq_id=ctypes.cast(self._seq_pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        )

    def set(self, first: int, tokens: list[int], start: int, seq: int, rows: int) -> int:
        """Write a chunk at index `first`; its last `rows` tokens give logits. Return the index after it."""
        count = len(tokens)
        last = first + count
        if count == 1:
            self.token[first], self.pos[first], self.seq[first], self.out[first] = tokens[0], start, seq, rows
            return last
        self.token[first:last] = tokens
        self.pos[first:last] = np.arange(start, start + count)
        self.seq[first:last] = seq
        self.out[first:last] = 0
        self.out[last - rows : last] = 1
        return last


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


# llama_cpp's own declaration makes a pointer object in each call; this one returns the address.
_get_logits = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", L._lib))  # noqa: SLF001


def logits_view(context: Any, rows: int, num_vocab: int) -> NDArray[np.float32]:
    """Return the logits of the last decode without a copy: [rows, vocab], valid until the next decode."""
    return _view(_get_logits(context), rows, num_vocab)


@functools.lru_cache(maxsize=8)
def _view(address: int, rows: int, num_vocab: int) -> NDArray[np.float32]:
    """Return a view of floats. It is kept: to make one takes as long as to find the greatest of them."""
    memory = (ctypes.c_float * (rows * num_vocab)).from_address(address)
    view: NDArray[np.float32] = np.ctypeslib.as_array(memory).reshape(rows, num_vocab)
    return view


def metadata(model: Any, key: str) -> str | None:
    """Return a scalar of a model's metadata as text."""
    buffer = ctypes.create_string_buffer(256)
    length = L.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if length >= 0 else None
