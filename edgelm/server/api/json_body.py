"""A request body as a JSON object, whose structure is limited before any Python object is made of it.

Millions of tiny values in a few MiB would cost seconds of the interpreter and gigabytes of memory. No call into C that
keeps the other threads waiting takes more than some 80 ms for 16 MiB. Knows no fields.
"""

from __future__ import annotations

import codecs
import math
import re
from typing import Any

from pydantic_core import from_json

from edgelm.server.api.errors import ApiError

MAX_VALUES = 50_000  # in one body: text, numbers, lists and objects together
MARKS = (b",", b"[", b"{")  # one of them precedes every value but the outermost
REPLACED = "half a character (a lone surrogate) was replaced by U+FFFD"
MAX_HALVES = 10_000
# Escapes one after the other, so that none begins within another: some that are no half of a character, a pair of
# halves, or a half alone. A run is short, as no other thread goes on while it is matched.
ESCAPES = re.compile(
    rb"(?:\\(?!u[dD][89a-fA-F]).){1,1000}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})",
    re.DOTALL,
)


class JsonBody(dict[str, Any]):
    """A body, the characters of all texts of each field, and what was changed in it."""

    sizes: dict[str, int]
    notes: tuple[str, ...] = ()


def read_json(body: bytes) -> JsonBody:
    """Return the JSON object of a body in UTF-8. Raises ApiError.

    Half a character (a lone surrogate) becomes U+FFFD: a client cut a text within an emoji, and sends it again with
    each turn of the conversation.
    """
    if _has_more_values(body, MAX_VALUES):
        raise ApiError(413, "request_too_large", f"the body holds more than {MAX_VALUES:,} values")
    try:
        # It takes a fifth of the memory of json.loads.
        body, is_changed = body.removeprefix(codecs.BOM_UTF8), False
        try:
            data = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            if "surrogate" not in str(error) and "hex escape" not in str(error):
                raise
            data, is_changed = from_json(_without_halves(body), allow_inf_nan=False), True
        sizes = {name: _num_chars(value) for name, value in data.items()} if isinstance(data, dict) else {}
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    result = JsonBody(data)
    result.sizes = sizes
    result.notes = (REPLACED,) if is_changed else ()
    return result


def _without_halves(body: bytes) -> bytes:
    """Return a body without escapes of half a character. Raises ValueError for too many."""
    pieces, done = list[bytes](), 0
    for match in ESCAPES.finditer(body):
        if match["half"]:
            pieces += (body[done : match.start()], rb"\ufffd")
            done = match.end()
            if len(pieces) > 2 * MAX_HALVES:
                raise ValueError(f"it has more than {MAX_HALVES:,} halves of characters")
    return b"".join((*pieces, body[done:]))


def _num_chars(value: Any) -> int:
    """Return the characters of all texts and names in a value. Raises ValueError for a number that is no finite one."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            total += sum(map(len, item))
            left += item.values()
        elif isinstance(item, float) and not math.isfinite(item):  # from_json reads 1e999 as infinity
            raise ValueError("a number is too large")
    return total


def _has_more_values(body: bytes, limit: int) -> bool:
    """Return whether a body has more values than the limit, at the cost of a few passes in C.

    Up to its first error, if it has one, a body is split into strings exactly as the parser does it.
    """
    if _num_marks(body) <= limit:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    if plain.count(b'"') > 4 * (limit + 1):  # a value has two strings at most: its name and itself
        return True
    return _num_marks(b"".join(plain.split(b'"')[::2])) > limit


def _num_marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in MARKS)
