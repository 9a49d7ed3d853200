"""The tokenizer of a GGUF in the torch engine is llama.cpp's, whichever of its two packages is installed."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.model import open_model
from edgelm.backends.torch import build
from tests.tiny import write_tiny


def test_a_ggufs_tokenizer_is_llama_cpps_with_edgelm_llama_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release has the binding in the package edgelm_llama, and no llama_cpp."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "llama_cpp" else find(name, package)

    monkeypatch.setattr(build, "find_spec", found)
    with open_model(write_tiny(tmp_path / "m.gguf")) as model:
        assert isinstance(build.tokenizer_of(model), LlamaTokenizer)
