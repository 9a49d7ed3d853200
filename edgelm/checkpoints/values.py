"""Numbers of a GGUF's metadata or a config.json, read with their types and ranges checked.

Owns the rules for missing, null and per-layer values, and the errors. Knows no key by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD

MAX_INTEGER = 2**40
MAX_FLOAT = 1e38
T = TypeVar("T")


class Values:
    """The values of a mapping, each under any of its names. Every method may raise ModelError.

    `source` begins the error messages, and `prefix` each key. `defaults` holds for a key that is absent, not for one
    that is null: null says that there is none.
    """

    def __init__(
        self, mapping: Mapping[str, Any], source: str, *, prefix: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.mapping = mapping
        self.source = source
        self._prefix = prefix
        self._defaults = defaults or {}

    def get(self, *names: str) -> Any:
        """Return the first value that is not null, else None."""
        return self._find(names)[1]

    def integer(self, *names: str, low: int = 0, high: int = MAX_INTEGER, default: int | None = None) -> int:
        key, value = self._find(names)
        if value is None:
            return self._required(key, default)
        if not is_integer(value) or not low <= value <= high:
            raise self.damaged(f"{key} is {described(value)}, but must be {low:,} to {high:,}")
        return value

    def per_layer(self, *names: str, num_layers: int, high: int, exact: bool = False) -> list[int] | None:
        """Return one integer for each layer, or None where there is no value. A single number holds for all layers.

        A list may be longer than the number of layers, unless `exact`.
        """
        key, value = self._find(names)
        if value is None:
            return None
        if not is_list(value):
            return [self.integer(*names, high=high)] * num_layers
        if len(value) < num_layers or (exact and len(value) > num_layers):
            raise self.damaged(f"{key} has {len(value):,} entries for {num_layers} layers")
        entries = list(value[:num_layers])
        for entry in entries:
            if not is_integer(entry) or not 0 <= entry <= high:
                raise self.damaged(f"{key} contains {described(entry)}, but must be 0 to {high:,}")
        return entries

    def number(self, *names: str, default: float | None = None) -> float:
        key, value = self._find(names)
        if value is None:
            return self._required(key, default)
        if not is_number(value):
            raise self.damaged(f"{key} is {described(value)}, but must be a number")
        return float(value)

    def entries(self, name: str, least: int = 0) -> list[Any]:
        """Return a list, cut to its first `least` entries if that is given; empty where there is none."""
        key, value = self._find((name,))
        if value is None:
            return []
        if not is_list(value):
            raise self.damaged(f"{key} is {described(value)}, but must be a list")
        if len(value) < least:
            raise self.damaged(f"{key} has {len(value):,} entries, but must have {least:,}")
        return list(value[:least] if least else value)

    def positive_numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers above zero; empty where there is none."""
        entries = self.entries(name)
        for entry in entries:
            if not is_number(entry) or entry <= 0:
                raise self.damaged(f"{self._prefix}{name} contains {described(entry)}, but must be above 0")
        return tuple(map(float, entries))

    def section(self, *names: str) -> Mapping[str, Any]:
        """Return a nested mapping, empty where there is none."""
        key, value = self._find(names)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.damaged(f"{key} is {described(value)}, but must be an object")
        return value

    def damaged(self, reason: str) -> ModelError:
        """Return the error for values that cannot be true."""
        return ModelError(f"{self.source} is damaged or wrongly converted: {reason}", DOWNLOAD)

    def _required(self, key: str, default: T | None) -> T:
        if default is None:
            raise self.damaged(f"{key} is missing")
        return default

    def _find(self, names: Sequence[str]) -> tuple[str, Any]:
        """Return the first key whose value is not null with that value, else the first key and None."""
        keys = [self._prefix + name for name in names]
        present = [key for key in keys if key in self.mapping]
        for key in present:
            value = self.mapping[key]
            if value is not None:
                return key, value
        if not present:
            for key, name in zip(keys, names, strict=True):
                if self._defaults.get(name) is not None:
                    return key, self._defaults[name]
        return keys[0], None


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a finite number of a sensible size, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Tell whether a value is a list or an array of a GGUF."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def described(value: object) -> str:
    """Return how a value looks in an error message."""
    if is_integer(value):
        return f"{value:,}" if abs(value) < 2**64 else "a number of many digits"
    if isinstance(value, float | bool):
        return str(value).lower()
    if isinstance(value, str):
        return "a string"
    return "a list" if is_list(value) else "an object" if isinstance(value, Mapping) else "null"
