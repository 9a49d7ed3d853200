"""The vectors of inputs of a causal model, from the hidden states of their tokens, piece by piece.

Owns the order of the tokens and the pooling. A backend runs the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgelm.engine.core import Pooling


class Piece(NamedTuple):
    """Tokens of one input, at the positions from `start` on."""

    seq: int
    start: int
    tokens: Sequence[int]


RunPieces = Callable[[Sequence[Piece]], NDArray[np.float32]]  # returns the hidden states: [tokens, width]


class CausalBatch:
    """An `EmbeddingBatch` over a function that runs pieces, of `max_piece` tokens together."""

    def __init__(
        self, inputs: Sequence[Sequence[int]], width: int, pooling: Pooling, max_piece: int, run: RunPieces
    ) -> None:
        self._inputs = inputs
        self._pooling = pooling
        self._max_piece = max_piece
        self._run = run
        self._seq, self._start = 0, 0  # the next token's
        self._vectors = np.zeros((len(inputs), width), np.float32)

    def step(self, max_tokens: int) -> int:
        pieces = self._next(min(max_tokens, self._max_piece))
        if not pieces:
            return 0
        hidden = self._run(pieces)
        first = 0
        for piece in pieces:
            last = first + len(piece.tokens)
            _add(self._vectors[piece.seq], hidden[first:last], piece.start, self._pooling)
            first = last
        return first

    def vectors(self) -> NDArray[np.float32]:
        return self._vectors

    def _next(self, room: int) -> list[Piece]:
        pieces: list[Piece] = []
        while room and self._seq < len(self._inputs):
            tokens = self._inputs[self._seq]
            piece = Piece(self._seq, self._start, tokens[self._start : self._start + room])
            pieces.append(piece)
            room -= len(piece.tokens)
            self._start += len(piece.tokens)
            if self._start == len(tokens):
                self._seq, self._start = self._seq + 1, 0
        return pieces


def _add(vector: NDArray[np.float32], hidden: NDArray[np.float32], start: int, pooling: Pooling) -> None:
    """Update the vector of an input by the hidden states of its tokens from `start` on: [tokens, width]."""
    if pooling == "mean":
        end = start + len(hidden)
        vector *= start / end
        vector += hidden.sum(0) / end
    elif pooling == "cls":
        if start == 0:
            vector[:] = hidden[0]
    else:
        vector[:] = hidden[-1]
