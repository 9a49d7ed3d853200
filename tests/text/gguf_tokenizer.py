"""Builds a tokenizer of the `tokenizers` library from a GGUF's vocabulary: tests have no real tokenizer.json.

Owns the meaning of the fields `tokenizer.ggml.*`, for the two kinds of vocabulary that nearly all models have. Knows
nothing of files: the fields come as a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from edgelm.text.fast_tokenizer import FastTokenizer, VocabularyFacts
from edgelm.text.known_vocabularies import SPACE, SPLITS, STOP_STRINGS

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types
FIELD = "tokenizer.ggml."

# The special tokens of models with these names take the white space behind them, but for those of KEEPS_SPACE. A GGUF
# does not say so; llama.cpp has the same list.
STRIPS = ("phi-3", "phi3")
KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
# A word that is itself a token is not built by merges.
WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35"})  # the text is normalized to NFC


def gguf_tokenizer(fields: Mapping[str, Any]) -> FastTokenizer:
    """Build the tokenizer of a GGUF from its metadata, with arrays as sequences."""
    family = fields.get(FIELD + "model")
    tokens, types = _strings(fields, "tokens"), list(fields.get(FIELD + "token_type") or [])
    types += [1] * (len(tokens) - len(types))
    types = [CONTROL if token in STOP_STRINGS else kind for token, kind in zip(tokens, types, strict=False)]
    rust = _byte_level(fields, tokens) if family == "gpt2" else _sentence_piece(fields, tokens, types)
    strips = any(name in str(fields.get("general.name", "")).lower() for name in STRIPS)
    for special, added_type in ((True, CONTROL), (False, USER_DEFINED)):
        added = [
            AddedToken(token, special=special, normalized=False, rstrip=strips and token not in KEEPS_SPACE)
            for token, kind in zip(tokens, types, strict=False)
            if kind == added_type
        ]
        (rust.add_special_tokens if special else rust.add_tokens)(added)
    return FastTokenizer(rust, _facts(fields, tokens, types, byte_level=family == "gpt2"))


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> RustTokenizer:
    pre = str(fields.get(FIELD + "pre") or "default")
    merges = [_pair(merge) for merge in _strings(fields, "merges")]
    rust = _tokenizer(tokens, merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    rust.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    rust.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        rust.normalizer = normalizers.NFC()
    return rust


def _sentence_piece(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> RustTokenizer:
    """Build a BPE vocabulary of SentencePiece, which merges the adjacent pair with the best score first."""
    scores = list(fields[FIELD + "scores"])
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in ids.items():
        if types[index] in (UNKNOWN, CONTROL):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-scores[index], ids[left], ids[right], left, right))
    merges.sort()
    unknown = next((token for token, kind in zip(tokens, types, strict=False) if kind == UNKNOWN), None)
    rust = _tokenizer(
        tokens, [(left, right) for *_, left, right in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if fields.get(FIELD + "add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
    rust.normalizer = normalizers.Sequence(steps)
    rust.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return rust


def _tokenizer(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> RustTokenizer:
    return RustTokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges, **options))


def _facts(fields: Mapping[str, Any], tokens: list[str], types: list[int], *, byte_level: bool) -> VocabularyFacts:
    def token(name: str) -> int | None:
        value = fields.get(f"{FIELD}{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    bos, eos = token("bos"), token("eos")
    ends = {token(name) for name in ("eos", "eot", "eom")}
    stops = ends | {index for index, text in enumerate(tokens) if text in STOP_STRINGS}
    add_bos = fields.get(FIELD + "add_bos_token", not byte_level or fields.get(FIELD + "pre") in WHOLE_WORDS_FIRST)
    add_eos = fields.get(FIELD + "add_eos_token", False)
    template = fields.get("tokenizer.chat_template")
    return VocabularyFacts(
        bos_id=bos,
        eos_id=eos,
        stop_ids=frozenset(index for index in stops if index is not None),
        prefix=(bos,) if add_bos and bos is not None else (),
        suffix=(eos,) if add_eos and eos is not None else (),
        chat_template=template if isinstance(template, str) else None,
        byte_level=byte_level,
        control_ids=frozenset(index for index, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)),
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _strings(fields: Mapping[str, Any], name: str) -> list[str]:
    return list(fields.get(FIELD + name) or [])
