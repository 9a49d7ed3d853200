"""Attention by its formula in float64, and the largest error of a correct kernel, of each element: derived, not tuned.

A result is o = sum of p[j] * v[j], with p[j] = exp(l[j]) / Z; a sink is a position whose v is 0. A kernel has

    logits      l[j] + e[j], where |e[j]| <= E[j]: rounded operands (a rotated q twice), a float32 sum over a head, and
                float32 operations around exp2. Since the sum of p[j] * (v[j] - o) is 0, the result moves by
                sum of p[j] * (exp(e[j]) - 1) * (v[j] - o) / sum of p[j] * exp(e[j]), so by at most
                exp(max E) * sum of p[j] * (exp(E[j]) - 1) * |v[j] - o|
    weights     rounded to 16 bits: by a part `unit` of themselves and, in float16, by half of its smallest number. They
                are at least 2**-SHIFT of what is summed to at least 1; with a code's scale in them, v is a code
    values      rounded to 16 bits, as keys are, where a prompt's kernel applies scales to codes
    sums        in float32 over all positions, and of the weights alone; rescaled at each larger logit

An error of a logit, or of a weight, is the same for all dimensions of a group, so a rotation does not mix it. Those of
single dimensions in the basis of a rotated cache are added up over a group.
Owns these formulas. Knows nothing of how a kernel is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgelm.kernels.attention import VERIFY_LEN
from edgelm.kernels.attention.launch import dot_dtype
from edgelm.kernels.cache.quantize import GROUP, ROTATION_FACTOR, rotate
from tests.kernels.cases.attention import Case, Inputs, stored
from tests.kernels.error_bounds import ROUNDING

F32 = 2.0**-24
EXP2 = 2.0**-21  # relative, of exp2 and the rounding of its argument's last bits
SHIFT = 4  # of the weights in a kernel, in bits
SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 0.0, torch.float32: 0.0}  # rounding of what is nearly 0
LARGEST_CODE = {None: 0.0, "int8": 127.0, "fp8": 448.0, "int4": 8.0}
Q_DOWN = 2.0**-6  # q is divided by 64 before it is rounded
OTHER_STEPS = 64  # roundings beside those of a sum's terms: chunks, warps, the sink, the quotient


class Row(NamedTuple):
    """A row of a sequence and what it sees: float64, heads first. `in_cache` is in the cache's basis."""

    q: Tensor  # [kv heads, queries, width]
    keys: Tensor  # [kv heads, length, width]
    values: Tensor  # [kv heads, length, width]
    q_in_cache: Tensor
    keys_in_cache: Tensor
    values_in_cache: Tensor
    sinks: Tensor | None  # [kv heads, queries]
    of_prompt: bool


def exact(case: Case, given: Inputs) -> Tensor:
    """Return attention by its formula: float64 [rows, heads, head_dim]."""
    return torch.stack([shown(case, weighted(case, row)[2]) for row in rows_of(case, given)])


def bound(case: Case, given: Inputs) -> Tensor:
    """Return the bound of each element of `exact`, before the result is rounded to its type."""
    return torch.stack([shown(case, _bound(case, given, row)) for row in rows_of(case, given)])


def rows_of(case: Case, given: Inputs) -> Iterator[Row]:
    """Yield all rows, in the order of the results."""
    padding = (0, -case.head_dim % GROUP)
    heads = case.num_kv_heads, case.queries_per_kv

    def turned(x: Tensor) -> Tensor:
        return rotate(x) if given.cache.format.rotated else x

    for sequence, (count, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        if not count:
            continue
        keys, values = (pad(entries.double(), padding).transpose(0, 1) for entries in stored(given, sequence))
        for i in range(count):
            position = length - count + i
            first = max(position - case.window + 1, 0) if case.window else 0
            q = pad(given.q[int(given.query_start_loc[sequence]) + i].double(), padding).unflatten(0, heads)
            own = q, keys[:, first : position + 1], values[:, first : position + 1]
            sinks = None if given.sinks is None else given.sinks.double().view(heads)
            yield Row(*own, *map(turned, own), sinks, count > VERIFY_LEN)


def weighted(case: Case, row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, weights p, the result, and log Z: [kv, q, length] twice, [kv, q, width], [kv, q, 1]."""
    logits = row.q @ row.keys.transpose(1, 2) * case.head_dim**-0.5
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    every = logits if row.sinks is None else torch.cat([logits, row.sinks[..., None]], -1)
    log_sum = every.logsumexp(-1, keepdim=True)
    weights = (logits - log_sum).exp()
    return logits, weights, weights @ row.values, log_sum


def shown(case: Case, result: Tensor) -> Tensor:
    """Return [kv heads, queries, width] as [heads, head_dim]."""
    return result.flatten(0, 1)[:, : case.head_dim]


def _mixed(x: Tensor) -> Tensor:
    """Return for each element the sum of its group of 32, times the factor of a rotation."""
    groups = x.unflatten(-1, (-1, GROUP))
    return (groups.sum(-1, keepdim=True) * ROTATION_FACTOR).expand_as(groups).flatten(-2)


def _bound(case: Case, given: Inputs, row: Row) -> Tensor:
    dot, kv_format = dot_dtype(given.q, given.cache), given.cache.format
    mixed = _mixed if kv_format.rotated else Tensor.abs
    unit, smallest = (0.0 if dot == torch.float32 else ROUNDING[dot]), SMALLEST[dot]
    key_unit, value_unit = (unit if kind and row.of_prompt else 0.0 for kind in (kv_format.key, kv_format.value))
    logits, weights, result, log_sum = weighted(case, row)
    length, width = row.keys.shape[1:]
    most_logit = logits.abs().amax(-1, keepdim=True)

    # logits
    off = unit * row.q.abs() @ row.keys.abs().transpose(1, 2)  # q, before it is rotated
    terms = (key_unit + (unit if kv_format.rotated else 0.0)) * row.q_in_cache.abs() * (1 + 2 * unit)
    terms = terms + (width + GROUP + 8) * F32 * mixed(row.q.abs())
    lost = (smallest / Q_DOWN + key_unit * smallest) * (1 + GROUP**0.5 if kv_format.rotated else 1)
    off = (off + (terms + lost) @ row.keys_in_cache.abs().transpose(1, 2)) * case.head_dim**-0.5
    off = off + case.softcap * 2.0**-21 + 8 * F32 * (logits.abs() + most_logit)
    off = off + EXP2 * (1 + length / GROUP)  # a rescaling for each block, at most
    of_sink = torch.full_like(most_logit, EXP2)
    if row.sinks is not None:
        of_sink += 8 * F32 * (row.sinks[..., None].abs() + most_logit)
    most = torch.maximum(off.amax(-1, keepdim=True), of_sink)
    moved = torch.zeros_like(result)
    for start in range(0, length, 256):  # [kv heads, queries, positions, width]
        some = slice(start, start + 256)
        apart = (row.values[:, None, some] - result[:, :, None]).abs()
        moved += ((weights * off.expm1())[..., some, None] * apart).sum(2)
    if row.sinks is not None:
        moved += (row.sinks[..., None] - log_sum).exp() * of_sink.expm1() * result.abs()

    # weights, values and sums
    sums = (length + OTHER_STEPS) * F32
    rounded = unit * (weights @ row.values.abs())
    share = value_unit * (1 + unit) + sums
    in_cache = row.values_in_cache.abs()
    codes = in_cache.sum(1)[:, None] + length * LARGEST_CODE[kv_format.value]
    lost_weights = smallest * 2.0**-SHIFT * (logits.amax(-1, keepdim=True) - log_sum).exp() * codes
    lost_values = (smallest if value_unit else 0.0) * weights.sum(-1, keepdim=True)
    single = mixed(share * (weights @ in_cache) + lost_weights + lost_values)
    limit = most.exp() * (moved + most.exp() * (rounded + single)) + sums * result.abs()
    return limit + 2 * GROUP * F32 * _mixed(result.abs()) if kv_format.rotated else limit
