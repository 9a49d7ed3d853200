"""The performance model: control bits against known instructions, and kernels whose time is known in closed form.

The simulation is tested on code that is made here, so that nothing is compiled: its instructions have the control bits
that the test gives them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.kernels.performance.budget import Budget, Row, begin_early
from tests.kernels.performance.code import Code, Instruction, Line, Loop, parse
from tests.kernels.performance.control import Control, decode
from tests.kernels.performance.estimate import _share_of_work
from tests.kernels.performance.gpus import CTA_TURN, GPUS, H100, Gpu
from tests.kernels.performance.launch import Launch, l1_bytes, place
from tests.kernels.performance.memory import Memory
from tests.kernels.performance.path import Path as WarpPath
from tests.kernels.performance.path import Request, _loop_times, _walk, paths_of
from tests.kernels.performance.pipeline import Multiprocessor, Result
from tests.kernels.performance.traffic import Recorder, Traffic, loads_used
from tests.kernels.performance.validate import Compared, bias, error, table
from tests.kernels.ptx.memory import GlobalMemory, SharedMemory
from tests.kernels.ptx.parse import parse as parse_ptx
from tests.kernels.ptx.races import Kind

ROOT = Path(__file__).resolve().parents[3]
PLAIN = Control(1, False, None, None, ())
LOAD = Control(1, False, 0, None, ())
USE = Control(1, False, None, None, (0,))
FAR = Request(sectors=16, misses=16, dram=1.0, pending=0, common=0, wavefronts=0, tensor="x")


def test_control_bits_of_known_instructions() -> None:
    """Encodings of nvdisasm: LDG.E.128 sets barrier 5 and waits for none; I2F.U8 waits for 2 and sets 0."""
    assert decode(0x000F68000C1E1D00) == Control(4, False, 5, None, ())
    assert decode(0x000362000C1E1D00) == Control(1, False, 5, 1, ())
    assert decode(0x001EE2000C1E1D00) == Control(1, False, 3, None, (0,))
    assert decode(0x000FE200078E00FF) == Control(1, False, None, None, ())
    assert decode(0x004FE40003F05070) == Control(2, False, None, None, (2,))
    assert decode(0x000FC4000001FF00).yields


def test_a_node_begins_early_where_it_and_the_one_before_are_launched_so() -> None:
    def node(dependent: bool) -> Launch:
        return Launch(SimpleNamespace(metadata=SimpleNamespace(launch_pdl=dependent)), (1, 1, 1), {})

    assert begin_early([node(True), node(True), "copy_", node(True), node(True)]) == [False, True, False, False, True]
    assert begin_early([node(True), node(False), node(True)]) == [False, False, False]
    rows = [Row("layer", 3, "", 10.0, None, early=True), Row("output", 1, "", 7.0, None)]
    step = Budget(H100._replace(graph_gap_us=2.0, pdl_gap_us=0.5), rows)
    assert (step.early_nodes, step.gaps_ms, step.step_ms) == (3, 3.5e-3, pytest.approx(40.5e-3))


def test_a_listing_is_parsed_with_lines_labels_and_loops() -> None:
    text = """
.text.kernel:
\t//## File "/x/kernel.py", line 7
        /*0000*/                   S2R R17, SR_TID.X ;           /* 0x0000000000117919 */
                                                                 /* 0x000e2e0000002100 */
.L_x_1:
\t//## File "/x/kernel.py", line 9 inlined at "/x/other.py", line 3
        /*0010*/                   LDG.E.128 R28, desc[UR8][R2.64] ; /* 0x00000008021c7981 */
                                                                 /* 0x000f68000c1e1d00 */
        /*0020*/               @P0 BRA `(.L_x_1) ;               /* 0xfffffffc00600947 */
                                                                 /* 0x000fea000383ffff */
        /*0030*/                   EXIT ;                        /* 0x000000000000794d */
                                                                 /* 0x000fea0003800000 */
.L_x_2:
        /*0040*/                   BRA `(.L_x_2);                /* 0xfffffffc00fc7947 */
                                                                 /* 0x000fc0000383ffff */
"""
    code = parse(text, 40)
    assert (code.name, code.registers, code.loops) == ("kernel", 40, [Loop(1, 2)])
    assert [instruction.opcode for instruction in code.instructions] == ["S2R", "LDG.E.128", "BRA", "EXIT"]
    load = code.instructions[1]
    assert (load.num_bytes, load.line, load.control.write_barrier) == (16, Line("kernel.py", 9), 5)
    assert (code.instructions[2].guard, code.instructions[2].target) == ("P0", 1)


def instruction(
    index: int, opcode: str, control: Control, operands: str = "", target: int | None = None
) -> Instruction:
    guard = "P0" if target is not None else ""
    return Instruction(index, guard, opcode, operands, control, Line("k.py", index), target)


def code_of(*parts: tuple[str, Control]) -> Code:
    return Code("made", [instruction(at, opcode, control) for at, (opcode, control) in enumerate(parts)], 32)


def simulated(code: Code, steps: list[int], gpu: Gpu, warps: int = 4, ctas: int = 1, resident: int = 1,
              requests: dict[int, Request] | None = None, l1_bytes: float = 1 << 17) -> Result:  # fmt: skip
    """Run CTAs on one multiprocessor that has its even share of the GPU's bandwidth."""
    memory = Memory(gpu, gpu.l2_rate / gpu.num_sms, gpu.dram_rate / gpu.num_sms, l1_bytes)
    path = WarpPath(steps, requests or {}, 1.0)
    return Multiprocessor(gpu, code, [path], memory, False).run(iter([0] * ctas), resident, warps)


def test_stalls_add_up_in_one_warp() -> None:
    code = code_of(("FFMA", PLAIN._replace(stall=4)), ("EXIT", PLAIN))
    result = simulated(code, [0] * 100 + [1], H100, warps=1)
    assert result.cycles == 100 * 4 + 1


def test_schedulers_issue_one_instruction_a_cycle_each() -> None:
    code = code_of(("FFMA", PLAIN._replace(stall=4)), ("EXIT", PLAIN))
    full = simulated(code, [0] * 200 + [1], H100, warps=32)
    assert full.cycles == pytest.approx(8 * 201, rel=0.01)  # 8 warps a scheduler, at least 4 are ready
    assert full.issued == 32 * 201


def test_a_unit_with_half_the_lanes_takes_twice_as_long() -> None:
    """Logic has 16 lanes a scheduler on sm_90, multiplications 32."""
    times = {}
    for opcode in ("FFMA", "LOP3", "MUFU"):
        code = code_of((opcode, PLAIN), ("EXIT", PLAIN))
        times[opcode] = simulated(code, [0] * 200 + [1], H100, warps=32).cycles
    assert times["LOP3"] == pytest.approx(2 * times["FFMA"], rel=0.01)
    assert times["MUFU"] == pytest.approx(8 * times["FFMA"], rel=0.01)


def test_a_chain_of_loads_takes_the_latency_each() -> None:
    code = code_of(("LDG.E.128", LOAD._replace(wait=(0,))), ("EXIT", USE))
    result = simulated(code, [0] * 50 + [1], H100, warps=1, requests={0: FAR})
    each = result.cycles / 50
    assert H100.dram_latency < each < H100.dram_latency + 60


def test_a_stream_with_many_warps_runs_at_the_share_of_the_bandwidth() -> None:
    code = code_of(("LDG.E.128", LOAD), ("LDG.E.128", LOAD), ("FADD", USE), ("EXIT", PLAIN))
    result = simulated(code, [0, 1, 2] * 40 + [3], H100, warps=64, requests={0: FAR, 1: FAR})
    share = H100.dram_rate / H100.num_sms
    assert result.dram_bytes == 64 * 80 * 512
    assert result.dram_bytes / share / result.cycles > 0.95


def test_littles_law_holds_where_few_bytes_are_in_flight() -> None:
    """One load of 512 bytes by each of 8 warps, over and over: 4 KB in each latency, less than DRAM could bring."""
    code = code_of(("LDG.E.128", LOAD), ("FADD", USE), ("EXIT", PLAIN))
    result = simulated(code, [0, 1] * 100 + [2], H100, warps=8, requests={0: FAR})
    rate = result.dram_bytes / result.cycles
    share = H100.dram_rate / H100.num_sms
    assert rate == pytest.approx(8 * 512 / (H100.dram_latency + 512 / share), rel=0.05)
    assert rate < 0.5 * share


OWN = FAR._replace(dram=0.0)
COMMON = OWN._replace(common=1.0)


@pytest.mark.parametrize("resident", [1, 2, 4])
def test_what_all_ctas_read_comes_from_l2_once(resident: int) -> None:
    """CTAs side by side or one after another, of 4 warps with 10 loads of 512 bytes each."""
    code = code_of(("LDG.E.128", LOAD), ("FADD", USE), ("EXIT", PLAIN))
    result = simulated(code, [0, 1] * 10 + [2], H100, ctas=4, resident=resident, requests={0: COMMON})
    assert result.l2_bytes == 4 * 10 * 512
    own = simulated(code, [0, 1] * 10 + [2], H100, ctas=4, resident=resident, requests={0: OWN})
    assert own.l2_bytes == 4 * 4 * 10 * 512
    assert result.cycles < own.cycles


def test_data_on_their_way_are_waited_for_by_every_cta_that_reads_them() -> None:
    code = code_of(("LDG.E.128", LOAD), ("FADD", USE), ("EXIT", PLAIN))
    result = simulated(code, [0, 1, 2], H100, warps=1, ctas=8, resident=8, requests={0: COMMON})
    assert min(result.ends) > H100.l2_latency


def test_what_came_in_between_drives_common_data_out_of_the_l1_cache() -> None:
    """A CTA reads 5 KB that all read and 5 KB of its own; the next one finds the first where 10 KB fit."""
    code = code_of(("LDG.E.128", LOAD), ("LDG.E.128", LOAD), ("FADD", USE), ("EXIT", PLAIN))
    steps = [*[0, 2] * 10, *[1, 2] * 10, 3]

    def l2_bytes(l1_bytes: int, opcode: str = "LDG.E.128") -> float:
        code.instructions[1] = instruction(1, opcode, LOAD)
        requests = {0: COMMON, 1: FAR}
        return simulated(code, steps, H100, warps=1, ctas=2, requests=requests, l1_bytes=l1_bytes).l2_bytes

    assert l2_bytes(10 * 1024) == 3 * 10 * 512
    assert l2_bytes(8 * 1024) == 4 * 10 * 512
    assert l2_bytes(8 * 1024, "LDGSTS.E.BYPASS.128") == 3 * 10 * 512


def test_the_l1_cache_is_what_shared_memory_leaves() -> None:
    for gpu, shared, kb in ((H100, 0, 256 - 32), (H100, 100 * 1024, 28), (GPUS["RTX 4090"], 16 * 1024, 28)):
        launch = launch_of(10_000, 2, shared)
        assert l1_bytes(launch, place(launch, 32, gpu), gpu) == kb * 1024, (gpu.name, shared)


def test_a_barrier_holds_all_warps_of_a_cta() -> None:
    code = code_of(("FFMA", PLAIN._replace(stall=4)), ("BAR.SYNC", PLAIN), ("EXIT", PLAIN))
    assert simulated(code, [0] * 10 + [1] + [0] * 10 + [2], H100, warps=8).cycles >= 2 * 10 * 4 + 20


def test_copies_are_waited_for_by_group() -> None:
    """DEPBAR.LE SB0, 0x1 leaves one group of cp.async open, 0x0 none."""

    def time_of(left: str) -> float:
        code = code_of(("LDGSTS.E.128", PLAIN), ("LDGDEPBAR", PLAIN), ("DEPBAR.LE", PLAIN), ("EXIT", PLAIN))
        code.instructions[2] = instruction(2, "DEPBAR.LE", PLAIN, f"SB0, {left}")
        return simulated(code, [0, 1, 2, 3], H100, warps=1, requests={0: FAR}).cycles

    assert time_of("0x1") < 50
    assert time_of("0x0") > H100.dram_latency


def test_a_cta_begins_after_another_ended_and_the_place_was_turned_over() -> None:
    code = code_of(("FFMA", PLAIN._replace(stall=10)), ("EXIT", PLAIN))
    one = simulated(code, [0] * 10 + [1], H100, warps=1).cycles
    assert simulated(code, [0] * 10 + [1], H100, warps=1, ctas=3).cycles == pytest.approx(3 * one + 2 * CTA_TURN, abs=3)


@pytest.mark.parametrize("name", ["A100", "RTX 4090", "H200"])
def test_more_bandwidth_and_more_warps_are_never_slower(name: str) -> None:
    gpu = GPUS[name]
    code = code_of(("LDG.E.128", LOAD), ("LOP3", USE), ("FFMA", PLAIN), ("EXIT", PLAIN))
    steps = [0, 1, *repeat(2, 20)] * 4 + [3]
    times = [
        simulated(code, steps, gpu._replace(stream_gbs=gpu.stream_gbs * more), warps=32, requests={0: FAR}).cycles
        for more in (0.5, 1.0, 2.0)
    ]
    assert times[0] >= times[1] >= times[2]
    by_warps = [simulated(code, steps, gpu, warps=n, requests={0: FAR}).cycles / n for n in (4, 8, 16, 32)]
    assert by_warps == sorted(by_warps, reverse=True)


def test_a_loop_runs_as_often_as_its_loads_must() -> None:
    """A loop unrolled by four, with a remainder: 4 x 5 + 3 of the PTX's 23 iterations."""
    parts = [instruction(at, "LDG.E", LOAD) for at in range(4)] + [instruction(4, "BRA", PLAIN, target=0)]
    parts += [instruction(5, "LDG.E", LOAD), instruction(6, "BRA", PLAIN, target=5), instruction(7, "EXIT", PLAIN)]
    line = Line("k.py", 1)
    parts = [part if part.opcode != "LDG.E" else Instruction(part.index, "", "LDG.E", "", LOAD, line) for part in parts]
    code = Code("made", parts, 32, [Loop(5, 6), Loop(0, 4)])
    wanted = {("k.py", 1, "global read"): 23.0}
    times = _loop_times(code, wanted, {line: 23.0})
    assert times == {Loop(0, 4): 5.0, Loop(5, 6): 3.0}
    steps = _walk(code, times, wanted, {line: 23.0})
    assert np.bincount(steps, minlength=8).tolist() == [5, 5, 5, 5, 5, 3, 3, 1]


@pytest.mark.parametrize(("times", "steps"), [(3, [0, 3, 4, 3, 4, 3, 4, 5, 6]), (0, [0, 1, 2, 6])])
def test_the_way_around_a_loop_is_taken_only_where_the_loop_does_not_run(times: int, steps: list[int]) -> None:
    """The lines of its instructions are those of the code before the loop, which run in any case."""
    parts = [
        instruction(0, "BRA", PLAIN, target=3),
        instruction(1, "FFMA", PLAIN),
        Instruction(2, "", "BRA", "", PLAIN, Line("k.py", 2), 6),
        instruction(3, "FFMA", PLAIN),
        instruction(4, "BRA", PLAIN, target=3),
        instruction(5, "FFMA", PLAIN),
        instruction(6, "EXIT", PLAIN),
    ]
    loop = Loop(3, 4)
    assert _walk(Code("made", parts, 32, [loop]), {loop: float(times)}, {}, {Line("k.py", 1): 1.0}) == steps


@pytest.mark.parametrize(("times", "steps"), [(2, [0, 1, 2, 3, 2, 3, 4, 5, 6]), (0, [0, 5, 6])])
def test_a_branch_around_a_loop_that_does_not_run_is_taken(times: int, steps: list[int]) -> None:
    """The lines before and in the loop run elsewhere: in a copy of the loop for other positions."""
    line = Line("k.py", 1)
    parts = [instruction(0, "BRA", PLAIN, target=5)]
    parts += [Instruction(at, "", name, "", PLAIN, line) for at, name in ((1, "FFMA"), (2, "LDG.E"))]
    parts += [instruction(3, "BRA", PLAIN, target=2), Instruction(4, "", "FFMA", "", PLAIN, line)]
    parts += [Instruction(5, "", "LDG.E", "", PLAIN, line), instruction(6, "EXIT", PLAIN)]
    loop = Loop(2, 3)
    wanted = {("k.py", 1, "global read"): 7.0}
    assert _walk(Code("made", parts, 32, [loop]), {loop: float(times)}, wanted, {line: 7.0}) == steps


def test_ctas_that_go_one_way_are_of_one_kind() -> None:
    """Executed counts that differ, but not by a turn of a loop of the machine code."""
    code = code_of(("FFMA", PLAIN), ("EXIT", PLAIN))
    program = parse_ptx(".visible .entry made()\n{\n\tmov.u32 \t%r1, 1;\n\tret;\n}\n")
    executed = np.array([[1, 1]] * 3 + [[9, 9]] * 1 + [[40, 40]] * 4)
    paths = paths_of(code, Traffic(program, 800, list(range(8)), executed), 1, frozenset())
    assert [(path.steps, path.share) for path in paths] == [([0, 1], 1.0)]


def on_line(line: int, one: Instruction) -> Instruction:
    return replace(one, line=Line("k.py", line))


def two_ways() -> Code:
    """Code of `if p: store 2 with a load of line 1; else: store 3 with the same load`, each with its own exit."""
    parts = [
        on_line(0, instruction(0, "BRA", PLAIN, target=4)),
        on_line(1, instruction(1, "LDG.E", LOAD)),
        on_line(2, instruction(2, "STG.E", PLAIN)),
        instruction(3, "EXIT", PLAIN),
        on_line(1, instruction(4, "LDG.E", LOAD)),
        on_line(3, instruction(5, "STG.E", PLAIN)),
        instruction(6, "EXIT", PLAIN),
    ]
    return Code("made", parts, 32)


@pytest.mark.parametrize(("store", "steps"), [(2, [0, 1, 2, 3]), (3, [0, 4, 5, 6])])
def test_of_two_ways_with_lines_in_common_the_one_is_taken_whose_own_accesses_are_executed(
    store: int, steps: list[int]
) -> None:
    wanted = {
        ("k.py", 1, "global read"): 1.0,
        ("k.py", store, "global write"): 1.0,
        ("k.py", 5 - store, "global write"): 0.0,
    }
    assert _walk(two_ways(), {}, wanted, {}) == steps


@pytest.mark.parametrize(("line", "steps"), [(1, [0, 1, 2, 4]), (3, [0, 3, 4])])
def test_the_second_of_two_ways_is_taken_where_only_its_own_lines_run(line: int, steps: list[int]) -> None:
    """Where the first way has no line of its own, the other one decides."""
    parts = [
        on_line(0, instruction(0, "BRA", PLAIN, target=3)),
        on_line(0, instruction(1, "FFMA", PLAIN)),
        replace(on_line(0, instruction(2, "BRA", PLAIN, target=4)), guard=""),
        on_line(3, instruction(3, "FFMA", PLAIN)),
        on_line(0, instruction(4, "EXIT", PLAIN)),
    ]
    lines = {Line("k.py", 0): 1.0, Line("k.py", 3): float(line == 3)}
    assert _walk(Code("made", parts, 32), {}, {}, lines) == steps


def test_a_loop_that_does_not_run_is_not_entered() -> None:
    parts = [
        instruction(0, "BRA", PLAIN, target=3),
        instruction(1, "LDG.E", LOAD),
        instruction(2, "BRA", PLAIN, target=1),
        instruction(3, "EXIT", PLAIN),
    ]
    loop = Loop(1, 2)
    lines = {Line("k.py", number): 1.0 for number in range(4)}
    assert _walk(Code("made", parts, 32, [loop]), {loop: 0.0}, {}, lines) == [0, 3]


def test_the_way_through_a_long_loop_has_its_end() -> None:
    parts = [instruction(0, "FFMA", PLAIN), instruction(1, "BRA", PLAIN, target=0), instruction(2, "EXIT", PLAIN)]
    loop = Loop(0, 1)
    steps = _walk(Code("made", parts, 32, [loop]), {loop: 250_000.0}, {}, {})
    assert (len(steps), steps[-1]) == (500_001, 2)


WAYS = """.visible .entry k(.param .u64 k_param_0) { .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
.loc 1 1 1 // k.py:1:1
@%p1 bra $ELSE;
ld.global.b32 {%r1}, [%rd1 + 0];
.loc 1 2 1 // k.py:2:1
st.global.b32 [%rd1 + 0], {%r1};
bra.uni $END;
$ELSE:
.loc 1 1 2 // k.py:1:2
ld.global.b32 {%r1}, [%rd1 + 0];
.loc 1 3 1 // k.py:3:1
st.global.b32 [%rd1 + 0], {%r1};
$END:
ret; }"""


def test_ctas_that_execute_as_much_but_something_else_are_of_another_kind() -> None:
    program = parse_ptx(WAYS)
    executed = np.array([[1, 1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1]])
    executed[1, 0] += 1  # as many in all
    traffic = Traffic(program, 3, [0, 1, 2], executed)
    paths = paths_of(two_ways(), traffic, 1, frozenset())
    assert sorted((path.steps, round(path.share, 2)) for path in paths) == [([0, 1, 2, 3], 0.67), ([0, 4, 5, 6], 0.33)]


def test_ctas_without_work_have_no_share_of_the_bandwidth() -> None:
    """132 CTAs, a quarter of them with loads: the multiprocessor of one has a 33rd of the rate."""
    worker, idle = WarpPath([0] * 10 + [1], {0: FAR}, 0.25), WarpPath([1] * 5, {0: FAR}, 0.75)
    placement = place(launch_of(132, 4), 32, H100)
    assert _share_of_work([worker, idle], placement, 132) == pytest.approx(1 / 33)


def recorder_of(ptx: str) -> Recorder:
    return Recorder(parse_ptx(ptx), 1, 1, SharedMemory(1, 1024), {0: "x"})


LOADS = """.visible .entry k(.param .u64 k_param_0) { .reg .b32 %r<9>; .reg .b64 %rd<9>;
ld.global.b32 {%r1}, [%rd1 + 0];
mov.b32 %r2, %r1;
ld.global.b32 {%r3}, [%rd1 + 0];
add.s32 %r4, %r2, 1;
ld.global.b32 {%r5}, [%rd1 + 0];
cp.async.cg.shared.global [%r6 + 0], [%rd1 + 0], 16;
ret; }"""


def test_data_are_on_their_way_until_something_uses_them() -> None:
    recorder = recorder_of(LOADS)
    load, _, again, add, last, *_ = recorder.program.instructions
    assert loads_used(recorder.program) == {add.index: [load.index]}
    zero = np.zeros(1, np.int64)
    for one in (load, again):
        recorder.clock += 1
        recorder.access(Kind.READ, GlobalMemory([]), zero, zero, zero, 4, one)
    recorder.used[load.index] = recorder.clock = 4
    recorder.access(Kind.READ, GlobalMemory([]), zero, zero, zero, 4, last)
    pending = [recorder.accesses[one.index].pending for one in (load, again, last)]
    assert pending == [0, 1, 0]


def test_the_source_of_a_copy_is_counted_once() -> None:
    """The emulator reads it at the start and at the end."""
    recorder = recorder_of(LOADS)
    copy, zero = recorder.program.instructions[5], np.zeros(1, np.int64)
    recorder.access(Kind.COPY, recorder.shared, zero, zero, zero, 16, copy)
    recorder.access(Kind.READ, GlobalMemory([]), zero, zero, zero, 16, copy)
    recorder.finish_write(recorder.shared, zero, zero, zero, 16)
    recorder.access(Kind.READ, GlobalMemory([]), zero, zero, zero, 16, copy)
    found = recorder.accesses[copy.index]
    assert (found.requests, found.sectors, found.misses, found.pending) == (1, 1, 1, 0)


def test_errors_are_factors_whichever_way_a_prediction_is_off() -> None:
    lines = [Compared("H100", f"add fp32 {n}", "loop", 10.0, predicted) for n, predicted in ((1, 20.0), (2, 5.0))]
    assert error(lines) == pytest.approx(2.0)
    assert bias(lines) == pytest.approx(1.0)
    text = "\n".join(table([*lines, replace(lines[0], problem="no such package")], 3))
    assert "2 points judged, 1 not, 3 not run" in text
    assert "not predicted: no such package" in text


def launch_of(ctas: int, warps: int, shared: int = 0) -> Launch:
    metadata = SimpleNamespace(num_warps=warps, shared=shared)
    return Launch(SimpleNamespace(metadata=metadata), (ctas, 1, 1), {})


def test_occupancy_is_that_of_the_occupancy_calculator() -> None:
    assert place(launch_of(10_000, 4), 66, H100).resident == 7  # 72 registers, 9,216 a CTA
    assert place(launch_of(10_000, 8), 255, H100).resident == 1
    assert place(launch_of(10_000, 4, 100 * 1024), 32, H100) == (2, "shared memory", 76, 132, 10_000 / 264, 8)
    assert place(launch_of(10_000, 4), 32, GPUS["RTX 4090"]).resident == 12  # 48 warps
    assert place(launch_of(100, 4), 32, H100).limit == "grid"


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_a_compiled_stream_is_bound_by_dram_and_a_single_cta_by_latency() -> None:
    """In a child: tests/conftest.py lets Triton interpret here."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.performance.compiled_checks"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
