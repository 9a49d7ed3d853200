"""The parts of a step: the same tokens and rows in several smaller steps, for a device that has too little memory.

Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgelm.engine.core import Chunk, Step

PART_TOKENS = 64


def parts_of(step: Step, max_tokens: int = PART_TOKENS) -> Iterator[Step]:
    """Yield steps of one sequence and at most so many tokens; their rows, in order, are those of the step."""
    for chunk in step.chunks:
        first_row = len(chunk.tokens) - chunk.rows
        for begin in range(0, len(chunk.tokens), max_tokens):
            tokens = chunk.tokens[begin : begin + max_tokens]
            rows = max(begin + len(tokens) - max(begin, first_row), 0)
            yield Step((Chunk(chunk.seq, chunk.start + begin, tokens, rows, chunk.kv),))
