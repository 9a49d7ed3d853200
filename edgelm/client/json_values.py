"""Values of the JSON that an endpoint sent, which may have any shape.

Owns how a value of the wrong kind is read: as unknown. Knows nothing of requests.
"""

from __future__ import annotations

import math
from typing import Any


def mapping(value: object) -> dict[str, Any]:
    """Return an object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        read = float(value)
    except OverflowError:  # a whole number of more than 300 digits
        return None
    return read if math.isfinite(read) else None


def whole(value: object) -> int | None:
    """Return a number without its fraction; None for anything else."""
    read = number(value)
    return None if read is None else int(read)


def clean_text(text: str) -> str:
    """Replace unpaired surrogates, which JSON can carry but UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text


def read_vectors(reply: object, count: int) -> list[list[float]] | None:
    """Return the vectors of an answer of /v1/embeddings; None where they are not `count` vectors of equal length."""
    items = mapping(reply).get("data")
    vectors = [mapping(item).get("embedding") for item in items] if isinstance(items, list) else []
    lists = [[value for value in map(number, vector) if value is not None] for vector in vectors if vector]
    return lists if lists and len(lists) == count and len({len(values) for values in lists}) == 1 else None
