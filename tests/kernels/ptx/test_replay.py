"""Equal launches run once, and what makes two launches equal."""

from __future__ import annotations

import torch

from tests.kernels.ptx.replay import Launches, digest_of, stripped

PTX = """//
.version 9.3
.target sm_86
.visible .entry k(.param .u64 k_param_0)
{
$L__tmp0:
    .loc 1 68 20 // kernel.py:68:20
    mov.u32 %r0, {number}; // begin inline asm
    ret;
}
    .section .debug_abbrev
    {
.b8 1 // Abbreviation Code
    }
    .section .debug_macinfo { }
"""


def text(number: int = 7, target: str = "sm_86", line: int = 68) -> str:
    return PTX.replace("{number}", str(number)).replace("sm_86", target).replace(":68", f":{line}")


def test_the_target_and_lines_for_debuggers_are_not_compared() -> None:
    assert stripped(text()) == stripped(text(target="sm_89", line=70))
    assert stripped(text()) != stripped(text(number=8))
    assert stripped(text()).split("\n")[2:-1] == ["mov.u32 %r0, 7;", "ret;"]


def test_launches_differ_in_each_of_their_parts() -> None:
    x = torch.arange(16.0)
    other = x.clone()
    other[15] = 0  # behind the view
    first = digest_of(text(), (1, 2), [x[:4], x[4:8]])
    assert digest_of(text(target="sm_89"), (1, 2), [x.clone()[:4], x[4:8]]) != first  # two storages
    copy = x.clone()
    assert digest_of(text(target="sm_89"), (1, 2), [copy[:4], copy[4:8]]) == first
    assert digest_of(text(8), (1, 2), [x[:4], x[4:8]]) != first
    assert digest_of(text(), (1, 3), [x[:4], x[4:8]]) != first
    assert digest_of(text(), (1, 2), [x[4:8], x[:4]]) != first
    assert digest_of(text(), (1, 2), [other[:4], other[4:8]]) != first


def test_an_equal_launch_writes_the_same_bytes_without_a_run() -> None:
    known = Launches()
    runs = []

    def launch(x: torch.Tensor, out: torch.Tensor) -> bool:
        def run() -> int:
            runs.append(1)
            out[1:3] = x.sum()
            return 5

        count, replayed = known.run(digest_of(text(), (), [x, out]), [x, out], run)
        assert count == 5
        return replayed

    outs = [torch.full((4,), -1.0) for _ in range(3)]
    assert not launch(torch.ones(3), outs[0])
    assert launch(torch.ones(3), outs[1])
    assert not launch(torch.ones(3) * 2, outs[2])
    assert len(runs) == 2
    assert outs[1].tolist() == outs[0].tolist() == [-1, 3, 3, -1]
    assert outs[2].tolist() == [-1, 6, 6, -1]


def test_a_launch_that_fails_is_not_kept() -> None:
    known, x = Launches(), torch.zeros(1)

    def fail() -> int:
        raise ValueError

    for _ in range(2):
        try:
            known.run("digest", [x], fail)
        except ValueError:
            continue
        raise AssertionError("the second launch did not run")
