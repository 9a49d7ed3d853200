"""A program that does not do its work is told with the reason, so that one failure in a long run can be explained."""

from __future__ import annotations

import sys

import pytest

from tests.kernels.emulated.children import ChildError, output_of

ENDS = {
    "import os, signal; print(5, flush=True); os.kill(os.getpid(), signal.SIGKILL)": r"was ended by SIGKILL \(out of",
    "print(5); raise SystemExit(3)": "ended with exit code 3",
    "print(5); raise ValueError": "ended with exit code 1",  # as a program that finds faults
    "import time; print(5, flush=True); time.sleep(600)": "was not done after 5 s",
}


@pytest.mark.parametrize("code", ENDS)
def test_the_end_of_a_program_is_told_with_its_last_lines(code: str) -> None:
    with pytest.raises(ChildError, match=rf"(?s){ENDS[code]}.* s of them computing; .*\n5\n"):
        output_of([sys.executable, "-c", code], 5.0)


def test_a_program_that_is_not_there_is_no_program_without_faults() -> None:
    with pytest.raises(ChildError, match=r"(?s)ended with exit code 1 .*No module named"):
        output_of([sys.executable, "-m", "tests.kernels.emulated.nothing"], 60.0)


@pytest.mark.parametrize("code", [0, 1])
def test_faults_are_no_failure(code: int) -> None:
    assert output_of([sys.executable, "-c", f"print(5); raise SystemExit({code})"], 60.0) == "5\n"
