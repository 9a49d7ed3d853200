"""Whether anything here can run a model, by the first bytes of its files: before the rest is downloaded.

Owns that refusal. Asks our own readers about a folder's config.json, and the installed llama.cpp about the architecture
of a GGUF: its library has the names of all that it knows. What cannot be told this early passes.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from typing import Any

from edgelm.base.errors import EngineError, ModelError
from edgelm.base.machine.llama_build import find_build
from edgelm.library.names import shown
from edgelm.library.selection import CONFIG

HEAD_BYTES = 2**16  # of a file, by which it is judged
MAX_ARCHITECTURE_BYTES = 64
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by GGUF's numbers of types
_STRING, _ARRAY = 8, 9


def require_runnable_config(repository: str, text: bytes) -> None:
    """Raise ModelError for the config.json of a model that neither runs here nor can be converted."""
    # A pull of a GGUF needs neither of these, nor numpy.
    from edgelm.checkpoints.config_json import decoder_values
    from edgelm.checkpoints.encoder import is_encoder, refuse_encoder
    from edgelm.checkpoints.quantization import read_quantization
    from edgelm.models.families import family_of_folder

    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelError(f"{CONFIG} of {repository} is not valid JSON", "choose another repository") from None
    if not isinstance(config, Mapping):
        raise ModelError(f"{CONFIG} of {repository} is not an object", "choose another repository")
    values = decoder_values(config)
    kind = values.get("model_type")
    if is_encoder(config):
        try:
            return refuse_encoder(values)
        except ModelError as error:
            raise _refused(repository, f"cannot be run, for {error.message}") from None
    if not isinstance(kind, str) or family_of_folder(kind) is None:
        what = (
            f"is a {shown(kind)} model" if isinstance(kind, str) and kind else "does not say what kind of model it is"
        )
        raise _refused(repository, f"{what}, which edgelm cannot run from safetensors")
    try:
        read_quantization(config)
    except ModelError as error:
        raise _refused(repository, f"cannot be run, for {error.message}") from None


def require_runnable_gguf(repository: str, head: bytes) -> None:
    """Raise ModelError if llama.cpp does not know the architecture of a GGUF with these first bytes."""
    architecture = gguf_architecture(head)
    if architecture is None:
        return
    try:
        library = next(iter(sorted(find_build().lib_dir.glob("libllama.*"))), None)
    except EngineError:
        return
    if library is None:
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        is_known = code.find(architecture.encode() + b"\0") >= 0
    if not is_known:
        raise _refused(repository, f"has the architecture {shown(architecture)}, which llama.cpp here does not know")


def gguf_architecture(head: bytes) -> str | None:
    """Return the architecture that the first bytes of a GGUF state; None if they do not reach as far."""
    if head[:4] != b"GGUF":
        return None
    try:
        at, (num_keys,) = 24, struct.unpack_from("<Q", head, 16)
        for _ in range(min(num_keys, 1000)):
            key, at = _string(head, at)
            (kind,) = struct.unpack_from("<I", head, at)
            at += 4
            if key == b"general.architecture" and kind == _STRING:
                value, _ = _string(head, at)
                text = value.decode("ascii", "replace")
                return text if 0 < len(text) <= MAX_ARCHITECTURE_BYTES and text.isprintable() else None
            at = _end(head, at, kind)
    except (struct.error, KeyError, RecursionError):  # cut off, or not a GGUF that is known
        return None
    return None


def _string(head: bytes, at: int) -> tuple[bytes, int]:
    length: int = struct.unpack_from("<Q", head, at)[0]
    if at + 8 + length > len(head):
        raise struct.error
    return head[at + 8 : at + 8 + length], at + 8 + length


def _end(head: bytes, at: int, kind: int) -> int:
    """Return where a value ends."""
    if kind == _STRING:
        return _string(head, at)[1]
    if kind != _ARRAY:
        return at + _SCALAR_BYTES[kind]
    item, items = struct.unpack_from("<IQ", head, at)
    kind, count, at = int(item), int(items), at + 12
    if kind in _SCALAR_BYTES:
        return at + count * _SCALAR_BYTES[kind]
    for _ in range(count):
        at = _end(head, at, kind)
    return at


def _refused(repository: str, reason: str) -> ModelError:
    hint = f"choose a GGUF of it, or another model; for other programs: hf download {repository}"
    return ModelError(f"{repository} {reason}", hint)
