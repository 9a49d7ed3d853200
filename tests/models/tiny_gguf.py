"""Writes a tiny transformers model as a GGUF, as llama.cpp's converter does: names, keys, permuted rows, folded norms.

Owns that mapping for the families that llama.cpp has. Knows nothing of edgelm.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama",
    "ministral3": "mistral3",
    "granite": "granite",
    "mixtral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router": "ffn_gate_inp",
}
DELTA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
WHOLE_NAMES = {"router.per_expert_scale": "ffn_down_exps.scale", "self_attn.sinks": "attn_sinks.weight"}
OWN_NAMES = {
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text"), GEMMA_NAMES),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), DELTA_NAMES),
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm"},
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


Kinds = Callable[[str], GGMLQuantizationType]  # takes the name of a tensor


def write_gguf(
    model: Any,
    path: Path,
    kinds: Kinds = lambda _: GGMLQuantizationType.F32,
    renamed: Mapping[str, str] = MappingProxyType({}),
    add: Callable[[GGUFWriter], None] = lambda _: None,
) -> Path:
    """Write a model, its matrices in the types of `kinds`, with some tensors renamed, or omitted by the name "".

    `add` adds keys and tensors.
    """
    config = model.config
    writer = GGUFWriter(path, ARCHITECTURES[config.model_type])
    _write_keys(writer, config)
    add(writer)
    for name, tensor in _tensors(model):
        name = renamed.get(name, name)
        if not name:
            continue
        data = np.ascontiguousarray(tensor.float().numpy())
        if _is_plain(name, data.ndim):
            writer.add_tensor(name, data)
        else:
            kind = kinds(name)
            writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize_model(model: Any, kinds: Kinds) -> Any:
    """Return a copy of a model with the dequantized weights of its GGUF. Rows may move: blocks lie along rows."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, view in _tensors(model, in_place=True):
            if not _is_plain(name, view.ndim):
                data = np.ascontiguousarray(view.numpy())
                view.copy_(torch.from_numpy(dequantize(quantize(data, kinds(name)), kinds(name))))
    return model


def _is_plain(name: str, num_dims: int) -> bool:
    return num_dims == 1 or "ffn_gate_inp" in name or name.endswith(".bias")


def _write_keys(writer: GGUFWriter, config: Any) -> None:
    gemma4 = config.model_type == "gemma4_text"
    layer = config.per_layer_config[0] if gemma4 else config
    head_dim = getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if gemma4:
        _write_heads(writer, config, head_dim)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(getattr(config, "top_k_experts", None) or config.num_experts_per_tok)
        if config.model_type != "mixtral":
            own = getattr(config, "moe_intermediate_size", 0)
            writer.add_expert_feed_forward_length(own or config.intermediate_size)
    if config.model_type == "qwen3_5_moe_text":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type.startswith("qwen3_5"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_uint32(f"{writer.arch}.full_attention_interval", config.layer_types.index("full_attention") + 1)
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    if config.model_type in ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    _write_rope(writer, config, head_dim)


def _write_heads(writer: GGUFWriter, config: Any, head_dim: int) -> None:
    """Write the heads of Gemma 4: those of the last layer, which has no window, are longer."""
    window = [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_key_length(layers[-1].head_dim)
    writer.add_value_length(layers[-1].head_dim)
    writer.add_key_length_swa(head_dim)
    writer.add_value_length_swa(head_dim)
    writer.add_rope_dimension_count_swa(head_dim)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_sliding_window_pattern(window)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_rope(writer: GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    kind = rope["rope_type"]
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if kind == "proportional":
        dim = config.per_layer_config[config.num_hidden_layers - 1].head_dim
    writer.add_rope_dimension_count(dim)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def _tensors(model: Any, *, in_place: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor by its name in a GGUF; `in_place`: as a view of the model's, without permuting rows."""
    config = model.config
    offset = config.model_type.startswith(("qwen3_5", "gemma")) and config.model_type != "gemma4_text"
    names = NAMES | OWN_NAMES.get(config.model_type, {})
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        match = LAYER.fullmatch(name)
        block, rest = (f"blk.{match[1]}.", match[2]) if match else ("", name)
        if rest.startswith(("mlp.experts.", "experts.")):
            yield from _experts(block, rest.removeprefix("mlp.").removeprefix("experts."), tensor, config)
            continue
        if rest in WHOLE_NAMES:
            yield block + WHOLE_NAMES[rest], tensor
            continue
        if rest.startswith("linear_attn."):
            yield _delta_tensor(block, rest.removeprefix("linear_attn."), tensor, config)
            continue
        base, suffix = rest.rsplit(".", 1)
        if offset and base.endswith("norm") and not in_place:
            tensor = tensor + 1
        if base == "mlp.shared_expert_gate":
            tensor = tensor[0]
        if not in_place and ARCHITECTURES[config.model_type] in ("llama", "smollm3", "mistral3", "granite"):
            if base == "self_attn.q_proj":
                tensor = permuted(tensor, config.num_attention_heads)
            elif base == "self_attn.k_proj":
                tensor = permuted(tensor, config.num_key_value_heads)
        yield f"{block}{names[base]}.{suffix}", tensor
    if not in_place:
        yield from _layer_scales(model)
        yield from _rope_tensors(config)


def _delta_tensor(block: str, rest: str, tensor: Tensor, config: Any) -> tuple[str, Tensor]:
    """Return a tensor of a gated delta net, with its value heads in llama.cpp's order."""
    base = rest.removesuffix(".weight")
    name = block + DELTA_NAMES[base] + ("" if base in ("A_log", "dt_bias") else ".weight")
    if base == "norm":
        return name, tensor
    if base == "out_proj":
        return name, tiled(tensor.T, config).T
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim if base in ("in_proj_qkv", "conv1d") else 0
    values = -tensor.exp() if base == "A_log" else tensor.squeeze(1) if base == "conv1d" else tensor
    return name, torch.cat([values[:keys], tiled(values[keys:], config)])


def tiled(rows: Tensor, config: Any) -> Tensor:
    """Return the rows of value heads, of which those of one key head are neighbours, with the key heads alternating."""
    heads = rows.unflatten(
        0, (config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads, -1)
    )
    return heads.transpose(0, 1).reshape(rows.shape)


def _layer_scales(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in model.named_buffers():
        if match := LAYER.fullmatch(name):
            yield f"blk.{match[1]}.layer_output_scale.weight", buffer


def _experts(block: str, rest: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    suffix = "bias" if rest.endswith("_bias") else "weight"
    if config.model_type == "gpt_oss":
        if suffix == "weight":
            tensor = tensor.transpose(1, 2)
        halves = (tensor[:, ::2], tensor[:, 1::2])
    else:
        halves = tuple(tensor.chunk(2, 1))
    if rest == "gate_up_proj" and config.model_type == "gemma4_text":
        yield f"{block}ffn_gate_up_exps.weight", tensor
    elif rest.startswith("gate_up_proj"):
        yield f"{block}ffn_gate_exps.{suffix}", halves[0]
        yield f"{block}ffn_up_exps.{suffix}", halves[1]
    else:
        yield f"{block}ffn_down_exps.{suffix}", tensor


def _rope_tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    rope = config.rope_parameters
    if "full_attention" in rope and rope["full_attention"]["rope_type"] == "proportional":
        pairs = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
        turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (pairs - turning))
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        yield "rope_freqs.weight", 1 / ((1 - smooth) / factor + smooth)


def permuted(tensor: Tensor, heads: int) -> Tensor:
    """Return rows of q or k with alternating rows of the two halves of each head."""
    parts = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return parts.transpose(1, 2).reshape(tensor.shape)
