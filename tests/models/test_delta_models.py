"""Models with gated delta nets: a GGUF equals llama.cpp, and only large matrices are quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.kernels.layout import DenseWeight, PackedWeight
from edgelm.models.config import read_config
from edgelm.models.decoder import DeltaNet
from edgelm.models.loading.decoder import load, unreadable_reason
from edgelm.models.loading.sources import FolderSource
from tests.models.test_gguf_models import decoder_of, llama_logits
from tests.models.tiny_models import Session, built, relative_error, write
from tests.odd_models import write_odd

LENGTH = 41
LLAMA = 1e-4


@pytest.mark.parametrize("heads", [None, 1.0])
def test_a_gguf_equals_llama_cpp(heads: float | None, tmp_path: Path) -> None:
    """Also one with a layer that predicts the token after the next, which is not used."""
    path = write_odd(tmp_path / "model.gguf", "qwen35", 3, heads=heads)
    ids = torch.randint(3, 500, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    session = Session(decoder_of(path, context=256))
    got = torch.cat([session.run({0: ids[:30]})[0], session.run({0: ids[30:]})[0]])
    assert relative_error(got, llama_logits(path, ids)) < LLAMA


def test_int4_leaves_the_rates_exact(tmp_path: Path) -> None:
    model = built("qwen3_5")
    settings = model.config.to_dict()
    with open_safetensors(write(model, tmp_path)) as files:
        config = read_config(settings)
        source = FolderSource(files, settings, quantize="int4")
        packed = load(config, source, "cpu", torch.float32, "reference", context=64)
    net = packed.weights.layers[0].attention
    assert isinstance(net, DeltaNet)
    kinds = {sum(linear.sizes): type(linear.weight) for linear in (*net.inputs, net.out)}
    assert kinds == {192 + 128: PackedWeight, 4: DenseWeight, 64: PackedWeight}
    ids = list(range(3, 30))
    session = Session(packed)
    whole = Session(packed).run({0: ids})[0]
    assert relative_error(torch.cat([session.run({0: [token]})[0] for token in ids]), whole) < 1e-4


def test_a_missing_tensor_is_told(tmp_path: Path) -> None:
    with open_gguf(write_odd(tmp_path / "model.gguf", "qwen35", drop="blk.1.ssm_alpha")) as gguf:
        assert unreadable_reason(gguf, gguf.metadata) == "the model has no tensor blk.1.ssm_alpha.weight"
