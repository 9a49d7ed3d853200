"""The machine code of all kernels has no faults on any GPU family, and its reader finds faults."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgelm.kernels
from tests.counts import Count
from tests.kernels.compile_case import compile_cases, op_names
from tests.kernels.sass import (
    TARGETS,
    Code,
    Figures,
    all_figures,
    load_widths,
    main_loop,
    ptx_code,
    sass_code,
    share,
    steady_barriers,
    table,
    unrolled,
)

NOT_OPS = {"cache"}  # device functions of other kernels
EVERY_CASE = Count(test=0, soak=1)

SASS = """
.text.total:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   MOV R2, R3 ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P1 LDG.E.EF.64.CONSTANT R8, desc[UR4][R2.64+0x10] ;
        /*0040*/                   LDG.E.U8 R9, desc[UR4][R2.64+0x20] ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64+0x20] ;
        /*0060*/                   LDG.E R9, desc[UR4][R2.64+0x20] ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   STG.E desc[UR4][R2.64], R9 ;
        /*0090*/              @!P2 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
"""
PTX = """
$L__BB0_1:
	ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@%p1 bra 	$L__BB0_1;
	ret;
"""


def test_the_main_loop_is_the_longest_innermost_one():
    loop = main_loop(sass_code(SASS))
    assert loop[0].startswith("LDG.E.128")
    assert loop[-1] == "BRA `(.L_x_1)"
    assert load_widths(loop) == {"128": 2, "64": 1, "32": 1, "8": 1}


def test_barriers_count_in_the_loop_that_runs_longest():
    ends = ["BAR.SYNC 0x0", "HMMA.1688 R0", "BRA `(.L_x_1)"]
    inner = ["HMMA.1688 R0", "BRA `(.L_x_2)"]
    small = ["BRA `(.L_x_3)"]
    code = Code([*ends, *inner, *small], {".L_x_1": 0, ".L_x_2": 3, ".L_x_3": 4})
    assert steady_barriers(code) == 0
    assert steady_barriers(Code(ends, {".L_x_1": 0})) == 1
    assert steady_barriers(Code([], {})) == 0


def test_unrolling_is_seen_by_the_loads():
    once = main_loop(ptx_code(PTX))
    assert len(once) == 2
    assert unrolled(once, ["LDG.E.128 R0"] * 4) == 4
    assert unrolled(once, ["LDG.E.128 R0"]) == 1
    assert unrolled([], ["LDG.E.128 R0"]) == 1


@pytest.fixture(scope="module")
def samples() -> dict[str, Figures]:
    return {row.case: row for row in all_figures([90], ["tests.kernels.sass_samples"])}


def test_a_good_kernel_has_no_faults(samples):
    good = samples["wide"]
    assert good.faults() == []
    assert set(good.loads) == {"128"}
    assert 1.0 <= good.per_weight <= 2.0  # an addition for each element, and a quarter of an address
    assert (good.spills, good.stack, good.shuffles, good.barriers) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("narrow", "only 0% of the bytes come in loads of 16 bytes"),
        ("over budget", "instructions an element, over 0.50"),
        ("spills", "instructions spill registers (32 registers"),
        ("spills allowed elsewhere", "instructions spill registers (32 registers"),
        ("loop spills", "instructions of the main loop spill registers"),
        ("no loop", "no main loop"),
        ("no value", "no value for ['block']"),
    ],
)
def test_a_bad_kernel_is_seen(samples, case, fault):
    assert any(fault in text for text in samples[case].faults()), table([samples[case]])


def test_spills_are_allowed_on_one_target(samples):
    figures = samples["spills allowed here"]
    assert 0 < figures.spills <= figures.most_spills
    assert not any("spill" in fault for fault in figures.faults())


def test_dots_barriers_and_shared_memory_are_counted(samples):
    figures = samples["dots"]
    assert figures.dots >= 4
    assert figures.barriers >= 2
    assert figures.shared_stores >= 2
    assert figures.shared >= 2 * 64 * 64 * 2


def test_every_op_has_compile_cases_of_its_own():
    folder = Path(edgelm.kernels.__path__[0])
    with_kernels = {path.parent.name for path in folder.glob("*/*kernel.py")} - NOT_OPS
    assert "attention" in with_kernels
    assert with_kernels | {"bandwidth"} == set(op_names()), "the bandwidth probe lies beside the tests"
    for op in op_names():
        names = [case.name for case in compile_cases([op])]
        assert names, f"compile_cases() of {op} is empty"
        assert all(name.split()[0] == op for name in names), names


@pytest.fixture(scope="module")
def main_rows() -> list[Figures]:
    return all_figures(TARGETS, only="main")  # in one process: to start one costs as much as three kernels


@pytest.mark.timeout(Count(test=600, soak=3600))
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_has_a_fault(request, target):
    if EVERY_CASE:  # many minutes for a target: each is a result of its own
        of_target = all_figures([target])
    else:
        of_target = [row for row in request.getfixturevalue("main_rows") if row.target == target]
    assert of_target
    bad = [row for row in of_target if row.faults()]
    assert not bad, "\n" + table(bad)


def test_every_run_compiles_each_op_for_two_targets_and_its_budgets_for_sm_90():
    cases = compile_cases()
    ops = {case.name.split()[0] for case in cases}
    for target in TARGETS:
        compiled = share(cases, target)
        assert all(case.main for case in compiled)
        assert len({case.name for case in compiled}) == len(compiled)
    assert {case.name.split()[0] for case in share(cases, 90)} == ops
    others = [case.name.split()[0] for target in TARGETS if target != 90 for case in share(cases, target)]
    assert all(others.count(op) == 1 for op in ops)
    for op in ops:
        limited = [case for case in cases if case.main and case.budget is not None and case.name.split()[0] == op]
        assert limited[:2] == share(limited, 90)
