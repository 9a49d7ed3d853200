"""Comparing the answers of two runs of an engine whose steps have other rows beside them.

A matmul over another number of rows sums in another order, so keys, values and logits differ in their last bits. Where
that moves a key or value across the border between two codes of the KV cache, the logits of the following rows differ
by more, and a draw between two nearly equal tokens may end differently. So not tokens are compared but logits, of every
sampled row up to the first token that differs; and each token must be the one that its own row's logits give.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.torch.executor import TorchExecutor
from edgelm.engine.core import SamplingParams, Step
from edgelm.engine.sampling.history import History
from edgelm.engine.sampling.reference import sample

Request = tuple[list[int], SamplingParams]
Rows = dict[tuple[int, int], NDArray[np.float32]]  # by the request's seed and the position of the sampled token
# The logits of the tiny model are about 4 in size. Rounding moved them by up to 0.06 in all KV formats (by 0.00005 with
# a cache of 32 bits); an entry that was not written by 1.6 to 13, a wrong token or block by 16 and more.
BOUND = 0.5
MOST_DIFFERENT = 3  # answers of a run


def recording(rows: Rows) -> type[TorchExecutor]:
    """Return an executor that records the logits of each sampled row; a row that is run again replaces the earlier."""

    class Recording(TorchExecutor):
        def forward(self, step: Step) -> None:
            super().forward(step)
            logits = iter(self.logits(step).copy())
            for chunk in step.chunks:
                for position in range(chunk.end - chunk.rows + 1, chunk.end + 1):
                    rows[chunk.seq.params.seed or 0, position] = next(logits)

    return Recording


def assert_equal_but_for_rounding(
    requests: Seq[Request], one: tuple[list[list[int]], Rows], other: tuple[list[list[int]], Rows]
) -> None:
    """Assert that two runs gave the same answers to the same requests; each is the answers and the recorded rows."""
    num_different = 0
    for i, (prompt, params) in enumerate(requests):
        answers = [tokens[i] for tokens, _ in (one, other)]
        for tokens, (_, rows) in zip(answers, (one, other), strict=True):
            _assert_sampled_from(rows, prompt, params, tokens)
        num_equal = next((n for n, (a, b) in enumerate(zip(*answers, strict=True)) if a != b), len(answers[0]))
        num_different += answers[0] != answers[1]
        for n in range(min(num_equal + 1, len(answers[0]))):
            key = params.seed or 0, len(prompt) + n
            difference = np.abs(one[1][key] - other[1][key]).max()
            assert difference < BOUND, f"request {i}: the logits of token {n} differ by {difference}"
    assert num_different <= MOST_DIFFERENT


def _assert_sampled_from(rows: Rows, prompt: list[int], params: SamplingParams, tokens: list[int]) -> None:
    """Assert that the tokens of an answer are those that the logits of its rows give."""
    assert len(tokens) == params.max_tokens
    history = History(prompt)
    for position, token in enumerate(tokens, len(prompt)):
        assert sample(rows[params.seed or 0, position], params, position, history).id == token, f"position {position}"
        history.extend([token])
