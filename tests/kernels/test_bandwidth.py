"""The bandwidth probe reads every word once."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.bandwidth import BLOCK_LEN, read
from tests.kernels.cases.bandwidth import SIZES
from tests.kernels.seeds import SEED, generator


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [SEED])
def test_every_word_is_read_once(size, seed, implementation):
    words = torch.randint(-(2**31), 2**31, (size,), generator=generator(seed), dtype=torch.int32)
    sums = read(words, implementation=implementation)
    assert sum(sums.tolist()) % 2**32 == sum(words.tolist()) % 2**32


def test_parts_of_a_block_are_refused():
    with pytest.raises(AssertionError):
        read(torch.zeros(BLOCK_LEN + 1, dtype=torch.int32))
