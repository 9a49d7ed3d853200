"""A step as tensors: the position of each token, the slot for its KV, and the block table of each sequence.

Owns buffers of a fixed size, so that a captured graph reads every step from the same memory. All tensors of a step are
in one piece of memory, so one copy brings them to the device. Two pieces of pinned host memory alternate, since the
device may still be copying the last one. Knows nothing of the model.

    tokens     ids, positions, slot_mapping              padding has slot -1, which is not written
    rows       indices of the sampled tokens, then of    padding repeats the first token
               others whose hidden states are read
    sequences  query_start_loc, seq_lens, states,        padding has no queries and length 0
               block_tables
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.engine.core import LAST, Chunk, StateSpan, Step
from edgelm.kernels.attention import VERIFY_LEN
from edgelm.models.decoder import Batch

NO_SLOT = -1
NO_STATE = StateSpan(0, 0, 0)
ALIGNMENT = 16  # bytes, of each tensor: kernels are compiled for it
NO_ROWS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes that a step is padded to."""

    tokens: int
    sequences: int
    rows: int
    max_query_len: int  # tokens of one sequence
    only_prompts: bool = False  # each sequence has more than VERIFY_LEN tokens
    others: int = 0  # rows beside the sampled ones

    @property
    def all_rows(self) -> int:
        return self.rows + self.others

    def holds(self, other: Bucket) -> bool:
        """Return whether a step of the size `other` can be padded to this one."""
        return (
            other.tokens <= self.tokens
            and other.sequences <= self.sequences
            and other.all_rows <= self.all_rows
            and other.max_query_len <= self.max_query_len
        )


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device."""

    ids: Tensor  # int32 [tokens]; -1 - i: what row i of the previous step sampled, which only the device knows
    batch: Batch
    rows: Tensor  # int64 [rows]: indices of the sampled tokens, and of others whose hidden states are read
    num_sampled: int


class StepBuffers:
    """The memory for steps with at most so many tokens, sequences, rows, and blocks per sequence."""

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

    def fill(
        self, step: Step, bucket: Bucket, last_rows: Mapping[int, int] = NO_ROWS, others: Sequence[int] = ()
    ) -> None:
        """Copy a step to the device, padded to a bucket.

        LAST stands for what the previous step sampled: `last_rows` has the row there, by sequence id. `others` are
        the indices of more rows.
        """
        self._turn = (self._turn + 1) % len(self._host)
        if self._copied:
            self._copied[self._turn].synchronize()
        host, device = self._host[self._turn], self._device
        self._write(host, step, bucket, last_rows, others)
        if self._copied:
            used = host.used_bytes(bucket.sequences)
            device.memory[:used].copy_(host.memory[:used], non_blocking=True)
            self._copied[self._turn].record()

    def views(self, bucket: Bucket) -> StepTensors:
        """Return the device tensors in the sizes of a bucket; a graph is captured over them."""
        fields = self._device
        return StepTensors(
            fields.ids[: bucket.tokens],
            Batch(
                positions=fields.positions[: bucket.tokens],
                slot_mapping=fields.slot_mapping[: bucket.tokens],
                block_tables=fields.block_tables[: bucket.sequences],
                query_start_loc=fields.query_start_loc[: bucket.sequences + 1],
                seq_lens=fields.seq_lens[: bucket.sequences],
                states=fields.states[: bucket.sequences],
                max_query_len=bucket.max_query_len,
                only_prompts=bucket.only_prompts,
            ),
            fields.rows[: bucket.all_rows],
            bucket.rows,
        )

    def _write(
        self, host: _Fields, step: Step, bucket: Bucket, last_rows: Mapping[int, int], others: Sequence[int]
    ) -> None:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        query_start_loc, seq_lens, states = [0], [], []
        for index, chunk in enumerate(step.chunks):
            assert isinstance(chunk.kv, tuple)
            if chunk.tokens[0] == LAST:
                ids.append(-1 - last_rows[chunk.seq.id])
            else:
                ids += chunk.tokens
            positions += range(chunk.start, chunk.end)
            slots += self._slots(chunk)
            host.set_block_table(index, chunk.kv)
            rows += range(len(ids) - chunk.rows, len(ids))
            query_start_loc.append(len(ids))
            seq_lens.append(chunk.end)
            states.append(chunk.state or StateSpan(index, chunk.start, chunk.end))
        padding, padding_seqs = bucket.tokens - len(ids), bucket.sequences - len(step.chunks)
        fields = host.arrays
        fields.ids[: bucket.tokens] = ids + [0] * padding
        fields.positions[: bucket.tokens] = positions + [0] * padding
        fields.slot_mapping[: bucket.tokens] = slots + [NO_SLOT] * padding
        rows += others
        fields.rows[: bucket.all_rows] = rows + [0] * (bucket.all_rows - len(rows))
        fields.query_start_loc[: bucket.sequences + 1] = query_start_loc + [len(ids)] * padding_seqs
        fields.seq_lens[: bucket.sequences] = seq_lens + [0] * padding_seqs
        fields.states[: bucket.sequences] = states + [NO_STATE] * padding_seqs

    def _slots(self, chunk: Chunk) -> list[int]:
        """Return the slot of each token of a chunk: block * block_len + offset."""
        assert isinstance(chunk.kv, tuple)
        size = self._block_len
        if len(chunk.tokens) == 1:
            return [chunk.kv[chunk.start // size] * size + chunk.start % size]
        positions = np.arange(chunk.start, chunk.end)
        slots: list[int] = (np.asarray(chunk.kv, np.int64)[positions // size] * size + positions % size).tolist()
        return slots


def bucket_of(step: Step, num_others: int = 0) -> Bucket:
    """Return the sizes of a step with so many rows beside the sampled ones, without padding."""
    lengths = [len(chunk.tokens) for chunk in step.chunks] or [0]
    return Bucket(step.num_tokens, len(step.chunks), step.num_rows, max(lengths), min(lengths) > VERIFY_LEN, num_others)


class _Arrays(NamedTuple):
    """The tensors in one piece of memory, in order. Block tables are last, so that only the used ones are copied."""

    slot_mapping: NDArray[np.int64]  # [tokens]
    rows: NDArray[np.int64]  # [rows]
    ids: NDArray[np.int32]  # [tokens]
    positions: NDArray[np.int32]  # [tokens]
    query_start_loc: NDArray[np.int32]  # [sequences + 1]
    seq_lens: NDArray[np.int32]  # [sequences]
    states: NDArray[np.int32]  # [sequences, 3]
    block_tables: NDArray[np.int32]  # [sequences, blocks]


class _Fields:
    """One piece of memory, as tensors, and as arrays if it is on the host."""

    def __init__(
        self, max_tokens: int, max_sequences: int, max_rows: int, max_blocks: int, device: torch.device, *, pinned: bool
    ) -> None:
        fields = (
            ((max_tokens,), torch.int64),
            ((max_rows,), torch.int64),
            ((max_tokens,), torch.int32),
            ((max_tokens,), torch.int32),
            ((max_sequences + 1,), torch.int32),
            ((max_sequences,), torch.int32),
            ((max_sequences, 3), torch.int32),
            ((max_sequences, max_blocks), torch.int32),
        )
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in fields]
        *offsets, end = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        views = [
            self.memory[offset : offset + size].view(dtype).view(shape)
            for offset, size, (shape, dtype) in zip(offsets, sizes, fields, strict=True)
        ]
        self.slot_mapping, self.rows, self.ids, self.positions = views[:4]
        self.query_start_loc, self.seq_lens, self.states, self.block_tables = views[4:]
        if device.type == "cpu":
            self.arrays = _Arrays(*(view.numpy() for view in views))
        self._block_tables_offset = offsets[-1]
        self._table_bytes = max_blocks * torch.int32.itemsize
        self._written: list[tuple[int, ...]] = [()] * max_sequences

    def set_block_table(self, index: int, block_table: tuple[int, ...]) -> None:
        """Write the blocks of a sequence, unless the same tuple was written there last time."""
        if self._written[index] is not block_table:
            self.arrays.block_tables[index, : len(block_table)] = block_table
            self._written[index] = block_table

    def used_bytes(self, sequences: int) -> int:
        """Return the bytes of the memory that a step of so many sequences reads."""
        return self._block_tables_offset + sequences * self._table_bytes
