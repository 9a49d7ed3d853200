"""The bound of attention: no rounding exceeds it, and a wrong column, token or head does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgelm.kernels.cache import FORMATS
from edgelm.kernels.cache.quantize import rotate
from tests.counts import Count
from tests.kernels.attention_bounds import bound, exact, rows_of, shown, weighted
from tests.kernels.cases.attention import Case, Inputs, inputs
from tests.kernels.seeds import SEED, generator
from tests.kernels.test_attention import random_case

SEEDS = range(SEED, SEED + Count(test=40, soak=3_000))
TYPES = (torch.float16, torch.bfloat16)


def near(x: Tensor, unit: float, g: torch.Generator) -> Tensor:
    """Return numbers with relative errors of up to `unit`."""
    return x * (1 + unit * (2 * torch.rand(x.shape, generator=g, dtype=x.dtype) - 1))


def as_a_kernel(case: Case, given: Inputs, g: torch.Generator) -> Tensor:
    """Return attention whose operands have the errors that a kernel's may have, in random directions."""
    unit = 0.0 if case.dtype == torch.float32 else 2.0**-11

    def turned(x: Tensor) -> Tensor:
        return rotate(x) if given.cache.format.rotated else x

    results = []
    for row in rows_of(case, given):
        of_codes = unit if row.of_prompt and given.cache.format.key else 0.0
        q = near(turned(near(row.q, unit, g)), unit if given.cache.format.rotated else 0.0, g)
        noisy = row._replace(q=q, keys=near(row.keys_in_cache, of_codes, g))
        logits, weights, _, _ = weighted(case, noisy)
        of_values = of_codes if given.cache.format.value else 0.0
        some = near(weights, unit, g)[..., None] * near(row.values_in_cache, of_values, g)[:, None]
        total = torch.zeros_like(some[:, :, 0], dtype=torch.float32)
        for position in torch.randperm(logits.shape[-1], generator=g).tolist():
            total = total + some[:, :, position].float()
        results.append(shown(case, turned(total)))
    return torch.stack(results)


def case_of(seed: int) -> Case:
    case = random_case(seed, (torch.float32, *TYPES)[seed % 3], 120, 20)
    return case if case.format != "f16" else case._replace(dtype16=torch.float16)


@pytest.mark.parametrize("seed", SEEDS)
def test_rounding_is_no_fault_and_a_wrong_column_or_head_is_one(seed: int) -> None:
    g = generator(seed)
    case = case_of(seed)
    given = inputs(case, g)
    expected, limit = exact(case, given), bound(case, given)
    got = as_a_kernel(case, given, g)
    assert bool(((got.double() - expected).abs() <= limit).all())
    column = int(expected.square().sum((0, 1)).argmax())
    wrong = got.clone()
    wrong[..., column] = got[..., column - 1]
    assert bool(((wrong.double() - expected).abs() > limit).any())
    if case.queries_per_kv > 1:
        group = expected[:, : case.queries_per_kv]
        head = 1 + int((group[:, 1:] - group[:, :-1]).abs().amax((0, 2)).argmax())  # least like the one before it
        wrong = got.clone()
        wrong[:, head] = got[:, head - 1]
        lengths = {length for rows, length in zip(case.query_lens, case.seq_lens, strict=True) if rows}
        alone = case.window == 1 or lengths == {1}  # all heads see one position, and differ by sinks alone
        assert alone or bool(((wrong.double() - expected).abs() > limit).any())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 17])
def test_one_token_too_many_or_too_few_is_found(name: str, rows: int) -> None:
    """Each of the tokens that count for as much as the average one, or more."""
    case = Case(name, 64, 2, 1, (rows,), (90,), dtype=torch.float16)
    given = inputs(case, generator(SEED))
    expected, limit = exact(case, given), bound(case, given)
    num_found = num_tried = 0
    for i, row in enumerate(rows_of(case, given)):
        _, weights, _, _ = weighted(case, row)
        length = weights.shape[-1]
        for left_out in range(length):
            kept = [position for position in range(length) if position != left_out]
            short = row._replace(keys=row.keys[:, kept], values=row.values[:, kept])
            got = shown(case, weighted(case, short)[2])
            counts = weights[0, :, left_out] >= 1 / length
            found = ((got - expected[i]).abs() > limit[i]).any(-1)
            num_tried += int(counts.sum())
            num_found += int((counts & found).sum())
    assert num_tried > 20
    assert num_found == num_tried
