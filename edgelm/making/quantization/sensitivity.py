"""Measures how far types of its matrices take a model from itself, and how large the rounding errors of the types are.

A measurement is a mean KL divergence on a text, of the model whose matrices have the values that they would have after
quantization; it is computed with 16-bit matrices, so that the error of the weights is all that it shows. Measurements
are kept in a file: they are the slow part, and another budget needs the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgelm.base.atomic import atomic_json, read_json
from edgelm.base.kept_files import delete_older
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.gguf_parse import Tensor, TensorType
from edgelm.making.quantization.candidates import TYPES
from edgelm.making.quantization.divergence import DivergenceMeter
from edgelm.making.quantization.rounding import dequantized, rounded
from edgelm.making.quantization.scratch import Scratch

Floats = NDArray[np.float32]
Importance = Mapping[str, Floats]  # by the names of tensors: [columns] or [experts * columns]
Types = Mapping[str, str]  # of tensors; the others are as in the source

# Of a tensor, on which the errors of types are computed: IQ types take seconds for a million.
SAMPLE_NUMBERS = 2**19
MAX_KEPT_BYTES = 2**26
MAX_AGE_S = 90 * 24 * 3600.0
FORMAT = 1  # of the file, and of the meaning of its numbers


class Kept:
    """The measurements of one model on one text, in a file. `key` is all that they depend on, as JSON."""

    def __init__(self, folder: Path, key: Any) -> None:
        text = json.dumps([FORMAT, key])
        self._key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        self._path = folder / f"{self._key[:32]}.json"
        self._saved = True
        delete_older(folder, MAX_AGE_S, "*.json")
        document = read_json(self._path, MAX_KEPT_BYTES)
        numbers = document.get("numbers") if isinstance(document, dict) and document.get("key") == self._key else {}
        self._numbers = {
            name: float(value)
            for name, value in (numbers.items() if isinstance(numbers, dict) else ())
            if isinstance(value, int | float) and math.isfinite(value)
        }

    def get(self, name: str, compute: Callable[[], float], *, save: bool = True) -> float:
        """Return a number, which is computed and kept if the file does not have it."""
        if name not in self._numbers:
            self._numbers[name] = compute()
            self._saved = False
            if save:
                self.save()
        return self._numbers[name]

    def save(self) -> None:
        """Write the file. If the disk refuses, the numbers are measured again another time."""
        if not self._saved:
            atomic_json(self._path, {"key": self._key, "numbers": self._numbers})
            self._saved = True


class Laboratory:
    """A model, and what is known of the types of its matrices. A context manager.

    `open_meter` makes the changeable copy and loads it, at the first measurement that is not kept.
    """

    def __init__(
        self,
        source: GGUF,
        importance: Importance | None,
        kept: Kept,
        open_meter: Callable[[ExitStack], tuple[Scratch, DivergenceMeter]],
    ) -> None:
        self._source = source
        self._importance = importance or {}
        self._kept = kept
        self._open_meter = open_meter
        self._opened: tuple[Scratch, DivergenceMeter] | None = None
        self._types: dict[str, str] = {}  # of the changed matrices of the copy
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def header_bytes(self) -> int:
        """The size of all that comes before the tensors in a file that llama.cpp writes: no type changes it."""
        return int(self._kept.get("header bytes", lambda: float(self._open()[0].header_bytes)))

    @property
    def num_tokens(self) -> int:
        """The tokens whose predictions are compared."""
        return int(self._kept.get("tokens", lambda: float(self._open()[1].num_tokens)))

    def divergence(self, types: Types) -> float:
        """Return the divergence of the model in which some matrices have these types."""
        return self._kept.get(_name(types), lambda: self._measure(types))

    def error(self, tensor: Tensor, kind: TensorType) -> float:
        """Return the sum of the squared rounding errors of a matrix, of some of its rows if it is large.

        With importance data, each column counts as its inputs do. Infinite: the type cannot hold the numbers.
        """
        if kind.name == tensor.type.name:
            return 0.0
        return self._kept.get(f"{tensor.name} {kind.name}", lambda: self._rounding_error(tensor, kind), save=False)

    def save(self) -> None:
        """Keep the errors so far; divergences are kept at once."""
        self._kept.save()

    def _rounding_error(self, tensor: Tensor, kind: TensorType) -> float:
        step = max(1, -(-tensor.num_elements // SAMPLE_NUMBERS))
        values, weights = self._values(tensor, step), self._weights(tensor)
        difference = (_as(values, kind, weights) - values).astype(np.float64)
        if weights is None:
            total = float(np.einsum("mrc,mrc->", difference, difference))
        else:
            total = float(np.einsum("mrc,mrc,mc->", difference, difference, weights))
        return min(total * tensor.num_elements / values.size, 1e300) if math.isfinite(total) else 1e300

    def _measure(self, types: Types) -> float:
        scratch, meter = self._open()
        for name in {**self._types, **types}:
            if (kind := types.get(name)) != self._types.get(name):
                tensor = self._source.tensors[name]
                values = self._values(tensor, 1)
                scratch.write(name, values if kind is None else _as(values, TYPES[kind], self._weights(tensor)))
                self._types.pop(name, None)
                if kind is not None:
                    self._types[name] = kind
        return meter.measure()

    def _open(self) -> tuple[Scratch, DivergenceMeter]:
        if self._opened is None:
            self._opened = self._open_meter(self._resources)
        return self._opened

    def _values(self, tensor: Tensor, step: int) -> Floats:
        """Return every `step`-th row of the matrices of a tensor: [matrices, rows, columns]."""
        columns, rows = tensor.shape[0], tensor.shape[1]
        row_bytes = tensor.nbytes * columns // tensor.num_elements
        data = np.frombuffer(self._source.tensor_bytes(tensor.name), np.uint8).reshape(-1, rows, row_bytes)
        part = np.ascontiguousarray(data[:, ::step])
        return dequantized(part.reshape(-1), tensor.type).reshape(part.shape[0], part.shape[1], columns)

    def _weights(self, tensor: Tensor) -> Floats | None:
        """Return the importance of the columns of a tensor: [matrices, columns]."""
        weights = self._importance.get(tensor.name)
        return None if weights is None else np.asarray(weights, np.float32).reshape(-1, tensor.shape[0])


def _as(values: Floats, kind: TensorType, weights: Floats | None) -> Floats:
    if kind.name == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return rounded(values, kind, weights)


def _name(types: Types) -> str:
    """Return the name under which a divergence is kept."""
    text = json.dumps(sorted(types.items()))
    return "divergence " + hashlib.sha256(text.encode()).hexdigest()[:32]
