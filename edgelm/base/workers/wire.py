"""The encoding of messages between a worker and its parent: dataclasses on both sides, one line of JSON on the wire.

A line is a JSON object: `event` is the class name in lower case, the rest are the fields. Fields may be added to a
message; a reader ignores those that it does not have. Knows nothing of processes.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from edgelm.base.errors import EdgeLMError

SAVING_S = 15.0  # that a worker may go on saving after its parent has left, as long as it makes progress


@dataclass(frozen=True, slots=True)
class Saving:
    """The worker made progress in saving conversations at its end: its parent waits longer for it."""

    num_left: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed. `kind` is the class name of the error."""

    message: str
    hint: str = ""
    kind: str = EdgeLMError.__name__

    @classmethod
    def of(cls, error: EdgeLMError) -> Failed:
        return cls(error.message, error.hint, type(error).__name__)

    def error(self, kinds: Iterable[type[EdgeLMError]] = ()) -> EdgeLMError:
        """Return the error as one of `kinds`, or as a plain EdgeLMError."""
        kind = next((kind for kind in kinds if kind.__name__ == self.kind), EdgeLMError)
        return kind(self.message, self.hint)


def encode(message: object) -> bytes:
    """Return a message as one line."""
    assert is_dataclass(message)
    assert not isinstance(message, type)
    document = {"event": type(message).__name__.lower()}
    document |= {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps(document, default=_plain).encode() + b"\n"


def decode(line: bytes, kinds: Iterable[type]) -> Any:
    """Return the message of a line as one of `kinds`. Raises ValueError for anything else."""
    document = json.loads(line)
    if isinstance(document, dict):
        for kind in kinds:
            if kind.__name__.lower() == document.get("event"):
                return _restore(kind, document)
    raise ValueError("not a message of this worker")


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    assert is_dataclass(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _restore(hint: Any, value: Any) -> Any:
    """Return a JSON value as the type that a field declares."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return value if value is None or len(kinds) > 1 else _restore(kinds[0], value)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = _hints(hint)
        return hint(**{name: _restore(hints[name], item) for name, item in value.items() if name in hints})
    if get_origin(hint) is tuple:
        return tuple(_restore(get_args(hint)[0], item) for item in value)
    return Path(value) if hint is Path else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
