"""Predictions for the table of engines, by the worker that reads headers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.machine.gpu import Gpu
from edgelm.base.workers.messages import Footprint, Predict
from edgelm.library.scan import LocalModel
from edgelm.server.engines import memory
from edgelm.server.engines.memory import Machine, Measured
from edgelm.server.engines.process import Launcher
from tests.tiny import write_tiny


class Questions:
    """A launcher that starts nothing."""

    async def question(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int) -> Predict:
        return Predict(model.path, Settings(spec="off"), None, False, usable_bytes, False, freed_gpu_bytes)


def predicted(path: Path, usable_bytes: int | None = None) -> Footprint:
    machine = Machine(cast(Launcher, Questions()))
    return asyncio.run(machine.predict(LocalModel("tiny", path), usable_bytes))


def test_a_prediction_and_a_refusal(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    assert predicted(path).total_bytes > path.stat().st_size
    with pytest.raises(ModelError, match=r"0\.00 GiB are free"):  # of this class, so that the room adds who is pinned
        predicted(path, 1)


@pytest.mark.parametrize(
    ("gpus", "amd", "free", "most"),
    [
        ([Gpu("A", 800, 400), Gpu("B", 800, 700)], [], 1100, 700),
        ([], [Gpu("C", 800, 600)], 600, 600),
        ([Gpu("GB10", 0, 0)], [], 1000, 1000),  # its memory is the processor's
        ([], [], None, 0),
    ],
)
def test_the_free_memory_of_the_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], amd: list[Gpu], free: int | None, most: int
) -> None:
    monkeypatch.setattr(memory, "has_torch", lambda: True)
    monkeypatch.setattr(memory, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(memory, "amd_gpus", lambda: amd)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000)
    measured = memory.measure([])
    assert measured.gpu_free_bytes == (None if free is None else int(memory.USABLE * free))
    assert measured.one_gpu_free_bytes == int(memory.USABLE * most)


def test_a_gpu_that_nothing_can_use_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask a laptop's wakes it."""
    asked: list[Gpu] = []
    monkeypatch.setattr(memory, "has_torch", lambda: False)
    monkeypatch.setattr(memory, "has_gpu_backend", lambda: False)
    monkeypatch.setattr(memory, "usable_gpus", lambda: asked.append(Gpu("A", 800, 400)) or asked)
    assert memory.measure([]).gpu_free_bytes is None
    monkeypatch.setattr(memory, "has_gpu_backend", lambda: True)
    assert memory.measure([]).gpu_free_bytes == int(memory.USABLE * 400)


def test_a_driver_that_hangs_takes_one_thread_and_none_of_the_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks gives up after a while, and its question stays."""
    answers, asked = threading.Event(), list[Sequence[int]]()

    def measure(pids: Sequence[int]) -> Measured:
        asked.append(pids)
        assert answers.wait(60)
        return Measured(len(pids))

    monkeypatch.setattr(memory, "measure", measure)

    async def front() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        machine = Machine(cast(Launcher, Questions()))
        try:
            for number in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(machine.measure([*range(number)]), 0.05)
            await asyncio.wait_for(asyncio.to_thread(int), 10)
            waiting = [asyncio.ensure_future(machine.measure([*range(number)])) for number in (3, 4)]
        finally:
            answers.set()
        measured = await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert measured == [Measured(3), Measured(4)]  # none is that of an earlier question
        assert asked == [[], [0, 1, 2], [0, 1, 2, 3]]

    asyncio.run(front())


def test_a_file_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EdgeLMError) as error:
        predicted(tmp_path / "gone.gguf")
    assert "gone.gguf" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_worker_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORKER", "edgelm.no_such_worker")
    with pytest.raises(EdgeLMError, match="memory of tiny could not be predicted: the process ended with code 1"):
        predicted(tmp_path / "tiny.gguf")
