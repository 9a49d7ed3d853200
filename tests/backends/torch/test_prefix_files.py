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
from edgelm.backends.torch import build as build_module
from edgelm.backends.torch.block_states import block_bytes, load_blocks, load_slot, save_blocks, save_slot, slot_bytes
from edgelm.base.config import Settings
from edgelm.base.errors import SnapshotError
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.core import Sampled, SamplingParams, Stats
from edgelm.kernels import delta
from edgelm.kernels.cache import FORMATS, allocate, read
from edgelm.kernels.delta_sizes import DeltaSizes
from tests.odd_models import write_odd
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


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_odd(tmp_path_factory.mktemp("models") / "m.gguf", "qwen35", 3)


@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_states_continue_a_conversation_to_the_bit(recurrent: Path, tmp_path: Path, kv: str) -> None:
    """Log-probabilities show each bit: in the process that wrote the beginning, and in the next one."""
    loaded = built(recurrent, tmp_path, kv=kv)

    async def two_turns() -> tuple[list[int], list[tuple[int, float | None]], int]:
        first = [sample.id for sample in (await sampled(loaded, PROMPT))[0]]
        turn = [*PROMPT, *first, 9, 8, 7]
        again, stats = await sampled(loaded, turn)
        return turn, [(sample.id, sample.logprob) for sample in again], stats.cached_tokens

    turn, want, num_cached = asyncio.run(two_turns())
    loaded.engine.close()
    assert num_cached == 320  # whole blocks of the prompt and its answer
    for path in paths(tmp_path):  # as if the process had ended behind the first turn
        path.unlink()
    loaded = built(recurrent, tmp_path, kv=kv)
    asyncio.run(sampled(loaded, PROMPT))
    loaded.engine.close()
    assert len(paths(tmp_path)) == 2, "behind the answer, and where a retry goes on"
    loaded = built(recurrent, tmp_path, kv=kv)
    got, stats = asyncio.run(sampled(loaded, turn))
    loaded.engine.close()
    assert stats.cached_tokens == num_cached
    assert [(sample.id, sample.logprob) for sample in got] == want


def test_the_regions_of_files_are_as_large_as_the_files(recurrent: Path, tmp_path: Path) -> None:
    """With the state behind each prefix."""
    ask(built(recurrent, tmp_path), PROMPT)
    loaded = built(recurrent, tmp_path)
    regions = sorted(region.nbytes for region in loaded.engine._scheduler.kv_regions())
    loaded.engine.close()
    assert regions == pytest.approx(sorted(path.stat().st_size for path in paths(tmp_path)), rel=0.02)
    assert regions[0] > loaded.engine.info.state_bytes > 10_000


async def sampled(loaded: LoadedModel, prompt: list[int]) -> tuple[list[Sampled], Stats]:
    samples: list[Sampled] = []
    stats = None
    async for event in loaded.engine.submit(prompt, SamplingParams(temperature=0, max_tokens=24, num_logprobs=0)):
        samples += event.sampled
        stats = event.stats
    assert stats
    return samples, stats


def test_states_of_another_model_or_layout_are_refused(
    recurrent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = tmp_path / "prefixes"
    ask(built(recurrent, prefixes), PROMPT)

    def cached(path: Path = recurrent, **settings: object) -> int:
        return ask(built(path, prefixes, **settings), [*PROMPT, *[5] * 40])[1].cached_tokens

    assert cached(write_odd(tmp_path / "other.gguf", "qwen35", 4)) == 0
    assert cached(kv="int8") == 0
    assert cached() > 0
    monkeypatch.setattr(build_module, "RING", 128)
    assert cached() == 0


def test_files_of_states_count_against_the_limit(recurrent: Path, tmp_path: Path) -> None:
    ask(built(recurrent, tmp_path), PROMPT)
    largest = max(path.stat().st_size for path in paths(tmp_path))
    limit = 1.5 * largest / 2**30  # not both of one conversation
    ask(built(recurrent, tmp_path, prefix_cache_disk=limit), PROMPT[::-1])
    sizes = [path.stat().st_size for path in paths(tmp_path)]
    assert 0 < sum(sizes) <= limit * 2**30


def test_a_state_comes_back_elsewhere() -> None:
    sizes = DeltaSizes(2, 4, 16, 32, 4, alternating=False)
    source, target = ([delta.allocate(sizes, 3, "cpu", torch.float16) for _ in range(2)] for _ in range(2))
    for cache in source:
        for plane in cache.planes.values():
            plane.copy_(torch.randn(plane.shape))
    state = np.empty(100 + slot_bytes(source), np.uint8)
    assert save_slot(source, 2, state).size == 100
    assert load_slot(target, state, 1).size == 100
    for before, after in zip(source, target, strict=True):
        for name, plane in before.planes.items():
            assert torch.equal(after.planes[name][1], plane[2])
            assert not after.planes[name][[0, 2]].any()
    with pytest.raises(SnapshotError, match="does not fit these states"):
        load_slot(target, np.zeros(10, np.uint8), 0)


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
