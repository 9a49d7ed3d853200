"""Checks of a GGUF before llama.cpp opens it. Each prevents an abort, a crash or NaN that a file has provoked.

Owns completeness only where all blocks are alike. llama.cpp refuses the rest with a clear message, and no valid model
of an unknown family may be refused here. The limits are those of llama.cpp's asserts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
from gguf.constants import MODEL_ARCH_NAMES, GGUFValueType

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.gguf_parse import Array, Tensor
from edgelm.checkpoints.ollama_format import is_ollamas_own
from edgelm.checkpoints.shape import MAX_VOCAB, Shape, gguf_experts, gguf_shape
from edgelm.checkpoints.summary import has_only_heads

MAX_VOCAB_BYTES = 2**25
MAX_EXPERTS = 1024
MAX_UINT = 2**31
TENSOR_ALIGNMENT = 32  # of the mapped buffer, whatever general.alignment says
BYTE_TOKEN = 6  # in tokenizer.ggml.token_type
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

ARCHITECTURES = frozenset(MODEL_ARCH_NAMES.values())  # llama.cpp has more
# decoders whose blocks are all alike: norm, attention by query, key and value, feed-forward
UNIFORM = frozenset("llama mistral3 qwen2 qwen2moe qwen3 qwen3moe gemma gemma2 gemma3 phi3 smollm3".split())
FULL_ROPE = frozenset(
    "qwen2 qwen2moe qwen3 qwen3moe mistral3 granite smollm3".split()
)  # they assert that the whole head is rotated
NO_BLOCKS = frozenset({"clip", "wavtokenizer-dec"})
BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.(\d{1,6})\.(.+)")
MATRIX = re.compile(
    r"(?:.*\.)?(?:token_embd|output|attn_(?:q|k|v|qkv|output)|ffn_(?:up|down|gate|gate_up)(?:_exps|_shexp|_inp)?)\.weight"
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
NOT_MODELS = {
    "adapter": "is an adapter (LoRA), not a whole model",
    "mmproj": "is the part of a model that reads images or sound, not the model",
    "imatrix": "is an importance matrix for quantizing, not a model",
}


def check_for_llama(gguf: GGUF) -> None:
    """Raise ModelError for a file that llama.cpp cannot run, or that would make it abort or compute nonsense."""
    require_model(gguf)
    if has_only_heads(gguf):
        raise ModelError(
            f"{gguf.name} holds only the heads that draft for a model",
            "name the file of the model itself, and this one with --draft",
        )
    check_blocks(gguf, check_values(gguf))


def check_heads_for_llama(gguf: GGUF) -> None:
    """Raise ModelError for a file of heads with which llama.cpp would abort or compute nonsense."""
    require_model(gguf)
    require_tensor(gguf, "token_embd.weight")
    require_tensor(gguf, "output_norm.weight")
    check_values(gguf)


def check_values(gguf: GGUF) -> Shape:
    """Check all but the presence of the blocks, and return the sizes."""
    shape = gguf_shape(gguf.values)
    check_scalars(gguf)
    check_experts(gguf, shape)
    check_rope(gguf, shape)
    check_vocabulary(gguf)
    check_types(gguf)
    return shape


def require_model(gguf: GGUF) -> None:
    """Refuse files that hold something other than a model."""
    kind = gguf.metadata.get("general.type")
    if gguf.metadata.get("general.architecture") == "clip":
        kind = "mmproj"
    if isinstance(kind, str) and kind in NOT_MODELS:
        hint = "name the file of the model itself" + ", with --lora and this one" * (kind == "adapter")
        raise ModelError(f"{gguf.name} {NOT_MODELS[kind]}", hint)
    if not gguf.architecture or not gguf.tensors:
        raise ModelError(f"{gguf.name} holds only a vocabulary, no weights", "name the file of a whole model")
    if is_ollamas_own(gguf):  # where the store is known, library/ollama_format.py names the same model for llama.cpp
        raise ModelError(f"{gguf.name} is made for Ollama's own engine", "take a GGUF that was made for llama.cpp")


def check_scalars(gguf: GGUF) -> None:
    """Check the sizes, and that every fraction is finite and possible: NaN spreads to all logits."""
    values = gguf.values
    values.integer("vocab_size", low=1, high=MAX_VOCAB, default=1)
    prefix = gguf.architecture + "."
    for key in gguf.metadata:
        value = gguf.metadata[key] if key.startswith(prefix) else None
        if not isinstance(value, float):
            continue
        if not math.isfinite(value):
            raise values.damaged(f"{shown(key)} is {value}")
        if key.endswith("epsilon") and not 0 <= value <= 1:
            raise values.damaged(f"{shown(key)} is {value:g}, but must be 0 to 1")
        if ".rope.freq_base" in key and value < 1:
            raise values.damaged(f"{shown(key)} is {value:g}, but must be 1 or more")


def check_experts(gguf: GGUF, shape: Shape) -> None:
    """Check what llama.cpp asserts about mixtures of experts and predicted tokens."""
    values = gguf.values
    count = values.integer("expert_count", high=MAX_EXPERTS, default=0)
    used = max(gguf_experts(values, shape.num_layers).used)
    groups = values.integer("expert_group_count", high=MAX_UINT, default=0)
    groups_used = values.integer("expert_group_used_count", high=MAX_UINT, default=0)
    if used > count or (count and not used):
        raise values.damaged(f"{used:,} of {count:,} experts are used")
    if groups > 1 and (not count or count % groups or not 0 < groups_used < groups):
        raise values.damaged(f"{groups_used:,} of {groups:,} groups of {count:,} experts are used")
    if groups and not count:
        raise values.damaged("it has groups of experts and no experts")
    values.integer("nextn_predict_layers", high=shape.num_layers, default=0)


def check_rope(gguf: GGUF, shape: Shape) -> None:
    """Check the part of a head that is rotated."""
    values = gguf.values
    key_lens = [
        values.integer(f"attention.key_length{kind}", low=1, high=2**16, default=shape.key_len)
        for kind in ("", "_mla", "_swa")
    ]
    rotated = values.integer("rope.dimension_count", high=max(key_lens), default=0)
    if rotated % 2:
        raise values.damaged(f"{rotated} numbers of a head are rotated, which must be even")
    stated = values.get("rope.dimension_count") is not None
    if stated and gguf.architecture in FULL_ROPE and rotated != shape.key_len:
        raise values.damaged(f"{rotated} numbers of a head are rotated, and it has {shape.key_len}")
    scaling = values.get("rope.scaling.type")
    if scaling is not None and scaling not in ROPE_SCALINGS:
        raise values.damaged(f"{gguf.architecture}.rope.scaling.type must be one of {', '.join(ROPE_SCALINGS)}")


def check_vocabulary(gguf: GGUF) -> None:
    """Check that the tokens are distinct, and that the embedding has a row for each.

    The key `vocab_size` need not agree: llama.cpp does not use it, and converters wrote it wrong.
    """
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError(f"{gguf.name} holds no vocabulary", "download a complete model")
    damaged = gguf.values.damaged
    if not isinstance(tokens, Array) or tokens.type != GGUFValueType.STRING:
        raise damaged("its vocabulary is not a list of strings")
    if not 1 <= len(tokens) <= MAX_VOCAB or tokens.nbytes > MAX_VOCAB_BYTES:
        raise damaged(f"its vocabulary has {len(tokens):,} tokens in {tokens.nbytes:,} bytes")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2 and embedding.shape[1] != len(tokens):
        raise damaged(f"its vocabulary has {len(tokens):,} tokens, its embedding {embedding.shape[1]:,}")
    kinds = gguf.metadata.get("tokenizer.ggml.token_type")
    if isinstance(kinds, Array) and kinds.type == GGUFValueType.INT32:
        with_bytes = bool((kinds.numpy() == BYTE_TOKEN).any())
        if with_bytes and gguf.metadata.get("tokenizer.ggml.model") == "bert":
            raise damaged("its vocabulary is of the kind bert and has byte tokens")
    repeated = repeated_token(tokens)
    if repeated is not None:
        raise damaged(f"its vocabulary has the token {shown(repr(repeated[:80]))} twice")


def repeated_token(tokens: Array) -> bytes | None:
    """Return a token that llama.cpp would find twice."""

    def as_llama_reads() -> Iterator[bytes]:
        for i, token in enumerate(tokens.raw()):
            yield token.partition(b"\0")[0] or b"[EMPTY_%d]" % i  # it reads them as C strings

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
    """Check what llama.cpp's kernels assume: alignment, and the types of norms, biases and matrices."""
    for tensor in gguf.tensors.values():
        reason = None
        if tensor.offset % TENSOR_ALIGNMENT:
            reason = f"not aligned to {TENSOR_ALIGNMENT} bytes"
        elif tensor.type.name != "F32" and is_elementwise(tensor):
            reason = f"{tensor.type.name}, but llama.cpp needs F32"
        elif tensor.type.name in NO_WEIGHTS and MATRIX.fullmatch(tensor.name):
            reason = f"{tensor.type.name}, which is not a type for weights"
        if reason is not None:
            raise gguf.values.damaged(f"tensor {shown(tensor.name)} is {reason}")


def is_elementwise(tensor: Tensor) -> bool:
    """Tell whether a tensor is multiplied or added element by element."""
    flat = len(tensor.shape) == 1 and ("norm" in tensor.name or tensor.name.endswith(".bias"))
    return flat or tensor.name.endswith("_norm.weight")


def check_blocks(gguf: GGUF, shape: Shape) -> None:
    """Check that no block is missing, and in uniform decoders that each block has its parts in the right sizes."""
    if gguf.architecture not in ARCHITECTURES - NO_BLOCKS:
        return
    values, num_layers = gguf.values, shape.num_layers
    require_tensor(gguf, "token_embd.weight")
    blocks: dict[int, set[str]] = {}
    for name in gguf.tensors:
        if match := BLOCK.fullmatch(name):
            blocks.setdefault(int(match[1]), set()).add(match[2])
    feed_forward = values.per_layer("feed_forward_length", num_layers=num_layers, high=MAX_UINT) or [1] * num_layers
    extra = values.integer("nextn_predict_layers", high=num_layers, default=0)  # some files omit these blocks
    for i in range(num_layers - extra):
        empty = shape.num_heads[i] == 0 and feed_forward[i] == 0  # pruned models skip such a block
        if i not in blocks and not empty:
            raise values.damaged(f"{gguf.architecture}.block_count is {num_layers}, and block {i} has no tensors")
    if gguf.architecture in UNIFORM:
        require_tensor(gguf, "output_norm.weight")
        for i in range(num_layers - extra):
            check_uniform_block(gguf, shape, i, blocks.get(i, set()))


def check_uniform_block(gguf: GGUF, shape: Shape, i: int, names: set[str]) -> None:
    """Check that a block has its parts, and attention matrices of the size that the head counts require."""
    for choices in PARTS_OF_A_BLOCK:
        if names.isdisjoint(choices):
            require_tensor(gguf, f"blk.{i}.{choices[0]}")
    query, key = shape.num_heads[i] * shape.key_len, shape.num_kv_heads[i] * shape.key_len
    value = shape.num_kv_heads[i] * shape.value_len
    sizes = {"attn_q": query, "attn_k": key, "attn_v": value, "attn_qkv": query + key + value}
    for part, rows in sizes.items():
        tensor = gguf.tensors.get(f"blk.{i}.{part}.weight")
        if tensor is not None and tensor.shape[1:] != (rows,):
            sizes_text = " x ".join(map(str, tensor.shape))
            raise gguf.values.damaged(f"tensor {tensor.name} is {sizes_text}, but must have {rows:,} rows")


def require_tensor(gguf: GGUF, name: str) -> None:
    """Refuse a file without this tensor."""
    if name not in gguf.tensors:
        raise gguf.values.damaged(f"tensor {name} is missing")
