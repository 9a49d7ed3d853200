"""How a decode matmul is laid out on a GPU: warps, tiles, prefetching, splits of K. Defaults, and what tuning may try.

Owns the numbers. None depends on the number of rows: a row's sums are then made in one order, whoever stands beside it.
"""

from __future__ import annotations

from typing import NamedTuple

from edgelm.kernels.layout import CHUNK, TILE, PackedWeight, Weight

PROGRAMS = 256  # enough for every GPU of up to 132 processors; more splits cost another pass


class Config(NamedTuple):
    """A program multiplies `tiles` tiles of 16 rows of the weight; its warps share K among them."""

    warps: int
    tiles: int
    prefetch: bool  # hold the words of the next step in registers
    splits: int  # programs that share K; more than one need a second kernel


def key(weight: Weight, gated: bool) -> str:
    """Return what a tuned config is good for: never the number of rows."""
    name = weight.layout.name if isinstance(weight, PackedWeight) else str(weight.data.dtype).removeprefix("torch.")
    return f"{name} {weight.rows}x{weight.columns}{' gated' if gated else ''}"


def default(weight: Weight, gated: bool) -> Config:
    """Return a config that is never bad: enough programs first, then few reads of x."""
    tiles = -(-weight.rows // TILE)
    steps = -(-weight.columns // CHUNK)
    each = 2 if gated or tiles >= 2 * PROGRAMS else 1
    warps = 8 if steps >= 64 and tiles < 4 * PROGRAMS else 4
    programs = -(-tiles // each)
    splits = 1
    while programs * splits < PROGRAMS and splits < 8 and steps // (warps * splits * 2) >= 4:
        splits *= 2
    return Config(warps, each, True, splits)


def in_float32(config: Config, gated: bool) -> Config:
    """Return a config for operands of float32, which go through shared memory: a larger one does not fit every GPU."""
    return config._replace(warps=4, tiles=2 if gated else 1, prefetch=False)


def candidates(weight: Weight, gated: bool) -> list[Config]:
    """Return what tuning tries, the default first."""
    steps = -(-weight.columns // CHUNK)
    found = [default(weight, gated)]
    for warps in (4, 8):
        for tiles in (2, 4) if gated else (1, 2, 4):
            for prefetch in (False, True):
                for splits in (1, 2, 4, 8):
                    config = Config(warps, tiles, prefetch, splits)
                    fits = tiles * TILE <= weight.rows and steps >= 2 * warps * splits
                    if config not in found and (splits == 1 or fits):
                        found.append(config)
    return found
