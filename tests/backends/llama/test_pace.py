"""Threads spin while the machine is theirs, sleep while others use it, and are as many as is fastest then."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgelm.backends.llama import pace as pace_module
from edgelm.backends.llama.pace import SPIN_US, NativeThreads, Pace
from edgelm.llama_build import COMPILED, InstalledLlama

SPINNING, SLEEPING = SPIN_US, 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Two cores, others that use some of them, and threads whose steps take a given time."""

    num_cores = 2

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, can_sleep: bool = True) -> None:
        for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
            monkeypatch.delenv(name, raising=False)
        self.others: float | None = 0.0
        self.can_sleep = can_sleep
        self.clock = Clock()
        self.count = (2, 2)
        self.spin_us = -1
        self.busy_step_s = {1: 0.018, 2: 0.033}
        self.steps: list[tuple[int, int]] = []  # threads, and how they wait

    def cores(self) -> float | None:
        return self.others

    def set(self, single: int, batch: int) -> None:
        self.count = (single, batch)

    def spin(self, microseconds: int) -> None:
        self.spin_us = microseconds

    def pace(self) -> Pace:
        return Pace(self, 2, 2, self, self.clock)  # type: ignore[arg-type]

    def run(self, pace: Pace, seconds: float, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Decode for some seconds; return threads and wait of each step."""
        end, start = self.clock.now + seconds, len(self.steps)
        while self.clock.now < end:
            with pace.step(num_tokens):
                self.clock.now += self.busy_step_s[self.count[0]] if self.others else 0.005
                self.steps.append((self.count[num_tokens > 1], self.spin_us))
        return self.steps[start:]


def test_a_quiet_machine_spins_with_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert set(machine.run(machine.pace(), 5)) == {(2, SPINNING)}


@pytest.mark.parametrize("fastest", [1, 2])
def test_a_busy_machine_sleeps_with_the_fastest_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, fastest: int
) -> None:
    machine = Machine(monkeypatch)
    machine.busy_step_s = {fastest: 0.018, 3 - fastest: 0.033}
    pace = machine.pace()
    machine.others = 1.9
    machine.run(pace, 1)
    steps = machine.run(pace, 60)
    assert {wait for _, wait in steps} == {SLEEPING}
    share = sum(count == fastest for count, _ in steps) / len(steps)
    assert share > 0.9
    assert share < 1, "the other number is tried again"


def test_a_machine_that_becomes_quiet_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    pace = machine.pace()
    for _ in range(3):
        machine.others = 2.0
        machine.run(pace, 2)
        machine.others = 0.0
        machine.run(pace, 0.5)
        assert set(machine.run(pace, 5)) == {(2, SPINNING)}


def test_a_load_about_the_threshold_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    pace = machine.pace()
    machine.others = 0.35
    assert set(machine.run(pace, 3)) == {(2, SPINNING)}
    machine.others = 1.0
    machine.run(pace, 1)
    machine.others = 0.35
    assert {wait for _, wait in machine.run(pace, 3)} == {SLEEPING}


def test_cores_that_no_thread_of_ours_needs_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.num_cores = 16
    machine.others = 14.0
    assert set(machine.run(machine.pace(), 2)) == {(2, SPINNING)}


def test_prompts_use_all_threads_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    pace = machine.pace()
    machine.others = 2.0
    machine.run(pace, 5)
    assert set(machine.run(pace, 5, num_tokens=64)) == {(2, SLEEPING)}


def test_threads_that_cannot_sleep_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, can_sleep=False)
    pace = machine.pace()
    machine.others = 1.9
    machine.run(pace, 1)
    assert {count for count, _ in machine.run(pace, 5)} == {1}
    machine.others = 0.0
    machine.run(pace, 1)
    assert {count for count, _ in machine.run(pace, 5)} == {2}


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


def test_a_build_of_this_machine_may_have_other_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With GGML_BACKEND_DL, llama-cpp-python has a library for each variant, and none of the usual name."""
    monkeypatch.setattr(pace_module, "BUILD", InstalledLlama(COMPILED, "0.3.36", tmp_path), raising=False)
    monkeypatch.setattr(pace_module, "cpu_library", tmp_path / "libggml-cpu.so")
    threads = NativeThreads(None)
    assert not threads.can_sleep
    threads.spin(0)


def test_a_system_that_does_not_tell_the_load_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    pace = machine.pace()
    machine.others = None
    machine.busy_step_s = {2: 0.01}
    assert {count for count, _ in machine.run(pace, 3)} == {2}


def test_no_load_and_no_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    machine = Machine(monkeypatch)
    pace = machine.pace()
    for _ in range(300):
        machine.others = rng.choice([0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 2.5])
        machine.busy_step_s = {1: rng.uniform(0.001, 3), 2: rng.uniform(0.001, 3)}
        steps = machine.run(pace, rng.uniform(0, 2), rng.choice([1, 1, 2, 64]))
        assert {count for count, _ in steps} <= {1, 2}
