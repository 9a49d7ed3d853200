"""The KV of some blocks as bytes, for snapshots: all blocks of the first plane of the first layer, then the next plane.

Behind them is the state of recurrent layers behind the last block, if a model has any, in the same order. Owns this
format. Knows nothing of which blocks belong together, and of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.base.errors import SnapshotError
from edgelm.kernels.cache import LayerCache
from edgelm.kernels.delta import StateCache

PIECE_BYTES = 2**22  # less than the warm-up of any model needs
FORMAT = 1  # part of the identity under which states are stored; another layout of kernels/cache is another format


def block_bytes(caches: Sequence[LayerCache]) -> int:
    """Return the bytes of one block in all layers."""
    return sum(plane[0].nbytes for plane in _planes(caches))


def save_blocks(caches: Sequence[LayerCache], blocks: Sequence[int], state: NDArray[np.uint8]) -> None:
    """Copy blocks from the device into `state`, which has `block_bytes` for each."""
    for plane, part in _parts(caches, state, len(blocks)):
        for some in _pieces(plane, len(blocks)):
            index = torch.tensor(blocks[some], device=plane.device)
            part[some].copy_(plane.index_select(0, index))


def load_blocks(caches: Sequence[LayerCache], state: NDArray[np.uint8], blocks: Sequence[int], first: int) -> None:
    """Copy the blocks of a state, from number `first` on, into these blocks of the device.

    Raises SnapshotError if the state is too short, or has no whole number of blocks.
    """
    num_blocks, rest = divmod(state.size, block_bytes(caches))
    if rest or first + len(blocks) > num_blocks:
        raise SnapshotError(f"a snapshot of {state.size:,} bytes does not fit this KV cache")
    for plane, part in _parts(caches, state, num_blocks):
        wanted = part[first : first + len(blocks)]
        for some in _pieces(plane, len(blocks)):
            index = torch.tensor(blocks[some], device=plane.device)
            plane.index_copy_(0, index, wanted[some].to(plane.device))


def slot_bytes(caches: Sequence[StateCache]) -> int:
    """Return the bytes of one state in all layers."""
    return sum(plane[0].nbytes for plane in _planes(caches))


def save_slot(caches: Sequence[StateCache], slot: int, state: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Copy a recurrent state from the device to the end of `state`; return the part before it."""
    for plane, part in _slot_parts(caches, state):
        part.copy_(plane[slot])
    return state[: -slot_bytes(caches)]


def load_slot(caches: Sequence[StateCache], state: NDArray[np.uint8], slot: int) -> NDArray[np.uint8]:
    """Copy the recurrent state at the end of `state` to the device; return the part before it.

    Raises SnapshotError if it is too short.
    """
    if state.size < slot_bytes(caches):
        raise SnapshotError(f"a snapshot of {state.size:,} bytes does not fit these states")
    for plane, part in _slot_parts(caches, state):
        plane[slot].copy_(part)
    return state[: -slot_bytes(caches)]


def _slot_parts(caches: Sequence[StateCache], state: NDArray[np.uint8]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each plane of states with its part of a snapshot."""
    end = state.size - slot_bytes(caches)
    for plane in _planes(caches):
        start, end = end, end + plane[0].nbytes
        yield plane, torch.from_numpy(state[start:end]).view(plane.dtype).view(plane.shape[1:])


def _pieces(plane: Tensor, num_blocks: int) -> Iterator[slice]:
    """Yield the blocks of a plane that are copied at a time: a copy takes as much memory of the device again."""
    step = max(PIECE_BYTES // plane[0].nbytes, 1)
    for start in range(0, num_blocks, step):
        yield slice(start, min(start + step, num_blocks))


def _planes(caches: Sequence[LayerCache | StateCache]) -> Iterator[Tensor]:
    for cache in caches:
        yield from cache.planes.values()


def _parts(caches: Sequence[LayerCache], state: NDArray[np.uint8], num_blocks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each plane with its part of a state: [num_blocks, ...]."""
    end = 0
    for plane in _planes(caches):
        start, end = end, end + num_blocks * plane[0].nbytes
        yield plane, torch.from_numpy(state[start:end]).view(plane.dtype).view(num_blocks, *plane.shape[1:])
