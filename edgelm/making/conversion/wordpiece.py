"""The vocabulary of a BERT as llama.cpp has it: words with a mark before them, and the pieces of words without one.

Owns the steps of a tokenizer.json that llama.cpp repeats, and the refusal of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from edgelm.base.errors import ModelError
from edgelm.making.conversion.special_tokens import SpecialTokens
from edgelm.making.conversion.splits import flattened
from edgelm.making.conversion.tokenizer_files import TokenizerFiles, damaged
from edgelm.text.known_vocabularies import SPACE

INNER = "##"  # before a piece that does not begin a word
# by the name in a GGUF: the token of a BERT, and its name in tokenizer_config.json
SPECIALS = {
    "bos": ("[CLS]", "cls_token"),
    "eos": ("[SEP]", "sep_token"),
    "unknown": ("[UNK]", "unk_token"),
    "seperator": ("[SEP]", "sep_token"),  # sic
    "padding": ("[PAD]", "pad_token"),
    "mask": ("[MASK]", "mask_token"),
}


class WordpieceRule(NamedTuple):
    """How a text becomes words."""

    lowers: bool
    strips_accents: bool
    unknown: str  # the token for a word that the vocabulary lacks


def is_wordpiece(files: TokenizerFiles) -> bool:
    """Tell whether a tokenizer.json has words and their pieces; older ones do not name the kind."""
    model = files.section("model")
    return model.get("type") == "WordPiece" or ("type" not in model and "continuing_subword_prefix" in model)


def read_wordpiece_rule(files: TokenizerFiles) -> WordpieceRule:
    """Return how texts are split. Raises ModelError where llama.cpp would split them in another way."""
    if reason := next(_refusals(files), ""):
        raise ModelError(f"llama.cpp would split texts in another way: {reason}", "choose another embedding model")
    steps = list(flattened(files, "normalizer"))
    normalizer = steps[0] if steps else {}
    lowers = normalizer.get("lowercase") is not False
    strips = normalizer.get("strip_accents")
    unknown = files.section("model").get("unk_token")
    return WordpieceRule(lowers, strips if isinstance(strips, bool) else lowers, str(unknown or "[UNK]"))


def as_llama_spells(token: str) -> str:
    """Return a token with llama.cpp's mark before words instead of BERT's before the other pieces."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix(INNER) if token.startswith(INNER) and token != INNER else SPACE + token


def wordpiece_specials(files: TokenizerFiles, tokens: Mapping[str, int]) -> SpecialTokens:
    """Return the ids of the special tokens. Raises ModelError where those around a text are missing."""
    ids = {}
    for name, (usual, key) in SPECIALS.items():
        stated = files.config.get(key)
        text = stated.get("content") if isinstance(stated, Mapping) else stated
        token = tokens.get(text if isinstance(text, str) else usual)
        if token is not None:
            ids[name] = token
    if missing := next((SPECIALS[name][0] for name in ("bos", "eos", "unknown") if name not in ids), ""):
        raise damaged(f"it has no token {missing}")
    return SpecialTokens(ids, {})


def _refusals(files: TokenizerFiles) -> Iterator[str]:
    model = files.section("model")
    if model.get("continuing_subword_prefix") != INNER:
        yield "its pieces have another mark"
    normalizer = list(flattened(files, "normalizer"))
    if [step.get("type") for step in normalizer] != ["BertNormalizer"]:
        yield "its texts are normalized by other steps than BERT's"
    elif normalizer[0].get("clean_text") is False or normalizer[0].get("handle_chinese_chars") is False:
        yield "it keeps control characters, or Chinese words as they are"
    if [step.get("type") for step in flattened(files, "pre_tokenizer")] != ["BertPreTokenizer"]:
        yield "its words are split by other steps than BERT's"
