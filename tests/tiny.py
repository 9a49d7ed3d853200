"""Writes tiny GGUF models with random weights, so that no test needs a download.

Owns shapes, vocabulary and weights of a model of some hundred kilobytes that llama.cpp loads and decodes with finite,
context-dependent logits. Knows nothing of edgelm. The same options always write the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray

Arch = Literal["llama", "qwen3"]
Quant = Literal["f32", "f16", "q8_0", "q4_0", "q4_k"]

UNK, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3  # ids; the 256 byte tokens follow the three control tokens
FIRST_PIECE = FIRST_BYTE + 256
SPACE = "\u2581"  # how an SPM vocabulary writes a space
WORDS = (
    "the and of to in it is was that he she you they said day little girl boy time one went with had his her for "
    "play once upon there happy big dog cat tree house saw very but so mom not all on at friend hello world"
).split()

TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32, 1),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16, 1),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0, 32),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0, 32),
    "q4_k": (GGMLQuantizationType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M, 256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """The options of `write_tiny`. `q4_k` needs `width`, `ffn` and `heads * head_dim` to be multiples of 256."""

    arch: Arch = "llama"
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 128
    vocab_size: int = 512
    context: int = 2048
    quant: Quant = "f32"
    seed: int = 0
    chat_template: str | None = None
    control: tuple[str, ...] = ()  # more control tokens, at the end of the vocabulary
    user_defined: tuple[str, ...] = ()  # tokens of any text, behind those
    vocab_only: bool = False  # the tokenizer and no weights
    nan_logits: bool = False  # loads, and computes NaN
    endless: bool = False  # the end token's logit is 0, far below the best one's: a greedy answer does not end
    experts: int = 0  # in each layer, two of which compute a token; 0: no mixture
    temperature: float | None = None  # that the file recommends
    script: tuple[int, ...] = ()  # different tokens; behind one of them, a greedy answer goes on with the next one

    def __post_init__(self) -> None:
        block = TYPES[self.quant][2]
        for name, cols in (("width", self.width), ("ffn", self.ffn), ("heads * head_dim", self.heads * self.head_dim)):
            if cols % block:
                raise ValueError(f"{name} is {cols}, and {self.quant} needs a multiple of {block}")
        if self.script and (self.quant != "f32" or len(set(self.script)) < len(self.script)):
            raise ValueError("a script needs f32 weights, and each token at most once")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv heads")
        if self.vocab_size < FIRST_PIECE:
            raise ValueError(f"vocab_size is {self.vocab_size}, and {FIRST_PIECE} tokens are always there")


def write_tiny(path: str | Path, **options: Any) -> Path:
    """Write the model that `Tiny(**options)` describes, and return its path."""
    tiny = Tiny(**options)
    path = Path(path)
    rng = np.random.default_rng(tiny.seed)
    writer = GGUFWriter(path, tiny.arch)
    _write_shape(writer, tiny)
    own = (*tiny.control, *tiny.user_defined)
    _write_tokenizer(writer, tiny, [*vocabulary(tiny.vocab_size - len(own), tiny.seed), *own])
    if not tiny.vocab_only:
        _write_weights(writer, tiny, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def end_as_begin(path: Path) -> Path:
    """Let one token end every text and be the BOS too, which begins none, as in Qwen3-Embedding; return the path."""
    fields = GGUFReader(path, "r+").fields
    for name, value in {"add_bos_token": False, "add_eos_token": True, "bos_token_id": EOS}.items():
        fields[f"tokenizer.ggml.{name}"].parts[-1][0] = value
    return path


def vocabulary(size: int, seed: int = 0) -> list[str]:
    """Return the texts of an SPM vocabulary: control tokens, bytes, letters, words, random pieces."""
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [SPACE, *"etaoinshrdlucmfwypvbgkqjxz", *".,!?'\"0123456789", "é", "ß", "日", "本"]
    # Every prefix of a word is a piece, because an SPM tokenizer builds a word by merging two pieces at a time.
    prefixes = [(SPACE + word)[:end] for word in WORDS for end in range(2, len(word) + 2)]
    pieces = list(dict.fromkeys(letters + prefixes))
    known = set(pieces)
    rng = np.random.default_rng((seed, size))
    while len(pieces) < size - len(fixed):
        first, second = rng.integers(0, len(pieces), 2)
        if (text := pieces[first] + pieces[second].replace(SPACE, "")) not in known:
            pieces.append(text)
            known.add(text)
    return (fixed + pieces)[:size]


def _write_shape(writer: GGUFWriter, tiny: Tiny) -> None:
    writer.add_name(f"tiny {tiny.arch} {tiny.quant}")
    writer.add_file_type(TYPES[tiny.quant][1])
    writer.add_context_length(tiny.context)
    writer.add_embedding_length(tiny.width)
    writer.add_block_count(tiny.layers)
    writer.add_feed_forward_length(tiny.ffn)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_rope_dimension_count(tiny.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tiny.vocab_size)
    if tiny.temperature is not None:
        writer.add_sampling_temp(tiny.temperature)
    if tiny.experts:
        writer.add_expert_count(tiny.experts)
        writer.add_expert_used_count(2)


def _write_tokenizer(writer: GGUFWriter, tiny: Tiny, texts: list[str]) -> None:
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    own = [TokenType.CONTROL] * len(tiny.control) + [TokenType.USER_DEFINED] * len(tiny.user_defined)
    kinds += [TokenType.NORMAL] * (len(texts) - len(kinds) - len(own)) + own
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * FIRST_PIECE + [-float(rank) for rank in range(len(texts) - FIRST_PIECE)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    if tiny.chat_template is not None:
        writer.add_chat_template(tiny.chat_template)


def _write_weights(writer: GGUFWriter, tiny: Tiny, rng: np.random.Generator) -> None:
    def linear(name: str, rows: int, cols: int, gain: float = 1.0) -> NDArray[Any]:
        if tiny.script and name.endswith(("attn_output", "ffn_down")):
            gain = 0  # the last token alone decides
        data, kind = _random_matrix(rng, rows, cols, gain, tiny.quant)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        return data

    def norm(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", np.full(size, value, np.float32))

    q_rows, kv_rows = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    embeddings = linear("token_embd", tiny.vocab_size, tiny.width)
    for layer in range(tiny.layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm", tiny.width)
        linear(block + "attn_q", q_rows, tiny.width, gain=2.0)
        linear(block + "attn_k", kv_rows, tiny.width, gain=2.0)
        linear(block + "attn_v", kv_rows, tiny.width)
        linear(block + "attn_output", tiny.width, q_rows)
        if tiny.arch == "qwen3":
            norm(block + "attn_q_norm", tiny.head_dim, 2.0)
            norm(block + "attn_k_norm", tiny.head_dim)
        norm(block + "ffn_norm", tiny.width)
        if tiny.experts:
            data, _ = _random_matrix(rng, tiny.experts, tiny.width, 4.0, "f32")
            writer.add_tensor(f"{block}ffn_gate_inp.weight", data)
            shapes = {"gate": (tiny.ffn, tiny.width), "up": (tiny.ffn, tiny.width), "down": (tiny.width, tiny.ffn)}
            for part, (rows, cols) in shapes.items():
                experts = [_random_matrix(rng, rows, cols, 1.0, tiny.quant) for _ in range(tiny.experts)]
                stack = np.stack([data for data, _ in experts])
                writer.add_tensor(f"{block}ffn_{part}_exps.weight", stack, raw_dtype=experts[0][1])
            continue
        linear(block + "ffn_gate", tiny.ffn, tiny.width)
        linear(block + "ffn_up", tiny.ffn, tiny.width)
        linear(block + "ffn_down", tiny.width, tiny.ffn)
    norm("output_norm", tiny.width, np.nan if tiny.nan_logits else 1.0)
    data, kind = _random_matrix(rng, tiny.vocab_size, tiny.width, 4.0, tiny.quant)  # logits as spread as real ones
    if tiny.endless:
        data[EOS] = 0
    if tiny.script:
        data[:] = 0
        for token, following in pairwise(tiny.script):
            data[following] = 8 * embeddings[token]
    writer.add_tensor("output.weight", data, raw_dtype=kind)


def _random_matrix(
    rng: np.random.Generator, rows: int, cols: int, gain: float, quant: Quant
) -> tuple[NDArray[Any], GGMLQuantizationType]:
    """Return weights of standard deviation `gain / sqrt(cols)`, in the bytes of their type."""
    kind = TYPES[quant][0]
    if quant == "q4_k":
        return _random_q4_k(rng, rows, cols, gain), kind
    return quantize((rng.standard_normal((rows, cols)) * gain * cols**-0.5).astype(np.float32), kind), kind


def _random_q4_k(rng: np.random.Generator, rows: int, cols: int, gain: float) -> NDArray[np.uint8]:
    # gguf reads Q4_K and does not write it. A block of 256 weights: fp16 scale and minimum, 12 bytes of sub-scales,
    # 128 of nibbles. 8 times the scale as the minimum centres the nibbles; 265 is the spread that is left.
    blocks = rng.integers(0, 256, (rows, cols // 256, 144), dtype=np.uint8)
    scale = gain * cols**-0.5 / 265
    blocks[..., 0:4] = np.array([scale, 8 * scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
