"""The special tokens of a folder: which they are, which stand around a text, and which end an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgelm.making.conversion.sentencepiece import SentencePieces
from edgelm.making.conversion.tokenizer_files import TokenizerFiles
from edgelm.text.known_vocabularies import STOP_STRINGS

# by the name in tokenizer_config.json: the name in a GGUF
NAMES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",  # sic
    "pad": "padding",
    "mask": "mask",
}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of special tokens by their names in a GGUF, and which of BOS and EOS are added to a text."""

    ids: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, bool] = field(default_factory=dict)

    def within(self, num_tokens: int) -> SpecialTokens:
        """Return those that the vocabulary has."""
        return SpecialTokens({name: token for name, token in self.ids.items() if token < num_tokens}, self.added)


def read_special_tokens(files: TokenizerFiles, pieces: SentencePieces | None) -> SpecialTokens:
    """Find the special tokens: by their text in tokenizer_config.json, else by their id in the other files."""
    ids = _ids(files, pieces)
    first, last = _around(files)
    found: dict[str, int] = {}
    for name, key in NAMES.items():
        token = ids.get(_text(files.config.get(f"{name}_token")))
        stated = [*_numbers(files.model, f"{name}_token_id"), *_numbers(files.generation, f"{name}_token_id")]
        if token is None and name == "bos":
            token = ids.get(first)
        if token is None:
            token = next(iter(stated), None)
        if token is not None:
            found[key] = token
    _add_ends(files, ids, found)
    return SpecialTokens(found, dict(_added(files, ids, found, first, last)))


def _add_ends(files: TokenizerFiles, ids: Mapping[str, int], found: dict[str, int]) -> None:
    """Add tokens that end an answer beside EOS, unless llama.cpp knows them by their text."""
    known = {token for text, token in ids.items() if text in STOP_STRINGS} | {found.get("eos")}
    ends = [*_numbers(files.generation, "eos_token_id"), *_numbers(files.model, "eos_token_id")]
    others = [token for token in dict.fromkeys(ends) if token not in known]
    found.update(zip(("eot", "eom"), others, strict=False))


def _added(
    files: TokenizerFiles, ids: Mapping[str, int], found: Mapping[str, int], first: str, last: str
) -> Iterator[tuple[str, bool]]:
    """Yield whether BOS and EOS stand around a text: as tokenizer_config.json states it, else by the template."""
    for name, text in (("bos", first), ("eos", last)):
        stated = files.config.get(f"add_{name}_token")
        if isinstance(stated, bool):
            yield name, stated
        elif files.tokenizer:
            yield name, bool(text) and ids.get(text) == found.get(name)


def _around(files: TokenizerFiles) -> tuple[str, str]:
    """Return the tokens that tokenizer.json puts before and after a text, "" for none."""
    section = files.section("post_processor")
    steps = section.get("processors") if section.get("type") == "Sequence" else [section]
    for step in steps if isinstance(steps, list) else ():
        single = step.get("single") if isinstance(step, Mapping) else None
        if isinstance(single, list) and len(single) > 1:
            return _special(single[0]), _special(single[-1])
    return "", ""


def _special(entry: object) -> str:
    token = entry.get("SpecialToken") if isinstance(entry, Mapping) else None
    return _text(token.get("id")) if isinstance(token, Mapping) else ""


def _ids(files: TokenizerFiles, pieces: SentencePieces | None) -> dict[str, int]:
    """Return the ids of all tokens that may be special, by their text."""
    ids = {piece.text: token for token, piece in enumerate(pieces.pieces)} if pieces else {}
    vocab = files.section("model").get("vocab")
    if isinstance(vocab, Mapping):
        ids |= {text: token for text, token in vocab.items() if isinstance(token, int)}
    decoder = files.config.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(entry, Mapping) and key.isdecimal():
            ids[_text(entry.get("content"))] = int(key)
    added = files.tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), int):
            ids[_text(entry.get("content"))] = entry["id"]
    ids.pop("", None)
    return ids


def _text(value: object) -> str:
    """Return the text of a token: a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def _numbers(values: Mapping[str, Any], name: str) -> list[int]:
    value = values.get(name)
    numbers = value if isinstance(value, list) else [value]
    return [number for number in numbers if isinstance(number, int) and not isinstance(number, bool) and number >= 0]
