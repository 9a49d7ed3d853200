"""The plain kernels behind the published timings compute what they are named after, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.performance import published_kernels as kernels


def random(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(kind)


def close(found: torch.Tensor, wanted: torch.Tensor, within: float = 1e-5) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=within, atol=within)


@pytest.mark.parametrize("wide", [False, True])
def test_addition(wide: bool) -> None:
    x, y, out = random(300), random(300).flip(0), torch.zeros(300)
    kernels.vector_add[(3,)](x, y, out, 300, BLOCK=128, WIDE=wide)
    close(out, x + y)


@pytest.mark.parametrize("block", [64, 16])
def test_softmax(block: int) -> None:
    x, out = random(3, 50), torch.zeros(3, 50)
    kernel = kernels.row_softmax if block == 64 else kernels.two_pass_softmax
    kernel[(3,)](x, out, 50, BLOCK=block)
    close(out, x.softmax(1))


def test_norms() -> None:
    x, weight, bias = random(3, 50), random(50), random(50).flip(0)
    out, means, scales = torch.zeros(3, 50), torch.zeros(3), torch.zeros(3)
    kernels.layer_norm[(3,)](x, out, weight, bias, means, scales, 50, 1e-5, BLOCK=64)
    close(out, torch.nn.functional.layer_norm(x, (50,), weight, bias))
    close(means, x.mean(1))
    kernels.rms_norm[(3,)](x, out, weight, scales, 50, 1e-6, BLOCK=64, STATS=True)
    close(out, torch.nn.functional.rms_norm(x, (50,), weight, 1e-6))


def test_rotation() -> None:
    q, k, angles = random(5, 4, 16), random(5, 2, 16), random(5, 8).repeat(1, 2)
    wanted = [
        heads * angles.cos()[:, None] + torch.cat([-heads[..., 8:], heads[..., :8]], 2) * angles.sin()[:, None]
        for heads in (q, k)
    ]
    kernels.rotate[(5,)](q, k, angles.cos(), angles.sin(), Q_HEADS=4, K_HEADS=2, HALF=8)
    close(q, wanted[0])
    close(k, wanted[1])


@pytest.mark.parametrize("half_sum", [False, True])
def test_product(half_sum: bool) -> None:
    a, b = random(40, 50, kind=torch.float16), random(50, 36, kind=torch.float16)
    out = torch.zeros(40, 36, dtype=torch.float16)
    tile = {"BM": 16, "BN": 16, "BK": 16, "GROUP": 2}
    kernels.matmul[(9,)](a, b, out, 40, 36, 50, 50, 36, 36, **tile, HALF_SUM=half_sum, TF32=False)
    close(out, a.float() @ b.float(), 0.05 if half_sum else 0.01)


def test_product_with_scales() -> None:
    a, b, out = random(20, 64), random(32, 64), torch.zeros(20, 32)
    a_scale, b_scale = random(20, 2), random(2, 2)
    tile = {"BM": 16, "BN": 16, "BK": 32, "GROUP": 1}
    kernels.scaled_matmul[(4,)](a, b, out, a_scale, b_scale, 20, 32, 64, **tile)
    wide_b = b * b_scale.repeat_interleave(16, 0).repeat_interleave(32, 1)
    close(out, (a * a_scale.repeat_interleave(32, 1)) @ wide_b.T, 1e-4)


def test_product_of_packed_halves() -> None:
    a = torch.randint(-8, 8, (3, 64), generator=torch.Generator().manual_seed(1))
    b = torch.randint(-8, 8, (64, 20), generator=torch.Generator().manual_seed(2))
    packed_a = ((a[:, 0::2] & 15) | (a[:, 1::2] & 15) << 4).to(torch.uint8)
    packed_b = ((b[0::2] & 15) | (b[1::2] & 15) << 4).to(torch.uint8)
    out = torch.zeros(3, 20)
    kernels.packed_matmul[(2,)](packed_a, packed_b, out, 3, 20, 64, BM=8, BN=16, BK=32, GROUP=4)
    close(out, (a @ b).float())


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    q, k, v = random(2, 40, 16), random(2, 40, 16).flip(1), random(2, 40, 16).flip(2)
    out = torch.zeros(2, 40, 16)
    kernels.attention[(2, 2)](q, k, v, out, 40, 0.25, D=16, BM=32, BN=16, CAUSAL=causal)
    close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal), 1e-4)


@pytest.mark.parametrize("kernel", [kernels.decode_by_token, kernels.decode_by_block])
def test_decoding(kernel: object) -> None:
    query, keys, values = random(2, 4, 16), random(6, 8, 2, 16), random(6, 8, 2, 16).flip(0)
    tables, lengths = torch.tensor([[4, 0, 2], [5, 1, 3]], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
    out = torch.zeros(2, 4, 16)
    sizes = {"HEADS": 4, "GROUP": 2, "D": 16, "PAGE": 8, "PAGES": 3, "BLOCK": 16}
    kernel[(2, 4)](out, query, keys, values, tables, lengths, 0.25, **sizes)
    for row, length in enumerate(lengths.tolist()):
        key, value = (
            cache[tables[row].long()].reshape(24, 2, 16)[:length].repeat_interleave(2, 1).transpose(0, 1)
            for cache in (keys, values)
        )
        wanted = torch.nn.functional.scaled_dot_product_attention(query[row][:, None], key, value)
        close(out[row], wanted[:, 0], 1e-4)
