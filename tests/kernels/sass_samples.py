"""Kernels with known machine code: the tests of sass.py read it."""

from __future__ import annotations

import triton
import triton.language as tl

from tests.kernels.compile_case import CompileCase


@triton.jit
def total(x, out, count, stride, block: tl.constexpr):
    """Add up `count` blocks of int32."""
    acc = tl.zeros([block], tl.int32)
    for at in range(count):
        acc += tl.load(x + at.to(tl.int64) * stride + tl.arange(0, block))
    tl.store(out + tl.arange(0, block), acc)


@triton.jit
def dots(x, y, out, count, size: tl.constexpr):
    """Multiply matrices, block after block, through shared memory."""
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    acc = tl.zeros([size, size], tl.float32)
    for _ in range(count):
        acc += tl.dot(tl.load(x + at), tl.load(y + at))
        x += size * size
        y += size * size
    tl.store(out + at, acc)


@triton.jit
def straight(x, out, block: tl.constexpr):
    """Copy one block: no loop."""
    tl.store(out + tl.arange(0, block), tl.load(x + tl.arange(0, block)))


def compile_cases() -> list[CompileCase]:
    """Return the samples."""
    ints = {"x": "*i32", "out": "*i32", "count": "i32", "stride": "i32", "block": "constexpr"}
    pair = {"x": "*fp16", "y": "*fp16", "out": "*fp32", "count": "i32", "size": "constexpr"}
    single = {"x": "*i32", "out": "*i32", "block": "constexpr"}
    wide = CompileCase(
        name="wide",
        fn=total,
        signature=ints,
        constants={"block": 1024},
        divisible=("x", "out", "stride"),
        loop_weights=8,
        budget=4.0,
    )
    spills = wide._replace(name="spills", constants={"block": 16384}, options={"maxnreg": 32}, loop_weights=128)
    return [
        wide,
        wide._replace(name="narrow", divisible=("x", "out")),
        wide._replace(name="over budget", budget=0.5),
        spills,
        spills._replace(name="spills allowed here", spills_on={90: 100_000}),
        spills._replace(name="spills allowed elsewhere", spills_on={80: 100_000}),
        wide._replace(
            name="loop spills",
            constants={"block": 16384},
            loop_weights=128,
            most_registers={90: 32},
            spills=100_000,
            loop_spills=3,
        ),
        CompileCase("dots", dots, pair, {"size": 64}, ("x", "y", "out"), options={"num_stages": 1}),
        CompileCase("no loop", straight, single, {"block": 512}, loop_weights=4),
        wide._replace(name="no value", constants={}),
    ]
