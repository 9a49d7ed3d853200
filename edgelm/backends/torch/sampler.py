"""DeviceSampler: samples rows of logits on the GPU: parameters go there, tokens come back, logits stay.

Owns the buffers between host and device, and their reuse. `edgelm.engine.sampling.reference` defines the parameters,
and `edgelm.kernels.sampling` computes the result. Knows nothing of steps and sequences.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.base.sampling import MAX_LOGPROBS, SamplingParams
from edgelm.engine.core import NOT_A_TOKEN, Sampled
from edgelm.engine.sampling.history import History
from edgelm.engine.sampling.reference import COLDEST, HOTTEST, SLACK
from edgelm.kernels import sampling
from edgelm.kernels.sampling import Answer, Batch, Flag, Word

assert sampling.MAX_TOP == MAX_LOGPROBS
assert NOT_A_TOKEN == -1  # the kernels have it as a constant

IN_FLIGHT = 2  # at most so many launches are unread: an engine may run one step ahead
_INACTIVE: NDArray[np.int64] = np.zeros(len(Word), np.int64)  # parameters of a row that is not sampled

Record = Callable[[Callable[[], object]], "Replayable"]


class Replayable(Protocol):
    """Recorded work on a device: a CUDA graph."""

    def replay(self) -> None: ...


class _Captured(NamedTuple):
    """The recorded sampling of all rows of one logits buffer."""

    logits: Tensor  # held, so that its address stays in use
    graph: Replayable


class RowRequest(NamedTuple):
    """The parameters of one row; `extra` are the draft tokens between the end of the history and this row."""

    params: SamplingParams
    position: int  # of the token to be sampled, in its sequence
    history: History | None = None  # required if the parameters have penalties
    extra: Sequence[int] = ()


class Launch:
    """Sampled rows, on their way to the host."""

    def __init__(self, answers: _Answers, num_tops: list[int], num_vocab: int) -> None:
        self._answers = answers
        self._number = answers.number
        self._num_tops = num_tops
        self._num_vocab = num_vocab

    def read(self) -> list[Sampled]:
        """Wait for the tokens. Has to be called before IN_FLIGHT more launches."""
        assert self._number == self._answers.number, "too many launches are not read"
        return self._answers.read(self._num_tops, self._num_vocab)


class DeviceSampler:
    """Samples up to `max_rows` rows at once, in launches on one stream of the device.

    All its memory is allocated here. `max_entries` bounds the biases, and the tokens of the histories, that are on the
    device at one time; rows with more are sampled in parts. By default they are those of the largest possible row.
    """

    def __init__(
        self,
        num_vocab: int,
        max_rows: int,
        device: torch.device | str,
        implementation: str | None = None,
        max_entries: int = 0,
    ) -> None:
        self._max_entries = max_entries or num_vocab
        self._num_vocab = num_vocab
        self._max_rows = max_rows
        self._device = torch.device(device)
        self._implementation = implementation
        self._captured: list[_Captured] = []  # the fewest rows first
        self._num_words = (num_vocab + 31) // 32  # of a mask
        num_masks = max_rows * self._num_words
        with torch.inference_mode():
            self._rows = _Column(torch.int64, max_rows * len(Word), self._device)
            self._bias_ids = _Column(torch.int32, self._max_entries, self._device)
            self._bias = _Column(torch.float64, self._max_entries, self._device)
            self._history_ids = _Column(torch.int32, self._max_entries, self._device)
            self._history_counts = _Column(torch.int32, self._max_entries, self._device)
            self._masks = _Column(torch.int32, num_masks, self._device)
            # The answers of all launches, of graphs too, in one place. On one stream, the copy to the host and the next
            # forward pass, which reads the tokens, end before the next launch writes here.
            self._latest = torch.full((max_rows, sampling.NUM_ANSWER), NOT_A_TOKEN, dtype=torch.int64, device=device)
            self._answers = deque(_Answers(max_rows, self._device) for _ in range(IN_FLIGHT))

    @property
    def tokens(self) -> Tensor:
        """The tokens of the latest launch, for the device's next work: int64 [max_rows], always in the same memory.

        NOT_A_TOKEN where the logits were not numbers.
        """
        return self._latest[:, Answer.TOKEN]

    def sample(self, logits: Tensor, rows: Iterable[RowRequest], masks: NDArray[np.int32] | None) -> list[Sampled]:
        """Sample each row of logits [rows, vocab] on the device; masks are [rows, ceil(vocab / 32)]."""
        return self.launch(logits, rows, masks).read()

    def capture(self, logits: Tensor, record: Record) -> None:
        """Sample rows of these logits by a graph that `record` captures; their memory must not move.

        The graph serves rows without biases and penalties; other rows are launched kernel by kernel.
        """
        assert len(logits) <= self._max_rows
        self._rows.clear()
        self._rows.append(np.zeros(len(logits) * len(Word), np.int64))
        table, masks = self._rows.send(), self._masks.send()
        none = table[:0]
        batch = Batch(
            table[: len(logits) * len(Word)].view(-1, len(Word)),
            none.int(),
            none.double(),
            none.int(),
            none.int(),
            masks.view(-1, self._num_words),
        )
        self._captured.append(_Captured(logits, record(lambda: self._sample(logits, batch))))
        self._captured.sort(key=lambda captured: len(captured.logits))

    def launch(self, logits: Tensor, rows: Iterable[RowRequest], masks: NDArray[np.int32] | None) -> Launch:
        """Start to sample, without waiting for the device. A launch may stay unread."""
        assert logits.shape[1] == self._num_vocab, logits.shape
        with torch.inference_mode():
            parts = self._parts(rows)
            captured = self._captured_over(logits) if len(parts) == 1 else None
            words: list[Tensor] = []
            num_tops: list[int] = []
            for part in parts:
                first = len(num_tops)
                batch = self._stage(part, masks, first, max(len(logits), len(captured.logits) if captured else 0))
                num_tops += [-1 if row.params.num_logprobs is None else row.params.num_logprobs for row in part]
                if captured and not len(batch.bias_ids) and not len(batch.history_ids):
                    captured.graph.replay()
                else:
                    self._sample(logits, batch)
                if len(parts) > 1:  # the next part overwrites its rows
                    words.append(self._latest[first : len(num_tops)].clone())
            assert len(logits) == len(num_tops) <= self._max_rows, (logits.shape, len(num_tops))
            assert masks is None or len(masks) == len(num_tops), (masks.shape, len(num_tops))
            if words:
                self._latest[: len(logits)].copy_(torch.cat(words))
            self._answers.rotate()
            self._answers[0].fetch(self._latest[: len(logits)])
        return Launch(self._answers[0], num_tops, self._num_vocab)

    def _sample(self, logits: Tensor, batch: Batch) -> None:
        """Start the kernels for rows of logits; a row that is not sampled gets NOT_A_TOKEN."""
        sampling.sample(logits, batch, out=self._latest[: len(logits)], implementation=self._implementation)

    def _parts(self, rows: Iterable[RowRequest]) -> list[list[RowRequest]]:
        """Return the rows in as few parts as have room for their biases and histories: nearly always one."""
        parts: list[list[RowRequest]] = [[]]
        biased = counted = 0
        for row in rows:
            own_biased = len(_bias_arrays(row.params.logit_bias)[0]) if row.params.logit_bias else 0
            own_counted = 0
            if row.params.penalized:
                assert row.history is not None, "penalties need a history"
                own_counted = min(len(row.history.ids) + len(row.extra), self._num_vocab)
            biased, counted = biased + own_biased, counted + own_counted
            if parts[-1] and max(biased, counted) > self._max_entries:
                parts.append([])
                biased, counted = own_biased, own_counted
            parts[-1].append(row)
        return parts

    def _captured_over(self, logits: Tensor) -> _Captured | None:
        """Return the smallest recorded work that samples these rows; None: there is none."""
        return next(
            (
                captured
                for captured in self._captured
                if captured.logits.data_ptr() == logits.data_ptr() and len(captured.logits) >= len(logits)
            ),
            None,
        )

    def _stage(self, rows: Sequence[RowRequest], masks: NDArray[np.int32] | None, first: int, num_padded: int) -> Batch:
        """Send the parameters of the rows from number `first` on, and of inactive rows before and behind them.

        With those there are `num_padded` rows. The masks are those of all rows.
        """
        columns = self._rows, self._bias_ids, self._bias, self._history_ids, self._history_counts, self._masks
        for column in columns:
            column.clear()
        masked: list[bool] = []
        if masks is not None:
            assert masks.shape[1] == self._num_words, masks.shape
            masked = (masks != -1).any(axis=1).tolist()
            if any(masked):
                self._masks.append(masks.reshape(-1))
        table_words: list[NDArray[np.int64]] = [_INACTIVE] * first
        for i, row in enumerate(rows, first):
            table_words.append(self._words(row, masks is not None and masked[i]))
        table_words += [_INACTIVE] * (num_padded - len(table_words))
        self._rows.append(np.concatenate(table_words))
        table, bias_ids, bias, history_ids, history_counts, packed = (column.send() for column in columns)
        num_biased, num_counted = self._bias.used, self._history_ids.used
        return Batch(
            table[: num_padded * len(Word)].view(-1, len(Word)),
            bias_ids[:num_biased],
            bias[:num_biased],
            history_ids[:num_counted],
            history_counts[:num_counted],
            packed.view(-1, self._num_words),
        )

    def _words(self, row: RowRequest, masked: bool) -> NDArray[np.int64]:
        """Stage the bias and the history of a row, and return its other parameters."""
        params = row.params
        bias_start, history_start = self._bias.used, self._history_ids.used
        if params.logit_bias:
            ids, bias = _bias_arrays(params.logit_bias)
            assert ids.max() < self._num_vocab, "a biased token is outside of the vocabulary"
            self._bias_ids.append(ids)
            self._bias.append(bias)
        if params.penalized:
            assert row.history is not None
            for token in row.extra:
                row.history.push(token)
            self._history_ids.append(row.history.ids)
            self._history_counts.append(row.history.counts)
            row.history.pop(len(row.extra))
        words = _words_of(params, self._num_vocab).copy()
        if masked:
            words[Word.FLAGS] |= Flag.MASKED
        words[Word.POSITION] = row.position
        words[Word.BIAS_START :] = bias_start, self._bias.used, history_start, self._history_ids.used
        return words


class _Column:
    """An array that is filled on the host, in pinned memory, and its copy on the device.

    There is a host buffer for each launch in flight, used in turn: so filling one never waits for a launch.
    """

    def __init__(self, dtype: torch.dtype, capacity: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._hosts = deque(
            torch.empty(capacity, dtype=dtype, pin_memory=self._cuda) for _ in range(IN_FLIGHT if self._cuda else 1)
        )
        self._sent = deque(torch.cuda.Event() for _ in self._hosts) if self._cuda else None
        self._device = torch.empty(capacity, dtype=dtype, device=device) if self._cuda else self._hosts[0]
        self.used = 0

    def clear(self) -> None:
        """Switch to the next host buffer: the device has its content, because its launch has been read."""
        self._hosts.rotate()
        if self._sent:
            self._sent.rotate()
            self._sent[0].synchronize()
        self.used = 0

    def append(self, values: NDArray[Any]) -> None:
        end = self.used + len(values)
        assert end <= len(self._hosts[0]), (end, len(self._hosts[0]))
        self._hosts[0].numpy()[self.used : end] = values
        self.used = end

    def send(self) -> Tensor:
        """Copy the appended values to the device, after its present work; return the whole array there."""
        host = self._hosts[0]
        if not self._sent:
            self._device = host
        elif self.used:
            self._device[: self.used].copy_(host[: self.used], non_blocking=True)
            self._sent[0].record()
        return self._device


class _Answers:
    """The answers of a launch on their way to the host; `number` tells of which launch."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._host = torch.empty((max_rows, sampling.NUM_ANSWER), dtype=torch.int64, pin_memory=cuda)
        self._fetched = torch.cuda.Event() if cuda else None
        self.number = 0

    def fetch(self, words: Tensor) -> None:
        """Start to copy the answers; on one stream, they follow those of the launch before."""
        self._host[: len(words)].copy_(words, non_blocking=True)
        self.number += 1
        if self._fetched:
            self._fetched.record()

    def read(self, num_tops: list[int], num_vocab: int) -> list[Sampled]:
        """Wait for the copy and return its rows; `num_tops` is the number of likely tokens that each row requested."""
        if self._fetched:
            self._fetched.synchronize()
        words: NDArray[np.int64] = self._host.numpy()[: len(num_tops)]
        tokens = words[:, Answer.TOKEN].tolist()
        return [
            Sampled(token) if num_top < 0 or token == NOT_A_TOKEN else _with_logprobs(words[i], min(num_top, num_vocab))
            for i, (token, num_top) in enumerate(zip(tokens, num_tops, strict=True))
        ]


def _with_logprobs(words: NDArray[np.int64], num_top: int) -> Sampled:
    highest, own, *top = _logits(words[Answer.MOST : Answer.TOP + num_top])
    log_sum = math.log(int(words[Answer.SUM])) - sampling.WEIGHT_BITS * math.log(2)
    ids = sampling.ID_BITS - (words[Answer.TOP : Answer.TOP + num_top] & 0xFFFFFFFF)
    likely = zip(ids.tolist(), top, strict=True)
    return Sampled(
        int(words[Answer.TOKEN]),
        own - highest - log_sum,
        tuple((token, logit - highest - log_sum) for token, logit in likely if logit > -math.inf),
    )


def _logits(composites: NDArray[np.int64]) -> list[float]:
    """Return the float32 logit of each composite: the inverse of the order-preserving map."""
    bits = (composites >> 32).astype(np.int32)
    logits: list[float] = np.where(bits < 0, bits ^ sampling.ID_BITS, bits).astype(np.int32).view(np.float32).tolist()
    return logits


@lru_cache(maxsize=256)
def _words_of(params: SamplingParams, num_vocab: int) -> NDArray[np.int64]:
    """Return the parameters that all rows of one request share."""
    words = np.zeros(len(Word), dtype=np.int64)
    floats = words.view(np.float64)
    words[Word.FLAGS] = Flag.ACTIVE | (Flag.GREEDY if params.greedy else 0)
    floats[Word.TEMPERATURE] = min(max(params.temperature, COLDEST), HOTTEST)
    floats[Word.CUT] = math.log(params.min_p) - SLACK if params.min_p > 0 else -math.inf
    floats[Word.TOP_P] = params.top_p - SLACK if params.top_p < 1 else 1.0
    words[Word.TOP_K] = params.top_k if params.top_k < num_vocab else 0
    floats[Word.REPETITION] = params.repetition_penalty
    floats[Word.FREQUENCY] = params.frequency_penalty
    floats[Word.PRESENCE] = params.presence_penalty
    words[Word.SEED] = params.seed - (params.seed >> 63 << 64)
    words[Word.CHOICE] = params.choice
    words[Word.NUM_TOP] = -1 if params.num_logprobs is None else params.num_logprobs
    return words


@lru_cache(maxsize=64)
def _bias_arrays(logit_bias: tuple[tuple[int, float], ...]) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    merged = dict(logit_bias)  # of two entries for one token the last counts
    return np.array(list(merged), dtype=np.int32), np.array(list(merged.values()), dtype=np.float64)
