"""The arguments of a call, read from the JSON that the model wrote, so that every answer can hold them.

JSON permits numbers, nesting and halves of characters that a response in JSON and UTF-8 cannot hold.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CUSTOM_INPUT = "input"  # the parameter of a custom tool
MAX_DEPTH = 200  # as in the body in which a client sends the call back


def read_arguments(arguments: str) -> dict[str, Any] | None:
    """Return the arguments as an object that JSON and UTF-8 can hold; None: they are no whole object, or too deep.

    Numbers too large become the greatest one, those that JSON does not know become null.
    """
    try:
        value = json.loads(arguments, parse_float=_finite, parse_constant=lambda _: None)
        return _encodable(value, MAX_DEPTH) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def custom_input(arguments: str) -> str:
    """Return the text of a custom tool's call; a call that was cut off keeps what came."""
    value = read_arguments(arguments)
    return arguments if value is None else str(value.get(CUSTOM_INPUT, ""))


def _finite(number: str) -> float:
    most = sys.float_info.max
    return min(max(float(number), -most), most)


def _encodable(value: Any, depth: int) -> Any:
    """Return a value without halves of characters. Raises ValueError if it is nested deeper."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise ValueError
    if isinstance(value, dict):
        return {_encodable(name, depth): _encodable(item, depth - 1) for name, item in value.items()}
    return [_encodable(item, depth - 1) for item in value]
