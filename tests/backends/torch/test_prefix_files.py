"""Idle conversations of the torch engine in files: the next process continues them, with the same answer."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from edgelm.backends.build import build
from edgelm.backends.model import LoadedModel
from edgelm.backends.torch.block_states import block_bytes, load_blocks, save_blocks
from edgelm.base.config import Settings
from edgelm.base.errors import SnapshotError
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.core import SamplingParams, Stats
from edgelm.kernels.cache import FORMATS, allocate, read
from tests.tiny import write_tiny

PROMPT = [3 + (17 * place) % 500 for place in range(300)]
ALL_BLOCKS = 288  # of the prompt, in blocks of 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "m.gguf", endless=True)


def built(path: Path, prefixes: Path | None, **settings: object) -> LoadedModel:
    fixed = {"threads": 1, "ctx": 512, "engine": "torch", "device": "cpu", "spec": "off"}
    return build(EngineJob(model=path, settings=Settings(**fixed | settings), prefixes=prefixes))  # type: ignore[arg-type]


def ask(loaded: LoadedModel, prompt: list[int], **where: object) -> tuple[list[int], Stats]:
    """Return the answer of a process that then ends."""

    async def answer() -> tuple[list[int], Stats]:
        ids, stats = [], None
        params = SamplingParams(temperature=0, max_tokens=8)
        async for event in loaded.engine.submit(prompt, params, **where):  # type: ignore[arg-type]
            ids += [sample.id for sample in event.sampled]
            stats = event.stats
        assert stats
        return ids, stats

    try:
        return asyncio.run(answer())
    finally:
        loaded.engine.close()


def paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.parametrize("kv", FORMATS)
def test_the_next_process_continues_a_conversation(model: Path, tmp_path: Path, kv: str) -> None:
    prefixes = tmp_path / "prefixes"
    first, stats = ask(built(model, prefixes, kv=kv), PROMPT)
    assert stats.cached_tokens == 0
    (file,) = paths(prefixes)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    turn = [*PROMPT, *first, 9, 8, 7]
    alone, _ = ask(built(model, None, kv=kv), turn)
    again, stats = ask(built(model, prefixes, kv=kv), turn)
    assert stats.cached_tokens == ALL_BLOCKS
    assert again == alone


def test_a_longer_conversation_replaces_its_file(model: Path, tmp_path: Path) -> None:
    ask(built(model, tmp_path), PROMPT)
    (before,) = paths(tmp_path)
    ask(built(model, tmp_path), [*PROMPT, *PROMPT[:100]])
    (after,) = paths(tmp_path)
    assert after.stat().st_size > before.stat().st_size if before.exists() else after != before


def test_a_conversation_serves_its_own_namespace_model_and_format(model: Path, tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes"
    ask(built(model, prefixes, kv="int8"), PROMPT, cache_namespace="a")

    def cached(path: Path = model, namespace: str = "a", **settings: object) -> int:
        _, stats = ask(built(path, prefixes, **{"kv": "int8"} | settings), [*PROMPT, 5], cache_namespace=namespace)
        return stats.cached_tokens

    assert cached() == ALL_BLOCKS
    assert cached(namespace="b") == 0
    assert cached(kv="f16") == 0
    assert cached(write_tiny(tmp_path / "other.gguf", seed=5)) == 0
    assert cached(prefix_cache_disk=0.0) == 0


@pytest.mark.parametrize("at", [20, -20])  # of the head, of the state
def test_a_damaged_file_is_deleted_and_computed_again(model: Path, tmp_path: Path, at: int) -> None:
    alone, _ = ask(built(model, None), [*PROMPT, 5])
    ask(built(model, tmp_path), PROMPT)
    (file,) = paths(tmp_path)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    again, stats = ask(built(model, tmp_path), [*PROMPT, 5])
    assert (again, stats.cached_tokens) == (alone, 0)
    _, stats = ask(built(model, tmp_path), [*PROMPT, 5])
    assert stats.cached_tokens == ALL_BLOCKS


@pytest.mark.parametrize("kv", FORMATS)
def test_blocks_come_back_elsewhere(kv: str) -> None:
    source, target = ([allocate(FORMATS[kv], 12, 2, 40, "cpu") for _ in range(3)] for _ in range(2))
    for cache in source:
        for plane in cache.planes.values():
            plane.view(torch.uint8).random_(0, 60)
    blocks = (7, 2, 9, 0)
    state = np.empty(len(blocks) * block_bytes(source), np.uint8)
    save_blocks(source, blocks, state)
    load_blocks(target, state, (1, 11), 1)
    for before, after in zip(source, target, strict=True):
        for old, new in zip(
            read(before, torch.tensor([2, 9]), 64), read(after, torch.tensor([1, 11]), 64), strict=True
        ):
            torch.testing.assert_close(old, new, rtol=0, atol=0)
        assert all(not plane[[0, *range(2, 11)]].any() for plane in after.planes.values())


def test_a_state_of_another_size_is_refused() -> None:
    caches = [allocate(FORMATS["f16"], 4, 2, 32, "cpu")]
    size = block_bytes(caches)
    for state, blocks, first in ((size + 1, (0,), 0), (size, (0, 1), 0), (2 * size, (0, 1), 1)):
        with pytest.raises(SnapshotError, match="does not fit this KV cache"):
            load_blocks(caches, np.zeros(state, np.uint8), blocks, first)
