"""The sizes of the CUDA graphs: which steps have one.

Owns these numbers. It does not import torch, since `edgelm plan` counts the memory of the graphs from another process.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

SIZES = 1, 2, 4, 8, 16, 24, 32, 48, 64  # tokens of a step: the last is the most that decode kernels take
VERIFY_LEN = 16  # tokens of a sequence, at most, that attention's decode kernel takes


class GraphSize(NamedTuple):
    """The steps that a graph holds."""

    tokens: int
    query_len: int  # tokens of one sequence, at most; 1: the step only decodes


def graph_sizes(max_sequences: int, max_tokens: int) -> list[GraphSize]:
    """Return the graphs for so many sequences and tokens, the smallest first; of one size, that which decodes."""
    sizes = []
    for smaller, size in pairwise((0, *(size for size in SIZES if size <= max_tokens))):
        if smaller < max_sequences:
            sizes.append(GraphSize(size, 1))
        if size > 1 and smaller < max_sequences * VERIFY_LEN:
            sizes.append(GraphSize(size, min(size, VERIFY_LEN)))
    return sizes
