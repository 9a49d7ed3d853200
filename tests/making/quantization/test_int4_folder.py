"""Folders quantized to packed INT4: they load, compute nearly the same, are resumed, and are never half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.messages import Note
from edgelm.checkpoints.config_json import read_config_json
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.library.local import find_local
from edgelm.making.quantization import int4_model
from edgelm.making.quantization.activations import Calibration, dense
from edgelm.making.quantization.int4 import Int4Format
from edgelm.making.quantization.int4_folder import UnfinishedFolder
from edgelm.making.quantization.int4_job import Int4Job, Int4Progress
from edgelm.making.quantization.int4_layer import LayerWeights, scale_layer
from edgelm.making.quantization.int4_plan import plan_folder
from edgelm.models.loading.decoder import load_layer
from edgelm.models.loading.sources import FolderSource
from tests.commands.test_torch_engine import write_tokenizer
from tests.counts import Count
from tests.models.test_architectures import decoder_of
from tests.models.tiny_models import Session, build, mean_relative_error, relative_error, stacked_experts, text, write

CPU = torch.device("cpu")
NUM_FAMILIES = Count(test=5, soak=15)
FAMILIES = (
    "llama3",
    "qwen3_moe",
    "gemma2",
    "qwen3_5_moe",
    "granite",
    "phi3",
    "ministral3",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "smollm3",
    "gemma3",
    "gemma4",
)
Replies = list[Int4Progress | Note]


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few scales: the results are as valid, and a little worse."""
    monkeypatch.setattr("edgelm.making.quantization.awq.NUM_ALPHAS", 3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in 16 bits, with the tokenizer and the other files that a folder has."""
    folder = tmp_path_factory.mktemp("source")
    size = write_tokenizer(folder)
    model = build("qwen3_moe", vocab_size=size, num_hidden_layers=2, mlp_only_layers=[1]).bfloat16()
    write(model, folder)
    (folder / "LICENSE").write_text("free")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    return folder


def job(source: Path, out: Path, method: str = "int4-gptq", **options: Any) -> Int4Job:
    fields = {"group": 32, "symmetric": True, "sequences": 4, "sequence_len": 64, "device": "cpu", **options}
    return Int4Job(folder=source, out=out, method=method, **fields)


def quantize(*args: Any, **options: Any) -> tuple[Path, Replies]:
    replies: Replies = []
    done = int4_model.quantize_folder(job(*args, **options), replies.append)
    return done.out, replies


def logits(folder: Path, ids: list[int]) -> Tensor:
    return Session(decoder_of(folder)).run({0: ids})[0]


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", FAMILIES[:NUM_FAMILIES])
def test_scaling_leaves_the_function_of_the_model(name: str, tmp_path: Path) -> None:
    """AWQ's scales are folded into norms and matrices: in float32 the logits are the same, but the weights are not."""
    folder = write(build(name), tmp_path)
    config = read_config_json(folder)
    ids = torch.tensor([text(64, seed=1), text(64, seed=2)], dtype=torch.int32)
    before, original = logits(folder, text(40, seed=3)), load_file(folder / "model.safetensors")
    changed = dict(original)
    with open_safetensors(folder) as model:
        plan, tensors = plan_folder(model, config, job(folder, tmp_path)), FolderSource(model, config)
        streams = Calibration(plan.config, ids, tensors.matrix(plan.embedding), CPU)
        for i, sites in enumerate(plan.sites):
            layer = dense(load_layer(plan.config, tensors, i, CPU, 64))
            names = plan.layer_names[i]
            stems = {stem for site in sites for stem in site.matrices}
            weights = LayerWeights(
                {stem: original[names[f"{stem}.weight"]].clone() for stem in stems},
                {name: original[file] for name, file in names.items() if name.removesuffix(".weight") not in stems},
            )
            form = Int4Format(32, symmetric=True, scale_dtype=torch.float32)
            scale_layer(weights, plan.config, i, sites, streams.observe(layer), form)
            changed |= {names[f"{stem}.weight"]: weight for stem, weight in weights.matrices.items()}
            changed |= {names[name]: tensor for name, tensor in weights.plain.items()}
            streams.advance(layer)
        moved = {stem for stem in stems if not torch.equal(weights.matrices[stem], original[names[f"{stem}.weight"]])}
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, folder / "model.safetensors")
    assert moved
    assert relative_error(logits(folder, text(40, seed=3)), before) < 1e-4


@pytest.mark.parametrize("method", ["int4", "int4-awq", "int4-gptq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_quantized_folder_loads_and_answers_nearly_the_same(
    source: Path, method: str, symmetric: bool, tmp_path: Path
) -> None:
    out, _ = quantize(source, tmp_path / "out", method, symmetric=symmetric)
    ids = list(b"the quick brown fox")
    assert mean_relative_error(logits(out, ids), logits(source, ids)) < 0.7  # logits of another model: 1.4
    assert not list(tmp_path.glob(".*"))
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "LICENSE",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (out / "LICENSE").read_text() == "free"
    tensors = read_all(out)
    section = read_config_json(out)["quantization_config"]
    assert section["config_groups"]["group_0"]["weights"]["symmetric"] == symmetric
    assert section["ignore"] == ["lm_head", "model.layers.0.mlp.gate"]
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    packed = tensors["model.layers.0.mlp.experts.3.gate_proj.weight_packed"]
    assert packed.dtype == torch.int32
    assert packed.shape == (32, 64 // 8)
    assert ("model.layers.1.mlp.up_proj.weight_zero_point" in tensors) != symmetric
    assert find_local(str(out)).format == "safetensors"


def test_stacked_experts_become_separate_ones(tmp_path: Path) -> None:
    """A mixture of gated delta nets: two tensors for all experts give the same bytes as two for each."""
    results = []
    model = build("qwen3_5_moe", vocab_size=258, num_hidden_layers=1)  # states carry errors from layer to layer
    for kind in ("apart", "stacked"):
        folder = write(model, tmp_path / kind)
        write_tokenizer(folder)
        if kind == "stacked":
            save_file(stacked_experts(load_file(folder / "model.safetensors")), folder / "model.safetensors")
        out, _ = quantize(folder, tmp_path / f"{kind}-int4")
        results.append(read_all(out))
        ids = list(b"the quick brown fox")
        assert mean_relative_error(logits(out, ids), logits(folder, ids)) < 0.7
    apart, stacked = results
    assert apart.keys() == stacked.keys()
    assert all(torch.equal(apart[name], stacked[name]) for name in apart)
    kept = {name.rpartition(".")[2] for name in apart if "in_proj_b" in name or "shared_expert_gate" in name}
    assert kept == {"weight"}  # rates and gates keep all their digits


@pytest.mark.parametrize("name", ["phi3", "gemma2"])
def test_fused_names_and_norms_with_an_offset(name: str, tmp_path: Path) -> None:
    """The names of the folder are kept, and each method is nearer to the model than chance."""
    folder = write(build(name, vocab_size=258), tmp_path / "source")
    write_tokenizer(folder)
    out, _ = quantize(folder, tmp_path / "out", "int4-awq")
    ids = list(b"the quick brown fox")
    assert mean_relative_error(logits(out, ids), logits(folder, ids)) < 0.7
    stems = {tensor.rpartition(".")[0] for tensor in read_all(out)}
    assert stems == {tensor.rpartition(".")[0] for tensor in load_file(folder / "model.safetensors")}


def test_an_expert_that_saw_no_token_is_rounded_plainly(source: Path, tmp_path: Path) -> None:
    """A router that always takes the same three of six experts leaves three without inputs, which is told."""
    folder = tmp_path / "source"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    router = tensors["model.layers.0.mlp.gate.weight"]
    router[3:] = 0
    router[:3] = tensors["model.layers.0.post_attention_layernorm.weight"].sign() * 0
    save_file(tensors, folder / "model.safetensors")
    out, replies = quantize(folder, tmp_path / "out", "int4-awq")
    notes = [reply.text for reply in replies if isinstance(reply, Note)]
    assert any("layer 1: 3 experts saw no token" in note for note in notes)
    assert logits(out, list(b"fox")).isfinite().all()


def test_an_interrupted_run_goes_on_after_the_last_layer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it, the folder has no name yet; the same command does the other layers, to the same bytes."""
    whole, _ = quantize(source, tmp_path / "whole")
    out = tmp_path / "out"
    written = UnfinishedFolder.write

    def fail_at(part: str) -> Callable[..., None]:
        def write_or_fail(self: UnfinishedFolder, name: str, tensors: Any) -> None:
            if name == part:
                raise KeyboardInterrupt
            written(self, name, tensors)

        return write_or_fail

    for part in ("layer-00001", "other-00000"):
        monkeypatch.setattr(UnfinishedFolder, "write", fail_at(part))
        with pytest.raises(KeyboardInterrupt):
            quantize(source, out)
        assert not out.exists()
    rename = Path.rename
    renamed = []

    def fail_later(self: Path, target: Path) -> Path:
        renamed.append(target)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(UnfinishedFolder, "write", written)
    monkeypatch.setattr(Path, "rename", fail_later)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out)
    monkeypatch.setattr(Path, "rename", rename)
    _, replies = quantize(source, out)
    assert [reply.text for reply in replies if isinstance(reply, Note)][-1] == "continuing after 2 of 2 layers"
    assert not [reply for reply in replies if isinstance(reply, Int4Progress)]
    for path in whole.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name


def test_other_options_begin_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnfinishedFolder, "finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize(source, tmp_path / "out", "int4")
    monkeypatch.undo()
    _, replies = quantize(source, tmp_path / "out", "int4", symmetric=False)
    assert len([reply for reply in replies if isinstance(reply, Int4Progress)]) == 2


def test_a_full_disk_is_told_before_the_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.base.disk.free_bytes", lambda _: 2**26 + 1000)
    with pytest.raises(EdgeLMError, match=r"out will take .* MiB, and .* has 64\.0 MiB free"):
        quantize(source, tmp_path / "out", "int4")


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"model_type": "rwkv9"}, {}, "does not support the architecture 'rwkv9'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, r"is quantized already \(AWQ 4-bit\)"),
        ({}, {"group": 128}, "has 32 columns, which groups of 128 do not divide; choose --group 32"),
    ],
)
def test_refusals(source: Path, changes: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EdgeLMError, match=reason):
        quantize(folder, tmp_path / "out", "int4", **options)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("name", "family", "hint"), [("gpt_oss", "gpt-oss", "MXFP4"), ("gemma4_moe", "Gemma 4", "quantize the GGUF")]
)
def test_experts_in_one_tensor_are_refused(name: str, family: str, hint: str, tmp_path: Path) -> None:
    folder = write(build(name), tmp_path / "source")
    with pytest.raises(EdgeLMError, match=f"the experts of {family} are one tensor") as refused:
        quantize(folder, tmp_path / "out", "int4")
    assert hint in refused.value.hint
