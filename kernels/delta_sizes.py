"""The sizes of a gated delta net. Knows no torch: configurations are read without it."""

from __future__ import annotations

from typing import NamedTuple

DELTA_DIMS = frozenset({16, 32, 64, 128, 256})  # numbers of a head, for the kernels


class DeltaSizes(NamedTuple):
    """The heads of one layer, and the window of its convolution."""

    num_key_heads: int  # of queries too
    num_value_heads: int
    key_dim: int  # of one head
    value_dim: int
    window: int  # positions that the convolution sees, with its own
    alternating: bool  # value head h has the key head h % num_key_heads, not h // (value heads of a key head)

    @property
    def value_width(self) -> int:
        """The numbers of all value heads together."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The numbers that the convolution takes of a token: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width
