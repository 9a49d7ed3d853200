"""A model in numbers, without its weights: what `list` shows and what memory planning needs.

Owns these records, and reading them from a GGUF's header; folder.py reads them from a folder of safetensors. Whether a
header lies on this disk or came over the network makes no difference.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from gguf.constants import LlamaFileType

from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.gguf_parse import Array
from edgelm.checkpoints.shape import MAX_HEAD_LEN, MAX_VOCAB, Shape, gguf_experts, gguf_shape, gguf_windows
from edgelm.checkpoints.values import Values
from edgelm.engine.core import Pooling

NEWER_LABELS = {41: "MOSTLY_Q2_0"}  # of llama.cpp, which the gguf library lacks
ModelKind = Literal["text", "embedding", "rerank"]  # it writes text, or only computes vectors, or only scores

MAX_NAME = 200
MAX_STATE = 2**24
F16_BYTES = 2
F32_BYTES = 4
POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.cpp's numbers
GEMMA2_SOFTCAP = {"gemma2": 50.0}  # of attention, where a file does not state it
PREDICTING = frozenset({"qwen35", "qwen35moe"})  # with heads that were tried in llama.cpp
HEADS = "heads."  # begins the names of tensors of another file
# llama.cpp keeps no keys and values of these: every token attends to all others
ENCODERS = frozenset(
    "bert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3 neo-bert modern-bert eurobert gemma-embedding t5encoder"
    " llama-embed".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """A model without its weights. Lists have one entry for each layer; 0 means that a layer keeps no KV."""

    name: str
    architecture: str
    parameters: int
    quantization: str  # "Q4_K_M", "F16", ...
    nbytes: int  # of the files
    context: int  # trained; 0: not stated
    layers: int
    width: int
    heads: int  # of the layer with the most
    kv_heads: list[int]
    key_lens: list[int]  # of one head
    value_lens: list[int]  # 0: values are a view of the keys (latent attention)
    sliding_window: int  # 0: none
    vocab_size: int
    kind: ModelKind = "text"
    pooling: Pooling = "mean"  # of its vectors
    attention_softcap: float = 0.0  # of attention's scores; 0: none
    attention_sinks: bool = False  # a learned score for each head that no position has

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one position in an f16 KV cache; sliding windows are not taken into account."""
        layers = zip(self.kv_heads, self.key_lens, self.value_lens, strict=True)
        return F16_BYTES * sum(heads * (key + value) for heads, key, value in layers)


class TensorFacts(NamedTuple):
    """One tensor. `shape` is in ggml's order: the columns first."""

    name: str
    type: str  # "Q4_0", "BF16", ...
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Everything about a model that its memory depends on."""

    summary: ModelSummary
    tensors: tuple[TensorFacts, ...]
    experts: int = 0  # in a layer; 0: not a mixture
    experts_used: int = 0  # by each token
    mtp_heads: int = 0  # layers that predict the tokens after the next one, which an engine can run
    state_bytes: int = 0  # kept by the recurrent layers for one sequence, whatever its length

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the token embedding."""
        return all(tensor.name != "output.weight" for tensor in self.tensors)

    def with_rollback(self, length: int) -> ModelFacts:
        """Return the facts with a copy of the states for each of so many tokens that can be taken back."""
        return replace(self, state_bytes=self.state_bytes * (1 + length))

    def with_heads(self, heads: ModelFacts, *, share_ends: bool = False) -> ModelFacts:
        """Return the facts with the tensors of another file: the heads, and their own copy of the vocabulary's.

        `share_ends`: they read the model's vocabulary, and the copy is not loaded.
        """
        own = [tensor for tensor in heads.tensors if not share_ends or tensor.name.startswith("blk.")]
        tensors = [tensor._replace(name=f"{HEADS}{tensor.name}") for tensor in own]
        if heads.tied and not share_ends:  # the embedding is the output matrix, too
            tensors = [t._replace(name=f"{HEADS}output.weight") if "token_embd" in t.name else t for t in tensors]
        return replace(self, mtp_heads=heads.mtp_heads, tensors=(*self.tensors, *tensors))


class WeightBytes(NamedTuple):
    """Memory of a model's weights in an engine, in bytes."""

    resident: int  # once loaded
    copied: int  # the part of these that the engine copies; the rest is the mapped file
    load_peak: int  # of the process during loading, with mapped pages that the system takes back when it needs them
    read_per_token: int  # when one sequence decodes


def model_summary(gguf: GGUF) -> ModelSummary:
    """Summarize an open model. Raises ModelError where its metadata cannot be true."""
    values = gguf.values
    shape = gguf_shape(values)
    key_lens, value_lens = head_lens(values, shape)
    name = gguf.metadata.get("general.name")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Array):
        num_tokens = len(tokens)
    else:
        num_tokens = values.integer("vocab_size", high=MAX_VOCAB, default=0)
    kind, pooling = kind_and_pooling(gguf)
    return ModelSummary(
        name=shown(name.strip(), MAX_NAME) if isinstance(name, str) and name.strip() else gguf.path.stem,
        architecture=gguf.architecture,
        parameters=sum(tensor.num_elements for tensor in gguf.tensors.values()),
        quantization=quantization(gguf),
        nbytes=gguf.size,
        context=shape.context,
        layers=shape.num_layers,
        width=shape.hidden_size,
        heads=max(shape.num_heads),
        kv_heads=[0] * shape.num_layers if gguf.architecture in ENCODERS else cached_kv_heads(values, shape),
        key_lens=key_lens,
        value_lens=value_lens,
        sliding_window=max(gguf_windows(values, shape.num_layers)),
        vocab_size=num_tokens,
        kind=kind,
        pooling=pooling,
        attention_softcap=values.number("attn_logit_softcapping", default=GEMMA2_SOFTCAP.get(gguf.architecture, 0.0)),
        attention_sinks=any(name.endswith(".attn_sinks.weight") for name in gguf.tensors),
    )


def model_facts(gguf: GGUF) -> ModelFacts:
    """Read the facts of an open model. Raises ModelError where its metadata cannot be true."""
    summary = model_summary(gguf)
    experts = gguf_experts(gguf.values, summary.layers)
    tensors = gguf.tensors.values()
    return ModelFacts(
        summary=summary,
        tensors=tuple(TensorFacts(tensor.name, tensor.type.name, tensor.shape, tensor.nbytes) for tensor in tensors),
        experts=experts.count,
        experts_used=max(experts.used),
        mtp_heads=mtp_heads(gguf, summary),
        state_bytes=recurrent_state_bytes(gguf.values, summary),
    )


def mtp_heads(gguf: GGUF, summary: ModelSummary) -> int:
    """Return how many layers predict the tokens after the next one, where llama.cpp can run them: 1 or 0.

    It runs one such layer (more end in an assertion), and files may name the layer in their metadata but lack it.
    """
    if gguf.architecture not in PREDICTING or gguf.values.get("nextn_predict_layers") != 1:
        return 0
    return int(
        all(f"blk.{summary.layers - 1}.nextn.{name}.weight" in gguf.tensors for name in ("eh_proj", "enorm", "hnorm"))
    )


def blocks_ahead(gguf: GGUF) -> tuple[str, ...]:
    """Return how the names of tensors begin that are of layers which predict ahead: no text runs through them."""
    num_layers = gguf_shape(gguf.values).num_layers
    count = gguf.values.integer("nextn_predict_layers", high=num_layers, default=0)
    return tuple(f"blk.{i}." for i in range(num_layers - count, num_layers))


def has_only_heads(gguf: GGUF) -> bool:
    """Tell whether a file has no layers but those that predict ahead: they draft for the model of another file."""
    return bool(gguf.values.get("nextn_predict_layers")) and "blk.0.attn_norm.weight" not in gguf.tensors


def kind_and_pooling(gguf: GGUF) -> tuple[ModelKind, Pooling]:
    """Return the kind of a model, and how its vectors are made. A model of text has no key for pooling."""
    number = gguf.values.get("pooling_type")
    pooling = POOLINGS.get(number) if isinstance(number, int) else None
    if pooling == "rank":
        return "rerank", pooling
    is_embedding = pooling is not None or gguf.architecture in ENCODERS
    return "embedding" if is_embedding else "text", pooling or "mean"


def quantization(gguf: GGUF) -> str:
    """Return the label of `general.file_type`, else the type that takes the most bytes."""
    value = gguf.metadata.get("general.file_type")
    labels = {int(kind): kind.name for kind in LlamaFileType if kind != LlamaFileType.GUESSED} | NEWER_LABELS
    if isinstance(value, int) and value in labels:
        return re.sub("^(ALL|MOSTLY)_", "", labels[value])
    nbytes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        nbytes[tensor.type.name] += tensor.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else "none"


def cached_kv_heads(values: Values, shape: Shape) -> list[int]:
    """Return the key-value heads of each layer, 0 for one that is recurrent, shares another's, or predicts ahead."""
    kv_heads = list(shape.num_kv_heads)
    interval = values.integer("full_attention_interval", high=shape.num_layers, default=0)  # the others are recurrent
    num_without = values.integer("attention.shared_kv_layers", high=shape.num_layers, default=0)
    num_without += values.integer("nextn_predict_layers", high=shape.num_layers, default=0)
    for i in range(shape.num_layers):
        if (interval and (i + 1) % interval) or i >= shape.num_layers - num_without or not shape.num_heads[i]:
            kv_heads[i] = 0
    return kv_heads


def head_lens(values: Values, shape: Shape) -> tuple[list[int], list[int]]:
    """Return the lengths of keys and values; sliding-window layers may have their own."""
    key_len, value_len = shape.key_len, shape.value_len
    if values.get("attention.key_length_mla") is not None:
        value_len = 0
    window_key_len = values.integer("attention.key_length_swa", low=1, high=MAX_HEAD_LEN, default=key_len)
    window_value_len = values.integer("attention.value_length_swa", low=1, high=MAX_HEAD_LEN, default=value_len)
    pattern = values.get("attention.sliding_window_pattern")
    windowed = [bool(entry) for entry in pattern[: shape.num_layers]] if isinstance(pattern, Array) else []
    windowed += [False] * (shape.num_layers - len(windowed))
    return (
        [window_key_len if window else key_len for window in windowed],
        [window_value_len if window else value_len for window in windowed],
    )


def recurrent_state_bytes(values: Values, summary: ModelSummary) -> int:
    """Return the bytes of one sequence's state in all recurrent layers: convolution windows and state matrices."""

    def number(name: str) -> int:
        return values.integer(name, high=MAX_STATE, default=0)

    inner, states = number("ssm.inner_size"), number("ssm.state_size")
    window = max(number("ssm.conv_kernel") - 1, 0) * (inner + 2 * number("ssm.group_count") * states)
    window += max(number("shortconv.l_cache") - 1, 0) * summary.width
    feeds = None
    if summary.architecture.startswith("nemotron_h"):  # a layer is one of three: recurrent, attention, feed-forward
        feeds = values.per_layer("feed_forward_length", num_layers=summary.layers, high=MAX_STATE)
    layers = zip(summary.kv_heads, feeds or [0] * summary.layers, strict=True)
    num_recurrent = sum(heads == 0 == feed for heads, feed in layers) - number("nextn_predict_layers")
    return F32_BYTES * max(num_recurrent, 0) * (window + inner * states)
