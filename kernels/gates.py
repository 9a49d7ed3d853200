"""The gates of feed-forward blocks, by name. Knows no torch: configurations are read without it."""

from __future__ import annotations

from typing import Literal, NamedTuple

GateKind = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]


class Gate(NamedTuple):
    """The gate of a feed-forward block: a nonlinearity of the gate columns times the up columns."""

    kind: GateKind
    limit: float = 7.0  # of swiglu_oai only, as is alpha
    alpha: float = 1.702
