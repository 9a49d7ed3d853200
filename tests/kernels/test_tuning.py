"""kernels/tuning.py: measurements are kept, found again, and ignored where they do not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from edgelm.backends.torch.tuning import fastest_of, tune
from edgelm.kernels.gpu_target import target_of
from edgelm.kernels.tuning import Table, file_name, num_measured


class Config(NamedTuple):
    warps: int
    prefetch: bool


CANDIDATES = [Config(4, False), Config(8, True), Config(4, True)]
TARGET = target_of(torch.device("cpu"))._replace(gpu="NVIDIA H100 80GB HBM3", num_sms=132, triton="3.9.0")


class Op:
    """An op with one kernel, whose time for each candidate is in `times`."""

    def __init__(self, table: Table, times: list[float], key: str = "q4_k 64x64") -> None:
        self.table, self.times, self.key = table, times, key
        self.launched: list[Config] = []

    def run(self) -> None:
        self.launched.append(self.table.best("matmul", self.key, lambda: CANDIDATES))

    def time_us(self, run) -> float:
        run()
        return self.times[CANDIDATES.index(self.launched[-1])]


def opened(folder: Path) -> Table:
    table = Table()
    table.open(folder, TARGET)
    return table


def test_without_measurements_the_first_candidate_is_taken():
    assert Table().best("matmul", "any", lambda: CANDIDATES) == CANDIDATES[0]


def test_the_fastest_candidate_is_taken_from_then_on_and_by_later_processes(tmp_path):
    op = Op(opened(tmp_path), [3.0, 1.0, 2.0])
    tune(op.table, op.run, op.time_us)
    assert op.table.best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[1]
    assert opened(tmp_path).best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[1]
    assert opened(tmp_path).best("matmul", "another key", lambda: CANDIDATES) == CANDIDATES[0]
    assert opened(tmp_path).best("attention", op.key, lambda: CANDIDATES) == CANDIDATES[0]


class Step:
    """A step of a model with three shapes. The time is only computed when it is read."""

    def __init__(self, table: Table) -> None:
        self.ops = [Op(table, times, key) for times, key in (([3, 1, 2], "a"), ([3, 2, 1], "b"), ([1, 2, 3], "c"))]
        self.readings = 0

    def run(self) -> list[Config]:
        for op in self.ops:
            op.run()
        return [op.launched[-1] for op in self.ops]

    def time_us(self, run) -> float:
        self.readings += 1
        return sum(op.times[CANDIDATES.index(config)] for op, config in zip(self.ops, run(), strict=True))


def test_a_model_that_tuned_its_steps_takes_what_was_fastest_and_so_do_later_ones(tmp_path):
    step = Step(opened(tmp_path))
    tune(step.ops[0].table, step.run, step.time_us)
    assert step.readings == 3 * (len(CANDIDATES) + 1)  # the default twice
    assert step.run() == [CANDIDATES[1], CANDIDATES[2], CANDIDATES[0]]
    later = Step(opened(tmp_path))
    assert later.run() == step.run()
    tune(later.ops[0].table, later.run, later.time_us)
    assert later.readings == 0
    assert step.readings == 3 * (len(CANDIDATES) + 1)  # the default twice


def test_a_model_that_does_not_tune_measures_nothing(tmp_path):
    step = Step(opened(tmp_path))
    assert [step.run() for _ in range(5)] == [[CANDIDATES[0]] * 3] * 5
    assert step.readings == 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_measured_while_a_graph_is_captured(tmp_path, monkeypatch):
    step = Step(opened(tmp_path))
    monkeypatch.setattr("edgelm.backends.torch.tuning.capturing", lambda: True)
    with pytest.raises(AssertionError, match="while a graph is captured"):
        tune(step.ops[0].table, step.run, step.time_us)
    assert step.run() == [CANDIDATES[0]] * 3
    assert step.readings == 0


def test_a_step_does_not_tune_itself(tmp_path):
    op = Op(opened(tmp_path), [3.0, 1.0, 2.0])
    with pytest.raises(AssertionError, match="does not nest"):
        tune(op.table, lambda: tune(op.table, op.run, op.time_us), op.time_us)
    assert op.launched == []


def test_a_second_model_leaves_the_first_one_its_configurations(tmp_path):
    first = Op(opened(tmp_path), [3.0, 1.0, 2.0])
    first.run()
    other = Op(opened(tmp_path), [3.0, 1.0, 2.0])  # in another process
    tune(other.table, other.run, other.time_us)
    first.table.open(tmp_path, TARGET)
    first.run()
    assert first.launched == [CANDIDATES[0]] * 2


def test_where_nothing_can_be_written_it_is_known_in_this_process_only(tmp_path):
    (tmp_path / "file").touch()
    op = Op(opened(tmp_path / "file"), [3.0, 1.0, 2.0])
    tune(op.table, op.run, op.time_us)
    op.run()
    assert op.launched[-1] == CANDIDATES[1]


def test_what_is_known_is_not_measured_again(tmp_path):
    op = Op(opened(tmp_path), [3.0, 1.0, 2.0])
    tune(op.table, op.run, op.time_us)
    again = Op(opened(tmp_path), [0.0, 9.0, 9.0])
    tune(again.table, again.run, again.time_us)
    assert again.launched == [CANDIDATES[1]]


def test_another_gpu_and_another_triton_have_their_own_file(tmp_path):
    op = Op(opened(tmp_path), [3.0, 1.0, 2.0])
    tune(op.table, op.run, op.time_us)
    for other in (TARGET._replace(triton="3.6.0"), TARGET._replace(num_sms=114), TARGET._replace(gpu="NVIDIA A100")):
        table = Table()
        table.open(tmp_path, other)
        assert table.best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[0]
    assert file_name(TARGET) == "nvidia-h100-80gb-hbm3-132sm-triton3.9.0-3.json"


def test_a_configuration_that_is_no_candidate_any_more_is_measured_anew(tmp_path):
    stored = {"matmul": {"q4_k 64x64": {"warps": 16, "prefetch": True}}}
    (tmp_path / file_name(TARGET)).write_text(json.dumps(stored))
    op = Op(opened(tmp_path), [3.0, 2.0, 1.0])
    assert op.table.best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[0]
    tune(op.table, op.run, op.time_us)
    assert op.table.best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[2]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"matmul": 1}', '{"matmul": {"k": 1}}', '{"matmul": {"k": {"W": "4"}}}', "\0"]
)
def test_a_damaged_file_is_no_file(tmp_path, text):
    path = tmp_path / file_name(TARGET)
    path.write_text(text)
    op = Op(opened(tmp_path), [3.0, 1.0, 2.0])
    assert op.table.best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[0]
    tune(op.table, op.run, op.time_us)
    assert json.loads(path.read_text()) == {"matmul": {op.key: {"warps": 8, "prefetch": True}}}


def test_two_processes_keep_what_either_has_measured(tmp_path):
    one, two = Op(opened(tmp_path), [3.0, 1.0, 2.0], "one"), Op(opened(tmp_path), [3.0, 2.0, 1.0], "two")
    tune(one.table, one.run, one.time_us)
    tune(two.table, two.run, two.time_us)
    table = opened(tmp_path)
    assert table.best("matmul", "one", lambda: CANDIDATES) == CANDIDATES[1]
    assert table.best("matmul", "two", lambda: CANDIDATES) == CANDIDATES[2]
    assert [path.name for path in tmp_path.iterdir()] == [file_name(TARGET)]


def test_a_candidate_that_does_not_fit_is_not_taken(tmp_path):
    op = Op(opened(tmp_path), [math.inf, 5.0, math.inf])
    tune(op.table, op.run, op.time_us)
    assert op.table.best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[1]
    none = Op(opened(tmp_path), [math.inf] * 3, "none")
    tune(none.table, none.run, none.time_us)
    assert none.table.best("matmul", "none", lambda: CANDIDATES) == CANDIDATES[0]


def test_a_measurement_that_fails_leaves_the_default(tmp_path):
    op = Op(opened(tmp_path), [1.0])
    with pytest.raises(IndexError):
        tune(op.table, op.run, op.time_us)
    assert op.table.best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("times", "again", "place"),
    [
        ([(10, 10), (8, 8), (9, 9)], (10, 10), 1),
        ([(10, 10), (9.9, 9.9)], (10, 10), 0),  # by less than anybody can measure
        ([(10, 10), (9.5, 9.5)], (11, 10), 0),  # the default itself differs by more
        ([(10, 10), (9.5, 9.5)], (10.1, 10), 1),
        ([(10, 100), (8, 110)], (10, 100), 0),  # slower with more rows
        ([(10, 100), (8, 101)], (10, 100), 1),  # shares of a time count, whether it is long or short
        ([(10, 100), (9, 70), (5, 100)], (10, 100), 2),
        ([(10, 10), (math.inf, 1)], (10, 10), 0),
        ([(math.inf, math.inf), (9, 9)], (math.inf, math.inf), 1),
        ([(math.inf, math.inf)], (math.inf, math.inf), None),
    ],
)
def test_a_candidate_replaces_the_default_if_it_is_faster_by_more_than_the_noise(times, again, place):
    assert fastest_of(times, again) == place


def test_the_number_of_measured_kernels_is_known_without_torch(tmp_path):
    op = Op(opened(tmp_path), [3.0, 1.0, 2.0])
    tune(op.table, op.run, op.time_us)
    assert num_measured(tmp_path, TARGET.gpu, TARGET.triton) == 1
    assert num_measured(tmp_path, TARGET.gpu, "3.6.0") == num_measured(tmp_path, "NVIDIA H100", TARGET.triton) == 0
    assert num_measured(tmp_path / "none", TARGET.gpu, TARGET.triton) == 0


def test_candidates_are_listed_once_for_a_key():
    table, calls = Table(), []
    for _ in range(3):
        table.best("matmul", "any", lambda: calls.append(1) or CANDIDATES)
    assert calls == [1]


def test_without_a_folder_it_is_known_in_this_process_only():
    op = Op(Table(), [3.0, 1.0, 2.0])
    tune(op.table, op.run, op.time_us)
    assert op.table.best("matmul", op.key, lambda: CANDIDATES) == CANDIDATES[1]
