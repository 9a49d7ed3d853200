"""A dependent launch that reads, writes or ends before it waits is found; correct ones pass."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.ptx.dependents import Weights
from tests.kernels.ptx.errors import DependenceError
from tests.kernels.ptx.handwritten import DECLARED
from tests.kernels.ptx.machine import Machine
from tests.kernels.ptx.parse import parse

WAIT = "griddepcontrol.wait;"
READ = "ld.global.b32 %r1, [%rd0];"
READ_WEIGHT = "ld.global.b32 %r2, [%rd1];"
WRITE = "st.global.b32 [%rd2], %r0;"
COPY = "cp.async.ca.shared.global [smem], [%rd0], 4;"
ATOMIC = "atom.relaxed.global.add.u32 %r3, [%rd2], 1;"
NEXT = "griddepcontrol.launch_dependents;"
EVEN = "and.b32 %r4, %r0, 1; setp.eq.b32 %p1, %r4, 0;"


def run(body: str, *, dependent: bool = True, early: bool = True) -> None:
    """Run a program of two warps; %rd0 is a tensor that is read, %rd1 a weight, %rd2 the result."""
    text = f"""
        .extern .shared .align 16 .b8 smem[];
        .visible .entry test(.param .u64 test_param_0, .param .u64 test_param_1, .param .u64 test_param_2)
        {{ {DECLARED} ld.param.b64 %rd0, [test_param_0]; ld.param.b64 %rd1, [test_param_1];
        ld.param.b64 %rd2, [test_param_2]; mov.u32 %r0, %tid.x; {body} ret; }}"""
    tensors = [torch.zeros(64, dtype=torch.int32) for _ in range(3)]
    weight = frozenset([tensors[1].untyped_storage().data_ptr()])
    machine = Machine(parse(text), 2, 2, 1024, "random", False, dependent)
    addresses = [tensor.data_ptr() for tensor in tensors]
    machine.run(tensors, addresses, (3,), 0, weights=Weights(weight if early else frozenset(), weight))


@pytest.mark.parametrize(
    "body",
    [
        f"{NEXT} {WAIT} {READ} {READ_WEIGHT} {WRITE}",
        f"{READ_WEIGHT} {WAIT} {READ} {WRITE}",
        f"{EVEN} @%p1 {WAIT} @!%p1 {WAIT} {ATOMIC}",
        f"{WAIT} {COPY} cp.async.wait_all;",
        f"st.shared.b32 [smem], %r0; {WAIT}",
    ],
)
def test_correct_programs_pass(body: str) -> None:
    run(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{READ} {WAIT} {WRITE}", "tensor . is read before"),
        (f"{WRITE} {WAIT}", "written before"),
        (f"{ATOMIC} {WAIT}", "written before"),
        (f"{COPY} {WAIT}", "tensor . is read before"),
        (f"{NEXT} {READ} {WRITE}", "tensor . is read before"),
        (NEXT, "ends without"),
        (f"{EVEN} @%p1 {WAIT} {READ}", "tensor . is read before"),  # half of the lanes wait
        (f"{EVEN} @%p1 {WAIT}", "ends without"),
        (f"{EVEN} @%p1 ret; {WAIT}", "ends without"),
        (f"{WAIT} st.global.b32 [%rd1], %r0;", "is a weight"),
    ],
)
def test_a_wrong_program_is_found(body: str, message: str) -> None:
    with pytest.raises(DependenceError, match=message):
        run(body)
    if "weight" not in message:
        run(body, dependent=False)


def test_a_weight_is_read_early_only_where_the_kernel_may() -> None:
    with pytest.raises(DependenceError, match="read before"):
        run(f"{READ_WEIGHT} {WAIT}", early=False)


def test_only_planes_of_loaded_weights_are_read_early() -> None:
    pytest.importorskip("triton")
    from tests.kernels.ptx.launch import Emulated

    codes, scales, x = (torch.zeros(4) for _ in range(3))
    places = {id(tensor): tensor.untyped_storage().data_ptr() for tensor in (codes, scales, x)}
    arguments = {"codes": codes, "scales": scales, "x": x}
    early = frozenset({places[id(codes)], places[id(scales)]})
    assert Emulated(90)._weights_of("decode_kernel", arguments) == Weights(early, early)
    assert Emulated(90)._weights_of("attend_chunks", arguments) == Weights()
    loaded = Emulated(90, weights=[codes, x])._weights_of("decode_kernel", arguments)
    assert loaded == Weights(frozenset({places[id(codes)]}), frozenset({places[id(codes)], places[id(x)]}))
