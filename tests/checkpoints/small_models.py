"""Models of a few kilobytes with the names and shapes of many families, and zero weights."""

from __future__ import annotations

import math
from typing import Any

from gguf.constants import GGUFValueType as V

from edgelm.checkpoints.gguf_parse import TENSOR_TYPES
from tests.checkpoints.gguf_bytes import Key, RawGGUF, RawTensor

WIDTH, HEADS, KV_HEADS, FFN, VOCAB = 32, 4, 2, 64, 24
Dims = tuple[int, ...]
NORM: dict[str, Dims] = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
ATTENTION: dict[str, Dims] = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, WIDTH // 2),
    "attn_v": (WIDTH, WIDTH // 2),
    "attn_output": (WIDTH, WIDTH),
}
DENSE: dict[str, Dims] = {"ffn_gate": (WIDTH, FFN), "ffn_up": (WIDTH, FFN), "ffn_down": (FFN, WIDTH)}
EXPERTS: dict[str, Dims] = {
    "ffn_gate_inp": (WIDTH, 4),
    "ffn_gate_exps": (WIDTH, FFN, 4),
    "ffn_up_exps": (WIDTH, FFN, 4),
    "ffn_down_exps": (FFN, WIDTH, 4),
}
LLAMA = NORM | ATTENTION | DENSE
FEW_OF_4: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}


def key(value: Any) -> Key:
    """Return a value with the type that converters use."""
    if isinstance(value, bool):
        return V.BOOL, value
    if isinstance(value, list):
        return V.ARRAY, (key(value[0])[0], value)
    return {int: V.UINT32, float: V.FLOAT32, str: V.STRING}[type(value)], value


def tensor(name: str, dims: Dims, kind: int = 0) -> RawTensor:
    size = TENSOR_TYPES[kind]
    return RawTensor(name, dims, kind, bytes(math.prod(dims) // size.block_len * size.block_bytes))


def model(arch: str, blocks: list[dict[str, Dims]], extra: dict[str, Dims] | None = None, **keys: Any) -> RawGGUF:
    """Describe a model; `keys` are those of the architecture, with `__` for a dot and None to omit one."""
    usual: dict[str, Any] = {
        "block_count": len(blocks),
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    usual |= {name.replace("__", "."): value for name, value in keys.items()}
    raw = RawGGUF({"general.architecture": key(arch)})
    raw.keys |= {f"{arch}.{name}": key(value) for name, value in usual.items() if value is not None}
    raw.keys |= {
        "tokenizer.ggml.model": key("gpt2"),
        "tokenizer.ggml.tokens": key([f"token {i}" for i in range(VOCAB)]),
        "tokenizer.ggml.token_type": (V.ARRAY, (V.INT32, [1] * VOCAB)),
    }
    shared = {"token_embd": (WIDTH, VOCAB), "output_norm": (WIDTH,)} if extra is None else extra
    raw.tensors = [tensor(f"{name}.weight", dims) for name, dims in shared.items()]
    for i, block in enumerate(blocks):
        raw.tensors += [tensor(f"blk.{i}.{name}.weight", dims) for name, dims in block.items()]
    return raw


QK_NORM: dict[str, Dims] = {"attn_q_norm": (8,), "attn_k_norm": (8,)}
GEMMA = LLAMA | QK_NORM | {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
MAMBA: dict[str, Dims] = {
    "attn_norm": (WIDTH,),
    "ssm_in": (WIDTH, 128),
    "ssm_conv1d": (4, 64),
    "ssm_a": (16, 64),
    "ssm_out": (64, WIDTH),
}
CONV = (
    NORM
    | DENSE
    | {"shortconv.conv": (3, WIDTH), "shortconv.in_proj": (WIDTH, 96), "shortconv.out_proj": (WIDTH, WIDTH)}
)
LATENT = NORM | {"attn_q": (WIDTH, 96), "attn_kv_a_mqa": (WIDTH, 24), "attn_kv_a_norm": (16,), "attn_k_b": (16, 16, 4)}
LATENT |= {"attn_v_b": (16, 8, 4), "attn_output": (WIDTH, WIDTH)}
FUSED = NORM | {
    "attn_qkv": (WIDTH, 64),
    "attn_output": (WIDTH, WIDTH),
    "ffn_up": (WIDTH, 128),
    "ffn_down": (FFN, WIDTH),
}
BERT: dict[str, Dims] = {"attn_output_norm": (WIDTH,), "layer_output_norm": (WIDTH,)} | ATTENTION | DENSE
SHARED: dict[str, Dims] = {"token_embd": (WIDTH, VOCAB), "token_embd_norm": (WIDTH,)}

# valid models of many families, which must not be refused
FAMILIES: dict[str, RawGGUF] = {
    "llama": model("llama", [LLAMA] * 2, rope__dimension_count=8, rope__freq_base=1e4, vocab_size=VOCAB),
    "llama with experts": model("llama", [NORM | ATTENTION | EXPERTS] * 2, **FEW_OF_4),
    "a vocab_size that nobody reads": model("llama", [LLAMA], vocab_size=VOCAB + 8),
    "qwen2": model("qwen2", [LLAMA] * 3),
    "qwen3moe": model("qwen3moe", [NORM | ATTENTION | QK_NORM | EXPERTS] * 2, attention__key_length=8, **FEW_OF_4),
    "gemma3": model("gemma3", [GEMMA] * 6, attention__sliding_window=64, attention__key_length=8),
    "gemma3n": model("gemma3n", [GEMMA] * 4, attention__shared_kv_layers=2, attention__sliding_window=64),
    "phi3": model("phi3", [FUSED] * 2, attention__sliding_window=0, rope__dimension_count=8),
    "mamba": model("mamba", [MAMBA] * 2, attention__head_count=0, attention__head_count_kv=None, feed_forward_length=0),
    "lfm2": model("lfm2", [CONV, LLAMA, CONV], SHARED, attention__head_count_kv=[0, KV_HEADS, 0]),
    "qwen3next": model("qwen3next", [NORM | {"ssm_in": (WIDTH, 96)}] * 3 + [LLAMA], full_attention_interval=4),
    "deepseek2": model(
        "deepseek2",
        [LATENT | DENSE, LATENT | EXPERTS],
        attention__head_count_kv=1,
        attention__key_length=24,
        attention__value_length=16,
        attention__key_length_mla=24,
        attention__value_length_mla=8,
        rope__dimension_count=8,
        expert_weights_scale=2.5,
        expert_group_count=2,
        expert_group_used_count=1,
        **FEW_OF_4,
    ),
    "deci": model(
        "deci",
        [LLAMA, {}, NORM | DENSE],
        attention__head_count=[HEADS, 0, 0],
        attention__head_count_kv=[KV_HEADS, 0, 0],
        feed_forward_length=[FFN, 0, FFN],
    ),
    "glm4moe without its last block": model("glm4moe", [LLAMA, LLAMA, {}], nextn_predict_layers=1),
    "bert": model("bert", [BERT] * 2, SHARED, attention__head_count_kv=None, attention__causal=False),
    "modern-bert": model("modern-bert", [BERT, BERT | {"attn_norm": (WIDTH,)}], SHARED),
    "olmo": model("olmo", [ATTENTION | DENSE] * 2, {"token_embd": (WIDTH, VOCAB)}),
    "kimi-k3, which the gguf library does not know": model("kimi-k3", [{"new": (5, 7)}], {"something": (3,)}),
}
