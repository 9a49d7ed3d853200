"""Folders of every family become GGUFs that llama.cpp computes as transformers computes the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.errors import ModelError
from edgelm.making.conversion.convert import convert_folder
from tests.backends.torch.test_heads import Fed, executor_of, load_both, load_folder
from tests.making.conversion.folders import LLAMA_CPP, VOCAB, folder_of, write_tokenizer
from tests.models.test_gguf_models import F32, GELU, llama_logits
from tests.models.test_quantized_models import as_mxfp4
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_models import (
    DELTA,
    WINDOW,
    add_head,
    build,
    expected,
    relative_error,
    stacked_experts,
    text,
    write,
)

LENGTH = 33
ROPE = DELTA["rope_parameters"]


def tensors_of(path: Path) -> dict[str, NDArray[Any]]:
    """Return the values of all tensors of a GGUF, flat."""
    reader = GGUFReader(path)
    return {tensor.name: dequantize(tensor.data, tensor.tensor_type).ravel() for tensor in reader.tensors}


def keys_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def rounded(model: Any) -> Any:
    """Round the weights of a model to bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


@pytest.mark.parametrize("name", sorted(LLAMA_CPP))
def test_a_family_is_computed_as_by_transformers(name: str, tmp_path: Path) -> None:
    model = build(name, vocab_size=VOCAB, **LLAMA_CPP[name])
    write(model, tmp_path / "folder")
    write_tokenizer(name, tmp_path / "folder")
    out = tmp_path / "model.gguf"
    convert_folder(tmp_path / "folder", out)
    reference = tensors_of(write_gguf(model, tmp_path / "reference.gguf"))
    tensors = tensors_of(out)
    assert tensors.keys() == reference.keys()
    for tensor, values in reference.items():
        np.testing.assert_allclose(tensors[tensor], values, rtol=1e-6, err_msg=tensor)
    wanted = keys_of(tmp_path / "reference.gguf")
    keys = keys_of(out)
    for key, value in wanted.items():
        if not key.startswith(("GGUF.", "tokenizer.")):
            assert keys[key] == pytest.approx(value, rel=1e-6), key
    ids = text(LENGTH, seed=1)
    error = relative_error(llama_logits(out, ids), expected(model, ids))
    assert error < (GELU if name.startswith("gemma") else F32)


def test_experts_in_mxfp4_keep_their_codes(tmp_path: Path) -> None:
    model = build("gpt_oss", vocab_size=VOCAB, **LLAMA_CPP["gpt_oss"])
    folder = write(model, tmp_path / "folder")
    write_tokenizer("gpt_oss", folder)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        packed, values = as_mxfp4(tensors.pop(name))
        tensors |= {name + suffix: part.contiguous() for suffix, part in packed.items()}
        with torch.no_grad():
            parameters[name].copy_(values)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    out = tmp_path / "model.gguf"
    convert_folder(folder, out)
    stored = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out).tensors}
    assert stored["blk.0.ffn_gate_exps.weight"] == stored["blk.2.ffn_down_exps.weight"] == "MXFP4"
    reference = tensors_of(write_gguf(model, tmp_path / "reference.gguf"))
    for name, values in tensors_of(out).items():
        np.testing.assert_allclose(values, reference[name], rtol=1e-6, err_msg=name)


def test_stacked_experts_are_the_same_as_experts_apart(tmp_path: Path) -> None:
    """Of Qwen 3.5 both are there: one tensor for all experts, or one for each."""
    folder = folder_of("qwen3_5_moe", tmp_path / "folder")
    convert_folder(folder, tmp_path / "apart.gguf")
    save_file(stacked_experts(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    convert_folder(folder, tmp_path / "stacked.gguf")
    apart = tensors_of(tmp_path / "apart.gguf")
    stacked = tensors_of(tmp_path / "stacked.gguf")
    assert stacked.keys() == apart.keys()
    for tensor, values in stacked.items():
        np.testing.assert_array_equal(values, apart[tensor], err_msg=tensor)


@pytest.mark.parametrize(("name", "stacked"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)])
def test_the_head_of_a_folder_drafts_the_same_in_its_gguf(name: str, stacked: bool, tmp_path: Path) -> None:
    """By the torch engine from the folder and from the GGUF, and by llama.cpp."""
    folder = folder_of(name, tmp_path / "folder", mtp_num_hidden_layers=1)
    add_head(folder, stacked=stacked)
    source = convert_folder(folder, tmp_path / "m.gguf")
    assert not source.notes
    keys = keys_of(tmp_path / "m.gguf")
    arch = keys["general.architecture"]
    assert (keys[f"{arch}.block_count"], keys[f"{arch}.nextn_predict_layers"]) == (5, 1)
    llama = LlamaExecutor(
        LlamaModel(tmp_path / "m.gguf", heads=True),
        LlamaOptions(context=512, kv="f16", threads=1, rollback=3, heads=True),
    )
    tokens = text(20, seed=3)
    drafts = []
    for executor in (executor_of(load_folder(folder)), executor_of(load_both(tmp_path / "m.gguf")), llama):
        fed = Fed(executor, 0)
        fed.compute(tokens)
        drafts.append(fed.draft(7))
    llama.close()
    for (token, chance), own, other in zip(*drafts, strict=True):
        assert own == (token, pytest.approx(chance, rel=1e-4))
        assert other == (token, pytest.approx(chance, rel=0.01))


def test_a_folder_that_names_a_head_and_lacks_it_has_none_as_gguf(tmp_path: Path) -> None:
    """As transformers saves a fine-tuned model."""
    convert_folder(folder_of("qwen3_5", tmp_path / "folder", mtp_num_hidden_layers=1), tmp_path / "m.gguf")
    keys = keys_of(tmp_path / "m.gguf")
    assert keys["qwen35.block_count"] == 4
    assert "qwen35.nextn_predict_layers" not in keys


def test_the_sampling_that_a_folder_recommends_is_kept(tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path / "folder")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 7}')
    convert_folder(folder, tmp_path / "m.gguf")
    keys = {name: value for name, value in keys_of(tmp_path / "m.gguf").items() if ".sampling." in name}
    assert keys == {"general.sampling.temp": pytest.approx(0.6), "general.sampling.top_k": 20}


def test_types_are_kept_or_chosen(tmp_path: Path) -> None:
    model = rounded(build("qwen3", vocab_size=VOCAB))
    folder = write(model.bfloat16(), tmp_path / "folder")
    write_tokenizer("qwen3", folder)
    plain = tensors_of(write_gguf(model.float(), tmp_path / "reference.gguf"))
    to: Any
    for to, stored in (("source", "BF16"), ("F32", "F32"), ("F16", "F16"), ("Q8_0", "Q8_0")):
        out = tmp_path / f"{to}.gguf"
        source = convert_folder(folder, out, to)
        types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out).tensors}
        assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == stored
        assert types["blk.0.attn_norm.weight"] == "F32"
        assert source.layout.types.keys() == {stored, "F32"}
        for name, values in tensors_of(out).items():
            error = np.abs(values - plain[name]).max()
            assert error <= {"F16": 1e-3, "Q8_0": 2e-2}.get(stored, 0) * np.abs(plain[name]).max(), (to, name)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama2", "model.layers.1.self_attn.q_proj.weight"),
        ("qwen3_5", "model.layers.1.linear_attn.in_proj_qkv.weight"),
        ("qwen3_5", "model.layers.1.linear_attn.out_proj.weight"),  # its columns are put in order
        ("qwen3_5_moe", "model.layers.1.mlp.shared_expert_gate.weight"),
    ],
)
def test_a_change_is_made_before_rows_are_permuted(tmp_path: Path, model: str, name: str) -> None:
    """The seam for adapters: rows of the folder's own tensors, in their own order."""
    folder = folder_of(model, tmp_path / "folder")
    shape = load_file(folder / "model.safetensors")[name].shape
    delta = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def change(tensor: str, rows: NDArray[np.float32], first: int) -> NDArray[np.float32]:
        return rows + delta[first : first + len(rows)] if tensor == name else rows

    convert_folder(folder, tmp_path / "changed.gguf", change=change, change_key="delta")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] += torch.from_numpy(delta)
    save_file(tensors, folder / "model.safetensors")
    convert_folder(folder, tmp_path / "merged.gguf")
    merged = tensors_of(tmp_path / "merged.gguf")
    for tensor, values in tensors_of(tmp_path / "changed.gguf").items():
        np.testing.assert_array_equal(values, merged[tensor])


def test_a_language_model_beside_a_vision_tower(tmp_path: Path) -> None:
    folder = folder_of("gemma3", tmp_path / "folder")
    plain = tmp_path / "plain.gguf"
    convert_folder(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    nested = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    nested["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(4, 3, 2, 2)
    nested["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(4, 4)
    save_file(nested, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    out = tmp_path / "model.gguf"
    source = convert_folder(folder, out)
    assert any("2 tensors for images or sound are left out" in note for note in source.notes)
    merged = tensors_of(plain)
    for name, values in tensors_of(out).items():
        np.testing.assert_array_equal(values, merged[name])


def test_a_window_that_llama_cpp_does_not_have_is_said(tmp_path: Path) -> None:
    source = convert_folder(folder_of("mistral", tmp_path / "folder"), tmp_path / "model.gguf")
    assert keys_of(tmp_path / "model.gguf")["general.architecture"] == "llama"
    assert any(f"after {WINDOW} tokens" in note for note in source.notes)


def test_a_name_that_llama_cpp_takes_for_another_vocabulary(tmp_path: Path) -> None:
    """llama.cpp fails for a model called Phi-3 whose vocabulary lacks its special tokens."""
    out = tmp_path / "model.gguf"
    convert_folder(folder_of("qwen3", tmp_path / "tuned-phi-3"), out)
    assert keys_of(out)["general.name"] == "tuned-Phi 3"
    assert llama_logits(out, [1, 2, 3]).isfinite().all()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, "some of its layers have experts"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "it divides by the root of 24"),
        ("llama2", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("smollm3", {"no_rope_layer_interval": 2}, "do not rotate"),
        ("qwen3_5", {"linear_key_head_dim": 16}, "keys and values of its linear attention differ"),
        ("qwen3_5", {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}, "leave pairs of 16 numbers unturned"),
        ("qwen3_5", {"layer_types": ["full_attention", "linear_attention"] * 2}, "are not evenly spaced"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = folder_of(name, tmp_path / "folder", **changes)
    with pytest.raises(ModelError, match=f"llama.cpp cannot compute this model: .*{reason}"):
        convert_folder(folder, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
