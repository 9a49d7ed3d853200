"""Sample the rows of a step's chunks on the host, in the order in which verification needs them.

Owns the token counts of running sequences, and when a chunk's rows end: at the first that differs from the draft.
Knows nothing of where the logits come from.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgelm.core import Chunk, Masks, Sampled, Sequence, Step
from edgelm.sampling.history import History
from edgelm.sampling.reference import Workspace, sample


class Histories:
    """The token counts of the sequences that have penalties, brought up to date when they are asked for."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Sequence, tuple[History, int]] = WeakKeyDictionary()

    def of(self, seq: Sequence) -> History | None:
        """Return the counts of a sequence; None where nothing needs them."""
        if not seq.params.penalized:
            return None
        history, known = self._known.get(seq) or (History(seq.tokens[: seq.prompt_len]), seq.prompt_len)
        history.extend(seq.tokens[known:])
        self._known[seq] = history, len(seq.tokens)
        return history


class HostSampler:
    """The numpy reference, row after row."""

    def __init__(self, num_vocab: int) -> None:
        self._histories = Histories()
        self._workspace = Workspace(num_vocab)

    def sample(self, step: Step, logits: NDArray[np.float32], masks: Masks | None) -> list[list[Sampled]]:
        """Sample the rows of each chunk, up to the first that differs from the draft."""
        first, sampled = 0, []
        for chunk in step.chunks:
            rows = slice(first, first + chunk.rows)
            sampled.append(self._chunk(chunk, logits[rows], None if masks is None else masks[rows]))
            first += chunk.rows
        return sampled

    def _chunk(self, chunk: Chunk, logits: NDArray[np.float32], masks: Masks | None) -> list[Sampled]:
        draft: list[int] = chunk.draft
        taken: list[Sampled] = []
        if not chunk.rows:
            return taken
        history = self._histories.of(chunk.seq)
        position = first_position(chunk)
        for row in range(chunk.rows):
            mask = None if masks is None else masks[row]
            taken.append(sample(logits[row], chunk.seq.params, position + row, history, mask, self._workspace))
            if row == len(draft) or taken[-1].id != draft[row]:
                break
            if history:
                history.push(draft[row])
        if history:
            history.pop(len(taken) - 1)
        return taken


def first_position(chunk: Chunk) -> int:
    """Return the position in its sequence of the first token that a chunk samples."""
    return chunk.end - chunk.rows + 1


def accepted_rows(step: Step, rows: Seq[Sampled]) -> list[list[Sampled]]:
    """Return rows that were all sampled at once by chunk, each chunk's up to the first that differs from its draft."""
    first, sampled = 0, []
    for chunk in step.chunks:
        mine = list(rows[first : first + chunk.rows])
        first += chunk.rows
        same = 0
        while same < len(chunk.draft) and mine[same].id == chunk.draft[same]:
            same += 1
        sampled.append(mine[: same + 1])
    return sampled
