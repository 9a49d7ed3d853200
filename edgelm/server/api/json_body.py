"""A request body as a JSON object, whose structure is limited before any Python object is made of it.

Millions of tiny values in a few MiB would cost seconds of the interpreter and gigabytes of memory. Knows no fields.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from pydantic_core import from_json

from edgelm.server.api.errors import ApiError

MAX_VALUES = 50_000  # in one body: text, numbers, lists and objects together
MARKS = (b",", b"[", b"{")  # one of them precedes every value but the outermost
REPLACED = "half a character (a lone surrogate) was replaced by U+FFFD"
HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
LARGE_NUMBER = re.compile(rb"\d[eE]\+?\d{3}|\d{200}")  # perhaps no finite float


class JsonBody(dict[str, Any]):
    """A body, and what was changed in it."""

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
        except ValueError:
            whole = _without_halves(body)
            if whole == body:
                raise
            data, is_changed = from_json(whole, allow_inf_nan=False), True
        if LARGE_NUMBER.search(body):
            json.dumps(data, allow_nan=False)  # from_json reads 1e999 as infinity
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    result = JsonBody(data)
    result.notes = (REPLACED,) if is_changed else ()
    return result


def _without_halves(body: bytes) -> bytes:
    """Return a body without escapes of half a character. No escape begins within a pair of backslashes."""
    return rb"\\".join(HALF.sub(rb"\\ufffd", piece) for piece in body.split(rb"\\"))


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
