"""The identity of a model by its content: a copy, another path and a new date have the same one.

Owns which bytes count: the head of each file, and a sample of each tensor, since another training or quantization
changes every tensor that it touches. A model of gigabytes takes milliseconds. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from edgelm.checkpoints.config_json import CONFIG
from edgelm.checkpoints.files import cannot_open
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.safetensors import Safetensors

SAMPLE_BYTES = 256  # of each tensor, in its middle
MAX_HEAD_BYTES = 2**28
BESIDE = (CONFIG, "tokenizer.json")  # of a folder: they decide how its weights compute


def content_identity(model: GGUF | Safetensors) -> str:
    """Return the identity of an open model, in hexadecimal. Raises ModelError where a file cannot be read."""
    digest = hashlib.sha256()
    places: dict[Path, list[tuple[int, int]]] = {path: [] for path in model.paths}
    for tensor in model.tensors.values():
        places[tensor.path].append((tensor.offset, tensor.nbytes))
    try:
        for path in model.paths:
            for part in _parts(path, places[path]):
                digest.update(len(part).to_bytes(8, "little") + part)
        if isinstance(model, Safetensors):
            for path in (model.folder / name for name in BESIDE):
                digest.update(path.read_bytes() if path.is_file() else b"")
    except OSError as error:
        raise cannot_open(model.name, error) from None
    return digest.hexdigest()


def _parts(path: Path, places: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the size of a file, all that is before its first tensor, and the samples."""
    with path.open("rb") as file:
        yield str(path.stat().st_size).encode()
        yield file.read(min([*(offset for offset, _ in places), MAX_HEAD_BYTES]))
        for offset, nbytes in sorted(places):
            file.seek(offset + max(nbytes - SAMPLE_BYTES, 0) // 2)
            yield file.read(min(nbytes, SAMPLE_BYTES))
