"""What the state of a sequence depends on: a saved one is of use only where all of this is the same.

Owns that list. llama.cpp itself stores no hash of the model with a state.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from llama_cpp import llama_cpp as L

from edgelm.executors.file_identity import file_identity
from edgelm.executors.llama import LlamaOptions
from edgelm.executors.llama_api import metadata
from edgelm.executors.llama_memory import KV_MODES
from edgelm.executors.llama_model import LlamaModel
from edgelm.executors.snapshot_files import Bounds, SnapshotFolder

log = logging.getLogger(__name__)


def snapshot_folder(
    root: Path, model: LlamaModel, files: Sequence[Path], options: LlamaOptions, bounds: Bounds
) -> SnapshotFolder | None:
    """Return the folder for a model's snapshots; None if there may be none, or nothing can name the model."""
    if not bounds.max_bytes:
        return None
    try:
        return SnapshotFolder(root, state_identity(model, files, options), bounds)
    except OSError as error:
        log.warning("conversations are not kept on disk: %s", error)
        return None


def state_identity(model: LlamaModel, files: Sequence[Path], options: LlamaOptions) -> bytes:
    """Return 16 bytes that stand for the weights, the build of llama.cpp, and how keys and values are stored.

    Of the weights' files: size, time, the head and samples. Raises OSError where they cannot be read.
    """
    mode = KV_MODES[options.kv]
    flash = mode.flash if options.flash is None else options.flash
    digest = hashlib.blake2b(digest_size=16)
    library = Path(L._lib._name).stat()  # noqa: SLF001 - its version alone does not name a build
    facts = [L.llama_version(), library.st_size, library.st_mtime_ns, mode.type_k, mode.type_v, flash]
    arch = metadata(model.native, "general.architecture")
    if metadata(model.native, f"{arch}.rope.scaling.original_context_length") is not None:
        facts.append(options.context)  # some rotate keys by other factors in a long context
    digest.update(repr(facts).encode())
    for part in file_identity(files):
        digest.update(part)
    return digest.digest()
