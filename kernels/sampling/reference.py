"""Sampling in plain torch, all rows at once; the kernels must equal it except in the last bits of exp.

`edgelm.engine.sampling.reference` owns the meaning of each step. This module sorts whole rows, which the kernels
never do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from edgelm.kernels.sampling.layout import ID_BITS, MAX_TOP, NUM_ANSWER, WEIGHT_BITS, Answer, Batch, Flag, Word

_LARGEST = torch.finfo(torch.float32).max
_LOW = 0xFFFFFFFF


def sample(logits: Tensor, batch: Batch, out: Tensor | None = None) -> Tensor:
    """See the package's function of this name."""
    answer = torch.full((len(logits), NUM_ANSWER), -1, dtype=torch.int64, device=logits.device)
    active = batch.rows[:, Word.FLAGS] & Flag.ACTIVE != 0
    raw = torch.where(active[:, None], logits.float(), 0.0)
    row = _processed(raw, batch)
    composite = composites(row)
    best = composite.amax(1)
    possible = active & raw.amax(1).isfinite() & (row.amax(1) > -math.inf)  # amax returns NaN if there is one
    greedy = batch.rows[:, Word.FLAGS] & Flag.GREEDY != 0
    token = ID_BITS - (best & _LOW)
    drawn = possible & ~greedy
    if drawn.any():
        token[drawn] = _draw(row[drawn], composite[drawn], batch.rows[drawn])
    answer[:, Answer.TOKEN] = torch.where(possible, token, -1)
    with_logprobs = possible & (batch.rows[:, Word.NUM_TOP] >= 0)
    if with_logprobs.any():
        raw, composite = raw[with_logprobs], composites(raw[with_logprobs])
        top = composite.sort(1, descending=True).values[:, :MAX_TOP]
        answer[with_logprobs, Answer.SUM] = weights(raw - raw.amax(1, keepdim=True)).sum(1)
        answer[with_logprobs, Answer.MOST] = top[:, 0]
        answer[with_logprobs, Answer.OWN] = composite.gather(1, token[with_logprobs][:, None])[:, 0]
        answer[with_logprobs, Answer.TOP : Answer.TOP + top.shape[1]] = top
    return answer if out is None else out.copy_(answer)


def composites(values: Tensor) -> Tensor:  # float32 [rows, vocab] -> int64
    """Return integers in the order of likelihood; of equal values, the lower id has the greater one.

    The upper half is the float's bits, in order; the lower half is ID_BITS - id.
    """
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)  # -0 and 0 are equally likely
    ordered = torch.where(bits < 0, bits ^ ID_BITS, bits).to(torch.int64)
    ids = torch.arange(values.shape[1], device=values.device)
    return (ordered << 32) | (ID_BITS - ids)


def weights(z: Tensor) -> Tensor:
    """Return exp(z), z <= 0, in units of 2**-WEIGHT_BITS."""
    return (torch.exp(z) * 2.0**WEIGHT_BITS).to(torch.int64)


def uniform(seed: Tensor, position: Tensor, choice: Tensor) -> Tensor:
    """Return Philox4x32-10's upper 24 bits of word 0, for the key `seed` and the counter (position, choice, 0, 0)."""
    c0, c1 = position & _LOW, choice & _LOW
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0 >> 8


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of a product of unsigned 32-bit numbers, as int64."""
    low = a * (b & 0xFFFF)  # below 2**48
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def share(total: Tensor, uniform: Tensor) -> Tensor:
    """Return floor(total * uniform / 2**24); the total is below 2**62."""
    return uniform * (total >> 24) + (uniform * (total & 0xFFFFFF) >> 24)


def _processed(raw: Tensor, batch: Batch) -> Tensor:
    """Return the logits after bias, penalties and mask."""
    row = raw.clone()
    floats = batch.rows.view(torch.float64)
    rows, entries = _entries(batch.rows[:, Word.BIAS_START], batch.rows[:, Word.BIAS_END])
    at, bias = (rows, batch.bias_ids[entries].long()), batch.bias[entries]
    before = row[at]
    biased = (before.double() + bias).clamp(-_LARGEST, _LARGEST).float()
    row[at] = torch.where((before > -math.inf) & (bias > -math.inf), biased, -math.inf)

    rows, entries = _entries(batch.rows[:, Word.HISTORY_START], batch.rows[:, Word.HISTORY_END])
    at, counts = (rows, batch.history_ids[entries].long()), batch.history_counts[entries].double()
    repetition, frequency, presence = (floats[rows, word] for word in (Word.REPETITION, Word.FREQUENCY, Word.PRESENCE))
    before = row[at]
    values = before.double()
    values = torch.where(values > 0, values / repetition, values * repetition).clamp(-_LARGEST, _LARGEST)
    values = values - (counts * frequency + (counts > 0) * presence)
    row[at] = torch.where(before > -math.inf, values.clamp(-_LARGEST, _LARGEST).float(), -math.inf)

    masked = batch.rows[:, Word.FLAGS] & Flag.MASKED != 0
    if masked.any():
        bits = torch.arange(32, dtype=torch.int32, device=row.device)
        allowed = (batch.masks[: len(row), :, None] >> bits & 1).flatten(1)[:, : row.shape[1]] != 0
        row = torch.where(allowed | ~masked[:, None], row, -math.inf)
    return row


def _entries(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the index of every entry in the ranges starts[row] .. ends[row]."""
    lengths = ends - starts
    rows = torch.repeat_interleave(lengths)
    firsts = lengths.cumsum(0) - lengths
    return rows, torch.arange(len(rows), device=rows.device) + (starts - firsts)[rows]


def _draw(row: Tensor, composite: Tensor, words: Tensor) -> Tensor:
    """Do steps 8 to 12 of the specification on rows whose greatest value is finite."""
    floats = words.view(torch.float64)
    z = (row - row.amax(1, keepdim=True)) / floats[:, Word.TEMPERATURE, None].float()
    left = weights(z).masked_fill_(z < floats[:, Word.CUT, None].float(), 0)
    top_k, top_p = words[:, Word.TOP_K], floats[:, Word.TOP_P]
    if ((top_k > 0) | (top_p < 1)).any():
        order = composite.sort(1, descending=True).indices
        in_order = left.gather(1, order)
        places = torch.arange(row.shape[1], device=row.device)
        in_order.masked_fill_((top_k[:, None] > 0) & (places >= top_k[:, None]), 0)
        sums = in_order.cumsum(1)
        bound = (top_p * sums[:, -1]).to(torch.int64).clamp(min=0)[:, None]
        in_order.masked_fill_(
            (top_p < 1)[:, None] & (sums - in_order > bound), 0
        )  # the likelier tokens reach the bound already
        left = torch.zeros_like(left).scatter_(1, order, in_order)
    sums = left.cumsum(1)
    u = uniform(words[:, Word.SEED], words[:, Word.POSITION], words[:, Word.CHOICE])
    return torch.searchsorted(sums, share(sums[:, -1], u)[:, None], right=True)[:, 0]
