"""Cases of the ops that multiply or unpack weights: the matrices of Llama-8B, and the experts of a mixture."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.benchmark import BenchCase, Work, nbytes_of
from edgelm.kernels.dequantize import dequantize
from edgelm.kernels.grouped import grouped_matmul
from edgelm.kernels.layout import PackedWeight, planes
from edgelm.kernels.matmul import matmul
from edgelm.kernels.matmul.cases import LAYOUTS, random_weight

SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096))  # rows, columns: N, K
FORMATS = ("q4_0", "q4_k", "q6_k", "q8_0")
ROWS = (1, 2, 4, 8, 16)
PROMPT_ROWS = 512
EXPERTS = (("mxfp4", 32, 4, 5760, 2880), ("q4_k", 128, 8, 1536, 2048))  # format, experts, of a token, N, K

# A float16 result: half a unit in its last place (2 ** -11 of the largest value) on either side, and as much again for
# products whose scales are rounded to float16.
TOLERANCE = 4 * 2.0**-11


class Product(NamedTuple):
    """Inputs of a product."""

    x: Tensor  # float16 [rows, K]
    weight: PackedWeight
    experts: Tensor | None = None  # int32 [rows, k]


def bench_cases(tiny: bool) -> list[BenchCase]:
    """Return the cases of matmul, grouped and dequantize."""
    shapes = ((48, 512), (32, 768)) if tiny else SHAPES
    rows = (1, 3, 16) if tiny else ROWS
    cases = [_matmul(name, shape, n) for shape in shapes for name in FORMATS for n in rows]
    cases += [_matmul(name, shapes[0 if tiny else 2], 20 if tiny else PROMPT_ROWS) for name in FORMATS]
    cases += [_dequantize(name, shapes[0 if tiny else 2]) for name in FORMATS]
    experts = (("mxfp4", 4, 2, 32, 128), ("q4_k", 3, 2, 32, 256)) if tiny else EXPERTS
    return cases + [_grouped(*each, n) for each in experts for n in ((1, 3) if tiny else (1, 4, 16))]


def _matmul(name: str, shape: tuple[int, int], rows: int) -> BenchCase:
    n, k = shape
    return BenchCase(
        op="matmul",
        shape=f"{n}x{k}",
        rows=rows,
        format=name,
        work=Work(
            partial(_product, name, n, k, rows), lambda given, how: matmul(given.x, given.weight, implementation=how)
        ),
        moved_bytes=lambda given: nbytes_of(given) + 2 * rows * n,
        tolerance=TOLERANCE,
        rival=Work(partial(_dense, n, k, rows), lambda given, _: given[0] @ given[1].T),
    )


def _product(name: str, n: int, k: int, rows: int, generator: Generator) -> Product:
    x = torch.randn(rows, k, generator=generator).half()
    return Product(x, random_weight(LAYOUTS[name], n, k, generator, garbage=False))


def _dense(n: int, k: int, rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    both = torch.randn(rows + n, k, generator=generator, dtype=torch.bfloat16)
    return both[:rows].clone(), both[rows:].clone()


def _dequantize(name: str, shape: tuple[int, int]) -> BenchCase:
    n, k = shape
    return BenchCase(
        op="dequantize",
        shape=f"{n}x{k}",
        rows=n,
        format=name,
        work=Work(
            lambda generator: random_weight(LAYOUTS[name], n, k, generator, garbage=False),
            lambda weight, how: dequantize(weight, torch.float16, implementation=how),
        ),
        moved_bytes=lambda weight: nbytes_of(weight) + 2 * n * k,
    )


def _grouped(name: str, experts: int, of_token: int, n: int, k: int, rows: int) -> BenchCase:
    return BenchCase(
        op="grouped",
        shape=f"{experts}x{n}x{k} of {of_token}",
        rows=rows,
        format=name,
        work=Work(
            partial(_experts, name, experts, of_token, n, k, rows),
            lambda given, how: grouped_matmul(given.x, given.weight, given.experts, implementation=how),
        ),
        moved_bytes=lambda given: _used_bytes(given) + 2 * rows * (k + of_token * n),
        tolerance=TOLERANCE,
    )


def _experts(name: str, experts: int, of_token: int, n: int, k: int, rows: int, generator: Generator) -> Product:
    x = torch.randn(rows, k, generator=generator).half()
    each = [random_weight(LAYOUTS[name], n, k, generator, garbage=False) for _ in range(experts)]
    stacked = {plane: torch.stack([planes(weight)[plane] for weight in each]) for plane in planes(each[0])}
    chosen = torch.rand(rows, experts, generator=generator).topk(of_token).indices.to(torch.int32)
    return Product(x, replace(each[0], **stacked), chosen)  # type: ignore[arg-type]  # planes are named as fields


def _used_bytes(given: Product) -> int:
    assert given.experts is not None
    return given.weight.nbytes * len(set(given.experts.flatten().tolist())) // given.weight.num_matrices
