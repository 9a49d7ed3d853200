"""The keys of a GGUF that describe the model: its name, sizes, rotation, windows, experts.

Owns the mapping from a configuration, and the refusal of what llama.cpp would compute in another way. The keys of the
tokenizer are in vocabulary.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gguf import GGUFType, GGUFWriter, LlamaFileType, PoolingType, RopeScalingType
from gguf.constants import GGML_QUANT_VERSION
from gguf.utility import size_label

from edgelm.base.errors import ModelError
from edgelm.checkpoints.encoder import EncoderConfig
from edgelm.checkpoints.recommended import GGUF_KEYS
from edgelm.engine.core import Pooling
from edgelm.making.conversion.layout import Layout, global_rope, target_family
from edgelm.making.conversion.number_types import Kind
from edgelm.models.config import GEMMA_27B_LAYERS, ModelConfig
from edgelm.models.families import GGUF_NEXT
from edgelm.models.rope_config import RopeConfig, yarn_scale

FILE_TYPES: Mapping[Kind, LlamaFileType] = {
    Kind.F32: LlamaFileType.ALL_F32,
    Kind.F16: LlamaFileType.MOSTLY_F16,
    Kind.BF16: LlamaFileType.MOSTLY_BF16,
    Kind.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    Kind.MXFP4: LlamaFileType.MOSTLY_MXFP4_MOE,
}
POOLINGS: Mapping[Pooling, PoolingType] = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "last": PoolingType.LAST}
OTHER_ENGINE = "run the folder itself, with the torch engine"
MROPE_SECTIONS = (11, 11, 10)  # of Qwen3.5, where its configuration does not state them
SWIGLU_LIMIT = 7.0  # of llama.cpp


@dataclass(frozen=True, slots=True)
class Description:
    """The facts of a model besides those that it is computed by."""

    name: str
    licence: str = ""
    inner_size: int = 0  # of the feed-forward network, as the configuration states it; 0: the tensors show it
    sampling: Mapping[str, float] = field(default_factory=dict)  # as the folder recommends


def write_model_keys(writer: GGUFWriter, config: ModelConfig, layout: Layout, about: Description) -> None:
    """Add the keys of a model. Raises ModelError for one that llama.cpp would compute in another way."""
    if reason := llama_refusal(config):
        raise ModelError(f"llama.cpp cannot compute this model: {reason}", OTHER_ENGINE)
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    _write_description(writer, layout, about)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden_size)
    head = GGUF_NEXT.joint.format(i=len(config.layers)) + ".weight" in shapes  # one layer more
    writer.add_block_count(len(config.layers) + head)
    if head:
        writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(about.inner_size or _inner_size(shapes))
    writer.add_head_count(config.num_heads)
    _write_heads(writer, config)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(shapes["token_embd.weight"][0])
    if config.attention_softcap:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.final_softcap:
        writer.add_final_logit_softcapping(config.final_softcap)
    if target_family(config).scaled:
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_attention_scale(config.attention_scale)
        writer.add_logit_scale(config.logit_divisor)
    if config.experts:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.used)
        if target_family(config).gguf != "llama":
            writer.add_expert_feed_forward_length(shapes["blk.0.ffn_down_exps.weight"][2])
    if target_family(config).gguf == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(shapes["blk.0.ffn_down_shexp.weight"][1])
    _write_deltas(writer, config)
    _write_windows(writer, config)
    _write_rope(writer, config)


def write_encoder_keys(writer: GGUFWriter, config: EncoderConfig, layout: Layout, about: Description) -> None:
    """Add the keys of a BERT."""
    _write_description(writer, layout, about)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.inner_size)
    writer.add_head_count(config.num_heads)
    writer.add_layer_norm_eps(config.norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(POOLINGS[config.pooling])
    writer.add_token_type_count(config.num_types)


def llama_refusal(config: ModelConfig) -> str:
    """Return why llama.cpp would compute another model than this; empty: it computes this one."""
    return next(_refusals(config), "")


def notes(config: ModelConfig) -> Iterator[str]:
    """Yield in how far llama.cpp simplifies a model, although it computes it."""
    windows = {layer.window for layer in config.layers if layer.window}
    if windows and not target_family(config).gguf_window and min(windows) < config.context:
        yield f"llama.cpp has no sliding window for this family: after {min(windows):,} tokens answers may differ"
    kinds = {layer.rope.kind for layer in config.layers if layer.rope}
    if "dynamic" in kinds:
        yield f"llama.cpp does not stretch this model's positions: after {config.context:,} tokens answers differ"


def _refusals(config: ModelConfig) -> Iterator[str]:
    family = target_family(config)
    gate = config.gate
    if gate.kind != family.gate:
        yield f"its activation is {gate.kind}, and there {family.name} has {family.gate}"
    if gate.kind == "swiglu_oai" and gate.limit != SWIGLU_LIMIT:
        yield f"the limit of its activation is {gate.limit:g}, and there it is {SWIGLU_LIMIT:g}"
    sparse = {layer.sparse for layer in config.layers}
    if len(sparse) > 1:
        yield "some of its layers have experts and some have none"
    if config.experts and sparse == {False}:
        yield "its configuration has experts, and no layer does"
    if config.experts and not (config.experts.normalised or config.family.routing == "topk_softmax"):
        yield "the weights of a token's experts do not add up to 1"
    rotated = [layer.rope is not None for layer in config.layers]
    every = family.rope_every
    if rotated != [not every or (i + 1) % every != 0 for i in range(len(rotated))]:
        yield "other layers than usual do not rotate keys and queries"
    divisor = max(layer.head_dim for layer in config.layers)
    if GEMMA_27B_LAYERS.get(family.gguf) == len(config.layers):
        divisor = config.hidden_size // config.num_heads
    if not (family.scaled or family.value_norm) and abs(config.attention_scale * divisor**0.5 - 1) > 1e-6:
        yield f"it divides by the root of {config.attention_scale**-2:g} in attention, and there it is {divisor}"
    yield from _delta_refusals(config)
    ropes = [layer.rope for layer in config.layers if layer.rope]
    if any(rope.temperature for rope in ropes) and not (family.temperature and ropes[0].kind == "yarn"):
        yield "its queries grow with their position"
    if family.gguf == "gemma2" and not (config.attention_softcap and config.final_softcap):
        yield "it has no soft caps, and there Gemma 2 always has"


def _delta_refusals(config: ModelConfig) -> Iterator[str]:
    deltas = [layer.delta for layer in config.layers]
    if not any(deltas):
        return
    if all(deltas):
        yield "none of its layers attends"
        return
    every = _attending_every(config)
    if [delta is not None for delta in deltas] != [(i + 1) % every != 0 for i in range(len(deltas))]:
        yield "its layers that attend are not evenly spaced"
    if any(delta and delta.key_dim != delta.value_dim for delta in deltas):
        yield "the keys and values of its linear attention differ in size"
    rope = global_rope(config)
    if rope and not all(pair < 3 * _sections(rope)[pair % 3] for pair in range(rope.dim // 2)):
        yield f"its positions of pictures ({_sections(rope)}) leave pairs of {rope.dim} numbers unturned there"


def _write_description(writer: GGUFWriter, layout: Layout, about: Description) -> None:
    writer.add_type(GGUFType.MODEL)
    writer.add_name(about.name)
    writer.add_string("general.size_label", _size_label(layout))
    writer.add_license(about.licence)
    writer.add_file_type(_file_type(layout))
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for name, value in about.sampling.items():
        if isinstance(value, int):
            writer.add_int32(GGUF_KEYS[name], value)
        else:
            writer.add_float32(GGUF_KEYS[name], value)


def _write_heads(writer: GGUFWriter, config: ModelConfig) -> None:
    """Write the sizes of heads: of layers without a window, and Gemma 4's of those with one."""
    kv_heads = [layer.num_kv_heads for layer in config.layers if not layer.delta]
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else kv_heads[0])
    lengths = {layer.window > 0: layer.head_dim for layer in config.layers}
    length = lengths[min(lengths)]
    writer.add_key_length(length)
    writer.add_value_length(length)
    if target_family(config).gguf == "gemma4":
        writer.add_key_length_swa(lengths.get(True, length))
        writer.add_value_length_swa(lengths.get(True, length))
        writer.add_shared_kv_layers(0)
        writer.add_embedding_length_per_layer_input(0)


def _write_deltas(writer: GGUFWriter, config: ModelConfig) -> None:
    """Write the sizes of gated delta nets, and which layers attend instead."""
    sizes = next((layer.delta for layer in config.layers if layer.delta), None)
    if sizes is None:
        return
    writer.add_ssm_conv_kernel(sizes.window)
    writer.add_ssm_state_size(sizes.key_dim)
    writer.add_ssm_group_count(sizes.num_key_heads)
    writer.add_ssm_time_step_rank(sizes.num_value_heads)
    writer.add_ssm_inner_size(sizes.value_width)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", _attending_every(config))


def _attending_every(config: ModelConfig) -> int:
    """Return the number of layers up to the first that attends, and so from each to the next."""
    return next(i + 1 for i, layer in enumerate(config.layers) if not layer.delta)


def _inner_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the width of the feed-forward network. Phi-3 has gate and up in one matrix."""
    if "blk.0.ffn_gate.weight" in shapes:
        return shapes["blk.0.ffn_gate.weight"][0]
    if "blk.0.ffn_up.weight" in shapes:
        return shapes["blk.0.ffn_up.weight"][0] // 2
    return shapes["blk.0.ffn_down_exps.weight"][2]


def _write_windows(writer: GGUFWriter, config: ModelConfig) -> None:
    family = target_family(config)
    if family.gguf == "phi3":
        writer.add_sliding_window(max(layer.window for layer in config.layers))
        return
    windows = [layer.window for layer in config.layers]
    if not family.gguf_window or not any(windows):
        return
    writer.add_sliding_window(max(windows))
    every = family.window_every
    if family.gguf == "gemma4" or [window > 0 for window in windows] != [
        not every or i % every < every - 1 for i in range(len(windows))
    ]:
        writer.add_sliding_window_pattern([window > 0 for window in windows])


def _write_rope(writer: GGUFWriter, config: ModelConfig) -> None:
    rope = global_rope(config)
    if rope is None:
        return
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(rope.dim)
    local = next((layer.rope for layer in config.layers if layer.window and layer.rope), None)
    if target_family(config).gguf in ("gemma3", "gemma4") and local is not None:
        writer.add_rope_freq_base_swa(local.theta)
    if target_family(config).gguf == "gemma4" and local is not None:
        writer.add_rope_dimension_count_swa(local.dim)
    if target_family(config).delta:
        writer.add_rope_dimension_sections([*_sections(rope), 0])
    _write_scaling(writer, rope, temperature=target_family(config).temperature)


def _sections(rope: RopeConfig) -> tuple[int, ...]:
    return rope.sections or MROPE_SECTIONS


def _write_scaling(writer: GGUFWriter, rope: RopeConfig, *, temperature: bool) -> None:
    match rope.kind:
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope.factor)
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope.factor)
            writer.add_rope_scaling_orig_ctx_len(rope.original_context)
            writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
            writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)
            usual = yarn_scale(rope.factor)  # llama.cpp multiplies by it itself
            if temperature:  # and divides by it again, for this family
                writer.add_rope_scaling_yarn_log_mul(1.0)
                writer.add_attn_temperature_scale(rope.temperature)
                usual = 1.0
            own = rope.scale / usual
            if abs(own - 1) > 1e-6:
                writer.add_rope_scaling_attn_factors(own)
        case "longrope":
            writer.add_rope_scaling_orig_ctx_len(rope.original_context)
            writer.add_rope_scaling_attn_factors(rope.scale)
        case _:
            pass  # llama3 is a tensor of divisors; dynamic has no effect up to the trained context


def _size_label(layout: Layout) -> str:
    """Return the size as GGUF names it, such as 1.2B or 8x7B."""
    total = shared = experts = count = 0
    for tensor in layout.tensors:
        size = 1
        for length in tensor.shape:
            size *= length
        total += size
        if "_exps." in tensor.name:
            count = tensor.shape[0]
            experts += size // count
        else:
            shared += size
    return size_label(total, shared, experts, count)


def _file_type(layout: Layout) -> LlamaFileType:
    """Return the file type by the type that takes the most bytes."""
    nbytes: Counter[Kind] = Counter()
    for tensor in layout.tensors:
        nbytes[tensor.kind] += tensor.nbytes
    return FILE_TYPES[nbytes.most_common(1)[0][0]]
