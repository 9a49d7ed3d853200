"""A model's files, opened: what both kinds say of themselves, before anything is loaded.

Owns the difference between a GGUF and a folder of safetensors for whoever builds an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgelm.weights.checks import check_for_llama
from edgelm.weights.facts import ModelFacts, folder_facts, model_facts
from edgelm.weights.folder import modelopt_quantization
from edgelm.weights.folder_config import CONFIG
from edgelm.weights.gguf import GGUF, open_gguf
from edgelm.weights.json_scan import read_json
from edgelm.weights.safetensors import Safetensors, open_safetensors


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An open model: one of the two is there."""

    path: Path
    facts: ModelFacts
    gguf: GGUF | None = None
    folder: Safetensors | None = None
    config: Mapping[str, Any] | None = None  # config.json of a folder

    @property
    def name(self) -> str:
        return self.facts.summary.name

    @property
    def files(self) -> tuple[Path, ...]:
        return self.gguf.paths if self.gguf else self.folder.paths if self.folder else ()

    @property
    def llama_problem(self) -> str:
        """Why llama.cpp cannot run it at all; empty: it may."""
        return "" if self.gguf else "llama.cpp does not read safetensors"

    def torch_problem(self, implementation: str = "reference") -> str:
        """Why the torch engine cannot run it by these ops, "reference" or "triton"; empty: it can.

        Torch is installed.
        """
        from edgelm.models.config import unsupported_reason  # these import torch
        from edgelm.weights.sources import unreadable_reason

        weights, config = self.gguf or self.folder, self.config or {}
        assert weights is not None
        return (
            unsupported_reason(self.gguf.metadata if self.gguf else config, implementation)
            or unreadable_reason(weights, config)
            or ""
        )


@contextmanager
def open_model(path: Path) -> Iterator[OpenedModel]:
    """Open a GGUF, or a folder or file of safetensors. Raises ModelError."""
    if path.is_dir() or path.name.endswith((".safetensors", ".safetensors.index.json")):
        with open_safetensors(path) as folder:
            facts, config = folder_facts(folder), read_json(folder.folder / CONFIG)
            if packed := modelopt_quantization(folder.folder):
                config = {"quantization_config": packed} | config
            yield OpenedModel(path, facts, folder=folder, config=config)
        return
    with open_gguf(path) as gguf:
        check_for_llama(gguf)
        yield OpenedModel(path, model_facts(gguf), gguf=gguf)
