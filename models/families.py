"""The families of architectures that the decoder computes: a row of flags and tensor names for each.

Owns what one family has and another has not, and what its tensors are called in a GGUF and in safetensors. Knows
neither sizes nor how anything is computed. A name has `{i}` for the layer and `{e}` for the expert, and no suffix
where its tensors have `.weight` and `.bias`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from edgelm.kernels.gate import GateKind

Routing = Literal["softmax", "topk_softmax"]


@dataclass(frozen=True, slots=True)
class Names:
    """What tensors are called. Where a family has a fused tensor and separate ones, a file has either."""

    embedding: str
    final_norm: str
    output: str
    attention_norm: str
    qkv: str
    q: str
    k: str
    v: str
    out: str
    q_norm: str
    k_norm: str
    sinks: str  # the whole name
    attention_post_norm: str
    feed_norm: str
    gate_up: str  # rows of gate, then rows of up
    gate: str
    up: str
    down: str
    feed_post_norm: str
    router: str
    expert_gate: str
    expert_up: str
    expert_down: str
    expert_gate_up: str = ""  # columns of gate and up alternate; all experts are one tensor, stored transposed


GGUF_NAMES = Names(
    embedding="token_embd",
    final_norm="output_norm",
    output="output",
    attention_norm="blk.{i}.attn_norm",
    qkv="blk.{i}.attn_qkv",
    q="blk.{i}.attn_q",
    k="blk.{i}.attn_k",
    v="blk.{i}.attn_v",
    out="blk.{i}.attn_output",
    q_norm="blk.{i}.attn_q_norm",
    k_norm="blk.{i}.attn_k_norm",
    sinks="blk.{i}.attn_sinks.weight",
    attention_post_norm="blk.{i}.post_attention_norm",
    feed_norm="blk.{i}.ffn_norm",
    gate_up="",
    gate="blk.{i}.ffn_gate",
    up="blk.{i}.ffn_up",
    down="blk.{i}.ffn_down",
    feed_post_norm="blk.{i}.post_ffw_norm",
    router="blk.{i}.ffn_gate_inp",
    expert_gate="blk.{i}.ffn_gate_exps",
    expert_up="blk.{i}.ffn_up_exps",
    expert_down="blk.{i}.ffn_down_exps",
)
FOLDER_NAMES = Names(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    output="lm_head",
    attention_norm="model.layers.{i}.input_layernorm",
    qkv="model.layers.{i}.self_attn.qkv_proj",
    q="model.layers.{i}.self_attn.q_proj",
    k="model.layers.{i}.self_attn.k_proj",
    v="model.layers.{i}.self_attn.v_proj",
    out="model.layers.{i}.self_attn.o_proj",
    q_norm="model.layers.{i}.self_attn.q_norm",
    k_norm="model.layers.{i}.self_attn.k_norm",
    sinks="model.layers.{i}.self_attn.sinks",
    attention_post_norm="",
    feed_norm="model.layers.{i}.post_attention_layernorm",
    gate_up="model.layers.{i}.mlp.gate_up_proj",
    gate="model.layers.{i}.mlp.gate_proj",
    up="model.layers.{i}.mlp.up_proj",
    down="model.layers.{i}.mlp.down_proj",
    feed_post_norm="",
    router="model.layers.{i}.mlp.gate",
    expert_gate="model.layers.{i}.mlp.experts.{e}.gate_proj",
    expert_up="model.layers.{i}.mlp.experts.{e}.up_proj",
    expert_down="model.layers.{i}.mlp.experts.{e}.down_proj",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family of architectures has. `defaults`: what its config.json may leave out, as transformers has it."""

    name: str
    gguf: str  # its `general.architecture`; "": it has no GGUF of its own
    folder: tuple[str, ...]  # its `model_type`, in safetensors
    gate: GateKind = "silu"
    qk_norm: bool = False
    post_norms: bool = False  # RMSNorm of what attention and feed-forward give, before it is added
    sinks: bool = False
    scaled_embedding: bool = False  # by sqrt(width)
    norm_offset: float = 0.0  # added to norm weights of safetensors; a GGUF has it in the weights
    gguf_interleaved: bool = False  # the rows of q and k are permuted in a GGUF, for pairs (2i, 2i + 1)
    window_every: int = 0  # every n-th layer has no window; 0: all layers with a window have the same
    window_is_optional: bool = False  # `use_sliding_window` says whether there is one, and `max_window_layers` where
    gguf_window: bool = False  # whether the window that a GGUF states is one (llama.cpp ignores it for some)
    rope_every: int = 0  # every n-th layer does not rotate
    routing: Routing = "softmax"
    normalised: bool = True  # the routes of a token sum up to 1, where its configuration does not say
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    gguf_names: Names = GGUF_NAMES
    folder_names: Names = FOLDER_NAMES


GEMMA_FOLDER = replace(
    FOLDER_NAMES,
    attention_post_norm="model.layers.{i}.post_attention_layernorm",
    feed_norm="model.layers.{i}.pre_feedforward_layernorm",
    feed_post_norm="model.layers.{i}.post_feedforward_layernorm",
)
GEMMA_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES = (
    Family(name="Llama", gguf="llama", folder=("llama",), gguf_interleaved=True),
    Family(
        name="Mistral",
        gguf="",  # "llama" there
        folder=("mistral",),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
        },
    ),
    Family(
        name="Mixtral",
        gguf="",  # "llama" there
        folder=("mixtral",),
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131_072,
        },
        folder_names=replace(
            FOLDER_NAMES,
            router="model.layers.{i}.block_sparse_moe.gate",
            expert_gate="model.layers.{i}.block_sparse_moe.experts.{e}.w1",
            expert_up="model.layers.{i}.block_sparse_moe.experts.{e}.w3",
            expert_down="model.layers.{i}.block_sparse_moe.experts.{e}.w2",
        ),
    ),
    Family(
        name="SmolLM3",
        gguf="smollm3",
        folder=("smollm3",),
        gguf_interleaved=True,
        window_is_optional=True,
        rope_every=4,
        defaults={
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32_768,
        },
    ),
    Family(
        name="Qwen2",
        gguf="qwen2",
        folder=("qwen2",),
        window_is_optional=True,
        defaults={"max_position_embeddings": 32_768, "max_window_layers": 28},
    ),
    Family(
        name="Qwen3",
        gguf="qwen3",
        folder=("qwen3",),
        qk_norm=True,
        window_is_optional=True,
        defaults={"head_dim": 128, "max_position_embeddings": 32_768, "max_window_layers": 28},
    ),
    Family(
        name="Qwen3-MoE",
        gguf="qwen3moe",
        folder=("qwen3_moe",),
        qk_norm=True,
        window_is_optional=True,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "max_position_embeddings": 32_768,
        },
    ),
    Family(
        name="Gemma",
        gguf="gemma",
        folder=("gemma",),
        gate="gelu_tanh",
        scaled_embedding=True,
        norm_offset=1.0,
        defaults={
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
    ),
    Family(
        name="Gemma 2",
        gguf="gemma2",
        folder=("gemma2",),
        gate="gelu_tanh",
        post_norms=True,
        scaled_embedding=True,
        norm_offset=1.0,
        window_every=2,
        gguf_window=True,
        defaults={
            **GEMMA_DEFAULTS,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "max_position_embeddings": 8192,
        },
        folder_names=GEMMA_FOLDER,
    ),
    Family(
        name="Gemma 3",
        gguf="gemma3",
        folder=("gemma3_text", "gemma3"),
        gate="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        scaled_embedding=True,
        norm_offset=1.0,
        window_every=6,
        gguf_window=True,
        defaults={
            **GEMMA_DEFAULTS,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10_000.0,
            "max_position_embeddings": 131_072,
        },
        folder_names=GEMMA_FOLDER,
    ),
    Family(
        name="Phi-3",
        gguf="phi3",
        folder=("phi3",),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        gguf_names=replace(GGUF_NAMES, gate_up="blk.{i}.ffn_up"),
    ),
    Family(
        name="gpt-oss",
        gguf="gpt-oss",
        folder=("gpt_oss",),
        gate="swiglu_oai",
        sinks=True,
        window_every=2,
        gguf_window=True,
        routing="topk_softmax",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 150_000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131_072,
        },
        gguf_names=replace(GGUF_NAMES, feed_norm="blk.{i}.post_attention_norm", attention_post_norm=""),
        folder_names=replace(
            FOLDER_NAMES,
            router="model.layers.{i}.mlp.router",
            expert_gate_up="model.layers.{i}.mlp.experts.gate_up_proj",
            expert_down="model.layers.{i}.mlp.experts.down_proj",
        ),
    ),
)


def family_of_gguf(architecture: str) -> Family | None:
    """Return the family that has this `general.architecture`, None where it is unknown."""
    return next((family for family in FAMILIES if family.gguf and family.gguf == architecture), None)


def family_of_folder(model_type: str) -> Family | None:
    """Return the family that has this `model_type`, None where it is unknown."""
    return next((family for family in FAMILIES if model_type in family.folder), None)
