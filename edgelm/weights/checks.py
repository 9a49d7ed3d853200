"""What must hold before llama.cpp opens a GGUF: each rule stands for an abort, a crash or NaN that was provoked.

Owns completeness only where all blocks are alike: the rest is left to llama.cpp, which refuses it with a clear message,
so that no valid model of a family unknown here is refused. The limits are those of llama.cpp's asserts.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator

import numpy as np
from gguf.constants import MODEL_ARCH_NAMES, GGUFValueType

from edgelm.errors import ModelError
from edgelm.weights.gguf import GGUF
from edgelm.weights.gguf_parse import Array, Tensor
from edgelm.weights.mapped import shown
from edgelm.weights.shape import Shape, damaged, number, per_layer, read_shape

MAX_CONTEXT = 2**27
MAX_VOCAB = 2**20
MAX_VOCAB_BYTES = 2**25
MAX_EXPERTS = 1024
TENSOR_ALIGNMENT = 32  # of the mapped buffer, whatever general.alignment says
BYTE_TOKEN = 6  # in tokenizer.ggml.token_type
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

KNOWN = frozenset(MODEL_ARCH_NAMES.values())  # llama.cpp knows more
# decoders whose blocks are all alike: norm, attention by query, key and value, feed-forward
PLAIN = frozenset("llama mistral3 qwen2 qwen2moe qwen3 qwen3moe gemma gemma2 gemma3 phi3 smollm3".split())
FULL_ROPE = frozenset({"qwen2", "qwen2moe", "qwen3", "qwen3moe"})  # assert that all of a head is rotated
NO_BLOCKS = frozenset({"clip", "wavtokenizer-dec"})
BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.(\d{1,6})\.(.+)")
MATRIX = re.compile(
    r"(?:.*\.)?(?:token_embd|output|attn_(?:q|k|v|qkv|output)|ffn_(?:up|down|gate)(?:_exps|_shexp|_inp)?)\.weight"
)
NO_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
PARTS_OF_A_BLOCK = (
    ("attn_norm.weight",),
    ("attn_q.weight", "attn_qkv.weight"),
    ("attn_k.weight", "attn_qkv.weight"),
    ("attn_v.weight", "attn_qkv.weight"),
    ("attn_output.weight",),
    ("ffn_norm.weight",),
    ("ffn_up.weight", "ffn_up_exps.weight", "ffn_up.0.weight", "ffn_gate_up_exps.weight"),
    ("ffn_down.weight", "ffn_down_exps.weight", "ffn_down.0.weight"),
)
NO_MODELS = {
    "adapter": "is an adapter (LoRA), not a whole model",
    "mmproj": "is the part of a model that reads images or sound, not the model",
    "imatrix": "is an importance matrix for quantizing, not a model",
}


def check_for_llama(gguf: GGUF) -> None:
    """Raise ModelError for a file that llama.cpp cannot run, or that would abort it or make it compute nonsense."""
    require_model(gguf)
    shape = read_shape(gguf)
    check_scalars(gguf)
    check_experts(gguf, shape)
    check_rope(gguf, shape)
    check_vocabulary(gguf)
    check_types(gguf)
    check_blocks(gguf, shape)


def unknown_architecture(gguf: GGUF) -> ModelError:
    """Return the error for an architecture that llama.cpp does not know: only llama.cpp itself can tell."""
    name = gguf.architecture
    near = difflib.get_close_matches(name, KNOWN, 1)
    like = f" (it resembles {near[0]})" if near and name not in KNOWN else ""
    return ModelError(f"{gguf.name} has the architecture {name}{like}, which edgelm cannot run", "update edgelm")


def require_model(gguf: GGUF) -> None:
    """Refuse files that hold something else than a model."""
    kind = gguf.metadata.get("general.type")
    if gguf.metadata.get("general.architecture") == "clip":
        kind = "mmproj"
    if isinstance(kind, str) and kind in NO_MODELS:
        raise ModelError(f"{gguf.name} {NO_MODELS[kind]}", "name the file of the model itself")
    if not gguf.architecture or not gguf.tensors:
        raise ModelError(f"{gguf.name} holds only a vocabulary, no weights", "name the file of a whole model")


def check_scalars(gguf: GGUF) -> None:
    """Check lengths, and that every number with a fraction is one; NaN spreads to all logits."""
    number(gguf, "context_length", 1, MAX_CONTEXT, 1)
    number(gguf, "vocab_size", 1, MAX_VOCAB, 1)
    prefix = gguf.architecture + "."
    for key in gguf.metadata:
        value = gguf.metadata[key] if key.startswith(prefix) else None
        if not isinstance(value, float):
            continue
        if not math.isfinite(value):
            raise damaged(gguf, f"{shown(key)} is {value}")
        if key.endswith("epsilon") and not 0 <= value <= 1:
            raise damaged(gguf, f"{shown(key)} is {value:g}, where 0 to 1 is possible")
        if ".rope.freq_base" in key and value < 1:
            raise damaged(gguf, f"{shown(key)} is {value:g}, where 1 or more is possible")


def check_experts(gguf: GGUF, shape: Shape) -> None:
    """Check what llama.cpp asserts about mixtures of experts and predicted tokens."""
    count = number(gguf, "expert_count", 0, MAX_EXPERTS, 0)
    used = max(per_layer(gguf, "expert_used_count", shape.layers, 2**31) or [0])
    groups = number(gguf, "expert_group_count", 0, 2**31, 0)
    groups_used = number(gguf, "expert_group_used_count", 0, 2**31, 0)
    if used > count or (count and not used):
        raise damaged(gguf, f"{used:,} of {count:,} experts are used")
    if groups > 1 and (not count or count % groups or not 0 < groups_used < groups):
        raise damaged(gguf, f"{groups_used:,} of {groups:,} groups of {count:,} experts are used")
    if groups and not count:
        raise damaged(gguf, "it has groups of experts and no experts")
    number(gguf, "nextn_predict_layers", 0, shape.layers, 0)


def check_rope(gguf: GGUF, shape: Shape) -> None:
    """Check the part of a head that is rotated."""
    longest = max(number(gguf, f"attention.key_length{kind}", 1, 2**16, shape.key_len) for kind in ("", "_mla", "_swa"))
    rotated = number(gguf, "rope.dimension_count", 0, longest, 0)
    if rotated % 2:
        raise damaged(gguf, f"{rotated} numbers of a head are rotated, which must be even")
    given = gguf.get("rope.dimension_count") is not None
    if given and gguf.architecture in FULL_ROPE and rotated != shape.key_len:
        raise damaged(gguf, f"{rotated} numbers of a head are rotated, and it has {shape.key_len}")
    scaling = gguf.get("rope.scaling.type", "none")
    if scaling not in ROPE_SCALINGS:
        raise damaged(gguf, f"{gguf.architecture}.rope.scaling.type is none of {', '.join(ROPE_SCALINGS)}")


def check_vocabulary(gguf: GGUF) -> None:
    """Check that the tokens are distinct and as many as the embedding has rows.

    The key `vocab_size` need not agree: llama.cpp does not use it, and converters got it wrong.
    """
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError(f"{gguf.name} holds no vocabulary", "download a complete model")
    if not isinstance(tokens, Array) or tokens.type != GGUFValueType.STRING:
        raise damaged(gguf, "its vocabulary is not a list of texts")
    if not 1 <= len(tokens) <= MAX_VOCAB or tokens.nbytes > MAX_VOCAB_BYTES:
        raise damaged(gguf, f"its vocabulary has {len(tokens):,} tokens in {tokens.nbytes:,} bytes")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2 and embedding.shape[1] != len(tokens):
        raise damaged(gguf, f"its vocabulary has {len(tokens):,} tokens, its embedding {embedding.shape[1]:,}")
    kinds = gguf.metadata.get("tokenizer.ggml.token_type")
    if isinstance(kinds, Array) and kinds.type == GGUFValueType.INT32:
        with_bytes = bool((kinds.numpy() == BYTE_TOKEN).any())
        if with_bytes and gguf.metadata.get("tokenizer.ggml.model") == "bert":
            raise damaged(gguf, "its vocabulary is of the kind bert and has byte tokens")
    twice = repeated_token(tokens)
    if twice is not None:
        raise damaged(gguf, f"its vocabulary has the token {shown(repr(twice[:80]))} twice")


def repeated_token(tokens: Array) -> bytes | None:
    """Return a token that llama.cpp would find twice."""

    def as_llama_reads() -> Iterator[bytes]:
        for i, token in enumerate(tokens.raw()):
            yield token.partition(b"\0")[0] or b"[EMPTY_%d]" % i  # it takes them as C strings

    # hashes first: a set of a large vocabulary takes 10 times their memory
    hashes, counts = np.unique(np.fromiter(map(hash, as_llama_reads()), np.int64, len(tokens)), return_counts=True)
    if len(hashes) == len(tokens):
        return None
    suspects = set(hashes[counts > 1].tolist())
    seen: set[bytes] = set()
    for token in as_llama_reads():
        if hash(token) in suspects:
            if token in seen:
                return token
            seen.add(token)
    return None


def check_types(gguf: GGUF) -> None:
    """Check what llama.cpp's kernels take without asking: alignment, and the types of norms, biases and matrices."""
    for tensor in gguf.tensors.values():
        what = f"tensor {shown(tensor.name)}"
        if tensor.offset % TENSOR_ALIGNMENT:
            raise damaged(gguf, f"{what} is not aligned to {TENSOR_ALIGNMENT} bytes")
        if tensor.type.name != "F32" and is_addend(tensor):
            raise damaged(gguf, f"{what} is {tensor.type.name}, where llama.cpp needs F32")
        if tensor.type.name in NO_WEIGHTS and MATRIX.fullmatch(tensor.name):
            raise damaged(gguf, f"{what} is {tensor.type.name}, which is no type for weights")


def is_addend(tensor: Tensor) -> bool:
    """Tell whether a tensor is multiplied or added by element."""
    flat = len(tensor.shape) == 1 and ("norm" in tensor.name or tensor.name.endswith(".bias"))
    return flat or tensor.name.endswith("_norm.weight")


def check_blocks(gguf: GGUF, shape: Shape) -> None:
    """Check that no block is missing, and for the plain decoders that each has its parts in the right sizes."""
    if gguf.architecture not in KNOWN - NO_BLOCKS:
        return
    require_tensor(gguf, "token_embd.weight")
    blocks: dict[int, set[str]] = {}
    for name in gguf.tensors:
        if match := BLOCK.fullmatch(name):
            blocks.setdefault(int(match[1]), set()).add(match[2])
    feed_forward = per_layer(gguf, "feed_forward_length", shape.layers, 2**31) or [1] * shape.layers
    extra = number(gguf, "nextn_predict_layers", 0, shape.layers, 0)  # some files leave these blocks out
    for i in range(shape.layers - extra):
        empty = shape.heads[i] == 0 and feed_forward[i] == 0  # pruned models skip such a block
        if i not in blocks and not empty:
            raise damaged(gguf, f"{gguf.architecture}.block_count is {shape.layers}, and block {i} has no tensors")
    if gguf.architecture in PLAIN:
        require_tensor(gguf, "output_norm.weight")
        for i in range(shape.layers - extra):
            check_plain_block(gguf, shape, i, blocks.get(i, set()))


def check_plain_block(gguf: GGUF, shape: Shape, i: int, names: set[str]) -> None:
    """Check that a block has its parts, and attention matrices of the size that the head counts ask for."""
    for choices in PARTS_OF_A_BLOCK:
        if names.isdisjoint(choices):
            require_tensor(gguf, f"blk.{i}.{choices[0]}")
    query, key = shape.heads[i] * shape.key_len, shape.kv_heads[i] * shape.key_len
    value = shape.kv_heads[i] * shape.value_len
    sizes = {"attn_q": query, "attn_k": key, "attn_v": value, "attn_qkv": query + key + value}
    for part, rows in sizes.items():
        tensor = gguf.tensors.get(f"blk.{i}.{part}.weight")
        if tensor is not None and tensor.shape[1:] != (rows,):
            has = " x ".join(map(str, tensor.shape))
            raise damaged(gguf, f"tensor {tensor.name} is {has}, where {rows:,} rows are needed")


def require_tensor(gguf: GGUF, name: str) -> None:
    """Refuse a file without this tensor."""
    if name not in gguf.tensors:
        raise damaged(gguf, f"tensor {name} is missing")
