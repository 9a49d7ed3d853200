"""Writes LoRA adapters as PEFT does, with random matrices, and merges them plainly.

Owns the names in the file. Knows nothing of edgelm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.3,
    tensors: Mapping[str, Array] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter that changes layers of these shapes [out, in]; `tensors` replace or add to its own."""
    rng = np.random.default_rng(seed)
    held: dict[str, Array] = {}
    for module, (rows, columns) in shapes.items():
        own = rank_of(module, rank, config)
        parts = {"lora_A.weight": (own, columns), "lora_B.weight": (rows, own)}
        if module.endswith("embed_tokens"):
            parts = {"lora_embedding_A": (own, rows), "lora_embedding_B": (columns, own)}
        for part, sizes in parts.items():
            held[f"{PREFIX}{module}.{part}"] = (size * rng.standard_normal(sizes)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(held | dict(tensors or {}), folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    return folder


def rank_of(module: str, rank: int, config: Mapping[str, Any]) -> int:
    """Return the rank of a layer, whose pattern is the end of its name here."""
    patterns: Mapping[str, int] = config.get("rank_pattern", {})
    return next((own for end, own in patterns.items() if module.endswith(end)), rank)
