"""The folder that a quantization writes: unfinished and hidden until it is whole, resumable layer by layer.

Owns the safetensors files, their index, the config.json with its `quantization_config`, and the copies of all other
files. A layer's file appears under its name when it is on the disk, so whatever ends the process, the layers with a
file are finished. Knows no tensors of models.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from edgelm.base.atomic import read_json, sync
from edgelm.base.disk import unfinished
from edgelm.base.errors import BusyError, EdgeLMError
from edgelm.checkpoints.config_json import CONFIG
from edgelm.checkpoints.safetensors import INDEX_SUFFIX
from edgelm.checkpoints.safetensors_parse import SUFFIX

STATE = "quantization.json"  # of the unfinished folder: what it is made from and how
MAX_STATE_BYTES = 2**20
LOCK_S = 5.0
WEIGHTS = re.compile(r".*\.(?:safetensors|safetensors\.index\.json|bin|bin\.index\.json|pt|pth|gguf|onnx|h5|msgpack)")
MODULES = re.compile(r"\d_\w+")  # the folders of sentence-transformers


class Stored(NamedTuple):
    """A tensor as a file has it."""

    dtype: str  # in the words of safetensors
    shape: tuple[int, ...]
    data: bytes | memoryview


class UnfinishedFolder:
    """The hidden folder beside `out`. Its methods raise EdgeLMError where the disk refuses."""

    def __init__(self, out: Path, key: Mapping[str, Any], parts: list[str]) -> None:
        """Continue an unfinished folder of the same key, else begin a new one, of these parts.

        `key` is all that its content depends on, as JSON.
        """
        self.out = out
        self.path = unfinished(out)
        self._lock = FileLock(f"{self.path}.lock")
        self._acquire()
        count = len(parts)
        self._names = {part: f"model-{i:05d}-of-{count:05d}{SUFFIX}" for i, part in enumerate(parts, 1)}
        self.continued = read_json(self.path / STATE, MAX_STATE_BYTES) == key
        try:
            if not self.continued:
                shutil.rmtree(self.path, ignore_errors=True)
                self.path.mkdir(parents=True)
                _write(self.path / STATE, json.dumps(key).encode())
        except OSError as error:
            raise _refused(out, error) from None

    def close(self) -> None:
        """Let other processes have the folder."""
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def _acquire(self) -> None:
        """Keep other processes from the folder: a killed one ends within two seconds."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=LOCK_S, poll_interval=0.1)
        except Timeout:
            hint = "wait for it, or give the name of another folder"
            raise BusyError(f"another process is writing {self.out}", hint) from None
        except OSError as error:
            raise _refused(self.out, error) from None

    def file(self, part: str) -> Path:
        """Return the file of a part, such as a layer: under a name of its own until all parts are there."""
        final = self.path / self._names[part]
        return final if final.is_file() else self.path / f"{part}{SUFFIX}"

    def has(self, part: str) -> bool:
        return self.file(part).is_file()

    def nbytes(self) -> int:
        """Return the bytes of the parts that are there."""
        return sum(self.file(part).stat().st_size for part in self._names if self.has(part))

    def write(self, part: str, tensors: Mapping[str, Stored]) -> None:
        """Write the file of a part. It has its name once all is on the disk."""
        try:
            _write(self.file(part), *_safetensors(tensors))
        except OSError as error:
            raise _refused(self.out, error) from None

    def finish(self, source: Path, config: Mapping[str, Any]) -> int:
        """Name the files as one model, add what belongs to it, and give the folder its name; return its bytes."""
        try:
            places: dict[str, str] = {}
            total = 0
            for part, name in self._names.items():
                for tensor, nbytes in _tensor_sizes(self.file(part)):
                    places[tensor] = name
                    total += nbytes
                self.file(part).rename(self.path / name)
            copy_others(source, self.path)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            _write_json(self.path / f"model{INDEX_SUFFIX}", index)
            _write_json(self.path / CONFIG, config)
            self.path.rename(self.out)
            sync(self.out.parent)
            (self.out / STATE).unlink()
            return sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())
        except OSError as error:
            raise _refused(self.out, error) from None


def copy_others(source: Path, target: Path) -> None:
    """Copy the files of a model that are no weights: tokenizer, template, licence. Raises OSError."""
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name == CONFIG or WEIGHTS.fullmatch(path.name):
            continue
        if path.is_file():
            shutil.copyfile(path, target / path.name)
            sync(target / path.name)
        elif MODULES.fullmatch(path.name) and (path / CONFIG).is_file():
            (target / path.name).mkdir(exist_ok=True)
            shutil.copyfile(path / CONFIG, target / path.name / CONFIG)


def quantization_config(group: int, *, symmetric: bool, ignore: list[str]) -> dict[str, Any]:
    """Return the section of the config.json: compressed-tensors, `pack-quantized`, one scheme for all linear layers."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _safetensors(tensors: Mapping[str, Stored]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file. The header is padded, so that the data begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.data


def _tensor_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the tensors of a file that `_safetensors` made, with their bytes. Raises OSError."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, end - start


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    _write(path, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())


def _write(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file, and give it its name when its bytes are on the disk."""
    part_file = unfinished(path)
    with part_file.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    part_file.replace(path)
    sync(path.parent)


def _refused(out: Path, error: OSError) -> EdgeLMError:
    return EdgeLMError(f"{out} cannot be written: {error.strerror}", "free some space, or choose another folder")
