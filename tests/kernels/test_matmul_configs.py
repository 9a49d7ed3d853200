"""How a decode matmul is divided among programs: every configuration can be launched, and has work for all of them."""

from __future__ import annotations

import pytest
import torch

from edgelm.kernels.layout import DenseWeight
from edgelm.kernels.matmul.configs import candidates, default_config, max_registers, most_blocks, tiles_of_program
from tests.kernels.cases.matmul import LAYOUTS, random_weight
from tests.kernels.seeds import SEED, generator


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0"])
@pytest.mark.parametrize("warps", [4, 8, 16])
@pytest.mark.parametrize("normed", [False, True])
def test_no_program_may_have_more_registers_than_a_multiprocessor(name: str, warps: int, normed: bool):
    weight = random_weight(LAYOUTS[name], 32, 256, generator(SEED))
    blocks = most_blocks(weight, torch.bfloat16, normed, warps)
    for used in range(1, blocks + 1):
        limit = max_registers(used, torch.bfloat16, packed=True, normed=normed)
        assert limit is None or limit * 32 * warps <= 65_536
    assert warps <= 8 or blocks == 2  # more spill within the 128 registers that 16 warps can have


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [64, 1024, 4096, 14336, 128256])
def test_configs_fit_their_weight(rows: int, gated: bool):
    weight = DenseWeight(torch.empty(rows, 4096, device="meta"))
    configs = candidates(weight, gated)
    assert configs[0] == default_config(weight, gated)
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert all(tiles_of_program(config, blocks, weight, gated) % 2 == 0 for blocks in (1, 2, 3, 4)) or not gated
        assert config.warps in (4, 8, 16)
        assert 4096 // 64 // config.warps >= config.splits  # none is without work
