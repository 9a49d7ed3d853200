"""How a tokenizer.json splits texts, by the name that llama.cpp has for it.

Owns the recognition of the steps in `pre_tokenizer`. The patterns are in text/known_vocabularies.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgelm.base.errors import ModelError
from edgelm.making.conversion.tokenizer_files import TokenizerFiles, damaged
from edgelm.text.known_vocabularies import SPLITS

OTHER = "run the folder itself, with the torch engine"
# names for a list of patterns, where several stand for the same
NAMES = ("gpt-2", "llama-bpe", "qwen2", "qwen35", "smollm", "gpt-4o", "tekken")
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
# tiktoken's way to write the pattern of Llama 3
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def split_rule(files: TokenizerFiles) -> str:
    """Return the name of the rule. Raises ModelError where llama.cpp has none for it."""
    patterns = []
    for step in flattened(files, "pre_tokenizer"):
        match step.get("type"):
            case "Split":
                patterns.append(_pattern(step))
            case "Digits" if step.get("individual_digits") is True:
                patterns.append(r"\p{N}")
            case "ByteLevel" if step.get("add_prefix_space") is not True:
                if step.get("use_regex", True):
                    patterns.append(SPLITS["gpt-2"][0])
            case kind:
                raise _refused(str(kind))
    patterns = [SPLITS["llama-bpe"][0] if pattern == CL100K else pattern for pattern in patterns]
    name = next((name for name in NAMES if SPLITS[name] == patterns), None)
    if name is None:
        raise _refused(" ".join(patterns) or "none")
    if name == "llama-bpe" and files.section("model").get("ignore_merges") is not True:
        return "dbrx"  # the same pattern, and a word that is a token is built by merges all the same
    return name


def is_byte_level(files: TokenizerFiles) -> bool:
    """Tell whether the letters of the tokens stand for bytes."""
    steps = (*flattened(files, "pre_tokenizer"), *flattened(files, "decoder"))
    return any(step.get("type") == "ByteLevel" for step in steps)


def flattened(files: TokenizerFiles, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part of tokenizer.json, those of a sequence one by one. Raises ModelError."""
    section = files.section(name)
    if section.get("type") != "Sequence":
        if section:
            yield section
        return
    steps = section.get(PARTS[name])
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise damaged(f"{name} has no steps")
    yield from steps


def _pattern(step: Mapping[str, Any]) -> str:
    pattern = step.get("pattern")
    text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    whole = (step.get("behavior"), step.get("invert") is True) in (("Isolated", False), ("Removed", True))
    if not isinstance(text, str) or not whole:
        raise _refused(str(pattern))
    return text


def _refused(rule: str) -> ModelError:
    return ModelError(f"its tokenizer splits texts by a rule that llama.cpp does not have ({rule[:60]})", OTHER)
