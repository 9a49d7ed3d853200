"""The benchmark cases of all ops: the sizes of Llama-8B, and the experts of two mixtures.

Owns the cases and the making of their inputs. Knows nothing of how they are checked and timed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.attention import attention
from edgelm.kernels.cache import BLOCK_LEN, FORMATS, KVFormat, LayerCache, allocate
from edgelm.kernels.dequantize import dequantize
from edgelm.kernels.grouped import grouped_matmul
from edgelm.kernels.layout import PackedWeight, planes
from edgelm.kernels.matmul import matmul
from edgelm.kernels.norm import add_rms_norm
from edgelm.kernels.rope import Rope
from edgelm.kernels.sampling import Answer, Batch, Flag, Word, sample
from edgelm.kernels.write_kv import write_kv
from tests.kernels import bandwidth
from tests.kernels.benchmark import BenchCase, Work, nbytes_of
from tests.kernels.cases.matmul import LAYOUTS, random_weight

LENGTHS = (1024, 8192, 32768, 131072)  # of a sequence
SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096))  # rows, columns: N, K
WEIGHT_FORMATS = ("q4_0", "q4_k", "q6_k", "q8_0")
PROMPT_ROWS = 512
EXPERTS = (("mxfp4", 32, 4, 5760, 2880), ("q4_k", 128, 8, 1536, 2048))  # format, experts, of a token, N, K

# The result is float16: an error of half a unit in its last place (2 ** -11 of the largest value), on either side.
NORM_TOLERANCE = 2 * 2.0**-11
# As much again for products whose scales are rounded to float16.
MATMUL_TOLERANCE = 4 * 2.0**-11
# Probabilities and values are rounded to float16 before they are multiplied; fp8 and k6v4 multiply rescaled values:
# one rounding more.
CACHE_TOLERANCE = 8 * 2.0**-11
_CODE_SCALE = {"int8": 1 / 64, "fp8": 1 / 128, "int6": 1 / 16, "int4": 1 / 4}


def all_cases(tiny: bool) -> list[BenchCase]:
    """Return the cases of all ops."""
    return [*_cache_cases(tiny), *_row_cases(tiny), *_weight_cases(tiny)]


class Heads(NamedTuple):
    """Numbers of heads, and their size."""

    queries: int = 32
    keys: int = 8
    dim: int = 128


class AttentionInputs(NamedTuple):
    """Inputs of `attention`: one sequence."""

    q: Tensor  # float16 [rows, heads, head_dim]
    cache: LayerCache
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class WriteInputs(NamedTuple):
    """Inputs of `write_kv`."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cache: LayerCache
    rope: Rope


def _cache_cases(tiny: bool) -> list[BenchCase]:
    """Return the cases of attention and write_kv."""
    heads = Heads(4, 2, 64) if tiny else Heads()
    lengths = (45, 130) if tiny else LENGTHS
    rows = (1, 3) if tiny else (1, 8)
    cases = [_attention(FORMATS[name], heads, length, n) for name in FORMATS for length in lengths for n in rows]
    return cases + [_write_kv(FORMATS[name], heads, n) for name in FORMATS for n in ((1, 3) if tiny else (1, 8, 512))]


def _random_cache(kv_format: KVFormat, num_blocks: int, heads: Heads, generator: Generator) -> LayerCache:
    """Return blocks full of random entries of about 1 in size."""
    cache = allocate(kv_format, num_blocks, heads.keys, heads.dim, generator.device)
    for name, plane in cache.planes.items():
        kind = kv_format.key if name.startswith("key") else kv_format.value
        if name.endswith("scales"):
            plane.copy_((torch.rand(plane.shape, generator=generator) + 0.5) * _CODE_SCALE[kind or ""])
        elif plane.dtype == torch.int32:
            plane.random_(-(2**31), 2**31, generator=generator)
        elif plane.dtype == torch.uint8:
            plane.random_(0, 256, generator=generator)
            if kind == "fp8":
                plane.bitwise_and_(0xF7)  # exponent and mantissa are never all ones: no NaN
        else:
            plane.normal_(generator=generator)
    return cache


def _attention(kv_format: KVFormat, heads: Heads, length: int, rows: int) -> BenchCase:
    def run(inputs: AttentionInputs, how: str) -> Any:
        step = inputs.block_tables, inputs.query_start_loc, inputs.seq_lens
        scale = heads.dim**-0.5
        return attention(inputs.q, inputs.cache, *step, scale=scale, max_query_len=rows, implementation=how)

    per_token = kv_format.bytes_per_token(heads.keys, heads.dim)
    return BenchCase(
        op="attention",
        shape=f"{heads.queries}:{heads.keys}x{heads.dim} len={length}",
        rows=rows,
        format=kv_format.name,
        work=Work(partial(_attention_inputs, kv_format, heads, length, rows), run),
        moved_bytes=lambda inputs: length * per_token + 2 * nbytes_of(inputs.q),
        tolerance=CACHE_TOLERANCE,
    )


def _attention_inputs(
    kv_format: KVFormat, heads: Heads, length: int, rows: int, generator: Generator
) -> AttentionInputs:
    num_blocks = -(-length // BLOCK_LEN)
    return AttentionInputs(
        q=torch.randn(rows, heads.queries, heads.dim, generator=generator).half(),
        cache=_random_cache(kv_format, num_blocks, heads, generator),
        block_tables=torch.randperm(num_blocks, generator=generator, dtype=torch.int32).unsqueeze(0),
        query_start_loc=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
    )


def _write_kv(kv_format: KVFormat, heads: Heads, rows: int) -> BenchCase:
    def run(inputs: WriteInputs, how: str) -> Any:
        *args, rope = inputs
        return write_kv(*args, rope=rope, implementation=how)

    return BenchCase(
        op="write_kv",
        shape=f"{heads.queries}:{heads.keys}x{heads.dim}",
        rows=rows,
        format=kv_format.name,
        work=Work(partial(_write_inputs, kv_format, heads, rows), run),
        moved_bytes=lambda inputs: (
            2 * nbytes_of(inputs.q)
            + nbytes_of((inputs.k, inputs.v))
            + rows * kv_format.bytes_per_token(heads.keys, heads.dim)
        ),
        tolerance=CACHE_TOLERANCE,
        compared=lambda inputs, q: (q, *_floats(inputs.cache)),
    )


def _floats(cache: LayerCache) -> list[Tensor]:
    """Return the planes without codes: a code on a rounding boundary may differ by one."""
    return [plane for plane in cache.planes.values() if plane.is_floating_point()]


def _write_inputs(kv_format: KVFormat, heads: Heads, rows: int, generator: Generator) -> WriteInputs:
    num_blocks = max(4, -(-rows // BLOCK_LEN))
    fused = torch.randn(rows, heads.queries + 2 * heads.keys, heads.dim, generator=generator).half()
    q, k, v = fused.tensor_split([heads.queries, heads.queries + heads.keys], 1)
    slot_mapping = torch.randperm(num_blocks * BLOCK_LEN, generator=generator)[:rows]
    positions = torch.randint(0, 8192, (rows,), generator=generator, dtype=torch.int32)
    frequencies = 500_000.0 ** -(torch.arange(0, heads.dim, 2, dtype=torch.float32) / heads.dim)
    cache = allocate(kv_format, num_blocks, heads.keys, heads.dim, generator.device)
    return WriteInputs(q, k, v, positions, slot_mapping, cache, Rope(frequencies))


class NormInputs(NamedTuple):
    """Inputs of `add_rms_norm`."""

    x: Tensor
    residual: Tensor
    weight: Tensor


class SampleInputs(NamedTuple):
    """Inputs of `sample`."""

    logits: Tensor  # float32 [rows, vocab]
    batch: Batch


class Recipe(NamedTuple):
    """Parameters of a sample."""

    name: str
    flags: int = Flag.ACTIVE
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    penalties: bool = False
    num_top: int = -1


RECIPES = (
    Recipe("greedy", Flag.ACTIVE | Flag.GREEDY),
    Recipe("temperature"),
    Recipe("top-k 40, top-p 0.95", top_k=40, top_p=0.95),
    Recipe("top-p 0.95", top_p=0.95),
    Recipe("penalties, top-p 0.95", top_p=0.95, penalties=True),
    Recipe("greedy, 5 log-probabilities", Flag.ACTIVE | Flag.GREEDY, num_top=5),
)


def _row_cases(tiny: bool) -> list[BenchCase]:
    """Return the cases of norm, sampling and bandwidth."""
    rows = (1, 3) if tiny else (1, 8, 16, 64)
    cases = [_norm(192 if tiny else 4096, n) for n in rows]
    cases += [_sampling(recipe, 1000 if tiny else 128256, n) for recipe in RECIPES for n in rows]
    return [*cases, _bandwidth(3 * bandwidth.BLOCK_LEN if tiny else 1 << 28)]


def _norm(width: int, rows: int) -> BenchCase:
    return BenchCase(
        op="norm",
        shape=f"add_rms_norm {width}",
        rows=rows,
        format="float16",
        work=Work(
            partial(_norm_inputs, width, rows),
            lambda inputs, how: add_rms_norm(inputs.x, inputs.residual, inputs.weight, 1e-5, implementation=how),
        ),
        moved_bytes=lambda inputs: nbytes_of(inputs) + nbytes_of((inputs.x, inputs.residual)),
        tolerance=NORM_TOLERANCE,
    )


def _norm_inputs(width: int, rows: int, generator: Generator) -> NormInputs:
    x, residual = torch.randn(2, rows, width, generator=generator)
    return NormInputs(x.half(), residual.clone(), 1 + torch.randn(width, generator=generator) / 4)


def _sampling(recipe: Recipe, vocab: int, rows: int) -> BenchCase:
    return BenchCase(
        op="sampling",
        shape=f"{vocab} {recipe.name}",
        rows=rows,
        format="float32",
        work=Work(
            partial(_sample_inputs, recipe, vocab, rows),
            lambda inputs, how: sample(inputs.logits, inputs.batch, implementation=how),
        ),
        moved_bytes=lambda inputs: nbytes_of(inputs.logits),
        compared=lambda _, answers: answers[:, Answer.TOKEN],
    )


def _sample_inputs(recipe: Recipe, vocab: int, rows: int, generator: Generator) -> SampleInputs:
    words = torch.zeros(rows, len(Word), dtype=torch.int64)
    floats = words.view(torch.float64)
    words[:, Word.FLAGS] = int(recipe.flags)
    floats[:, Word.TEMPERATURE] = recipe.temperature
    floats[:, Word.CUT] = float("-inf")
    floats[:, Word.TOP_P] = recipe.top_p
    words[:, Word.TOP_K] = recipe.top_k
    floats[:, Word.REPETITION] = 1.1 if recipe.penalties else 1.0
    words[:, Word.SEED] = torch.arange(rows) + 1234
    words[:, Word.POSITION] = torch.arange(rows) + 77
    words[:, Word.NUM_TOP] = recipe.num_top
    seen = min(vocab // 2, 512) if recipe.penalties else 0
    words[:, Word.HISTORY_START] = torch.arange(rows) * seen
    words[:, Word.HISTORY_END] = (torch.arange(rows) + 1) * seen
    history = [torch.randperm(vocab, generator=generator)[:seen] for _ in range(rows)]
    batch = Batch(
        rows=words,
        bias_ids=torch.zeros(1, dtype=torch.int32),
        bias=torch.zeros(1, dtype=torch.float64),
        history_ids=torch.cat([*history, torch.zeros(1, dtype=torch.int64)]).to(torch.int32),
        history_counts=torch.ones(rows * seen + 1, dtype=torch.int32),
        masks=torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32),
    )
    return SampleInputs(4 * torch.randn(rows, vocab, generator=generator), batch)


def _bandwidth(words: int) -> BenchCase:
    return BenchCase(
        op="bandwidth",
        shape=f"{4 * words} bytes",
        rows=1,
        format="int32",
        work=Work(
            lambda generator: torch.randint(-(2**31), 2**31, (words,), generator=generator, dtype=torch.int32),
            lambda inputs, how: bandwidth.read(inputs, implementation=how),
        ),
        moved_bytes=nbytes_of,
        compared=lambda _, sums: sums.sum().remainder(2**32),
    )


class MatmulInputs(NamedTuple):
    """Inputs of `matmul` and `grouped_matmul`."""

    x: Tensor  # float16 [rows, K]
    weight: PackedWeight
    experts: Tensor | None = None  # int32 [rows, k]


def _weight_cases(tiny: bool) -> list[BenchCase]:
    """Return the cases of matmul, grouped and dequantize."""
    shapes = ((48, 512), (32, 768)) if tiny else SHAPES
    rows = (1, 3, 16, 17) if tiny else (1, 2, 4, 8, 16, 24, 32, 64)
    cases = [_matmul(name, shape, n) for shape in shapes for name in WEIGHT_FORMATS for n in rows]
    cases += [_matmul(name, shapes[0 if tiny else 2], 70 if tiny else PROMPT_ROWS) for name in WEIGHT_FORMATS]
    cases += [_dequantize(name, shapes[0 if tiny else 2]) for name in WEIGHT_FORMATS]
    experts = (("mxfp4", 4, 2, 32, 128), ("q4_k", 3, 2, 32, 256)) if tiny else EXPERTS
    return cases + [_grouped(*mixture, n) for mixture in experts for n in ((1, 3) if tiny else (1, 4, 16, 64))]


def _matmul(name: str, shape: tuple[int, int], rows: int) -> BenchCase:
    n, k = shape
    return BenchCase(
        op="matmul",
        shape=f"{n}x{k}",
        rows=rows,
        format=name,
        work=Work(
            partial(_matmul_inputs, name, n, k, rows),
            lambda inputs, how: matmul(inputs.x, inputs.weight, implementation=how),
        ),
        moved_bytes=lambda inputs: nbytes_of(inputs) + 2 * rows * n,
        tolerance=MATMUL_TOLERANCE,
        rival=Work(partial(_dense_inputs, n, k, rows), lambda inputs, _: inputs[0] @ inputs[1].T),
    )


def _matmul_inputs(name: str, n: int, k: int, rows: int, generator: Generator) -> MatmulInputs:
    x = torch.randn(rows, k, generator=generator).half()
    return MatmulInputs(x, random_weight(LAYOUTS[name], n, k, generator, garbage=False))


def _dense_inputs(n: int, k: int, rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
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
            partial(_grouped_inputs, name, experts, of_token, n, k, rows),
            lambda inputs, how: grouped_matmul(inputs.x, inputs.weight, inputs.experts, implementation=how),
        ),
        moved_bytes=lambda inputs: _used_bytes(inputs) + 2 * rows * (k + of_token * n),
        tolerance=MATMUL_TOLERANCE,
    )


def _grouped_inputs(
    name: str, experts: int, of_token: int, n: int, k: int, rows: int, generator: Generator
) -> MatmulInputs:
    x = torch.randn(rows, k, generator=generator).half()
    matrices = [random_weight(LAYOUTS[name], n, k, generator, garbage=False) for _ in range(experts)]
    stacked = {plane: torch.stack([planes(matrix)[plane] for matrix in matrices]) for plane in planes(matrices[0])}
    chosen = torch.rand(rows, experts, generator=generator).topk(of_token).indices.to(torch.int32)
    return MatmulInputs(x, replace(matrices[0], **stacked), chosen)  # type: ignore[arg-type]  # planes are named as fields


def _used_bytes(inputs: MatmulInputs) -> int:
    assert inputs.experts is not None
    return inputs.weight.nbytes * len(set(inputs.experts.flatten().tolist())) // inputs.weight.num_matrices
