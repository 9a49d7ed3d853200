"""A step as tensors: where each token stands, where its KV goes, and which blocks each sequence reads.

Owns buffers of a fixed size, so that a captured graph reads each step from the same memory. Two sets of pinned host
memory take turns: the one of a step that the device may still be copying is not written. Knows nothing of a model.

    tokens     ids, positions, slots            a bucket pads them: slot -1 stores nothing
    sequences  starts, lengths, tables          padded ones have no queries and length 0
    rows       which tokens are sampled         padded ones repeat the first token
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.core import Step
from edgelm.models.batch import Batch

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes that a step is padded to."""

    tokens: int
    sequences: int
    rows: int
    max_query: int  # tokens of one sequence


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device."""

    ids: Tensor  # int32 [tokens]
    batch: Batch
    rows: Tensor  # int64 [rows]: which tokens are sampled


@dataclass(frozen=True, slots=True)
class _Fields:
    """One set of buffers."""

    ids: Tensor
    positions: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    slots: Tensor
    rows: Tensor


class StepBuffers:
    """The memory of steps with at most so many tokens, sequences, rows, and blocks of a sequence."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        max_rows: int,
        max_blocks: int,
        block_len: int,
        device: torch.device,
    ) -> None:
        self._block_len = block_len
        self._cuda = device.type == "cuda"
        sizes = max_tokens, max_sequences, max_rows, max_blocks
        self._host = [
            _make_fields(*sizes, torch.device("cpu"), pinned=self._cuda) for _ in range(2 if self._cuda else 1)
        ]
        self._device = _make_fields(*sizes, device, pinned=False) if self._cuda else self._host[0]
        self._copied = [torch.cuda.Event() for _ in self._host] if self._cuda else []
        self._turn = 0

    def fill(self, step: Step, bucket: Bucket | None = None) -> StepTensors:
        """Bring a step to the device, padded to a bucket; None: to its own sizes."""
        bucket = bucket or bucket_of(step)
        self._turn = (self._turn + 1) % len(self._host)
        if self._copied:
            self._copied[self._turn].synchronize()
        host = self._host[self._turn]
        self._write(host, step, bucket)
        device = self._device
        if self._copied:
            for name in _Fields.__dataclass_fields__:
                getattr(device, name).copy_(getattr(host, name), non_blocking=True)
            self._copied[self._turn].record()
        return self.views(bucket)

    def views(self, bucket: Bucket) -> StepTensors:
        """Return the device's memory as a bucket sees it: what a graph is captured over."""
        fields = self._device
        return StepTensors(
            fields.ids[: bucket.tokens],
            Batch(
                positions=fields.positions[: bucket.tokens],
                slots=fields.slots[: bucket.tokens],
                tables=fields.tables[: bucket.sequences],
                starts=fields.starts[: bucket.sequences + 1],
                lengths=fields.lengths[: bucket.sequences],
                max_query=bucket.max_query,
            ),
            fields.rows[: bucket.rows],
        )

    def _write(self, host: _Fields, step: Step, bucket: Bucket) -> None:
        ids, positions, slots = host.ids.numpy(), host.positions.numpy(), host.slots.numpy()
        starts, lengths, tables, rows = (
            host.starts.numpy(),
            host.lengths.numpy(),
            host.tables.numpy(),
            host.rows.numpy(),
        )
        token = row = 0
        for index, chunk in enumerate(step.chunks):
            assert isinstance(chunk.kv, tuple)
            end = token + len(chunk.tokens)
            ids[token:end] = chunk.tokens
            places = np.arange(chunk.start, chunk.end)
            positions[token:end] = places
            table: NDArray[np.int32] = np.asarray(chunk.kv, np.int32)
            tables[index, : len(table)] = table
            slots[token:end] = table[places // self._block_len].astype(np.int64) * self._block_len
            slots[token:end] += places % self._block_len
            starts[index], lengths[index] = token, chunk.end
            rows[row : row + chunk.rows] = range(end - chunk.rows, end)
            token, row = end, row + chunk.rows
        starts[len(step.chunks) : bucket.sequences + 1] = token
        lengths[len(step.chunks) : bucket.sequences] = 0
        ids[token : bucket.tokens] = 0
        positions[token : bucket.tokens] = 0
        slots[token : bucket.tokens] = NO_SLOT
        rows[row : bucket.rows] = 0


def bucket_of(step: Step) -> Bucket:
    """Return the sizes of a step as they are."""
    longest = max((len(chunk.tokens) for chunk in step.chunks), default=0)
    return Bucket(step.num_tokens, len(step.chunks), step.num_rows, longest)


def _make_fields(
    max_tokens: int, max_sequences: int, max_rows: int, max_blocks: int, device: torch.device, *, pinned: bool
) -> _Fields:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

    return _Fields(
        ids=zeros(max_tokens),
        positions=zeros(max_tokens),
        starts=zeros(max_sequences + 1),
        lengths=zeros(max_sequences),
        tables=zeros(max_sequences, max_blocks),
        slots=zeros(max_tokens, dtype=torch.int64),
        rows=zeros(max_rows, dtype=torch.int64),
    )
