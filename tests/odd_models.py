"""Writes tiny GGUF models whose cache is none of the usual kind: a sliding window, recurrent states, a mix of both.

Owns their shapes and random weights. The vocabulary is that of `tests.tiny`. Knows nothing of edgelm.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.tiny import Tiny, _write_tokenizer, vocabulary

Odd = Literal["gemma3", "mamba", "lfm2", "qwen35", "qwen35moe", "nemotron_h"]
Part = Literal["all", "model", "heads"]  # of a model with heads: all in one file, or each in its own
WIDTH, HEADS, KV_HEADS, HEAD, FFN, VOCAB, WINDOW = 64, 2, 1, 32, 128, 512, 32
INNER, STATE, RANK, KERNEL = 128, 16, 4, 4  # of mamba
SHORT = 3  # positions that lfm2's convolutions see
DELTA_HEADS, DELTA_GROUPS, DELTA_HEAD = 4, 2, 32  # of qwen35: gated delta nets, and every fourth layer attends
DELTA_LAYERS = 4
EXPERTS = 4
Q8_0 = GGMLQuantizationType.Q8_0


def write_odd(
    path: Path,
    arch: Odd,
    seed: int = 0,
    *,
    heads: float | None = None,
    drop: str = "-",
    part: Part = "all",
    router: GGMLQuantizationType = Q8_0,
    tiny: Tiny = Tiny(vocab_size=VOCAB),  # noqa: B008 - it is frozen
) -> Path:
    """Write a model of an architecture; the same seed always writes the same bytes.

    Tensors with `drop` in their names are left out. With `heads`, qwen35 also has a head that predicts the token after
    the next, and all text depends mostly on the last token, as the head does: `heads` is the weight of all others.
    Where it is 1, all weights are random. `part` leaves out the heads, or the layers before them. `router` is the type
    of experts' routers: F32 differs in llama.cpp in the last bits by the rows of a step, and then chooses other
    experts; Q8_0 does not, and is coarse. The vocabulary is that of `tiny`.
    """
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, arch)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    _write_tokenizer(writer, tiny, [*vocabulary(VOCAB - len(tiny.control)), *tiny.control])
    if arch in ("qwen35", "qwen35moe"):
        tensors = _qwen35(writer, heads=heads is not None and part != "model")
    else:
        tensors = {"gemma3": _gemma3, "mamba": _mamba, "lfm2": _lfm2, "nemotron_h": _nemotron_h}[arch](writer)
    tensors |= {"token_embd.weight": (VOCAB, WIDTH), "output.weight": (VOCAB, WIDTH)}
    if arch != "lfm2":
        tensors["output_norm.weight"] = (WIDTH,)
    own_blocks = tuple(f"blk.{layer}." for layer in range(DELTA_LAYERS))
    if heads is not None:
        tensors |= _next_tokens(writer, named=part != "model")
    if arch == "qwen35moe":
        tensors = _experts(writer, tensors)
    for name, shape in tensors.items():
        weights = _weights(name, shape, rng)
        is_head = name.startswith(f"blk.{DELTA_LAYERS}.")
        if drop in name or (part == "model" and is_head) or (part == "heads" and name.startswith(own_blocks)):
            continue
        if heads not in (None, 1.0) and re.search("attn_output|ffn_down|ssm_out", name):
            weights *= 0.0 if is_head else heads
        if heads != 1.0 and name.endswith("eh_proj.weight"):
            weights = np.eye(WIDTH, 2 * WIDTH, dtype=np.float32)  # the embedding, not the hidden state
        if "ffn_gate_inp" in name:
            writer.add_tensor(name, quantize(weights, router), raw_dtype=router)
            continue
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if "norm" in name or name.endswith("ssm_d"):
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(rng.standard_normal(shape)).astype(np.float32)
    gain = 4.0 if name == "output.weight" else 1.5
    return (rng.standard_normal(shape) * gain * shape[-1] ** -0.5).astype(np.float32)


def _attention(writer: GGUFWriter, kv_heads: int | list[int], feeds: list[int] | None = None) -> None:
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_feed_forward_length(feeds or FFN)
    writer.add_rope_freq_base(10_000.0)


def _attention_tensors(block: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{block}.attn_q.weight": (HEADS * HEAD, WIDTH),
        f"{block}.attn_k.weight": (KV_HEADS * HEAD, WIDTH),
        f"{block}.attn_v.weight": (KV_HEADS * HEAD, WIDTH),
        f"{block}.attn_output.weight": (WIDTH, HEADS * HEAD),
        f"{block}.attn_q_norm.weight": (HEAD,),
        f"{block}.attn_k_norm.weight": (HEAD,),
    }


def _feed_forward(block: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{block}.attn_norm.weight": (WIDTH,),
        f"{block}.ffn_norm.weight": (WIDTH,),
        f"{block}.ffn_gate.weight": (FFN, WIDTH),
        f"{block}.ffn_up.weight": (FFN, WIDTH),
        f"{block}.ffn_down.weight": (WIDTH, FFN),
    }


def _gemma3(writer: GGUFWriter) -> dict[str, tuple[int, ...]]:
    layers = 6  # every sixth sees all
    writer.add_block_count(layers)
    writer.add_sliding_window(WINDOW)
    _attention(writer, KV_HEADS)
    tensors: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        block = f"blk.{layer}"
        tensors |= _attention_tensors(block) | _feed_forward(block)
        tensors |= {f"{block}.post_attention_norm.weight": (WIDTH,), f"{block}.post_ffw_norm.weight": (WIDTH,)}
    return tensors


def _mamba(writer: GGUFWriter) -> dict[str, tuple[int, ...]]:
    writer.add_block_count(2)
    writer.add_head_count(0)
    writer.add_feed_forward_length(0)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    tensors: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        block = f"blk.{layer}"
        tensors |= {
            f"{block}.attn_norm.weight": (WIDTH,),
            f"{block}.ssm_in.weight": (2 * INNER, WIDTH),
            f"{block}.ssm_conv1d.weight": (INNER, KERNEL),
            f"{block}.ssm_conv1d.bias": (INNER,),
            f"{block}.ssm_x.weight": (RANK + 2 * STATE, INNER),
            f"{block}.ssm_dt.weight": (INNER, RANK),
            f"{block}.ssm_dt.bias": (INNER,),
            f"{block}.ssm_a": (INNER, STATE),
            f"{block}.ssm_d": (INNER,),
            f"{block}.ssm_out.weight": (WIDTH, INNER),
        }
    return tensors


def _lfm2(writer: GGUFWriter) -> dict[str, tuple[int, ...]]:
    kinds = [0, KV_HEADS, 0]
    writer.add_block_count(len(kinds))
    writer.add_shortconv_l_cache(SHORT)
    _attention(writer, kinds)
    tensors: dict[str, tuple[int, ...]] = {"token_embd_norm.weight": (WIDTH,)}
    for layer, kv_heads in enumerate(kinds):
        block = f"blk.{layer}"
        tensors |= _feed_forward(block)
        if kv_heads:
            tensors |= _attention_tensors(block)
        else:
            tensors |= {
                f"{block}.shortconv.conv.weight": (WIDTH, SHORT),
                f"{block}.shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
                f"{block}.shortconv.out_proj.weight": (WIDTH, WIDTH),
            }
    return tensors


def _nemotron_h(writer: GGUFWriter) -> dict[str, tuple[int, ...]]:
    """Write the metadata of layers of three kinds: mamba2, attention, feed-forward."""
    kinds = "MAFM"
    writer.add_block_count(len(kinds))
    writer.add_layer_norm_eps(1e-5)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(DELTA_HEADS)
    writer.add_ssm_group_count(DELTA_GROUPS)
    _attention(writer, [KV_HEADS * (kind == "A") for kind in kinds], [FFN * (kind == "F") for kind in kinds])
    conv = INNER + 2 * DELTA_GROUPS * STATE
    tensors: dict[str, tuple[int, ...]] = {}
    for layer, kind in enumerate(kinds):
        block = f"blk.{layer}"
        tensors[f"{block}.attn_norm.weight"] = (WIDTH,)
        if kind == "M":
            tensors |= {
                f"{block}.ssm_in.weight": (INNER + conv + DELTA_HEADS, WIDTH),
                f"{block}.ssm_conv1d.weight": (conv, KERNEL),
                f"{block}.ssm_conv1d.bias": (conv,),
                f"{block}.ssm_dt.bias": (DELTA_HEADS,),
                f"{block}.ssm_a": (DELTA_HEADS, 1),
                f"{block}.ssm_d": (DELTA_HEADS, 1),
                f"{block}.ssm_norm.weight": (DELTA_GROUPS, INNER // DELTA_GROUPS),
                f"{block}.ssm_out.weight": (WIDTH, INNER),
            }
        elif kind == "A":
            tensors |= {name: shape for name, shape in _attention_tensors(block).items() if "_norm" not in name}
        else:
            tensors |= {f"{block}.ffn_up.weight": (FFN, WIDTH), f"{block}.ffn_down.weight": (WIDTH, FFN)}
    return tensors


def _qwen35(writer: GGUFWriter, *, heads: bool) -> dict[str, tuple[int, ...]]:
    layers, interval, inner = DELTA_LAYERS, 4, DELTA_HEADS * DELTA_HEAD
    writer.add_block_count(layers + heads)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(DELTA_HEAD)
    writer.add_ssm_time_step_rank(DELTA_HEADS)
    writer.add_ssm_group_count(DELTA_GROUPS)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", interval)
    writer.add_rope_dimension_sections([6, 5, 5, 0])  # they alternate; a pair of none of them would not turn
    _attention(writer, KV_HEADS)
    conv = 2 * DELTA_GROUPS * DELTA_HEAD + inner
    tensors: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        block = f"blk.{layer}"
        tensors |= {name: shape for name, shape in _feed_forward(block).items() if not name.endswith("ffn_norm.weight")}
        tensors[f"{block}.post_attention_norm.weight"] = (WIDTH,)
        if (layer + 1) % interval == 0:
            tensors |= _attention_tensors(block) | {f"{block}.attn_q.weight": (2 * HEADS * HEAD, WIDTH)}
            continue
        tensors |= {
            f"{block}.attn_qkv.weight": (conv, WIDTH),
            f"{block}.attn_gate.weight": (inner, WIDTH),
            f"{block}.ssm_conv1d.weight": (conv, KERNEL),
            f"{block}.ssm_dt.bias": (DELTA_HEADS,),
            f"{block}.ssm_a": (DELTA_HEADS,),
            f"{block}.ssm_beta.weight": (DELTA_HEADS, WIDTH),
            f"{block}.ssm_alpha.weight": (DELTA_HEADS, WIDTH),
            f"{block}.ssm_norm.weight": (DELTA_HEAD,),
            f"{block}.ssm_out.weight": (WIDTH, inner),
        }
    return tensors


def _next_tokens(writer: GGUFWriter, *, named: bool) -> dict[str, tuple[int, ...]]:
    """Add one layer that predicts the token after the next: a block that attends, behind all others."""
    block = f"blk.{DELTA_LAYERS}"
    if named:
        writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)
    tensors = {name: shape for name, shape in _feed_forward(block).items() if not name.endswith("ffn_norm.weight")}
    tensors |= _attention_tensors(block) | {f"{block}.attn_q.weight": (2 * HEADS * HEAD, WIDTH)}
    return tensors | {
        f"{block}.post_attention_norm.weight": (WIDTH,),
        f"{block}.nextn.eh_proj.weight": (WIDTH, 2 * WIDTH),
        f"{block}.nextn.enorm.weight": (WIDTH,),
        f"{block}.nextn.hnorm.weight": (WIDTH,),
    }


def _experts(writer: GGUFWriter, tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Replace each feed-forward by EXPERTS of its size, of which two are used, and one for every token."""
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(FFN)
    writer.add_expert_shared_feed_forward_length(FFN)
    with_experts: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        stem, part = name.removesuffix(".weight"), name.rpartition(".ffn_")[2]
        if part not in ("gate.weight", "up.weight", "down.weight"):
            with_experts[name] = shape
            continue
        with_experts |= {f"{stem}_exps.weight": (EXPERTS, *shape), f"{stem}_shexp.weight": shape}
        if part == "gate.weight":
            with_experts |= {f"{stem}_inp.weight": (EXPERTS, WIDTH), f"{stem}_inp_shexp.weight": (WIDTH,)}
    return with_experts
