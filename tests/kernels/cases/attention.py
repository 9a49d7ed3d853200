"""The cases of `attention`: shapes, poisoned inputs, and compiled kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.cache import BLOCK_LEN, FORMATS, LayerCache, allocate, read
from edgelm.kernels.cache.order import token_column
from edgelm.kernels.gpu_target import triton_version
from tests.kernels.compile_case import CompileCase

INTEGERS = dict.fromkeys(("window", "num_tokens", "num_seqs", "block_table_len", "max_query_len", "max_rows"), "i32")
CODE_SCALE = {"int8": 1 / 64, "fp8": 1 / 128, "int6": 1 / 16, "int4": 1 / 4}
FP8_NAN = 0x7F

# Instructions that spill registers, by case and compute capability, with Triton 3.9. What removes attend_chunks'
# on one GPU adds some on another, and smaller tiles of prompts are slower: docs/experiments.md, "Spills of attention".
SPILLS: dict[str, dict[int, int]] = {
    "f16 d=256": {90: 14},
    "int8 d=256": {80: 10, 86: 8, 89: 8, 90: 6, 120: 10},
    "fp8 d=256": {80: 4},
    "k8v4 d=256": {80: 8, 90: 6, 120: 8},
    "f16 d=256 window cap sinks": {80: 2, 86: 2, 89: 2, 90: 12},
    "f16 d=64 prompt": {80: 43, 86: 31, 89: 31, 120: 34},
    "int8 d=64 prompt": {80: 8, 120: 9},
    "fp8 d=64 prompt": {80: 8, 120: 10},
    "k8v4 d=64 prompt": {80: 10, 120: 6},
    "k6v4 d=64 prompt": {80: 2, 86: 6, 89: 6, 120: 6},
}
# The same with other releases, where it was compiled and differs. 3.7.1 is the installed one. 3.8 is left out by the
# extra `cuda`: with 255 registers, the most there are, k6v4 spills in long heads all the same (docs/gpu.md).
OTHER_SPILLS: dict[str, dict[str, dict[int, int]]] = {
    "3.6": {"k6v4 d=256": {90: 6}},
    "3.7": {
        "f16 d=80": {120: 14},
        "f16 d=256": {80: 6, 86: 4, 89: 4, 90: 2},
        "int8 d=128": {80: 6},
        "int8 d=256": {80: 32, 86: 10, 89: 10},
        "fp8 d=256": {80: 24},
        "k8v4 d=256": {80: 26, 86: 2, 89: 2},
        "k6v4 d=128": {80: 6},
        "k6v4 d=256": {120: 6},
        "k6v4 d=256 window cap sinks": {90: 18, 120: 16},
        "f16 d=64 window cap sinks": {80: 6, 86: 6, 89: 6, 90: 12},
        "f16 d=256 window cap sinks": {80: 8, 86: 16, 89: 16, 120: 6},
        # fewer tokens at a time spill nothing, and take a quarter more instructions for each (int8) or as many (k8v4)
        "int8 d=64 prompt": {80: 122, 86: 78, 89: 78, 120: 73},
        "fp8 d=64 prompt": {80: 119, 86: 81, 89: 81, 120: 71},
        "k8v4 d=64 prompt": {80: 103, 86: 62, 89: 62, 120: 74},
        "k6v4 d=64 prompt": {80: 90, 86: 90, 89: 90, 120: 87},
        "k6v4 d=128 prompt": {86: 10, 89: 10, 120: 3},
        "k8v4 d=128 prompt": {120: 4},
        "k6v4 d=256 prompt": {120: 8},
        "k6v4 d=256 window cap sinks split prompt": {120: 5},
    },
    "3.8": {"int8 d=128": {80: 16, 86: 2}, "int8 d=256": {80: 54, 89: 21}, "k6v4 d=256": {90: 62, 120: 115}},
}
OTHER_LOOP_SPILLS = {
    "3.7": {"int8 d=64 prompt": 45, "fp8 d=64 prompt": 44, "k8v4 d=64 prompt": 39, "k6v4 d=64 prompt": 39},
    "3.8": {"k6v4 d=256": 19},
}
EXCHANGED = {("3.7", "k6v4 d=64")}  # the high bits of keys pass through shared memory, with a barrier for it
BUDGETS = {"int8": 7.3, "f16 d=128": 4.0}  # instructions an element
# Spills with Triton 3.7 and 3.8, barriers at the ends of a context there; operands that need no shuffles.
DIFFERS = {"int8 d=128": (86, 90), "f16 d=128": (90,), "k6v4 d=256": (90,)}
LOOP_SPILLS = {"f16 d=64 prompt": 9}  # of these, in the main loop; all others have none there


class Case(NamedTuple):
    """A call of `attention`: sequence s has query_lens[s] rows and seq_lens[s] positions."""

    format: str
    head_dim: int
    queries_per_kv: int = 1
    num_kv_heads: int = 1
    query_lens: tuple[int, ...] = (1,)
    seq_lens: tuple[int, ...] = (40,)
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    dtype16: torch.dtype = torch.float16

    @property
    def name(self) -> str:
        more = [f"w={self.window}"] if self.window else []
        more += [f"cap={self.softcap:g}"] if self.softcap else []
        more += ["sinks"] if self.sinks else []
        more += [str(self.dtype).removeprefix("torch.")]
        more += [f"cache {self.dtype16}".replace("torch.", "")] if self.dtype16 != torch.float16 else []
        heads = f"{self.queries_per_kv}x{self.num_kv_heads}"
        rows = ",".join(f"{count}@{length}" for count, length in zip(self.query_lens, self.seq_lens, strict=True))
        return f"{self.format} d={self.head_dim} {heads} {rows} {' '.join(more)}"


class Inputs(NamedTuple):
    """Arguments of `attention`."""

    q: Tensor
    cache: LayerCache
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    sinks: Tensor | None


BF16 = torch.bfloat16

TRITON_CASES = [
    Case("f16", 32, 3, 1, (1, 0, 2), (33, 0, 70)),
    Case("int8", 64, 1, 1, (2,), (258,)),
    Case("fp8", 80, 2, 2, (1,), (37,)),
    Case("k8v4", 96, 1, 1, (1,), (33,)),
    Case("k8v4", 32, 8, 1, (3,), (40,)),
    Case("k6v4", 64, 2, 1, (1, 2), (1, 70), window=20, softcap=3.0, sinks=True),
    Case("f16", 256, 1, 1, (1,), (33,), sinks=True, dtype=torch.float16),
    Case("f16", 96, 2, 1, (2,), (32,), softcap=5.0, dtype=BF16, dtype16=BF16),
    Case("f16", 32, 1, 1, (2,), (34,), dtype=BF16),
    Case("int8", 32, 1, 1, (16,), (150,), window=100, dtype=BF16),
    Case("k6v4", 128, 1, 1, (1,), (33,), dtype=torch.float16),
    Case("k6v4", 32, 1, 1, (2,), (40,), dtype=BF16),
    Case("fp8", 32, 1, 2, (3,), (3,), dtype=torch.float16),
    # prompts
    Case("f16", 32, 1, 1, (18, 2), (70, 33), window=30),
    Case("int8", 32, 3, 1, (17,), (40,), sinks=True),
    Case("fp8", 80, 2, 1, (17,), (17,)),
    Case("k8v4", 64, 1, 1, (17, 0), (70, 0), softcap=4.0, dtype=torch.float16),
    Case("k6v4", 96, 1, 1, (18,), (50,)),
    Case("f16", 32, 1, 1, (17,), (40,), dtype=BF16),
    Case("f16", 32, 1, 1, (17,), (40,), dtype=BF16, dtype16=BF16),
    Case("int8", 32, 1, 1, (17,), (40,), dtype=BF16),
    Case("k6v4", 32, 1, 1, (17,), (40,), dtype=BF16),
]

LONG_TRITON_CASES = [
    Case("int8", 128, 1, 1, (2,), (258,)),
    Case("fp8", 80, 4, 2, (1,), (37,)),
    Case("k8v4", 96, 8, 1, (3,), (40,)),
    Case("k6v4", 256, 1, 1, (1,), (5,)),
    Case("int8", 256, 1, 1, (1,), (5,)),
    Case("f16", 512, 2, 1, (2,), (40,), dtype=BF16),
    *(Case(name, 512, 1, 1, (1,), (33,)) for name in ("int8", "fp8", "k8v4", "k6v4")),
    Case("f16", 512, 2, 1, (17,), (40,), dtype=BF16),
    *(Case(name, 512, 1, 1, (17,), (18,)) for name in ("int8", "k6v4")),
    Case("f16", 64, 3, 1, (20, 2), (70, 40), window=30),
    Case("k6v4", 128, 4, 1, (1,), (129,), dtype=torch.float16),
    Case("int8", 128, 1, 1, (17,), (40,), sinks=True),
]

REFERENCE_CASES = [
    *(Case(name, 64, 4, 2, (1, 0, 1, 1), (1, 0, 33, 300)) for name in FORMATS),
    *(Case(name, 128, 8, 1, (16, 3, 20), (70, 3, 40), softcap=8.0, sinks=True) for name in FORMATS),
    *(Case(name, 80, 3, 2, (5, 20), (64, 100), window=65) for name in ("fp8", "k8v4")),
    *(Case(name, 256, 1, 2, (2, 1), (64, 31), window=1, sinks=True) for name in ("f16", "k6v4")),
    Case("f16", 96, 1, 4, (3,), (520,), dtype=BF16, dtype16=BF16),
]


def inputs(case: Case, generator: Generator) -> Inputs:
    """Return random inputs, with NaN (if the type has it) in everything that must not be read.

    That is block 0, slots that no sequence uses, and a last row of q. Block tables end in numbers of no block.
    """
    needed = [-(-length // BLOCK_LEN) for length in case.seq_lens]
    kv_format = FORMATS[case.format]
    cache = allocate(kv_format, sum(needed) + 2, case.num_kv_heads, case.head_dim, "cpu", case.dtype16)
    fill(cache, generator)
    order = torch.randperm(sum(needed), generator=generator, dtype=torch.int32) + 1
    block_tables = torch.full((len(needed), max(needed) + 1), -77, dtype=torch.int32)
    free = torch.ones(cache.num_blocks, BLOCK_LEN, dtype=torch.bool)
    for sequence, blocks in enumerate(torch.split(order, needed)):
        block_tables[sequence, : len(blocks)] = blocks
        slots = torch.arange(case.seq_lens[sequence])
        free[blocks.long()[slots // BLOCK_LEN], slots % BLOCK_LEN] = False
    poison(cache, free)
    query_start_loc = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    heads = case.queries_per_kv * case.num_kv_heads
    q = torch.randn(sum(case.query_lens) + 1, heads, case.head_dim, generator=generator)
    q[-1] = torch.nan
    sinks = torch.randn(heads, generator=generator) if case.sinks else None
    return Inputs(
        q.to(case.dtype), cache, block_tables, query_start_loc, torch.tensor(case.seq_lens, dtype=torch.int32), sinks
    )


def fill(cache: LayerCache, generator: Generator) -> None:
    """Fill the cache with random entries of about 1 in size; padding is 0, as `write_kv` leaves it."""
    heads = torch.randn(cache.num_blocks, cache.num_kv_heads, BLOCK_LEN, cache.head_dim, generator=generator)
    for name, plane in cache.planes.items():
        kind = cache.format.key if name.startswith("key") else cache.format.value
        if name.endswith("scales"):
            spread = torch.rand(plane.shape, generator=generator) + 0.5
            plane.copy_(spread * CODE_SCALE[kind or ""] * (-1 if kind in ("int6", "int4") else 1))
        elif kind is None:
            padded = torch.nn.functional.pad(
                heads if name == "keys" else heads.flip(0), (0, cache.width - cache.head_dim)
            )
            if name == "values":
                plane[..., token_column(torch.arange(BLOCK_LEN), nibbles=False)] = padded.transpose(-2, -1).to(
                    plane.dtype
                )
            else:
                plane.copy_(padded)
        elif plane.dtype == torch.int32:
            plane.random_(-(2**31), 2**31, generator=generator)
        else:
            plane.random_(0, 256, generator=generator)
            if kind == "fp8":
                plane.bitwise_and_(0xF7)  # exponent and mantissa are never all ones: no NaN


def poison(cache: LayerCache, free: Tensor, value: float = torch.nan) -> None:
    """Write NaN or `value` to the `free` slots, bool [blocks, 32], of float planes and scales; fp8 always gets NaN."""
    columns = torch.zeros_like(free)
    columns[:, token_column(torch.arange(BLOCK_LEN), nibbles=False)] = free
    for name, plane in cache.planes.items():
        if name.endswith("scales"):
            plane.masked_fill_(free[:, None, None], value)
        elif plane.is_floating_point() or cache.format.name == "fp8":
            bad = value if plane.is_floating_point() else FP8_NAN
            plane.masked_fill_(free[:, None, :, None] if name == "keys" else columns[:, None, None], bad)


def unseen(given: Inputs, sequence: int, seen: range) -> Tensor:
    """Return all slots except those of some positions of a sequence: bool [blocks, 32]."""
    free = torch.ones(given.cache.num_blocks, BLOCK_LEN, dtype=torch.bool)
    at = torch.arange(seen.start, seen.stop)
    free[given.block_tables[sequence].long()[at // BLOCK_LEN], at % BLOCK_LEN] = False
    return free


def stored(given: Inputs, sequence: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a sequence, float32 [length, num_kv_heads, head_dim]."""
    length = int(given.seq_lens[sequence])
    return read(given.cache, given.block_tables[sequence, : -(-length // BLOCK_LEN)].long(), length)


def compile_cases() -> list[CompileCase]:
    """Return the kernels for the heads of common models in every format."""
    main = [("int8", 128, False, ""), ("k6v4", 256, False, ""), ("fp8", 64, True, ""), ("k8v4", 128, False, "prompt")]
    shapes = [(name, dim, False, "") for name in FORMATS for dim in (64, 80, 96, 128, 256)]
    shapes += [(name, dim, False, "prompt") for name in FORMATS for dim in (64, 128, 256)]
    shapes += [("f16", 64, True, ""), ("int8", 256, True, "prompt"), ("k6v4", 96, False, "prompt")]
    shapes += [("f16", 256, True, ""), ("k6v4", 256, True, ""), ("f16", 256, True, "prompt")]
    shapes += [("int8", 128, False, "split prompt"), ("k6v4", 256, True, "split prompt")]
    cases = [_compile_case(*shape, main=shape in main) for shape in dict.fromkeys(main + shapes)]
    assert {f"attention {title}" for title in SPILLS} <= {case.name for case in cases}
    combines = ((128, True, False), (80, False, False), (256, False, False), (128, False, True))
    return cases + [_combine_case(*shape, main=shape[1]) for shape in combines]


def _compile_case(name: str, head_dim: int, special: bool, way: str, *, main: bool) -> CompileCase:
    """Return attend_chunks, or for prompts attend_tiles. special: with window, soft cap and sinks."""
    from edgelm.kernels.attention import launch
    from edgelm.kernels.attention.decode_kernel import attend_chunks
    from edgelm.kernels.attention.prefill_kernel import attend_tiles

    cache = allocate(FORMATS[name], 1, 8, head_dim, "meta")
    groups = cache.width // 32
    scalars = {"scale": "fp32", "softcap": "fp32"} | INTEGERS
    pointers = {
        "q": "*fp16",
        "keys": "*i32" if cache.format.key else "*fp16",
        "key_high": "*i32",
        "values": "*i32" if cache.format.value else "*fp16",
        "key_scales": "*fp16",
        "value_scales": "*fp16",
        "block_tables": "*i32",
        "query_start_loc": "*i32",
        "seq_lens": "*i32",
    }
    pointers |= {"sums": "*fp32", "stats": "*fp32"}
    fixed = launch.constants(cache, 32, torch.float16) | {
        "ASM": True,
        "ROTATED": cache.format.rotated,
        "WINDOWED": special,
        "CAPPED": special,
    }
    tile = launch.tile_of(cache, torch.float16, wgmma=False)
    if way:
        fn = attend_tiles
        pointers |= {"sinks": "*fp32", "out": "*fp16"}
        all_groups = 1 << (groups - 1).bit_length()
        split = way == "split prompt"
        fixed |= {"ALL": all_groups, "SINKS": special, "SPLIT": split, "ROWS": tile.rows, "TOKENS": tile.tokens}
    else:
        fn = attend_chunks
        fixed |= {"PARTS": launch.parts_of(cache), "KW": launch.kwidth_of(cache)}
    signature = pointers | scalars | dict.fromkeys(fixed, "constexpr")
    release = ".".join(triton_version().split(".")[:2])
    title = f"{name} d={head_dim}{' window cap sinks' if special else ''}{' ' if way else ''}{way}"
    return CompileCase(
        name=f"attention {title}",
        fn=fn,
        signature={argument: signature[argument] for argument in fn.arg_names if argument in signature},
        constants=fixed,
        divisible=tuple(pointers),
        num_warps=tile.num_warps if way else 4,
        options={
            "num_stages": tile.num_stages if way else 1,
            "maxnreg": launch.MAX_REGISTERS if way else launch.registers_of(cache),
            "enable_fp_fusion": bool(way),
        },
        loop_weights=0 if way else cache.width + cache.width // launch.parts_of(cache),
        budget=None if way else BUDGETS.get(name, BUDGETS.get(title)),
        spills_on=SPILLS.get(title, {}) | OTHER_SPILLS.get(release, {}).get(title, {}),
        loop_spills=OTHER_LOOP_SPILLS.get(release, {}).get(title, LOOP_SPILLS.get(title, 0)),
        # with fewer bits per value, a lane takes 8 bytes at a time, and a warp 256 consecutive bytes
        wide_loads=name == "f16",
        differs_on=DIFFERS.get(title, ()),
        # PARTS of 16-bit values are exchanged
        own_warps=not way and cache.format.key is not None and (release, title) not in EXCHANGED,
        main=main,
    )


def _combine_case(head_dim: int, rotated: bool, prompts: bool, *, main: bool) -> CompileCase:
    from edgelm.kernels.attention.decode_kernel import combine_chunks
    from edgelm.kernels.attention.launch import AT_ONCE

    pointers = {
        "sums": "*fp32",
        "stats": "*fp32",
        "sinks": "*fp32",
        "query_start_loc": "*i32",
        "seq_lens": "*i32",
        "out": "*fp16",
    }
    groups = -(-head_dim // 32)
    fixed: dict[str, object] = {
        "KV_HEADS": 8,
        "QUERIES_PER_KV": 4,
        "HEAD_DIM": head_dim,
        "GROUPS": groups,
        "PROMPTS": prompts,
        "ROTATED": rotated,
        "WINDOWED": True,
        "SINKS": True,
        "AT_ONCE": AT_ONCE,
    }
    scalars = INTEGERS | {"splits": "i32"}
    return CompileCase(
        name=f"attention combine d={head_dim}{' rotated' if rotated else ''}{' prompts' if prompts else ''}",
        fn=combine_chunks,
        signature=pointers | scalars | dict.fromkeys(fixed, "constexpr"),
        constants=fixed,
        divisible=tuple(pointers),
        num_warps=1,
        main=main,
    )
