"""Compares a packed INT4 folder as we read it with two independent readers: compressed-tensors and transformers.

    PYTHONPATH=.:FOLDER_WITH_compressed_tensors python -m tests.making.quantization.check_compressed_tensors FOLDER

Not part of the tests: the package compressed-tensors is no requirement of ours. Exit code 1 where something differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file

from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.models.loading.sources import FolderSource
from tests.models.test_architectures import decoder_of
from tests.models.tiny_models import Session, relative_error

LEAST_AGREEMENT = 2e-3  # of logits, relative to the largest: both compute in float32


def matrices_agree(folder: Path) -> bool:
    """Compare each matrix as compressed-tensors decompresses it with the values of our reader."""
    config = json.loads((folder / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    stems = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    worst = 0.0
    with open_safetensors(folder) as model:
        source = FolderSource(model, config)
        for stem in stems:
            parts = {name.removeprefix(f"{stem}."): tensor for name, tensor in stored.items() if _is_of(name, stem)}
            parts["weight_scale"] = parts["weight_scale"].float()
            theirs = PackedQuantizationCompressor.decompress(parts, scheme)["weight"].float()
            worst = max(worst, float((theirs - source.vector(f"{stem}.weight")).abs().max()))
    print(f"{len(stems)} matrices, largest difference {worst}")
    return worst == 0


def logits_agree(folder: Path) -> bool:
    """Compare the logits of transformers, which decompresses with that package, with those of our torch decoder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(range(5, 105))
    with torch.no_grad():
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    error = relative_error(Session(decoder_of(folder)).run({0: ids})[0], theirs)
    print(f"transformers {transformers.__version__}: logits differ by {error:.2e} of the largest")
    return error < LEAST_AGREEMENT


def _is_of(name: str, stem: str) -> bool:
    return name.rpartition(".")[0] == stem


if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.exit(0 if all([matrices_agree(path), logits_agree(path)]) else 1)
