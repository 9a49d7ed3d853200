"""Deliberate mutations of compiled kernels are found by their emulation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.counts import Count
from tests.kernels.emulated.case import OUTSIDE_OF_STEPS, all_cases
from tests.kernels.emulated.children import ROOT, TEST_LIMIT_S, lines_of
from tests.kernels.emulated.mutations import DEPENDENCE, EQUIVALENT, SUBJECTS, Kind
from tests.kernels.emulated.test_cases import launched_kernels

WHOLE = bool(Count(test=0, soak=1))
pytestmark = pytest.mark.timeout(TEST_LIMIT_S)


@pytest.fixture(scope="module")
def verdicts() -> list[dict[str, Any]]:
    """Emulate the mutations of every test run; with --soak, all."""
    return lines_of("mutations", *([] if WHOLE else ["--main"]))


def test_every_mutation_is_found(verdicts: list[dict[str, Any]]) -> None:
    missed = [verdict["title"] for verdict in verdicts if not verdict["found"] and not verdict["equivalent"]]
    assert not missed, "\n".join(missed)
    assert len(verdicts) >= Count(test=4, soak=40)


def test_what_is_listed_as_equivalent_changes_nothing(verdicts: list[dict[str, Any]]) -> None:
    found = [verdict["title"] for verdict in verdicts if verdict["found"] and verdict["equivalent"]]
    assert not found, "\n".join(found)
    if WHOLE:
        assert not set(EQUIVALENT) - {verdict["title"] for verdict in verdicts}, "a listed mutation is not tried"


def test_every_kernel_is_mutated() -> None:
    kernels = launched_kernels(ROOT / "kernels")
    assert not kernels - {subject.kernel for subject in SUBJECTS}
    dependent = {subject.kernel for subject in SUBJECTS if subject.kinds == DEPENDENCE}
    assert kernels - OUTSIDE_OF_STEPS == dependent


def test_the_cases_of_every_mutation_exist() -> None:
    names = [case.name for case in all_cases()]
    wanted = {name for subject in SUBJECTS for name in (subject.case, subject.other) if name}
    assert not [name for name in wanted if not any(case.startswith(name) for case in names)]


@pytest.mark.parametrize(
    ("replacement", "changed"),
    [("", "a  b"), (r"load \1", "a load 3 b"), ("load <1+16>", "a load 19 b"), ("load <1/2>", "a load 1 b")],
)
def test_a_mutation_changes_its_place_alone(replacement: str, changed: str) -> None:
    kind = Kind("", r"wait (\d+)", replacement)
    text = "wait 1\na wait 3 b\nwait 5\n"
    assert kind.places(text) == [0, 1, 2]
    assert kind.apply(text, 1) == f"wait 1\n{changed}\nwait 5\n"


def test_a_line_moves_behind_the_next_one_of_another_kind() -> None:
    text = "load 1\nwait\nadd\nload 2\nload 3\n"
    assert Kind("", "wait", behind="load").apply(text, 1) == "load 1\nadd\nload 2\nwait\nload 3\n"
