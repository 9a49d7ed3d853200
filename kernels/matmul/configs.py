"""How a decode matmul is divided among programs: tiles of the weight, rows of x, parts of K.

Owns these choices. Knows nothing of the kernel's arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from edgelm.kernels.gpu_target import has_hbm
from edgelm.kernels.layout import CHUNK, TILE, Layout, PackedWeight, Weight

BLOCKS, LARGE_BLOCKS = 4, 2  # of 8 rows, of a program; the second where operands or many warps leave less room
MANY_WARPS = 8  # more have at most 128 registers a thread: all that a multiprocessor has, 65,536
MAX_REGISTERS = 255  # without this limit, the assembler may spill a few registers to reach a lower one
FEW_REGISTERS = 128  # with these, 16 warps fit on a multiprocessor
PROGRAMS = 256  # enough for every GPU of up to 132 multiprocessors; more splits cost another pass


class Config(NamedTuple):
    """The layout of a decode matmul. A program multiplies `tiles` tiles of 16 rows; its warps share K.

    Nothing here depends on the number of rows of x, so a row's sums are made in one order for any batch.
    """

    warps: int
    tiles: int
    prefetch: int  # steps whose weights are loaded ahead of their use, into registers: 0, 1 or 2
    splits: int  # programs that share K; more than one need a second kernel


def tuning_key(weight: Weight, gated: bool) -> str:
    """Return the shapes and the format that a tuned config holds for: never the number of rows of x."""
    name = weight.layout.name if isinstance(weight, PackedWeight) else str(weight.data.dtype).removeprefix("torch.")
    return f"{name} {weight.rows}x{weight.columns}{' gated' if gated else ''}"


def default_config(weight: Weight, gated: bool) -> Config:
    """Return a config that is never bad: enough programs first, then few reads of x."""
    tiles = -(-weight.rows // TILE)
    steps = -(-weight.columns // CHUNK)
    # Programs of one tile and four warps spread better, but read x twice as often: without HBM, 16 rows get slower.
    spread = not gated and PROGRAMS < tiles <= 2 * PROGRAMS and steps <= 128 and has_hbm()
    program_tiles = 2 if gated or (tiles > PROGRAMS and not spread) else 1
    warps = 4 if steps < 64 or tiles >= 4 * PROGRAMS or spread else 16 if tiles <= PROGRAMS // 2 else 8
    programs = -(-tiles // 2) if gated else tiles
    splits = 1
    while programs * splits < PROGRAMS and splits < 8 and steps // (warps * splits * 2) >= 4:
        splits *= 2
    return Config(warps, program_tiles, 2, splits)


def float32_config(config: Config, gated: bool) -> Config:
    """Return a config for float32 operands, which go through shared memory: a larger one does not fit every GPU."""
    return config._replace(warps=4, tiles=2 if gated else 1, prefetch=0)


def most_blocks(weight: Weight, dtype: torch.dtype, warps: int) -> int:
    """Return how many blocks of 8 rows a program has registers for, which multiplies in this type.

    Groups of 16 have twice the sums of x, and float32 operands go through shared memory.
    """
    large = dtype == torch.float32 or warps > MANY_WARPS
    if isinstance(weight, PackedWeight):
        large |= weight.layout.group == 16 and weight.layout.offset != "none"
    else:
        large |= weight.data.dtype != dtype  # they meet in float32
    return LARGE_BLOCKS if large else BLOCKS


def steps_ahead(config: Config, blocks: int, tiles: int, layout: Layout | None, *, hbm: bool) -> int:
    """Return how many steps a program of so many blocks and tiles loads ahead. They change no bit of a result.

    More than two blocks of rows leave no registers for two steps. Two blocks and two tiles leave them only to codes of
    4 and 8 bits; a few constants are spilled, which pays where latency bounds the kernel, as it does with HBM.
    `layout` is None for a dense weight.
    """
    light = layout is not None and layout.bits in (4, 8) and layout.code != "codebook" and layout.group >= 32
    two_fit = blocks < 2 or (blocks == 2 and (tiles == 1 or (tiles == 2 and hbm and light)))
    return config.prefetch if two_fit else min(config.prefetch, 1)


def max_registers(blocks: int, dtype: torch.dtype, *, packed: bool) -> int | None:
    """Return the limit of a thread's registers in a program that multiplies in this type; None: the compiler's.

    Within FEW_REGISTERS a program with two tiles keeps a few constants of the loop on the stack, but more programs fit.
    """
    if blocks <= 2:
        return FEW_REGISTERS if packed and dtype != torch.float32 else None
    return MAX_REGISTERS if blocks == BLOCKS else None


def row_blocks(rows: int, most: int) -> tuple[int, int]:
    """Return how many blocks of 8 rows a program takes, at most `most`, and how many programs share the rows."""
    blocks = -(-rows // 8)
    shares = -(-blocks // most)
    return -(-blocks // shares), shares


def tiles_of_program(config: Config, blocks: int, weight: Weight, gated: bool, num_sms: int) -> int:
    """Return the tiles of a program that takes so many blocks of rows. They change no bit of a result.

    Each program reads all of its rows of x, which are more than its weights where there are many: two tiles halve that.
    Two blocks and codes of up to 5 bits are faster so on a GPU without HBM: its tensor cores are slower than its
    memory, and the tiles of a program share the sums of x. Below 1.5 such programs a multiprocessor, more and smaller
    ones win.
    """
    if blocks > 2:
        return 2 if gated or -(-weight.rows // TILE) * config.splits >= PROGRAMS else 1
    few_bits = isinstance(weight, PackedWeight) and weight.layout.bits <= 5
    if blocks == 2 and few_bits and not has_hbm():
        programs = -(-weight.rows // (2 * TILE)) * config.splits  # of two tiles
        return max(config.tiles, 2) if 2 * programs > 3 * num_sms else config.tiles
    return config.tiles


def candidates(weight: Weight, gated: bool) -> list[Config]:
    """Return the configs that tuning may try: the default first, then the nearer to it the earlier."""
    steps = -(-weight.columns // CHUNK)
    default = default_config(weight, gated)
    configs = [default]
    for warps in (4, 8, 16):
        for tiles in (2, 4) if gated else (1, 2, 4):
            for prefetch in (0, 1, 2):
                for splits in (1, 2, 4, 8):
                    config = Config(warps, tiles, prefetch, splits)
                    fits = tiles * TILE <= weight.rows and steps >= 2 * warps * splits
                    if config not in configs and (splits == 1 or fits):
                        configs.append(config)
    return sorted(configs, key=lambda config: _distance(config, default))


def _distance(one: Config, other: Config) -> float:
    """Return by how many factors of two two configs differ; prefetching more or less is one."""
    numbers = ((one.warps, other.warps), (one.tiles, other.tiles), (one.splits, other.splits))
    return sum(abs(math.log2(a / b)) for a, b in numbers) + (one.prefetch != other.prefetch)
