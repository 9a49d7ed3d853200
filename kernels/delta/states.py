"""The states of a gated delta net, one for each sequence. Owns their memory; knows nothing of who computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgelm.kernels.delta_sizes import DeltaSizes

# Inputs of a sequence that are kept: those of the convolution's window, of accepted tokens that S lacks (at most 30,
# see StateSlots), and of the tokens of a step that verifies (16).
RING = 64


@dataclass(frozen=True, slots=True, eq=False)
class StateCache:
    """The states of one layer. The inputs of position p are in row p % RING: channels, then beta and alpha."""

    sizes: DeltaSizes
    states: Tensor  # float32 [slots, num_value_heads, key_dim, value_dim]
    inputs: Tensor  # [slots, RING, channels + 2 * num_value_heads], in the type of the activations

    @property
    def planes(self) -> dict[str, Tensor]:
        """Every tensor, by name; the first dimension is the slot."""
        return {"states": self.states, "inputs": self.inputs}

    @property
    def device(self) -> torch.device:
        return self.states.device

    def copy(self, source: int, target: int) -> None:
        """Copy the state of a slot to another."""
        for plane in self.planes.values():
            plane[target].copy_(plane[source])


def allocate(sizes: DeltaSizes, num_slots: int, device: torch.device | str, dtype: torch.dtype) -> StateCache:
    """Return cleared states; `dtype` is that of the activations."""
    heads = sizes.num_value_heads
    return StateCache(
        sizes,
        torch.zeros(num_slots, heads, sizes.key_dim, sizes.value_dim, device=device),
        torch.zeros(num_slots, RING, sizes.channels + 2 * heads, device=device, dtype=dtype),
    )


def state_bytes(sizes: DeltaSizes, dtype: torch.dtype) -> int:
    """Return the bytes of one slot of a layer."""
    heads = sizes.num_value_heads
    return 4 * sizes.value_width * sizes.key_dim + RING * (sizes.channels + 2 * heads) * dtype.itemsize
