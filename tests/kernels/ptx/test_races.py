"""Programs with a barrier, a wait or a fence taken out are found in every order of warps; correct ones pass."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.ptx import machine
from tests.kernels.ptx.errors import BoundsError, DeadlockError, EmulatorError, RaceError
from tests.kernels.ptx.handwritten import run
from tests.kernels.ptx.machine import Order

ORDERS: tuple[Order, ...] = ("least", "random", "ahead")
# Thread t writes word t of shared memory and reads the word of another warp's thread
ADDRESSES = """mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; xor.b32 %r4, %r2, 128;
    add.s32 %r5, %r1, %r4;
    cvt.u64.u32 %rd10, %r2; add.s64 %rd11, %rd0, %rd10;"""
EXCHANGE = f"{ADDRESSES} st.shared.b32 [%r3], %r0; bar.sync 0; ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd11], %r6;"
TWICE = EXCHANGE + "bar.sync 0; add.s32 %r7, %r0, 1; st.shared.b32 [%r3], %r7;"
COPY = f"""{ADDRESSES} add.s64 %rd12, %rd1, %rd10; cp.async.ca.shared.global [%r3], [%rd12], 4; cp.async.commit_group;
    cp.async.wait_group 0; bar.sync 0; ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd11], %r6;"""


def other_warp(num_threads: int) -> list[int]:
    return [thread ^ 32 for thread in range(num_threads)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("text", [EXCHANGE, TWICE, COPY])
def test_correct_programs_pass(text: str, order: Order):
    out = torch.full((64,), -1, dtype=torch.int32)
    for seed in range(3):
        run(text, [out, torch.arange(64, dtype=torch.int32)], warps=2, ctas=1, order=order, seed=seed, races=True)
    assert out.tolist() == other_warp(64)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("text", "taken_out"),
    [
        (EXCHANGE, "bar.sync 0;"),
        (TWICE, "bar.sync 0; add"),
        (COPY, "bar.sync 0;"),
        (COPY, "cp.async.wait_group 0;"),
        (COPY, "cp.async.commit_group;"),
    ],
)
def test_a_mutation_is_found(text: str, taken_out: str, order: Order):
    mutated = text.replace(taken_out, "add" if taken_out.endswith("add") else "")
    assert mutated != text
    with pytest.raises(RaceError):
        run(mutated, [torch.zeros(64, dtype=torch.int32)] * 2, warps=2, order=order, races=True)


def test_the_error_names_both_instructions_threads_and_the_address():
    with pytest.raises(RaceError) as caught:
        run(EXCHANGE.replace("bar.sync 0;", ""), [torch.zeros(64, dtype=torch.int32)], warps=2, races=True)
    message = str(caught.value)
    assert "byte 128 of shared memory" in message or "byte 0 of shared memory" in message
    parts = ("st.shared.b32", "ld.shared.b32", "thread 0 of CTA 0", "thread 32 of CTA 0")
    assert [part for part in parts if part not in message] == []


def test_a_copy_comes_as_late_as_allowed():
    """Without the check a thread that does not wait reads what was there before."""
    out = torch.zeros(64, dtype=torch.int32)
    run(COPY.replace("cp.async.wait_group 0;", ""), [out, torch.arange(64, dtype=torch.int32)], warps=2)
    assert out.tolist() == [0xCDCDCDCD - (1 << 32)] * 64


def test_ctas_race_unless_they_use_atomics_or_write_the_same():
    numbers = "mov.u32 %r1, %ctaid.x;"
    tensor = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(RaceError, match="of CTA 0"):
        run(f"{numbers} st.global.b32 [%rd0], %r1;", [tensor], ctas=2, races=True)
    with pytest.raises(RaceError, match="of a tensor"):  # CTAs one after the other, too
        run(
            f"{numbers} ld.global.b32 %r2, [%rd0]; st.global.b32 [%rd0], %r1;", [tensor], ctas=2, together=1, races=True
        )
    with pytest.raises(RaceError):
        run("red.global.gpu.relaxed.add.u32 [%rd0], 1; ld.global.b32 %r2, [%rd0];", [tensor], warps=2, races=True)
    run("st.global.b32 [%rd0], 5;", [tensor], ctas=3, races=True)
    run("red.global.gpu.relaxed.add.u32 [%rd0], 1;", [tensor], ctas=3, warps=2, races=True)
    assert tensor.tolist() == [5 + 192, 0, 0, 0]


def test_warps_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch):
    """A barrier of two warps of four; a barrier that too few come to; a loop without an end; a warp that is apart."""
    text = f"""{ADDRESSES} setp.lt.u32 %p1, %r0, 64; @%p1 bra $L_few; bra $L_end;
        $L_few: st.shared.b32 [%r3], %r0; bar.sync 1, 64; ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd11], %r6;
        $L_end:"""
    out = torch.full((128,), -1, dtype=torch.int32)
    run(text, [out], warps=4, races=True)
    assert out.tolist() == other_warp(64) + [-1] * 64
    with pytest.raises(DeadlockError, match="barrier 1"):
        run(text.replace("bar.sync 1, 64", "bar.sync 1, 96"), [out], warps=4)
    monkeypatch.setattr(machine, "LIMIT", 10_000)
    with pytest.raises(DeadlockError, match="has not ended"):
        run("$L_a: bra $L_a;", [])
    with pytest.raises(EmulatorError, match="apart"):
        run("setp.lt.u32 %p1, %r0, 5; @%p1 bra $L_a; bra $L_b; $L_a: bar.sync 0; $L_b:", [])


def test_bounds():
    tensor = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(BoundsError, match=r"st\.global\.b32.*24 threads.*byte 32 of a tensor's 32"):
        run(f"{ADDRESSES} st.global.b32 [%rd11], %r0;", [tensor])
    with pytest.raises(BoundsError, match="outside of shared memory"):
        run(f"{ADDRESSES} st.shared.b32 [%r3+4000], %r0;", [tensor], shared_bytes=4096)
    with pytest.raises(BoundsError, match="no multiple of 4"):
        run("ld.global.b32 %r1, [%rd0+2];", [tensor])


def test_lanes_that_part_meet_again():
    """Thread t adds 1, 2, ..., t in a loop of its own length; a shuffle after it needs the whole warp."""
    text = f"""{ADDRESSES} mov.b32 %r8, 0; mov.b32 %r9, %r0; $L_loop: setp.eq.b32 %p1, %r9, 0; @%p1 bra $L_end;
        add.s32 %r8, %r8, %r9; add.s32 %r9, %r9, -1; bra $L_loop; $L_end: shfl.sync.bfly.b32 %r10, %r8, 1, 31, -1;
        st.global.b32 [%rd11], %r10;"""
    out = torch.zeros(64, dtype=torch.int32)
    run(text, [out], warps=2)
    assert out.tolist() == [(t ^ 1) * ((t ^ 1) + 1) // 2 for t in range(64)]
