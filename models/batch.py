"""What one forward pass of a model runs on: rows of several sequences, and where their keys and values lie.

Owns the meaning of these tensors. Knows nothing of requests, nor of who fills them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of a step, sequence after sequence. The sizes are fixed for a CUDA graph, the values are not."""

    positions: Tensor  # int32 [tokens]
    slots: Tensor  # int64 [tokens]: block * BLOCK_LEN + offset, where a row's key and value go; below 0: nowhere
    tables: Tensor  # int32 [sequences, max_blocks]: the blocks of each sequence
    starts: Tensor  # int32 [sequences + 1]: the first row of each sequence, and the end
    lengths: Tensor  # int32 [sequences]: positions in the cache, those of this step included; 0: no sequence
    max_query: int  # no sequence has more rows

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]
