"""TorchHeads: the head of a model that predicts the token after the next one, over a cache of its own.

Owns that cache, HEADS_LEN positions for each sequence, and the rows of hidden states that the executor's steps write. A
sequence's first position there is 0, wherever the head begins: attention depends on distances only. What it reads and
has computed is that of `FollowedHeads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from edgelm.backends.followed_heads import HEADS_WINDOW, NOTHING, Followed, FollowedHeads
from edgelm.backends.torch.batch import StepBuffers, bucket_of
from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.memory import HEADS_LEN
from edgelm.base.sampling import SamplingParams
from edgelm.engine.core import Chunk, Step
from edgelm.engine.core import Sequence as TokenSequence
from edgelm.kernels.attention import VERIFY_LEN
from edgelm.kernels.cache import BLOCK_LEN, KVFormat, LayerCache
from edgelm.models.next_head import NextHead


class TorchHeads(FollowedHeads[Tensor]):
    """The `Heads` of an executor, for so many sequences. `max_rows` bounds the hidden states of one step."""

    def __init__(self, head: NextHead, kv_format: KVFormat, num_sequences: int, max_rows: int) -> None:
        super().__init__(num_sequences, max_len=HEADS_LEN - HEADS_WINDOW)
        self._head = head
        self._blocks = HEADS_LEN // BLOCK_LEN
        caches = head.new_caches(kv_format, num_sequences * self._blocks, 0, torch.float16)
        self._caches = [cache for cache in caches if isinstance(cache, LayerCache)]
        self._seq = TokenSequence(0, [], 0, SamplingParams())  # of all our steps
        self._tables = [tuple(range(i * self._blocks, (i + 1) * self._blocks)) for i in range(num_sequences)]
        self._buffers = StepBuffers(
            max_tokens=VERIFY_LEN,
            max_sequences=1,
            max_rows=VERIFY_LEN,
            max_blocks=self._blocks,
            block_len=BLOCK_LEN,
            device=head.device,
        )
        self._hidden = torch.zeros(max_rows, head.config.hidden_size, dtype=head.dtype, device=head.device)

    # -- for the executor ------------------------------------------------------------------------------------------

    def others(self, step: Step) -> list[int]:
        """Return the rows of a step whose hidden states are read, beside the sampled ones."""
        rows: list[int] = []
        start = 0
        for chunk in step.chunks:
            end = start + len(chunk.tokens)
            rows += range(end - chunk.rows - self.wanted(chunk), end - chunk.rows)
            start = end
        return rows

    def write(self, hidden: Tensor) -> None:
        """Copy the rows of a step, in a graph too: the sampled ones, then the others."""
        self._hidden[: len(hidden)].copy_(hidden)

    def take(self, step: Step) -> None:
        """Keep the hidden states of a step that was launched."""
        if not any(map(self.follows, step.chunks)):
            return
        counts = [self.wanted(chunk) for chunk in step.chunks]
        rows = self._hidden[: step.num_rows + sum(counts)].clone().unbind()
        sampled, other = 0, step.num_rows
        for chunk, count in zip(step.chunks, counts, strict=True):
            if self.follows(chunk):
                self.keep(chunk, [*rows[other : other + count], *rows[sampled : sampled + chunk.rows]])
            sampled, other = sampled + chunk.rows, other + count

    def warm_up(self, most: int = VERIFY_LEN) -> Iterator[None]:
        """Run passes of all kinds, of at most so many rows, on the first blocks; their result means nothing."""
        from edgelm.backends.torch.warm_up import pass_lengths  # it imports Triton, which the CPU does without

        for rows in pass_lengths(self._head, self._caches, HEADS_LEN, most):
            self._predict(Followed(0), [0] * rows, 0, list(self._hidden[:1].expand(rows, -1)))
            yield

    # -- the head's cache ------------------------------------------------------------------------------------------

    def _forget(self, followed: Followed[Tensor], length: int) -> None:
        """Do nothing: later positions overwrite it, and nothing reads it before."""

    def _run(
        self, followed: Followed[Tensor], tokens: list[int], start: int, hidden: Sequence[Tensor]
    ) -> tuple[int, float]:
        at = start - followed.begin
        if at + len(tokens) > HEADS_LEN:
            return NOTHING
        for first in range(0, len(tokens), VERIFY_LEN):
            part = slice(first, first + VERIFY_LEN)
            logits = self._predict(followed, tokens[part], at + first, hidden[part])
        with gpu_errors(), torch.inference_mode():
            probability, token = torch.softmax(logits[0].double(), 0).max(0)
            best, chance = torch.stack((token.double(), probability)).tolist()  # one wait for both
        return (int(best), chance) if chance > 0 else NOTHING  # not if it is NaN

    def _predict(self, followed: Followed[Tensor], tokens: list[int], at: int, hidden: Sequence[Tensor]) -> Tensor:
        """Compute the positions from `at` on; return the logits behind the last one: [1, vocab_size]."""
        step = Step((Chunk(self._seq, at, tokens, 1, self._tables[followed.slot]),))
        size = bucket_of(step)
        with gpu_errors(), torch.inference_mode():
            self._buffers.fill(step, size)
            tensors = self._buffers.views(size)
            states = self._head.predict(tensors.ids, torch.stack(list(hidden)), tensors.batch, self._caches)
            followed.state = states[-1]
            return self._head.logits(states[-1:])
