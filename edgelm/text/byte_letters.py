"""The letters that stand for bytes in a byte-level vocabulary, as GPT-2 defines them.

Knows no tokenizer library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def _byte_letters() -> dict[str, int]:
    """Return the byte for each letter."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


def missing_bytes(tokens: Iterable[str]) -> frozenset[int]:
    """Return the bytes that no token of a vocabulary writes; read the tokens only until all bytes have one."""
    missing = set(BYTE_LETTERS)
    for token in tokens:
        missing.discard(token)
        if not missing:
            break
    return frozenset(BYTE_LETTERS[letter] for letter in missing)


def unwritable(text: str, missing: Collection[int]) -> str:
    """Return the characters of a text that need missing bytes."""
    data = text.encode()
    if len(data.translate(None, bytes(missing))) == len(data):
        return ""
    return "".join(char for char in sorted(set(text)) if not set(char.encode()).isdisjoint(missing))


def without(text: str, tokens: Iterable[str]) -> str:
    """Return the characters of a text outside strings that are tokens of their own; the longest ones first."""
    parts = [text]
    for token in sorted(filter(None, tokens), key=len, reverse=True):
        parts = [rest for part in parts for rest in part.split(token)]
    return "".join(parts)
