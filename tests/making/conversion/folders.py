"""Folders of safetensors as users have them: tiny random models of every family with small tokenizers.

Owns the files of the tokenizers, in the forms of Llama 2 (SentencePiece), Gemma, Llama 3, Qwen and gpt-oss. The weights
are those of tests/models/tiny_models.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgelm.text.byte_letters import BYTE_LETTERS
from edgelm.text.known_vocabularies import SPACE, SPLITS
from tests.models.test_gguf_models import MODELS
from tests.models.tiny_models import build, write

VOCAB = 416  # rows of the embeddings; the tokenizers have fewer tokens
WORDS = "the and hello world little girl said once upon time was to in it is 12 def return".split()
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPLIT_OF = {
    "llama3": "llama-bpe",
    "smollm3": "llama-bpe",
    "gpt_oss": "gpt-4o",
    "ministral3": "tekken",
    "granite": "llama-bpe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35",
}
PIECES = ("llama2", "tied", "mixtral", "phi3", "gemma", "gemma2", "gemma3", "gemma4", "gemma4_moe", "mistral")

LLAMA_CPP: Mapping[str, Mapping[str, Any]] = MODELS  # what llama.cpp computes as transformers does


def folder_of(name: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny model with its tokenizer, and return its folder."""
    write(build(name, vocab_size=VOCAB, **{**LLAMA_CPP.get(name, {}), **changes}), folder)
    write_tokenizer(name, folder)
    return folder


def write_tokenizer(name: str, folder: Path) -> None:
    """Write the tokenizer of a model."""
    if name in PIECES:
        write_pieces(folder, gemma=name.startswith("gemma"))
    else:
        write_letters(folder, SPLIT_OF.get(name, "qwen2"))


def write_letters(folder: Path, split: str) -> None:
    """Write a byte-level BPE that splits texts by a rule."""
    vocab = {letter: i for i, letter in enumerate(BYTE_LETTERS)}
    merges = _merges([f"\u0120{word}" for word in WORDS] + WORDS, vocab)
    steps: list[Any] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in SPLITS[split]
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False})
    bos = len(vocab)
    added = ["<|begin|>", "<|im_end|>", "<|im_start|>", "<tool>"]
    document = {
        "version": "1.0",
        "added_tokens": _added(added, bos, plain="<tool>"),
        "normalizer": {"type": "NFC"} if split.startswith("qwen") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None if split.startswith("qwen") else _template(added[0], bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": split == "llama-bpe", "vocab": vocab, "merges": merges},
    }
    own = {} if split.startswith("qwen") else {"bos_token": added[0]}
    _write(folder, document, {**own, "eos_token": added[1], "chat_template": TEMPLATE})


def write_pieces(folder: Path, *, gemma: bool = False) -> None:
    """Write a BPE with the spelling of SentencePiece, in a tokenizer.json alone."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    letters = sorted({SPACE, *"".join(WORDS), *"ABCDefgHIJ.,!?'\n"})
    vocab = {text: i for i, text in enumerate([*names, *(f"<0x{byte:02X}>" for byte in range(256)), *letters])}
    merges = _merges([f"{SPACE}{word}" for word in WORDS], vocab)
    last = len(vocab)
    bos, eos = ("<bos>", "<eos>") if gemma else ("<s>", "</s>")
    spaces: Any = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not gemma:
        spaces = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}
    decoders: list[Any] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    document = {
        "version": "1.0",
        "added_tokens": [*_added(names, 0), *_added(["<|im_end|>", "<|im_start|>"], last)],
        "normalizer": spaces,
        "pre_tokenizer": None,
        "post_processor": _template(bos, vocab[bos]),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    _write(folder, document, {"bos_token": bos, "eos_token": eos, "unk_token": "<unk>", "chat_template": TEMPLATE})


def pieces_file(pieces: Sequence[tuple[str, float, int]], *, model_type: int = 2, adds_space: bool = True) -> bytes:
    """Return a tokenizer.model of SentencePiece with these texts, scores and types."""
    data = b""
    for text, score, kind in pieces:
        piece = _bytes(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
        data += _bytes(1, piece)
    data += _bytes(2, b"\x18" + bytes([model_type]))
    return data + _bytes(3, _bytes(1, b"identity") + b"\x18" + bytes([adds_space]))


def _bytes(number: int, data: bytes) -> bytes:
    """Return a field of protobuf with bytes."""
    length, size = len(data), b""
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + data


def _merges(words: Sequence[str], vocab: dict[str, int]) -> list[list[str]]:
    """Add the beginnings of words to a vocabulary, and return the merges that make them."""
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[: end - 1], word[end - 1]])
    return merges


def _added(texts: Sequence[str], first: int, plain: str = "") -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": first + i, "content": text, **flags, "special": text != plain} for i, text in enumerate(texts)]


def _template(bos: str, token: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [token], "tokens": [bos]}},
    }


def _write(folder: Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
