"""How a decode matmul is divided among programs: every configuration can be launched, and has work for all of them."""

from __future__ import annotations

import pytest
import torch

from edgelm.kernels.layout import DenseWeight
from edgelm.kernels.matmul import configs
from edgelm.kernels.matmul.configs import (
    Config,
    candidates,
    default_config,
    max_registers,
    most_blocks,
    steps_ahead,
    tiles_of_program,
)
from tests.kernels.cases.matmul import LAYOUTS, random_weight
from tests.kernels.seeds import SEED, generator


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0"])
@pytest.mark.parametrize("warps", [4, 8, 16])
def test_no_program_may_have_more_registers_than_a_multiprocessor(name: str, warps: int):
    weight = random_weight(LAYOUTS[name], 32, 256, generator(SEED))
    blocks = most_blocks(weight, torch.bfloat16, warps)
    for used in range(1, blocks + 1):
        limit = max_registers(used, torch.bfloat16, packed=True)
        assert limit is None or limit * 32 * warps <= 65_536
    assert warps <= 8 or blocks == 2  # more spill within the 128 registers that 16 warps can have


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [64, 1024, 4096, 6144, 14336, 128256])
@pytest.mark.parametrize("hbm", [False, True])
def test_configs_fit_their_weight(rows: int, gated: bool, hbm: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(configs, "has_hbm", lambda: hbm)
    weight = DenseWeight(torch.empty(rows, 4096, device="meta"))
    tried = candidates(weight, gated)
    assert tried[0] == default_config(weight, gated)
    assert len(set(tried)) == len(tried)
    for config in tried:
        assert all(tiles_of_program(config, blocks, weight, gated, 82) % 2 == 0 for blocks in (1, 2, 3, 4)) or not gated
        assert config.warps in (4, 8, 16)
        assert 4096 // 64 // config.warps >= config.splits  # none is without work


@pytest.mark.parametrize(("rows", "without", "with_hbm"), [(4096, 1, 1), (5120, 2, 1), (8192, 2, 1), (8208, 2, 2)])
def test_gpus_with_hbm_take_smaller_programs(rows: int, without: int, with_hbm: int, monkeypatch: pytest.MonkeyPatch):
    weight = DenseWeight(torch.empty(rows, 4096, device="meta"))
    for hbm, tiles in ((False, without), (True, with_hbm)):
        monkeypatch.setattr(configs, "has_hbm", lambda hbm=hbm: hbm)
        warps = 4 if (without, tiles) == (2, 1) else 8
        assert default_config(weight, gated=False) == Config(warps, tiles, 2, splits=1)
        assert default_config(weight, gated=True).tiles == 2


@pytest.mark.parametrize(("name", "hbm", "num_sms", "rows", "tiles"), [
    ("q4_k", False, 82, 4096, 2),  # an RTX 3090
    ("q4_k", False, 82, 1024, 1),
    ("q4_k", False, 128, 4096, 1),  # an RTX 4090
    ("q4_k", True, 82, 4096, 1),
    ("q6_k", False, 82, 4096, 1),
    (None, False, 82, 4096, 1),
])  # fmt: skip
def test_two_blocks_of_rows_take_two_tiles_where_programs_remain_enough(
    name: str | None, hbm: bool, num_sms: int, rows: int, tiles: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(configs, "has_hbm", lambda: hbm)
    dense = DenseWeight(torch.empty(rows, 256, device="meta"))
    weight = random_weight(LAYOUTS[name], rows, 256, generator(SEED)) if name else dense
    config = Config(8, 1, 2, 1)
    assert [tiles_of_program(config, blocks, weight, False, num_sms) for blocks in (1, 2)] == [1, tiles]


@pytest.mark.parametrize(("name", "blocks", "tiles", "hbm", "steps"), [
    ("q4_k", 1, 2, False, 2),
    ("q4_k", 2, 1, False, 2),
    ("q4_k", 2, 2, False, 1),
    ("q4_k", 2, 2, True, 2),
    ("q4_k", 2, 4, True, 1),
    ("q6_k", 2, 2, True, 1),
    ("mxfp4", 2, 2, True, 1),
    ("int4_g16", 2, 2, True, 1),
    (None, 2, 2, True, 1),
    ("q4_k", 3, 1, True, 1),
])  # fmt: skip
def test_two_steps_are_under_way_where_registers_are_enough(
    name: str | None, blocks: int, tiles: int, hbm: bool, steps: int
):
    layout = LAYOUTS[name] if name else None
    assert steps_ahead(Config(4, tiles, 2, 1), blocks, tiles, layout, hbm=hbm) == steps
    assert steps_ahead(Config(4, tiles, 0, 1), blocks, tiles, layout, hbm=hbm) == 0
