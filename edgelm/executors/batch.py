"""A step as tensors: where each token stands, where its KV goes, and which blocks each sequence reads.

Owns buffers of a fixed size, so that a captured graph reads each step from the same memory. All of a step lies in one
piece, which one copy brings to the device. Two pieces of pinned host memory take turns: the one of a step that the
device may still be copying is not written. Knows nothing of a model.

    tokens     ids, sources, positions, slots   a bucket pads them: slot -1 stores nothing
    rows       which tokens are sampled         padded ones repeat the first token
    sequences  starts, lengths, tables          padded ones have no queries and length 0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.core import LAST, Chunk, Step
from edgelm.models.batch import Batch

NO_SLOT = -1
ALIGNMENT = 16  # bytes: kernels are compiled for what begins there


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes that a step is padded to."""

    tokens: int
    sequences: int
    rows: int
    max_query: int  # tokens of one sequence

    def holds(self, other: Bucket) -> bool:
        """Whether a step of that size can be padded to this one."""
        return (
            other.tokens <= self.tokens
            and other.sequences <= self.sequences
            and other.rows <= self.rows
            and other.max_query <= self.max_query
        )


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device."""

    ids: Tensor  # int32 [tokens]
    batch: Batch
    rows: Tensor  # int64 [rows]: which tokens are sampled


@dataclass(frozen=True, slots=True)
class LastTokens:
    """What the step before sampled, where nothing is to wait for it."""

    tokens: Tensor  # int64 [rows], on the device; below 0 where there is none
    row_of: Mapping[int, int]  # by sequence: the row of its last token


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
        self._host = [_Fields(*sizes, torch.device("cpu"), pinned=self._cuda) for _ in range(2 if self._cuda else 1)]
        self._device = _Fields(*sizes, device, pinned=False) if self._cuda else self._host[0]
        self._copied = [torch.cuda.Event() for _ in self._host] if self._cuda else []
        self._turn = 0

    def fill(self, step: Step, bucket: Bucket, last: LastTokens | None = None) -> None:
        """Bring a step to the device, padded to a bucket. LAST is looked up in `last`."""
        self._turn = (self._turn + 1) % len(self._host)
        if self._copied:
            self._copied[self._turn].synchronize()
        host, device = self._host[self._turn], self._device
        self._write(host, step, bucket, last.row_of if last else {})
        if self._copied:
            used = host.used_bytes(bucket.sequences)
            device.memory[:used].copy_(host.memory[:used], non_blocking=True)
            self._copied[self._turn].record()
        if any(chunk.tokens[0] == LAST for chunk in step.chunks):
            assert last is not None
            count = len(step.chunks)
            assert count == step.num_tokens, "LAST stands alone in its chunk, and in all of a step's"
            known = last.tokens.index_select(0, device.sources[:count]).clamp_(min=0)  # of NaN no row is looked up
            device.ids[:count].copy_(known)

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

    def _write(self, host: _Fields, step: Step, bucket: Bucket, row_of: Mapping[int, int]) -> None:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        starts, lengths, sources = [0], [], []
        for index, chunk in enumerate(step.chunks):
            assert isinstance(chunk.kv, tuple)
            if chunk.tokens[0] == LAST:
                ids.append(0)
                sources.append(row_of[chunk.seq.id])
            else:
                ids += chunk.tokens
            positions += range(chunk.start, chunk.end)
            slots += self._slots(chunk)
            host.set_table(index, chunk.kv)
            rows += range(len(ids) - chunk.rows, len(ids))
            starts.append(len(ids))
            lengths.append(chunk.end)
        tokens, sequences = bucket.tokens - len(ids), bucket.sequences - len(step.chunks)
        fields = host.arrays
        fields.ids[: bucket.tokens] = ids + [0] * tokens
        fields.positions[: bucket.tokens] = positions + [0] * tokens
        fields.slots[: bucket.tokens] = slots + [NO_SLOT] * tokens
        fields.rows[: bucket.rows] = rows + [0] * (bucket.rows - len(rows))
        fields.starts[: bucket.sequences + 1] = starts + [len(ids)] * sequences
        fields.lengths[: bucket.sequences] = lengths + [0] * sequences
        fields.sources[: len(sources)] = sources

    def _slots(self, chunk: Chunk) -> list[int]:
        """Return where the KV of each token of a chunk goes: block and offset in one number."""
        assert isinstance(chunk.kv, tuple)
        size = self._block_len
        if len(chunk.tokens) == 1:
            return [chunk.kv[chunk.start // size] * size + chunk.start % size]
        places = np.arange(chunk.start, chunk.end)
        slots: list[int] = (np.asarray(chunk.kv, np.int64)[places // size] * size + places % size).tolist()
        return slots


def bucket_of(step: Step) -> Bucket:
    """Return the sizes of a step as they are."""
    longest = max((len(chunk.tokens) for chunk in step.chunks), default=0)
    return Bucket(step.num_tokens, len(step.chunks), step.num_rows, longest)


class _Arrays(NamedTuple):
    """What lies where in one piece of memory. Tables come last: only those of a step are copied."""

    slots: NDArray[np.int64]  # [tokens]
    rows: NDArray[np.int64]  # [rows]
    ids: NDArray[np.int32]  # [tokens]
    sources: NDArray[np.int32]  # [tokens]
    positions: NDArray[np.int32]  # [tokens]
    starts: NDArray[np.int32]  # [sequences + 1]
    lengths: NDArray[np.int32]  # [sequences]
    tables: NDArray[np.int32]  # [sequences, blocks]


class _Fields:
    """One piece of memory, as tensors and, on the host, as arrays."""

    def __init__(
        self,
        max_tokens: int,
        max_sequences: int,
        max_rows: int,
        max_blocks: int,
        device: torch.device,
        *,
        pinned: bool,
    ) -> None:
        fields = (
            ((max_tokens,), torch.int64),
            ((max_rows,), torch.int64),
            ((max_tokens,), torch.int32),
            ((max_tokens,), torch.int32),
            ((max_tokens,), torch.int32),
            ((max_sequences + 1,), torch.int32),
            ((max_sequences,), torch.int32),
            ((max_sequences, max_blocks), torch.int32),
        )
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in fields]
        *starts, end = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        views = [
            self.memory[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, fields, strict=True)
        ]
        self.slots, self.rows, self.ids, self.sources, self.positions, self.starts, self.lengths, self.tables = views
        if device.type == "cpu":
            self.arrays = _Arrays(*(view.numpy() for view in views))
        self._tables_at = starts[-1]
        self._table_bytes = max_blocks * torch.int32.itemsize
        self._written: list[tuple[int, ...]] = [()] * max_sequences

    def set_table(self, index: int, table: tuple[int, ...]) -> None:
        """Write the blocks of a sequence, unless they are what was written there the last time."""
        if self._written[index] is not table:
            self.arrays.tables[index, : len(table)] = table
            self._written[index] = table

    def used_bytes(self, sequences: int) -> int:
        """Return how much of the memory a step of so many sequences reads."""
        return self._tables_at + sequences * self._table_bytes
