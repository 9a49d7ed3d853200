"""The launches behind the published timings: which kernel, compiled how, with which arguments.

Owns the build functions. Knows nothing of the measurements: those are in published_rows.py and published_products.py.
Kernels of other projects come from their packages, which are no dependency of this project: `MissingPackageError`
where one is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from tests.kernels.performance.launch import Launch

KINDS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv", torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class MissingPackageError(Exception):
    """The kernel's package is not installed: the point cannot be predicted here."""


def packaged(package: str, module: str, name: str) -> Any:
    """Return a kernel of a package."""
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"no {error.name}: pip install --no-deps {package}") from None


def plain(name: str) -> Any:
    """Return a kernel of ours."""
    return getattr(import_module("tests.kernels.performance.published_kernels"), name)


def launch(
    kernel: Any,
    capability: int,
    grid: tuple[int, ...],
    args: dict[str, object],
    constants: dict[str, object],
    warm: frozenset[str] = frozenset(),
    **options: object,
) -> Launch:
    """Compile a kernel as Triton does at a launch with these arguments: it fixes a 1 and notes what 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = constants | {name: 1 for name, value in args.items() if type(value) is int and value == 1}
    args = {name: value for name, value in args.items() if name not in fixed}
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = args.get(name)
        if name in fixed:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name], attrs[index,] = KINDS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            attrs |= {(index,): [["tt.divisibility", 16]]} if value % 16 == 0 else {}
        else:
            assert isinstance(value, float), name
            signature[name] = "fp32"
    known = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature, known, attrs)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True} | options
    )
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(compiled, (x, y, z), args, warm)


def blocks(count: int, block: int) -> int:
    """Return how many blocks cover a count."""
    return -(-count // block)


def power_of_2(count: int) -> int:
    """Return the power of two that is not below a count."""
    return 1 << (count - 1).bit_length()


def row_warps(block: int) -> int:
    """Return the warps that kernels with one row a program usually get."""
    return 32 if block >= 32768 else 16 if block >= 8192 else 8 if block >= 2048 else 4


def nothing(capability: int) -> list[Launch]:
    return [launch(plain("nothing"), capability, (1,), {"out": torch.empty(1)}, {})]


def vector_add(capability: int, count: int, kind: torch.dtype = torch.float32, wide: bool = False) -> list[Launch]:
    args: dict[str, object] = {name: torch.empty(count, dtype=kind) for name in ("x", "y", "out")}
    constants = {"BLOCK": 1024, "WIDE": wide}
    return [launch(plain("vector_add"), capability, (blocks(count, 1024),), args | {"count": count}, constants)]


def softmax(
    capability: int, rows: int, columns: int, kind: torch.dtype = torch.float32, passes: int = 1
) -> list[Launch]:
    args: dict[str, object] = {name: torch.empty(rows, columns, dtype=kind) for name in ("x", "out")}
    block = power_of_2(columns)
    kernel = plain("row_softmax" if passes == 1 else "two_pass_softmax")
    warps = 16 if block >= 8192 else row_warps(block)
    return [launch(kernel, capability, (rows,), args | {"columns": columns}, {"BLOCK": block}, num_warps=warps)]


def layer_norm(capability: int, rows: int, columns: int, kind: torch.dtype = torch.float32) -> list[Launch]:
    args: dict[str, object] = {name: torch.empty(rows, columns, dtype=kind) for name in ("x", "out")}
    args |= {name: torch.empty(columns, dtype=kind) for name in ("weight", "bias")}
    args |= {name: torch.empty(rows) for name in ("means", "scales")} | {"columns": columns, "eps": 1e-5}
    block = power_of_2(columns)
    constants = {"BLOCK": block}
    return [launch(plain("layer_norm"), capability, (rows,), args, constants, num_warps=row_warps(block))]


def rms_norm(
    capability: int, rows: int, columns: int, kind: torch.dtype, stats: bool = True, warps: int = 0
) -> list[Launch]:
    args: dict[str, object] = {name: torch.empty(rows, columns, dtype=kind) for name in ("x", "out")}
    args |= {"weight": torch.empty(columns, dtype=kind), "scales": torch.empty(rows), "columns": columns, "eps": 1e-6}
    block = power_of_2(columns)
    constants = {"BLOCK": block, "STATS": stats}
    return [launch(plain("rms_norm"), capability, (rows,), args, constants, num_warps=warps or row_warps(block))]


def rotate(capability: int, positions: int, q_heads: int, k_heads: int, width: int) -> list[Launch]:
    heads = {"q": q_heads, "k": k_heads, "cosines": 1, "sines": 1}
    args: dict[str, object] = {
        name: torch.empty(positions, count, width, dtype=torch.bfloat16) for name, count in heads.items()
    }
    constants = {"Q_HEADS": q_heads, "K_HEADS": k_heads, "HALF": width // 2}
    return [launch(plain("rotate"), capability, (positions,), args, constants, num_warps=4)]


def matmul(
    capability: int,
    shape: tuple[int, int, int],
    tile: tuple[int, int, int, int, int, int],
    kind: torch.dtype = torch.float16,
    half_sum: bool = False,
    tf32: bool = False,
) -> list[Launch]:
    """C[m, n] = A[m, k] @ B[k, n]; a tile is BM, BN, BK, GROUP, warps, stages."""
    m, n, k = shape
    bm, bn, bk, group, warps, stages = tile
    args: dict[str, object] = {
        "a": torch.empty(m, k, dtype=kind), "b": torch.empty(k, n, dtype=kind), "c": torch.empty(m, n, dtype=kind),
        "m": m, "n": n, "k": k, "a_row": k, "b_row": n, "c_row": n,
    }  # fmt: skip
    constants = {"BM": bm, "BN": bn, "BK": bk, "GROUP": group, "HALF_SUM": half_sum, "TF32": tf32}
    grid = (blocks(m, bm) * blocks(n, bn),)
    return [launch(plain("matmul"), capability, grid, args, constants, num_warps=warps, num_stages=stages)]


def scaled_matmul(capability: int, shape: tuple[int, int, int], warm_weights: bool) -> list[Launch]:
    """C[m, n] = A[m, k] @ B[n, k].T of 8-bit floats, in tiles of 64 x 128 x 128; the call before left its operands."""
    m, n, k = shape
    eight = torch.float8_e4m3fn
    args: dict[str, object] = {
        "a": torch.empty(m, k, dtype=eight), "b": torch.empty(n, k, dtype=eight),
        "c": torch.empty(m, n, dtype=torch.bfloat16), "a_scale": torch.empty(m, blocks(k, 128)),
        "b_scale": torch.empty(blocks(n, 128), blocks(k, 128)), "m": m, "n": n, "k": k,
    }  # fmt: skip
    constants = {"BM": 64, "BN": 128, "BK": 128, "GROUP": 32}
    grid = (blocks(m, 64) * blocks(n, 128),)
    warm = frozenset({"a", "a_scale", "b_scale"} | ({"b"} if warm_weights else set()))
    return [launch(plain("scaled_matmul"), capability, grid, args, constants, warm, num_warps=4, num_stages=2)]


def packed_matmul(capability: int, shape: tuple[int, int, int]) -> list[Launch]:
    m, n, k = shape
    args: dict[str, object] = {
        "a": torch.empty(m, k // 2, dtype=torch.uint8), "b": torch.empty(k // 2, n, dtype=torch.uint8),
        "c": torch.empty(m, n), "m": m, "n": n, "k": k,
    }  # fmt: skip
    constants = {"BM": 8, "BN": 64, "BK": 128, "GROUP": 4}
    grid = (blocks(m, 8) * blocks(n, 64),)
    return [launch(plain("packed_matmul"), capability, grid, args, constants, num_warps=4, num_stages=4)]


def attention(
    capability: int, heads: int, length: int, width: int, causal: bool, tile: tuple[int, int, int, int]
) -> list[Launch]:
    """Attention of all heads of all prompts; a tile is the queries and keys of a step, warps, stages."""
    bm, bn, warps, stages = tile
    args: dict[str, object] = {
        name: torch.empty(heads, length, width, dtype=torch.float16) for name in ("q", "k", "v", "out")
    }
    args |= {"length": length, "scale": width**-0.5}
    constants = {"D": width, "BM": bm, "BN": bn, "CAUSAL": causal}
    grid = (blocks(length, bm), heads)
    return [launch(plain("attention"), capability, grid, args, constants, num_warps=warps, num_stages=stages)]


def decode(capability: int, rows: int, length: int, by_token: bool) -> list[Launch]:
    """Attention of 16 heads of 128 values, two to a key head, to a cache in pages of 256 that lies in the L2 cache."""
    pages = blocks(length, 256)
    args: dict[str, object] = {
        name: torch.empty(rows, 16, 128, dtype=torch.float16) for name in ("out", "query")
    }  # fmt: skip
    args |= {name: torch.empty(rows * pages, 256, 8, 128, dtype=torch.float16) for name in ("keys", "values")}
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(length)).to(torch.int32)
    args |= {"tables": order.reshape(rows, pages), "lengths": torch.full((rows,), length, dtype=torch.int32)}
    args["scale"] = 128**-0.5
    constants = {"HEADS": 16, "GROUP": 2, "D": 128, "PAGE": 256, "PAGES": pages, "BLOCK": 64}
    kernel = plain("decode_by_token" if by_token else "decode_by_block")
    return [launch(kernel, capability, (rows, 16), args, constants, frozenset(args), num_warps=4)]
