"""The grammar masks of a step: host work that hides behind the device."""

from __future__ import annotations

import numpy as np

from edgelm.core import Masks, Step


def grammar_masks(step: Step, num_vocab: int) -> Masks | None:
    """Return the masks of a step's sampled rows, in their order; None where no sequence has a grammar."""
    if all(chunk.seq.matcher is None for chunk in step.chunks):
        return None
    masks = np.full((step.num_rows, (num_vocab + 31) // 32), -1, np.int32)  # every bit set: all allowed
    first = 0
    for chunk in step.chunks:
        if chunk.seq.matcher and chunk.rows:
            chunk.seq.matcher.fill(chunk.draft, masks[first : first + chunk.rows])
        first += chunk.rows
    return masks
