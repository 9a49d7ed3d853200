"""The families of architectures that the decoder supports: a row of flags and tensor names for each.

Owns the features in which families differ, and the names of their tensors in a GGUF and in safetensors. Knows neither
sizes nor computation. A name has `{i}` for the layer and `{e}` for the expert. A name without a suffix stands for
tensors that end in `.weight` and `.bias`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from edgelm.kernels.gates import GateKind

Routing = Literal["softmax", "topk_softmax"]

# prefixes of a language model that is part of a larger one, or that was saved without its output matrix
DECODER = re.compile(r"\A(?:model\.|language_model\.)*(?=(?:layers|embed_tokens|norm)\.)")
OUTPUT = re.compile(r"\A(?:model\.|language_model\.)+(?=lm_head\.)")
LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
UNUSED = re.compile(r".*(?:rotary_emb\.inv_freq|attn_rot_embd\.weight|\.[qkv]_scale)")  # no part of the computation


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the tensors. Where a family has a fused tensor and separate ones, a file has either."""

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
    layer_scale: str = ""  # the whole name: the factor of the stream behind a layer
    delta_qkv: str = ""  # of gated delta nets
    delta_z: str = ""
    delta_beta: str = ""
    delta_alpha: str = ""
    delta_conv: str = ""  # the whole name, as of the next two
    delta_decay: str = ""
    delta_bias: str = ""
    delta_norm: str = ""
    delta_out: str = ""
    expert_gate_up: str = ""  # columns of gate and up alternate; all experts are one tensor, stored transposed
    # Of experts beside a dense network; the last three are whole names.
    dense_post_norm: str = ""
    expert_norm: str = ""
    expert_post_norm: str = ""
    router_scale: str = ""  # of the router's normalized input, [hidden_size]
    expert_scale: str = ""  # of each expert's result
    expert_gate_then_up: str = ""  # rows of gate, then rows of up; all experts are one tensor
    shared_gate: str = ""  # [1, hidden_size], of an expert that all tokens use; its matrices are gate, up and down


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


class NextNames(NamedTuple):
    """The names of a head that predicts the token after the next one, beside those of its layer.

    A file may lack the last three: then they are the model's.
    """

    joint: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    embedding: str
    output: str


GGUF_NEXT = NextNames(
    joint="blk.{i}.nextn.eh_proj",
    embedding_norm="blk.{i}.nextn.enorm",
    hidden_norm="blk.{i}.nextn.hnorm",
    norm="blk.{i}.nextn.shared_head_norm",
    embedding="blk.{i}.nextn.embed_tokens",
    output="blk.{i}.nextn.shared_head_head",
)
FOLDER_NEXT = NextNames(
    joint="mtp.fc",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
    embedding="mtp.embed_tokens",
    output="mtp.lm_head",
)


def names_of_next(names: Names) -> Names:
    """Return the names of the layer of such a head: a folder has it apart, a GGUF behind the last layer."""
    return Names(**{name: text.replace("model.layers.{i}", "mtp.layers.0") for name, text in asdict(names).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The features of one family. What its config.json may omit is in `edgelm.checkpoints.config_json`."""

    name: str
    gguf: str  # `general.architecture`; "": it has no GGUF of its own
    folder: tuple[str, ...]  # `model_type` in config.json
    gate: GateKind = "silu"
    qk_norm: bool = False
    post_norms: bool = False  # RMSNorm of the results of attention and feed-forward, before they are added
    dense_beside_experts: bool = False  # a sparse layer has both, each with norms of its own
    sinks: bool = False
    scaled_embedding: bool = False  # by sqrt(hidden size)
    value_norm: bool = False  # values have an RMSNorm without weights, and attention divides by nothing
    scaled: bool = False  # the configuration has factors of embedding, residual, attention and logits
    temperature: bool = False  # queries grow with their position, as the configuration says
    norm_offset: float = 0.0  # added to norm weights of safetensors; in a GGUF the weights include it
    gguf_interleaved: bool = False  # the rows of q and k are permuted in a GGUF, for pairs (2i, 2i + 1)
    window_every: int = 0  # every n-th layer has no window; 0: every layer has one
    window_is_optional: bool = False  # by `use_sliding_window` and `max_window_layers`
    gguf_window: bool = False  # the window in a GGUF holds; llama.cpp ignores it for some families
    rope_every: int = 0  # every n-th layer has no rotation
    delta: bool = False  # some layers are gated delta nets, and the results of attention have a gate
    routing: Routing = "softmax"
    normalised: bool = True  # the weights of a token's experts add up to 1, unless the configuration states otherwise
    gguf_names: Names = GGUF_NAMES
    folder_names: Names = FOLDER_NAMES


GEMMA_FOLDER = replace(
    FOLDER_NAMES,
    attention_post_norm="model.layers.{i}.post_attention_layernorm",
    feed_norm="model.layers.{i}.pre_feedforward_layernorm",
    feed_post_norm="model.layers.{i}.post_feedforward_layernorm",
)

DELTA_GGUF = replace(
    GGUF_NAMES,
    feed_norm="blk.{i}.post_attention_norm",
    attention_post_norm="",
    delta_qkv="blk.{i}.attn_qkv",
    delta_z="blk.{i}.attn_gate",
    delta_beta="blk.{i}.ssm_beta",
    delta_alpha="blk.{i}.ssm_alpha",
    delta_conv="blk.{i}.ssm_conv1d.weight",
    delta_decay="blk.{i}.ssm_a",
    delta_bias="blk.{i}.ssm_dt.bias",
    delta_norm="blk.{i}.ssm_norm",
    delta_out="blk.{i}.ssm_out",
)
DELTA_FOLDER = replace(
    FOLDER_NAMES,
    delta_qkv="model.layers.{i}.linear_attn.in_proj_qkv",
    delta_z="model.layers.{i}.linear_attn.in_proj_z",
    delta_beta="model.layers.{i}.linear_attn.in_proj_b",
    delta_alpha="model.layers.{i}.linear_attn.in_proj_a",
    delta_conv="model.layers.{i}.linear_attn.conv1d.weight",
    delta_decay="model.layers.{i}.linear_attn.A_log",
    delta_bias="model.layers.{i}.linear_attn.dt_bias",
    delta_norm="model.layers.{i}.linear_attn.norm",
    delta_out="model.layers.{i}.linear_attn.out_proj",
)

FAMILIES = (
    Family(name="Llama", gguf="llama", folder=("llama",), gguf_interleaved=True),
    Family(name="Mistral", gguf="", folder=("mistral", "mistral3")),  # a GGUF says "llama"
    Family(name="Ministral 3", gguf="mistral3", folder=("ministral3",), gguf_interleaved=True, temperature=True),
    Family(name="Granite", gguf="granite", folder=("granite",), gguf_interleaved=True, scaled=True),
    Family(
        name="Mixtral",
        gguf="",  # a GGUF says "llama"
        folder=("mixtral",),
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
    ),
    Family(name="Qwen2", gguf="qwen2", folder=("qwen2",), window_is_optional=True),
    Family(name="Qwen3", gguf="qwen3", folder=("qwen3",), qk_norm=True, window_is_optional=True),
    Family(name="Qwen3-MoE", gguf="qwen3moe", folder=("qwen3_moe",), qk_norm=True, window_is_optional=True),
    Family(name="Gemma", gguf="gemma", folder=("gemma",), gate="gelu_tanh", scaled_embedding=True, norm_offset=1.0),
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
        folder_names=GEMMA_FOLDER,
    ),
    Family(
        name="Gemma 4",
        gguf="gemma4",
        folder=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
        gate="gelu_tanh",
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        scaled_embedding=True,
        dense_beside_experts=True,
        window_every=6,
        gguf_window=True,
        gguf_names=replace(
            GGUF_NAMES,
            layer_scale="blk.{i}.layer_output_scale.weight",
            dense_post_norm="blk.{i}.post_ffw_norm_1",
            expert_norm="blk.{i}.pre_ffw_norm_2",
            expert_post_norm="blk.{i}.post_ffw_norm_2",
            router_scale="blk.{i}.ffn_gate_inp.scale",
            expert_scale="blk.{i}.ffn_down_exps.scale",
            expert_gate_then_up="blk.{i}.ffn_gate_up_exps.weight",
        ),
        folder_names=replace(
            GEMMA_FOLDER,
            layer_scale="model.layers.{i}.layer_scalar",
            dense_post_norm="model.layers.{i}.post_feedforward_layernorm_1",
            expert_norm="model.layers.{i}.pre_feedforward_layernorm_2",
            expert_post_norm="model.layers.{i}.post_feedforward_layernorm_2",
            router="model.layers.{i}.router.proj",
            router_scale="model.layers.{i}.router.scale",
            expert_scale="model.layers.{i}.router.per_expert_scale",
            expert_gate_then_up="model.layers.{i}.experts.gate_up_proj",
            expert_gate="model.layers.{i}.experts.{e}.gate_proj",  # of quantized folders
            expert_up="model.layers.{i}.experts.{e}.up_proj",
            expert_down="model.layers.{i}.experts.{e}.down_proj",
        ),
    ),
    Family(
        name="Qwen3.5",
        gguf="qwen35",
        folder=("qwen3_5_text", "qwen3_5"),
        qk_norm=True,
        norm_offset=1.0,
        delta=True,
        gguf_names=DELTA_GGUF,
        folder_names=DELTA_FOLDER,
    ),
    Family(
        name="Qwen3.5-MoE",
        gguf="qwen35moe",
        folder=("qwen3_5_moe_text", "qwen3_5_moe"),
        qk_norm=True,
        norm_offset=1.0,
        delta=True,
        gguf_names=replace(
            DELTA_GGUF,
            gate="blk.{i}.ffn_gate_shexp",
            up="blk.{i}.ffn_up_shexp",
            down="blk.{i}.ffn_down_shexp",
            shared_gate="blk.{i}.ffn_gate_inp_shexp",
            expert_gate_then_up="blk.{i}.ffn_gate_up_exps.weight",
        ),
        folder_names=replace(
            DELTA_FOLDER,
            gate_up="",
            gate="model.layers.{i}.mlp.shared_expert.gate_proj",
            up="model.layers.{i}.mlp.shared_expert.up_proj",
            down="model.layers.{i}.mlp.shared_expert.down_proj",
            shared_gate="model.layers.{i}.mlp.shared_expert_gate",
            expert_gate_then_up="model.layers.{i}.mlp.experts.gate_up_proj",
        ),
    ),
    Family(name="Phi-3", gguf="phi3", folder=("phi3",), gguf_names=replace(GGUF_NAMES, gate_up="blk.{i}.ffn_up")),
    Family(
        name="gpt-oss",
        gguf="gpt-oss",
        folder=("gpt_oss",),
        gate="swiglu_oai",
        sinks=True,
        window_every=2,
        gguf_window=True,
        routing="topk_softmax",
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
    """Return the family with this `general.architecture`, or None."""
    return next((family for family in FAMILIES if family.gguf and family.gguf == architecture), None)


def family_of_folder(model_type: str) -> Family | None:
    """Return the family with this `model_type`, or None."""
    return next((family for family in FAMILIES if model_type in family.folder), None)


def decoder_name(name: str) -> str:
    """Return the name that a tensor has where the language model is not part of a larger one."""
    return OUTPUT.sub("", DECODER.sub("model.", name, count=1), count=1)
