"""Matrix instructions against plain products, with the layouts as the PTX manual draws them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.ptx.errors import RaceError
from tests.kernels.ptx.fragments import right_matrix, spread_accumulators
from tests.kernels.ptx.handwritten import run
from tests.kernels.ptx.wgmma import addresses_of


def registers_of(matrix: torch.Tensor) -> torch.Tensor:
    """Spread a left operand, [16, 16] halves, over lanes: [32, 8] (manual, figure of the fragment of matrix A)."""
    out = torch.empty(32, 8, dtype=matrix.dtype)
    for lane in range(32):
        group, inside = lane >> 2, lane & 3
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            out[lane, i] = matrix[row, inside * 2 + (i & 1) + (8 if i >= 4 else 0)]
    return out


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_mma(kind: str, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(16, 16, generator=generator).to(dtype), torch.randn(16, 8, generator=generator).to(dtype)
    right = torch.empty(32, 4, dtype=dtype)
    for lane in range(32):
        for i in range(4):
            right[lane, i] = b[(lane & 3) * 2 + (i & 1) + (8 if i >= 2 else 0), lane >> 2]
    out = torch.full((32, 4), float("nan"))
    text = f"""shl.b32 %r1, %r0, 4; cvt.u64.u32 %rd5, %r1; add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd2, %rd5;
        shr.u64 %rd8, %rd5, 1; add.s64 %rd9, %rd1, %rd8; ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd6];
        ld.global.v2.b32 {{%r14, %r15}}, [%rd9]; mov.b32 %r16, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}},
            {{%r14, %r15}}, {{%r16, %r16, %r16, %r16}};
        st.global.v4.b32 [%rd7], {{%r20, %r21, %r22, %r23}};"""
    run(text, [registers_of(a), right, out])
    expected = a.double() @ b.double() + 1
    for lane in range(32):
        for i in range(4):
            row, column = (lane >> 2) + 8 * (i >= 2), (lane & 3) * 2 + (i & 1)
            assert abs(out[lane, i] - expected[row, column]) < 1e-5


def test_accumulators_and_right_operands_are_inverse_to_their_layouts():
    sums = np.arange(16 * 24, dtype=np.float32).reshape(1, 16, 24)
    words = spread_accumulators(sums)
    assert words.shape == (12, 1, 32)
    assert words[5, 0, 7] == sums[0, 1, 8 + 7]  # row 7 // 4, column 8 + 2 * 3 + 1
    halves = np.arange(16 * 8, dtype=np.float16).reshape(16, 8)
    spread = np.empty((2, 1, 32, 2), np.float16)
    for lane in range(32):
        for register in range(2):
            spread[register, 0, lane] = halves[2 * (lane % 4) + 8 * register :, lane // 4][:2]
    assert np.array_equal(right_matrix(spread.view(np.uint32)[..., 0], "f16")[0], halves)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(transposed: bool):
    """Matrices go through shared memory; thread t gives row t % 8 of matrix t // 8."""
    trans = ".trans" if transposed else ""
    text = f"""mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2; cvt.u64.u32 %rd5, %r2;
        add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd1, %rd5; ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd6];
        st.shared.v4.b32 [%r3], {{%r10, %r11, %r12, %r13}}; bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r3]; bar.warp.sync -1;
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {{%r20, %r21, %r22, %r23}}; bar.warp.sync -1;
        ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r3]; st.global.v4.b32 [%rd7], {{%r10, %r11, %r12, %r13}};"""
    matrices = torch.arange(256, dtype=torch.int16).reshape(4, 8, 8)
    out = torch.zeros_like(matrices)
    run(text, [matrices, out], races=True)
    assert torch.equal(out, matrices.transpose(1, 2) if transposed else matrices)


@pytest.mark.parametrize(("mode", "width"), [(1, 128), (2, 64), (3, 32)])
def test_swizzled_descriptors(mode: int, width: int):
    """16-byte chunk c of row r lies at chunk c ^ (r % 8 * width / 128), in tiles of eight rows."""
    descriptor = mode << 62 | (8 * width >> 4) << 32 | 1024 >> 4
    addresses = addresses_of(descriptor, np.arange(16), 16, transposed=False)
    for row in range(16):
        for k in range(16):
            chunk = (k * 2 // 16) ^ (row % 8 * width // 128)
            assert addresses[row, k] == 1024 + row // 8 * 8 * width + row % 8 * width + chunk * 16 + k * 2 % 16


PRODUCT = """mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; cvt.u64.u32 %rd5, %r2; add.s64 %rd6, %rd0, %rd5;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd6]; add.s64 %rd6, %rd1, %rd5; setp.lt.u32 %p1, %r0, 16;
    add.s32 %r3, %r1, %r2; mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
    @%p1 ld.global.v4.b32 {%r14, %r15, %r16, %r17}, [%rd6]; @%p1 st.shared.v4.b32 [%r3], {%r14, %r15, %r16, %r17};
    fence.proxy.async.shared::cta; bar.sync 0; mov.pred %p2, 0;
    cvt.u64.u32 %rd10, %r1; shr.u64 %rd10, %rd10, 4; mov.b64 %rd11, 0x800080000; or.b64 %rd10, %rd10, %rd11;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r20, %r21, %r22, %r23},
        {%r10, %r11, %r12, %r13}, %rd10, %p2, 1, 1, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    add.s64 %rd7, %rd2, %rd5; st.global.v4.b32 [%rd7], {%r20, %r21, %r22, %r23}; @%p1 st.shared.b32 [%r3], %r0;"""


def operands() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return a left operand [64, 16], a right one [16, 8], and tensors: registers, shared memory, output."""
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(64, 16, generator=generator).half(), torch.randn(16, 8, generator=generator).half()
    shared = b.T.reshape(8, 2, 8).transpose(0, 1).contiguous()  # without a swizzle: cores of 8 rows of 16 bytes
    registers = torch.cat([registers_of(part) for part in a.split(16)])
    return a, b, [registers, shared, torch.full((128, 4), float("nan"))]


def test_wgmma():
    a, b, tensors = operands()
    text = PRODUCT.replace("@%p1 st.shared.b32 [%r3], %r0;", "")
    run(text, tensors, warps=4, races=True)
    expected = a.double() @ b.double()
    for thread in range(128):
        for i in range(4):
            row, column = thread // 32 * 16 + thread % 32 // 4 + 8 * (i >= 2), thread % 4 * 2 + (i & 1)
            assert abs(tensors[2][thread, i] - expected[row, column]) < 1e-5
    run(text.replace("wgmma.wait_group", "bar.sync 0; wgmma.wait_group"), tensors, warps=4, races=True)


def test_wgmma_of_tf32():
    """A word holds one number: its last 13 bits do not count."""
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(64, 8, generator=generator), torch.randn(8, 8, generator=generator)
    registers = torch.empty(128, 4)
    for thread in range(128):
        for i in range(4):
            row, column = thread // 32 * 16 + thread % 32 // 4 + 8 * (i & 1), thread % 4 + 4 * (i >= 2)
            registers[thread, i] = a[row, column]
    shared = b.T.reshape(8, 2, 4).transpose(0, 1).contiguous()  # cores of 8 rows of 16 bytes, as above
    out = torch.full((128, 4), float("nan"))
    text = PRODUCT.replace("k16.f32.f16.f16", "k8.f32.tf32.tf32").replace("%p2, 1, 1, 0;", "%p2, 1, 1;")
    run(text.replace("@%p1 st.shared.b32 [%r3], %r0;", ""), [registers, shared, out], warps=4, races=True)
    a, b = ((part.view(torch.int32) & -(1 << 13)).view(torch.float32).double() for part in (a, b))
    expected = a @ b
    for thread in range(128):
        for i in range(4):
            row, column = thread // 32 * 16 + thread % 32 // 4 + 8 * (i >= 2), thread % 4 * 2 + (i & 1)
            assert abs(out[thread, i] - expected[row, column]) < 1e-5


@pytest.mark.parametrize(("mode", "width"), [(0, 16), (1, 128), (2, 64), (3, 32)])
def test_descriptors_of_32_bits(mode: int, width: int):
    """Numbers of four bytes lie where pairs of two bytes do."""
    descriptor = mode << 62 | (8 * width >> 4) << 32 | 256 >> 4 << 16 | 1024 >> 4
    halves = addresses_of(descriptor, np.arange(16), 16, transposed=False)
    words = addresses_of(descriptor, np.arange(16), 8, transposed=False, itemsize=4)
    assert np.array_equal(words, halves[:, ::2])


@pytest.mark.parametrize(
    ("taken_out", "message"),
    [
        ("fence.proxy.async.shared::cta;", "nothing orders"),
        ("bar.sync 0;", "nothing orders"),
        ("wgmma.fence.sync.aligned;", r"no wgmma\.fence"),
        ("wgmma.wait_group.sync.aligned 0;", "still uses a register"),
        ("wgmma.commit_group.sync.aligned;", "still uses a register"),
        ("", "nothing orders"),  # at its end a warp writes what others may still read
    ],
)
def test_what_wgmma_needs(taken_out: str, message: str):
    with pytest.raises(RaceError, match=message):
        run(PRODUCT.replace(taken_out, "") if taken_out else PRODUCT, operands()[2], warps=4, races=True)
