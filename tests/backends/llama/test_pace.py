"""Threads spin while the machine is theirs, sleep while others use it, and are as many as is fastest then."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from edgelm.backends.llama import pace as pace_module
from edgelm.backends.llama.pace import SPIN_US, NativeThreads, Pace
from tests.tiny import write_tiny

SPINNING, SLEEPING = SPIN_US, 0
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Two cores, others that use some of them, and threads whose steps take a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, can_sleep: bool = True, cores: int = 2) -> None:
        for name in WAIT_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        self.num_cores = cores
        self.others: float | None = 0.0
        self.at_once: float | None = None  # others that run at a moment; None: as many as in the mean
        self.can_sleep = can_sleep
        self.clock = Clock()
        self.count = 0
        self.spin_us = 0
        self.step_s: dict[tuple[int, int], float] = {}  # by threads and wait
        self.steps: list[tuple[int, int]] = []  # threads, and how they wait

    def cores(self) -> float | None:
        return self.others

    def runnable(self) -> float:
        return self.at_once if self.at_once is not None else self.others or 0.0

    def set(self, single: int, batch: int) -> None:
        assert single == batch
        self.count = single

    def spin(self, microseconds: int) -> None:
        self.spin_us = microseconds

    def pace(self, count: int = 2) -> Pace:
        return Pace(self, count, self, self.clock)  # type: ignore[arg-type]

    def run(self, pace: Pace, seconds: float, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Decode for some seconds; return threads and wait of each step."""
        end, start = self.clock.now + seconds, len(self.steps)
        while self.clock.now < end:
            began = pace.begin(num_tokens)
            self.clock.now += self.step_s.get((self.count, self.spin_us), 0.04)
            self.steps.append((self.count, self.spin_us))
            pace.end(num_tokens, began)
        return self.steps[start:]

    def usual(self, pace: Pace, seconds: float, num_tokens: int = 1) -> tuple[int, int]:
        """Decode for some seconds; return threads and wait of nine steps in ten."""
        steps = self.run(pace, seconds, num_tokens)
        (setting, count) = Counter(steps).most_common(1)[0]
        assert count > 0.9 * len(steps)
        return setting


@pytest.mark.parametrize("fastest", [1, 2])
def test_a_quiet_machine_spins_with_the_fastest_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, fastest: int
) -> None:
    machine = Machine(monkeypatch)
    machine.step_s = {(fastest, SPINNING): 0.010, (3 - fastest, SPINNING): 0.012}
    pace = machine.pace()
    machine.run(pace, 1)
    assert machine.usual(pace, 30) == (fastest, SPINNING)
    assert {count for count, _ in machine.steps} == {1, 2}, "the other number is tried, too"


def test_many_cores_may_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=16)
    machine.step_s = {(8, SPINNING): 0.012, (4, SPINNING): 0.008, (1, SPINNING): 0.010}
    pace = machine.pace(8)
    machine.run(pace, 1)
    assert machine.usual(pace, 30) == (4, SPINNING)


def test_a_hopeless_setting_costs_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.step_s = {(2, SPINNING): 0.06, (1, SPINNING): 0.11}
    steps = machine.run(machine.pace(), 10)
    assert 1 <= steps.count((1, SPINNING)) <= 2


@pytest.mark.parametrize("fastest", [(1, SPINNING), (2, SLEEPING)])
def test_a_busy_machine_has_the_fastest_setting_that_leaves_others_their_cores(
    monkeypatch: pytest.MonkeyPatch, fastest: tuple[int, int]
) -> None:
    machine = Machine(monkeypatch)
    pace = machine.pace()
    machine.run(pace, 1)
    machine.others = 1.9
    machine.step_s = {(1, SPINNING): 0.033, (2, SLEEPING): 0.033, (2, SPINNING): 0.001} | {fastest: 0.018}
    machine.run(pace, 1)
    steps = machine.run(pace, 60)
    assert (2, SPINNING) not in steps, "nobody can know that it would be fast"
    assert machine.usual(pace, 60) == fastest


def test_the_first_step_knows_the_load_while_the_model_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.others = 1.9
    assert machine.run(machine.pace(), 0.04, num_tokens=64) == [(1, SPINNING)]


def test_what_ran_in_a_pause_and_has_ended_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    pace = machine.pace()
    machine.run(pace, 1)
    machine.clock.now += 60
    machine.others, machine.at_once = 2.0, 0.0
    assert machine.run(pace, 0.04, num_tokens=64) == [(2, SPINNING)]
    machine.clock.now += 60
    machine.at_once = 2.0
    assert machine.run(pace, 0.04, num_tokens=64) == [(1, SPINNING)]
    machine.step_s[1, SPINNING] = machine.step_s[2, SPINNING] = 3.0
    machine.at_once = 0.0
    machine.run(pace, 3.0, num_tokens=64)
    assert machine.run(pace, 3.0, num_tokens=64) == [(1, SPINNING)], "others ran beside a long step, not in a pause"


def test_a_setting_that_becomes_slow_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short bursts of others are no load that counts, and yet threads that spin suffer from them."""
    machine = Machine(monkeypatch)
    machine.step_s = {(2, SPINNING): 0.010, (1, SPINNING): 0.0125}
    pace = machine.pace()
    machine.run(pace, 2)
    machine.others = 0.2
    machine.step_s[2, SPINNING] = 0.015
    machine.run(pace, 1)
    assert machine.usual(pace, 2) == (1, SPINNING)


def test_a_machine_that_becomes_quiet_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.step_s = {(2, SPINNING): 0.010, (1, SPINNING): 0.020, (2, SLEEPING): 0.030}
    pace = machine.pace()
    for _ in range(3):
        machine.others = 2.0
        machine.run(pace, 2)
        assert machine.usual(pace, 5) == (1, SPINNING)
        machine.others = 0.0
        machine.run(pace, 1)
        assert machine.usual(pace, 5) == (2, SPINNING)


def test_a_load_about_the_threshold_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.step_s = {(2, SPINNING): 0.010, (2, SLEEPING): 0.010}
    pace = machine.pace()
    machine.others = 0.35
    assert SLEEPING not in {wait for _, wait in machine.run(pace, 3)}
    machine.others = 1.0
    machine.run(pace, 1)
    machine.others = 0.35
    assert machine.usual(pace, 30) == (2, SLEEPING)


def test_cores_that_no_thread_of_ours_needs_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=16)
    machine.step_s = {(2, SPINNING): 0.010}
    machine.others = 14.0
    assert {wait for _, wait in machine.run(machine.pace(), 2)} == {SPINNING}


@pytest.mark.parametrize(
    ("cores", "others", "setting"),
    [
        (2, 0.0, (2, SPINNING)),
        (2, 0.45, (1, SPINNING)),
        (2, 1.0, (1, SPINNING)),
        (2, 2.0, (1, SPINNING)),
        (4, 1.45, (2, SPINNING)),
        (8, 1.0, (7, SPINNING)),
        (8, 4.0, (4, SPINNING)),
        (8, 6.0, (8, SLEEPING)),  # a share of all the cores is more than the two that are free
        (8, 8.0, (8, SLEEPING)),
    ],
)
def test_prompts_have_no_trial(
    cores: int, others: float, setting: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    machine.num_cores = cores
    machine.step_s = {(1, SPINNING): 0.001}
    pace = machine.pace(cores)
    machine.others = others
    machine.run(pace, 5)
    assert set(machine.run(pace, 5, num_tokens=64)) == {setting}


def test_steps_of_a_short_run_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of rows are measured by a few steps each: a trial among them would be taken for the cost of rows."""
    machine = Machine(monkeypatch)
    pace = machine.pace()
    for num_tokens in (1, 4, 2, 8, 3) * 10:
        for _ in range(3):
            began = pace.begin(num_tokens)
            assert (machine.count, machine.spin_us) == (2, SPINNING)
            machine.clock.now += 0.01
            pace.end(num_tokens, began)


def test_threads_that_cannot_sleep_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, can_sleep=False)
    machine.step_s = {(2, SPINNING): 0.010}
    pace = machine.pace()
    machine.others = 1.9
    machine.run(pace, 1)
    assert {count for count, _ in machine.run(pace, 5)} == {1}
    machine.others = 0.0
    machine.run(pace, 1)
    assert machine.usual(pace, 5) == (2, SPINNING)


@pytest.mark.parametrize(
    ("name", "value", "wait"),
    [
        ("OMP_WAIT_POLICY", "PASSIVE", SLEEPING),
        ("OMP_WAIT_POLICY", "active", SPINNING),
        ("GOMP_SPINCOUNT", "0", SLEEPING),
        ("GOMP_SPINCOUNT", "infinity", SPINNING),
        ("KMP_BLOCKTIME", "0", SLEEPING),
    ],
)
def test_the_users_own_policy_wins(monkeypatch: pytest.MonkeyPatch, name: str, value: str, wait: int) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setenv(name, value)
    pace = machine.pace()
    steps = machine.run(pace, 1)
    machine.others = 2.0
    assert {*steps, *machine.run(pace, 3)} == {(2, wait)}


def test_a_build_may_have_no_library_of_the_usual_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With GGML_BACKEND_DL, llama-cpp-python has a library for each variant."""
    monkeypatch.setattr(pace_module, "cpu_library", tmp_path / "libggml-cpu.so")
    threads = NativeThreads(None)
    assert not threads.can_sleep
    threads.spin(0)
    threads.close()


def test_a_system_that_does_not_tell_the_load_is_taken_for_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.step_s = {(2, SPINNING): 0.010}
    machine.others = None
    assert machine.usual(machine.pace(), 3) == (2, SPINNING)


def test_no_load_and_no_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    machine = Machine(monkeypatch)
    pace = machine.pace()
    for _ in range(300):
        machine.others = rng.choice([0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 2.5])
        machine.step_s = {(count, spin): rng.uniform(0.001, 3) for count in (1, 2) for spin in (SPINNING, SLEEPING)}
        steps = machine.run(pace, rng.uniform(0, 2), rng.choice([1, 1, 2, 64]))
        assert {count for count, _ in steps} <= {1, 2}


SWITCHES = """
import sys
from pathlib import Path
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.pace import SPIN_US, NativeThreads
from tests.bare import BareLoop

model = LlamaModel(Path(sys.argv[1]))
loop = BareLoop(model.native, 512, threads=2)
threads = NativeThreads(loop.context)
assert threads.can_sleep

def switches():
    status = (path.read_text() for path in Path("/proc/self/task").glob("*/status"))
    return sum(int(line.split()[1]) for text in status for line in text.splitlines() if line.startswith("voluntary"))

def count(wait):
    threads.spin(wait)
    loop.greedy([5, 6, 7], 20)
    before = switches()
    loop.greedy([5, 6, 7], 100)
    return switches() - before

print(*(count(wait) for wait in (SPIN_US, 0, SPIN_US, 0)))
threads.close()
"""


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="two threads need two cores")
def test_threads_are_told_to_sleep_and_to_spin_while_they_run(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    command = [sys.executable, "-c", SWITCHES, str(write_tiny(tmp_path / "tiny.gguf"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=True)
    spin, sleep, spin_again, sleep_again = map(int, done.stdout.split())
    assert min(sleep, sleep_again) > 5 * max(spin, spin_again, 100)
