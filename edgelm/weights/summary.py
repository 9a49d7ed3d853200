"""What a GGUF model is, in the numbers that `list` shows and memory planning needs.

Owns the reading of names, quantization and the size of the KV cache from metadata. Loads nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from gguf.constants import LlamaFileType

from edgelm.weights.checks import MAX_CONTEXT, MAX_VOCAB
from edgelm.weights.gguf import GGUF
from edgelm.weights.gguf_parse import Array
from edgelm.weights.mapped import shown
from edgelm.weights.shape import MAX_HEAD_LEN, Shape, number, per_layer, read_shape

F16_BYTES = 2
MAX_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """A model without its weights. Lists have one entry for each layer; 0 means that a layer keeps no KV."""

    name: str
    architecture: str
    parameters: int
    quantization: str  # "Q4_K_M", "F16", ...
    nbytes: int  # of the files
    context: int  # trained; 0 where the file does not say
    layers: int
    width: int
    heads: int  # of the layer with the most
    kv_heads: list[int]
    key_lens: list[int]  # numbers of one head's key
    value_lens: list[int]  # 0 where values are a view of the keys (latent attention)
    sliding_window: int  # 0: none
    vocab_size: int
    has_chat_template: bool

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that the KV cache holds for one position of a layer-full context."""
        each = zip(self.kv_heads, self.key_lens, self.value_lens, strict=True)
        return sum(heads * (key + value) for heads, key, value in each)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one position in an f16 KV cache, a sliding window not counted."""
        return F16_BYTES * self.kv_elements_per_token


def model_summary(gguf: GGUF) -> ModelSummary:
    """Summarize an open model. Raises ModelError where its metadata cannot be true."""
    shape = read_shape(gguf)
    key_lens, value_lens = head_lens(gguf, shape)
    name = gguf.metadata.get("general.name")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return ModelSummary(
        name=shown(name.strip(), MAX_NAME) if isinstance(name, str) and name.strip() else gguf.path.stem,
        architecture=gguf.architecture,
        parameters=sum(tensor.num_elements for tensor in gguf.tensors.values()),
        quantization=quantization(gguf),
        nbytes=gguf.size,
        context=number(gguf, "context_length", 1, MAX_CONTEXT, 0),
        layers=shape.layers,
        width=shape.width,
        heads=max(shape.heads),
        kv_heads=layers_with_kv(gguf, shape),
        key_lens=key_lens,
        value_lens=value_lens,
        sliding_window=max(per_layer(gguf, "attention.sliding_window", shape.layers, 2**32) or [0]),
        vocab_size=len(tokens) if isinstance(tokens, Array) else number(gguf, "vocab_size", 0, MAX_VOCAB, 0),
        has_chat_template=isinstance(gguf.metadata.get("tokenizer.chat_template"), str),
    )


def quantization(gguf: GGUF) -> str:
    """Return the label of `general.file_type`, or the type that most bytes have."""
    value = gguf.metadata.get("general.file_type")
    labels = {int(kind): kind.name for kind in LlamaFileType if kind != LlamaFileType.GUESSED}
    if isinstance(value, int) and value in labels:
        return re.sub("^(ALL|MOSTLY)_", "", labels[value])
    nbytes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        nbytes[tensor.type.name] += tensor.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else "none"


def layers_with_kv(gguf: GGUF, shape: Shape) -> list[int]:
    """Return the key-value heads of each layer, 0 for one that is recurrent, shares another's, or predicts ahead."""
    kv_heads = list(shape.kv_heads)
    every = number(gguf, "full_attention_interval", 0, shape.layers, 0)  # the layers between are recurrent
    behind = number(gguf, "attention.shared_kv_layers", 0, shape.layers, 0)
    behind += number(gguf, "nextn_predict_layers", 0, shape.layers, 0)
    for i in range(shape.layers):
        if (every and (i + 1) % every) or i >= shape.layers - behind or not shape.heads[i]:
            kv_heads[i] = 0
    return kv_heads


def head_lens(gguf: GGUF, shape: Shape) -> tuple[list[int], list[int]]:
    """Return the lengths of keys and values; sliding-window layers may have their own."""
    key_len, value_len = shape.key_len, shape.value_len
    if gguf.get("attention.key_length_mla") is not None:
        value_len = 0
    key_swa = number(gguf, "attention.key_length_swa", 1, MAX_HEAD_LEN, key_len)
    value_swa = number(gguf, "attention.value_length_swa", 1, MAX_HEAD_LEN, value_len)
    pattern = gguf.get("attention.sliding_window_pattern")
    windowed = [bool(entry) for entry in pattern[: shape.layers]] if isinstance(pattern, Array) else []
    windowed += [False] * (shape.layers - len(windowed))
    return [key_swa if w else key_len for w in windowed], [value_swa if w else value_len for w in windowed]
