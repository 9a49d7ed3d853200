"""The chain of kernels by which a GPU is tried: its result, and what is seen where a kernel does not wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgelm.backends.torch import trial
from edgelm.kernels.trial import PART, chain, chained


def test_each_kernel_takes_the_part_of_the_next_program(generator: torch.Generator) -> None:
    x = torch.randint(-(2**31), 2**31, (3, PART), generator=generator, dtype=torch.int32)
    numbers = x.to(torch.int64)
    for _ in range(4):
        for _ in range(5):
            numbers = numbers * 3 + 1
        numbers = numbers.roll(-1, 0)
    expected = numbers.to(torch.int32)  # the lowest 32 bits
    assert torch.equal(chained(x, 4, 5), expected)
    got = x.clone()
    chain(got, torch.zeros_like(x), 4, 5)
    assert torch.equal(got, expected)


def test_a_kernel_that_reads_before_the_end_of_another_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.get_default_device()
    assert trial.chain_is_right(device, rounds=3)

    def too_early(x: Tensor, spare: Tensor, links: int, rounds: int) -> None:
        before = x.clone()
        chain(x, spare, links, rounds)
        x[1] = chained(before, links - 1, rounds)[1]  # the last one has read what was there before

    monkeypatch.setattr(trial, "chain", too_early)
    assert not trial.chain_is_right(device, rounds=3)
