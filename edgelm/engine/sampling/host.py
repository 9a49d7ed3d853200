"""HostSampler: samples the rows of a step's chunks on the host, in the order that verification needs.

Owns the rule where the rows of a chunk end: at the first that differs from the draft. Knows nothing of where the logits
come from.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from edgelm.engine.core import Chunk, Masks, Sampled, Step
from edgelm.engine.sampling.history import Histories
from edgelm.engine.sampling.reference import Workspace, sample


class HostSampler:
    """Samples with the numpy reference, row by row."""

    def __init__(self, num_vocab: int) -> None:
        self._histories = Histories()
        self._workspace = Workspace(num_vocab)

    def sample(self, step: Step, logits: NDArray[np.float32], masks: Masks | None) -> list[list[Sampled]]:
        """Sample the rows of each chunk, up to the first that differs from the draft."""
        first, sampled = 0, []
        row_masks: list[NDArray[np.int32] | None] = [None] * step.num_rows
        if masks is not None:  # most rows of a batch may have no grammar: their masks allow all tokens
            row_masks = [mask if bound else None for mask, bound in zip(masks, (masks != -1).any(axis=1), strict=True)]
        for chunk in step.chunks:
            rows = slice(first, first + chunk.rows)
            sampled.append(self._sample_chunk(chunk, logits[rows], row_masks[rows]))
            first += chunk.rows
        return sampled

    def _sample_chunk(
        self, chunk: Chunk, logits: NDArray[np.float32], masks: Seq[NDArray[np.int32] | None]
    ) -> list[Sampled]:
        draft: list[int] = chunk.draft
        sampled: list[Sampled] = []
        if not chunk.rows:
            return sampled
        history = self._histories.of(chunk.seq)
        position = first_position(chunk)
        for row in range(chunk.rows):
            sampled.append(sample(logits[row], chunk.seq.params, position + row, history, masks[row], self._workspace))
            if row == len(draft) or sampled[-1].id != draft[row]:
                break
            if history:
                history.push(draft[row])
        if history:
            history.pop(len(sampled) - 1)
        return sampled


def first_position(chunk: Chunk) -> int:
    """Return the position, in its sequence, of the first token that a chunk samples."""
    return chunk.end - chunk.rows + 1


def accepted_rows(step: Step, rows: Seq[Sampled]) -> list[list[Sampled]]:
    """Divide rows that were all sampled at once by chunk, and cut each after the first that differs from its draft."""
    first, sampled = 0, []
    for chunk in step.chunks:
        chunk_rows = list(rows[first : first + chunk.rows])
        first += chunk.rows
        accepted = 0
        while accepted < len(chunk.draft) and chunk_rows[accepted].id == chunk.draft[accepted]:
            accepted += 1
        sampled.append(chunk_rows[: accepted + 1])
    return sampled
