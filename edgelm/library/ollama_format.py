"""The error for a GGUF that was made for Ollama's own engine, with the catalogue's name of the same model.

Owns the choice of that name. checkpoints/ollama_format.py recognizes the files.
"""

from __future__ import annotations

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.ollama_format import RENAMED, is_ollamas_own, num_text_parameters
from edgelm.library.catalog import Entry, entries
from edgelm.library.ollama_store import ORIGIN, name_of_blob

NEAR = 0.25  # most by which the parameters of the same model differ, as the two count them
OTHER_FILE = "take a GGUF of it that was made for llama.cpp"


def refuse_ollamas_own(gguf: GGUF) -> None:
    """Raise ModelError for a file that was made for Ollama's own engine."""
    if not is_ollamas_own(gguf):
        return
    name = name_of_blob(gguf.path)
    entry = _same_model(gguf, name) if name else None
    message = f"{shown(ORIGIN + name) if name else gguf.name} is made for Ollama's own engine"
    raise ModelError(message, f"edgelm pull {entry.name} has it for llama.cpp" if entry else OTHER_FILE)


def _same_model(gguf: GGUF, name: str) -> Entry | None:
    """Return the entry of the catalogue for a name of Ollama: of its family, in the size that is nearest."""
    own = _plain(name.partition(":")[0])
    architecture = RENAMED.get(gguf.architecture, gguf.architecture)
    same = [
        entry
        for entry in entries()
        if own == (family := _plain(entry.family)) or (own.startswith(family) and entry.architecture == architecture)
    ]
    family = max((entry.family for entry in same), key=len, default="")
    count = num_text_parameters(gguf)
    near = [entry for entry in same if entry.family == family and abs(entry.parameters - count) <= NEAR * count]
    return min(near, key=lambda entry: abs(entry.parameters - count), default=None)


def _plain(family: str) -> str:
    """Return a family without what Ollama and the catalogue write differently: olmo-3, olmo3."""
    return family.casefold().replace("-", "")
