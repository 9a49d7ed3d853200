"""The sampling that a model's files recommend: keys of a GGUF, or generation_config.json of a folder.

Owns the names in the files and which values are taken. Whether they are used is decided in jobs/answer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgelm.base.errors import ModelError
from edgelm.base.sampling import SAMPLING
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.values import is_number

GENERATION = "generation_config.json"
# llama.cpp has more, such as those of XTC and mirostat, which are not sampled here. A penalty for repetition is not
# taken: it makes each token dearer, ends the step ahead of all answers of a batch, and no setting takes it back.
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
}
DIGITS = 6  # of a float32: 0.95 is stored as 0.949999988


def gguf_sampling(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a GGUF's metadata by our names, without those that cannot be meant."""
    return _taken({name: metadata.get(key) for name, key in GGUF_KEYS.items()})


def folder_sampling(folder: Path) -> dict[str, float]:
    """Return the values of a folder's generation_config.json by our names, without those that cannot be meant.

    As in vLLM, `do_sample: false` is not read: it is the default of transformers, and says nothing about chats.
    """
    path = folder / GENERATION
    try:
        return _taken(read_json(path)) if path.is_file() else {}
    except ModelError:
        return {}


def _taken(values: Mapping[str, Any]) -> dict[str, float]:
    taken: dict[str, float] = {}
    for name in GGUF_KEYS:
        value = values.get(name)
        if name == "top_k" and value == -1:  # off, as in llama.cpp and vLLM
            value = 0
        if not is_number(value):
            continue
        if isinstance(value, float):
            value = float(f"{value:.{DIGITS}g}")
        try:
            taken[name] = SAMPLING[name].check.parse(value)
        except ValueError:  # out of the range that a user may type
            continue
    return taken
