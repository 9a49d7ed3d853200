"""Quantized folders compute the same as transformers with the dequantized weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edgelm.backends.model import open_model
from edgelm.base.errors import ModelError
from edgelm.checkpoints.folder import folder_summary
from edgelm.checkpoints.safetensors import open_safetensors
from tests.models.loading.packers import awq, gptq, named, pack_quantized
from tests.models.test_architectures import BF16, F32, LENGTH, decoder_of
from tests.models.tiny_models import (
    Session,
    built,
    expected,
    mean_relative_error,
    relative_error,
    stacked_experts,
    text,
)

GROUP = 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP microscaling formats 1.0
Packed = tuple[dict[str, Tensor], Tensor]  # the tensors of a folder, and their dequantized values


class Codes:
    """A matrix in groups of codes with scales and zero points; `shuffled`: a group has columns far apart."""

    def __init__(
        self, weight: Tensor, bits: int = 4, *, symmetric: bool = False, shuffled: bool = False, group: int = GROUP
    ) -> None:
        rows, columns = weight.shape
        self.groups = np.arange(columns) // min(group, columns)
        if shuffled:
            np.random.default_rng(rows * columns).shuffle(self.groups)
        order = torch.from_numpy(np.argsort(self.groups, kind="stable"))
        grouped = weight[:, order].view(rows, -1, group)
        high = 2**bits - 1
        if symmetric:
            self.scales = (grouped.abs().amax(-1) / (high // 2)).half()
            zeros = torch.full_like(self.scales, (high + 1) // 2)
        else:
            self.scales = ((grouped.amax(-1) - grouped.amin(-1)) / high).half()
            zeros = (-grouped.amin(-1) / self.scales).round().clamp(1, high)
        numbers = (grouped / self.scales.float()[..., None] + zeros[..., None]).round().clamp(0, high)
        values = self.scales.float()[..., None] * (numbers - zeros[..., None])
        self.values = torch.empty_like(weight)
        self.values[:, order] = values.view(rows, columns)
        plain = torch.empty_like(weight)
        plain[:, order] = numbers.view(rows, columns)
        self.codes = plain.numpy().astype(np.int64)
        self.zeros = zeros.numpy().astype(np.int64)


def as_awq(weight: Tensor) -> Packed:
    codes = Codes(weight)
    return awq(codes.codes, codes.scales, codes.zeros), codes.values


def as_gptq(weight: Tensor) -> Packed:
    codes = Codes(weight, shuffled=True)
    return gptq(codes.codes, codes.scales, codes.zeros, codes.groups), codes.values


def as_gptq_of_8_bits(weight: Tensor) -> Packed:
    codes = Codes(weight, 8, symmetric=True)
    return gptq(codes.codes, codes.scales, codes.zeros, codes.groups, 8), codes.values


def as_pack_quantized(weight: Tensor) -> Packed:
    codes = Codes(weight, symmetric=True)
    return pack_quantized(codes.codes, codes.scales), codes.values


def as_blocks_of_fp8(weight: Tensor) -> Packed:
    rows, columns = weight.shape
    high, wide = -(-rows // 32), -(-columns // 64)
    scales = 0.01 * torch.rand(high, wide, generator=torch.Generator().manual_seed(rows)) + 0.001
    spread = scales.repeat_interleave(32, 0)[:rows].repeat_interleave(64, 1)[:, :columns]
    stored = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}, stored.float() * spread


def as_mxfp4(weight: Tensor) -> Packed:
    """The model has experts as [columns, rows]; the file has blocks of rows."""
    grouped = weight.mT.reshape(len(weight), weight.shape[-1], -1, GROUP)
    exponents = grouped.abs().amax(-1).log2().floor() - 2  # the largest code is 6, so 4 and more for the largest
    codes = (grouped[..., None] / exponents.exp2()[..., None, None] - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * exponents.exp2()[..., None]).flatten(-2).mT
    pairs = codes.to(torch.uint8)
    blocks = pairs[..., 0::2] | pairs[..., 1::2] << 4
    return {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}, values


def as_static_fp8(weight: Tensor) -> Packed:
    """One scale for the whole matrix, and one for its activations."""
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": stored, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.02)}
    return tensors, stored.float() * scale


FORMATS: Mapping[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "awq": (as_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "gptq8": (as_gptq_of_8_bits, {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "sym": True}),
    "compressed-tensors": (
        as_pack_quantized,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": GROUP}}},
            "ignore": ["lm_head"],
        },
    ),
    "fp8": (as_blocks_of_fp8, {"quant_method": "fp8", "weight_block_size": [32, 64]}),
    "static fp8": (as_static_fp8, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}),
    "mxfp4": (as_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
}


def quantized(name: str, kind: str, folder: Path) -> Any:
    """Write a model with its matrices packed; return transformers' model with the dequantized weights."""
    pack, quantization = FORMATS[kind]
    return packed_model(name, kind, folder, lambda _: pack, quantization)


def packed_model(
    name: str, kind: str, folder: Path, packer: Callable[[str], Callable[[Tensor], Packed]], quantization: Any
) -> Any:
    """Write a model whose matrices are packed by what `packer` returns for their names; return transformers' model."""
    model = copy.deepcopy(built(name))
    tensors: dict[str, Tensor] = {}
    parameters = model.state_dict()
    for key, values in split_experts(name, parameters).items():
        stem = key.removesuffix(".weight")
        if is_packed(key, kind):
            packed, stands_for = packer(stem)(values)
            tensors |= {stem + part: each for part, each in packed.items()} if kind == "mxfp4" else named(stem, packed)
            values.copy_(stands_for)  # a view of the model's own
        else:
            tensors[key] = values.clone()
    save_file({key: each.contiguous() for key, each in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def split_experts(name: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as files have them: those of Qwen's and Gemma's experts one by one, as views."""
    if name not in ("qwen3_moe", "qwen3_5_moe", "gemma4_moe"):
        return dict(parameters)
    split: dict[str, Tensor] = {}
    for key, values in parameters.items():
        stem, _, last = key.rpartition(".")
        if last == "gate_up_proj":
            for e, each in enumerate(values):
                gate, up = each.chunk(2)
                split |= {f"{stem}.{e}.gate_proj.weight": gate, f"{stem}.{e}.up_proj.weight": up}
        elif last == "down_proj":
            split |= {f"{stem}.{e}.down_proj.weight": each for e, each in enumerate(values)}
        else:
            split[key] = values
    return split


def is_packed(key: str, kind: str) -> bool:
    if kind == "mxfp4":
        return key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return key.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama3", each) for each in FORMATS if each != "mxfp4"),
        ("phi3", "awq"),  # q, k and v in one matrix, and gate and up
        ("phi3", "gptq"),
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "gptq"),  # each expert has its columns in an order of its own
        ("qwen3_moe", "fp8"),
        ("qwen3_moe", "static fp8"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_a_quantized_folder(name: str, kind: str, tmp_path: Path) -> None:
    model = quantized(name, kind, tmp_path)
    ids = text(LENGTH, 1)
    want = expected(model, ids)
    assert mean_relative_error(want, expected(built(name), ids)) > 10 * F32, "the weights were not quantized"
    got = Session(decoder_of(tmp_path)).run({0: ids})[0]
    assert relative_error(got, want) < F32
    session = Session(decoder_of(tmp_path, torch.bfloat16), cache_dtype=torch.bfloat16)
    got = torch.cat([session.run({0: ids[:30]})[0], session.run({0: ids[30:]})[0]])
    assert mean_relative_error(got, want) < BF16


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed-tensors", "fp8"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_moe"])
def test_a_quantized_folder_of_a_model_that_sees(name: str, kind: str, tmp_path: Path) -> None:
    """As the hub has the families of 2026: the decoder inside a larger model, experts one by one, exact routers."""
    model = quantized(name, kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    inner = {f"model.language_model.{key.removeprefix('model.')}": values for key, values in tensors.items()}
    inner = {key.replace("model.language_model.lm_head", "lm_head"): values for key, values in inner.items()}
    inner["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(3, 3)
    inner["mtp.fc.weight"] = torch.zeros(64, 128)  # a head that no engine runs from a folder yet
    save_file(inner, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config}
    outer["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(outer))
    ids = text(LENGTH, 1)
    want = expected(model, ids)
    assert mean_relative_error(want, expected(built(name), ids)) > 10 * F32, "the weights were not quantized"
    assert relative_error(Session(decoder_of(tmp_path)).run({0: ids})[0], want) < F32
    assert not problem_of(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gemma4_moe"])
def test_experts_that_are_quantized_in_one_tensor_are_refused(name: str, tmp_path: Path) -> None:
    quantized(name, "fp8", tmp_path)
    tensors = stacked_experts(load_file(tmp_path / "model.safetensors"))
    stacks = {key: values for key, values in tensors.items() if key.endswith("experts.gate_up_proj")}
    scales = {f"{key}_scale_inv": torch.ones(len(values), 1, 1) for key, values in stacks.items()}
    tensors |= {key: values.to(torch.float8_e4m3fn) for key, values in stacks.items()} | scales
    save_file({key: values.contiguous() for key, values in tensors.items()}, tmp_path / "model.safetensors")
    reason = r"layers\.0\..*experts\.gate_up_proj has the quantized experts of a layer in one"
    with pytest.raises(ModelError, match=reason) as error:
        decoder_of(tmp_path)
    assert "GGUF" in error.value.hint
    assert problem_of(tmp_path) == error.value.message


# GPTQModel: `down_proj` has 8 bits, `q_proj` has groups of 16, `o_proj` of layer 1 is not quantized
DYNAMIC = {
    r".*\.down_proj": {"bits": 8, "sym": True},
    r"+:model\.layers\.[0-9]+\.self_attn\.q_proj$": {"group_size": 16, "desc_act": True},
    r"-:model\.layers\.1\.self_attn\.o_proj": {},
    r".*\.o_proj": {"bits": 4},  # the first rule that matches holds
}


def as_plain(weight: Tensor) -> Packed:
    return {"weight": weight.clone()}, weight.clone()


def as_gptq_of_small_groups(weight: Tensor) -> Packed:
    codes = Codes(weight, shuffled=True, group=16)
    return gptq(codes.codes, codes.scales, codes.zeros, codes.groups), codes.values


def by_rules(stem: str) -> Callable[[Tensor], Packed]:
    if stem.endswith("down_proj"):
        return as_gptq_of_8_bits
    if stem.endswith("q_proj"):
        return as_gptq_of_small_groups
    return as_plain if stem == "model.layers.1.self_attn.o_proj" else as_gptq


def test_modules_with_a_quantization_of_their_own(tmp_path: Path) -> None:
    config = FORMATS["gptq"][1] | {"dynamic": DYNAMIC}
    model = packed_model("llama3", "gptq", tmp_path, by_rules, config)
    ids = text(LENGTH, 1)
    want = expected(model, ids)
    assert relative_error(Session(decoder_of(tmp_path)).run({0: ids})[0], want) < F32
    with open_safetensors(tmp_path) as files:
        summary = folder_summary(files)
        parameters = sum(tensor.numel() for tensor in built("llama3").state_dict().values())
        assert summary.parameters == parameters


# -- what `edgelm plan` says -------------------------------------------------------------------------------------------


def problem_of(folder: Path) -> str:
    with open_model(folder) as model:
        return model.torch_problem()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_plan_runs_what_can_be_loaded(kind: str, tmp_path: Path) -> None:
    quantized({"mxfp4": "gpt_oss"}.get(kind, "llama3"), kind, tmp_path)
    assert not problem_of(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.layers.1.mlp.up_proj.spin": torch.ones(3)}, r"a tensor model\.layers\.1\.mlp\.up_proj\.spin is not"),
        ({"model.layers.0.mlp.up_proj.scales": None}, r"tensor model\.layers\.0\.mlp\.up_proj\.scales is missing"),
        ({"model.layers.2.input_layernorm.weight": None}, r"no tensor model\.layers\.2\.input_layernorm\.weight"),
        ({"model.norm.weight": torch.ones(65)}, r"model\.norm\.weight is 65, but must be 64"),
        ({"model.layers.1.mlp.up_proj.qweight": torch.ones(8, 90, dtype=torch.int32)}, r"is 8 x 90|is \d+ x \d+, but"),
        ({"lm_head.weight": None}, r"the model has no tensor lm_head\.weight, and its config\.json does not tie"),
    ],
)
def test_the_plan_refuses_what_loading_refuses(change: dict[str, Tensor | None], reason: str, tmp_path: Path) -> None:
    quantized("llama3", "gptq", tmp_path)
    tensors: dict[str, Any] = load_file(tmp_path / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=reason) as error:
        decoder_of(tmp_path)
    assert problem_of(tmp_path) == error.value.message
