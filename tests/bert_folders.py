"""Writes a tiny BERT as the folder that sentence-transformers has: weights, configuration, tokenizer, pooling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tiny_bert import SPECIAL, VOCABULARY, tiny_bert

HANGUL = ["한", "국", "##어", "ᄒ", "##ᅡ", "##ᆫ", "##ᄀ", "##ᅮ", "##ᆨ", "##ᄋ", "##ᅥ", "क", "##ि", "ह", "##ी", "É", "##É"]
LETTERS = [letter for upper in "ABCXYZ" for letter in (upper, f"##{upper}")]
WORDS = [*VOCABULARY, *HANGUL, *LETTERS]


def bert_folder(folder: Path, pooling: str = "mean_tokens", **changes: Any) -> Path:
    """Write the folder; `changes` replace values of its config.json."""
    model = tiny_bert()
    model.resize_token_embeddings(len(WORDS))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"], **changes}))
    write_wordpiece(folder)
    if pooling:
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return folder


def write_wordpiece(
    folder: Path,
    words: Sequence[str] = WORDS,
    *,
    normalizer: Mapping[str, Any] | None = None,
    splitter: str = "BertPreTokenizer",
) -> None:
    """Write tokenizer.json and tokenizer_config.json of a BERT."""
    ids = {word: i for i, word in enumerate(words)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]"))
    usual = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": ids[name], "content": name, **flags, "special": True} for name in SPECIAL],
        "normalizer": {"type": "BertNormalizer", **usual, **(normalizer or {})},
        "pre_tokenizer": {"type": splitter},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}, end],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, end, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in ("[CLS]", "[SEP]")},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **special}))
