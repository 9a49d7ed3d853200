"""StepTimes: the measured points, an empty executor afterwards, and files that are damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.snapshots import SnapshotStore
from edgelm.engine import step_times
from edgelm.engine.core import Chunk, CompletedSamples, Copy, ExecutorInfo, SamplingParams, Sequence, Step
from edgelm.engine.step_times import DEEP_ROWS, DEPTH, MORE_ROWS, ROWS, StepTimes, measure_steps
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "m.gguf")


@pytest.fixture
def executor(model_path: Path) -> Iterator[LlamaExecutor]:
    executor = LlamaExecutor(LlamaModel(model_path), LlamaOptions(context=2048))
    yield executor
    executor.close()


def logits_of(executor: LlamaExecutor, tokens: list[int]) -> list[float]:
    seq = Sequence(0, tokens, len(tokens), SamplingParams(temperature=0))
    step = Step((Chunk(seq, 0, tokens, 1, 0),))
    executor.forward(step)
    return [float(value) for value in executor.logits(step)[0]]


def test_all_points_are_measured_if_there_is_time(executor: LlamaExecutor, tmp_path: Path) -> None:
    times = StepTimes(tmp_path, ["a"])
    times.measure(executor, budget_s=60)
    assert {rows for rows, depth, _ in times.points if depth < 100} == set(ROWS)
    deep = {rows: depth for rows, depth, _ in times.points if depth > 100}
    assert deep.keys() == set(DEEP_ROWS)
    assert all(DEPTH // 2 < depth < 2048 for depth in deep.values())
    assert all(0 < seconds < 5 for _, _, seconds in times.points)


def test_the_cache_is_empty_afterwards(model_path: Path, executor: LlamaExecutor) -> None:
    measure_steps(executor, [(4, 8), (2, 1024)], 60)
    measured = logits_of(executor, [5, 6, 7])
    fresh = LlamaExecutor(LlamaModel(model_path), LlamaOptions(context=2048))
    assert measured == logits_of(fresh, [5, 6, 7])
    fresh.close()


def test_points_are_kept_and_the_rest_is_measured_at_the_next_start(executor: LlamaExecutor, tmp_path: Path) -> None:
    first = StepTimes(tmp_path, ["a"])
    first.measure(executor, budget_s=0)
    assert len(first.points) <= 1
    again = StepTimes(tmp_path, ["a"])
    assert again.points == first.points
    again.measure(executor, budget_s=60)
    assert len(again.points) == len(again.surface())
    third = StepTimes(tmp_path, ["a"])
    assert third.points == again.points
    assert len(third.points) > len(ROWS)


def test_a_point_measured_on_a_busy_machine_is_corrected_by_later_starts(
    executor: LlamaExecutor, tmp_path: Path
) -> None:
    times = StepTimes(tmp_path, ["a"])
    times.measure(executor, budget_s=60)
    rows, depth, seconds = times.points[0]
    times.points[0] = rows, depth, 1000 * seconds
    for _ in range(4):
        times.measure(executor, budget_s=60, more_s=60)
    assert len(times.points) == 3 * len(times.surface())
    assert times.surface()[0][2] < 100 * seconds


def test_another_model_or_machine_has_its_own_times(executor: LlamaExecutor, tmp_path: Path) -> None:
    StepTimes(tmp_path, ["a", 2]).measure(executor, budget_s=60)
    assert StepTimes(tmp_path, ["a", 3]).points == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "[[1, 2]]",
        "[[0, 8, 0.1]]",
        '[[1, 8, "NaN"]]',
        "[[1, 8, 1e400]]",
        "[[1, 8, -1]]",
        "null",
        "[" * 5000,
    ],
)
def test_an_invalid_file_is_measured_again(tmp_path: Path, content: str) -> None:
    times = StepTimes(tmp_path, ["a"])
    times._path.write_text(content)
    assert StepTimes(tmp_path, ["a"]).points == []


def test_a_folder_that_cannot_be_written_only_loses_the_file(executor: LlamaExecutor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    times = StepTimes(tmp_path / "file" / "folder", ["a"])
    times.measure(executor, budget_s=0.2)
    assert times.points


def test_the_file_is_the_users_alone(executor: LlamaExecutor, tmp_path: Path) -> None:
    times = StepTimes(tmp_path / "new", ["a"])
    times.measure(executor, budget_s=0.1)
    assert times._path.stat().st_mode & 0o077 == 0
    assert json.loads(times._path.read_text())


@pytest.mark.parametrize("context", [2, 9, 24, 40, 300])
def test_a_short_context_is_measured_as_far_as_it_goes(model_path: Path, tmp_path: Path, context: int) -> None:
    executor = LlamaExecutor(LlamaModel(model_path), LlamaOptions(context=context))
    times = StepTimes(tmp_path, ["a"])
    times.measure(executor, budget_s=60)
    assert max((rows for rows, _, _ in times.points), default=0) <= max(context - 8, 0)
    assert bool(times.points) == (context > 8)
    executor.close()


def test_an_executor_with_one_slot_measures_no_depth(model_path: Path, tmp_path: Path) -> None:
    executor = LlamaExecutor(LlamaModel(model_path), LlamaOptions(context=2048, max_sequences=1))
    times = StepTimes(tmp_path, ["a"])
    times.measure(executor, budget_s=60)
    assert {depth for _, depth, _ in times.points} == {8}
    executor.close()


def test_without_memory_for_states_no_depth_is_measured(model_path: Path, tmp_path: Path) -> None:
    executor = LlamaExecutor(LlamaModel(model_path), LlamaOptions(context=2048), SnapshotStore(0))
    times = StepTimes(tmp_path, ["a"])
    for _ in range(2):
        times.measure(executor, budget_s=60)
        assert {(rows, depth) for rows, depth, _ in times.points} == {(rows, 8) for rows in ROWS}
    executor.close()


class RecordingBlocks:
    """An executor with block tables that does nothing; it keeps its steps."""

    def __init__(self, max_sequences: int) -> None:
        self.steps: list[Step] = []
        limits = {"context": 4096, "capacity": 8192, "max_tokens": 512, "max_rows": 64, "max_draft": 15}
        self.info = ExecutorInfo(
            engine="torch", device="cpu", num_vocab=100, kv_bytes_per_token=1, block_len=32,
            max_sequences=max_sequences, **limits,
        )  # fmt: skip

    def forward(self, step: Step) -> None:
        self.steps.append(step)

    def sample(self, step: Step, _: None) -> CompletedSamples:
        return CompletedSamples([[] for _ in step.chunks])


def test_what_is_busy_for_a_moment_slows_no_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repeats of a point followed one another: a program that ran for a moment slowed all of one point."""
    now = [0.0]
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Busy(RecordingBlocks):
        def forward(self, step: Step) -> None:
            super().forward(step)
            busy = 10 <= len(self.steps) < 16 or 18 <= len(self.steps) < 24
            now[0] += 0.01 * step.num_rows * (5 if busy else 1)

    points = measure_steps(Busy(8), [(rows, 8) for rows in ROWS], 60)  # type: ignore[arg-type]
    assert points == [(rows, 8, pytest.approx(0.01 * rows)) for rows in ROWS]


@pytest.mark.parametrize("can_trim", [True, False])
def test_the_time_of_filling_a_cache_is_in_no_step(monkeypatch: pytest.MonkeyPatch, can_trim: bool) -> None:
    """A device computes after the call has returned: the step behind a fill waited for both."""
    now, queued = [0.0], [0.0]
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Queue(RecordingBlocks):
        def forward(self, step: Step) -> None:
            copies = sum(isinstance(op, Copy) for op in step.ops)
            queued[0] += 0.01 * sum(len(chunk.tokens) for chunk in step.chunks) + copies

        def sample(self, step: Step, _: None) -> CompletedSamples:
            now[0], queued[0] = now[0] + queued[0], 0.0
            return super().sample(step, _)

    executor = Queue(2)
    executor.info = replace(executor.info, block_len=None, can_trim=can_trim, can_copy=can_trim)
    points = [(1, 8), (4, 8), (2, 1024), (8, 8)] if can_trim else [(1, 8), (4, 8), (8, 8)]
    measured = measure_steps(executor, points, 10_000)  # type: ignore[arg-type]
    for rows, _, seconds in measured:
        assert seconds == pytest.approx(0.01 * rows)
    assert len(measured) == len(points)


@pytest.mark.parametrize(("max_sequences", "largest"), [(1, 16), (2, 32), (8, 64)])
def test_no_sequence_has_more_rows_than_a_step_verifies(tmp_path: Path, max_sequences: int, largest: int) -> None:
    executor = RecordingBlocks(max_sequences)
    times = StepTimes(tmp_path, ["a"])
    times.measure(executor, budget_s=60)  # type: ignore[arg-type]
    assert {rows for rows, _, _ in times.points} == {rows for rows in ROWS + MORE_ROWS if rows <= largest}
    for step in executor.steps:
        assert all(len(chunk.tokens) <= 16 for chunk in step.chunks)
        tables = [block for chunk in step.chunks for block in chunk.kv]  # type: ignore[union-attr]
        assert len(set(tables)) == len(tables), "two sequences write to one block"
    assert max(step.num_rows for step in executor.steps) == largest
