"""The choices that are made before a model is loaded: how much context, and whether it fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm import build as build_module
from edgelm.build import build
from edgelm.config import Settings
from edgelm.errors import EdgeLMError, ModelError
from tests.tiny import write_tiny

MIB = 2**20


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose cache takes 64 KiB a position in f16: 8 layers of 8 heads of 256 numbers, twice."""
    return write_tiny(tmp_path / "wide.gguf", layers=8, heads=8, kv_heads=8, head_dim=256, context=32768)


def context_of(path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, **settings: object) -> int:
    monkeypatch.setattr(build_module, "available_memory_bytes", lambda: free_mib * MIB)
    loaded = build(path, Settings(threads=1, **settings))
    loaded.engine.close()
    return loaded.engine.info.context


def test_the_context_is_what_fits_where_it_was_not_chosen(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_of(wide, monkeypatch, 4000) == 8192
    assert context_of(wide, monkeypatch, 1000) == 4096  # 512 MiB of cache would be one too many
    assert context_of(wide, monkeypatch, 1000, kv="int8") == 8192
    assert context_of(wide, monkeypatch, 1000, kv="k8v4") == 8192


def test_what_was_chosen_is_kept_or_refused(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_of(wide, monkeypatch, 4000, ctx=100) == 100
    with pytest.raises(ModelError, match=r"needs about 1\.0 GiB with 8,192 tokens of context, 1\.0 GiB are free"):
        context_of(wide, monkeypatch, 1000, ctx=8192)
    with pytest.raises(EdgeLMError, match="more than the 32,768"):
        context_of(wide, monkeypatch, 1000, ctx=32769)


def test_what_cannot_fit_at_all_is_refused_before_it_is_loaded(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "LlamaModel", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ModelError, match="take a smaller model"):
        context_of(wide, monkeypatch, 100)
