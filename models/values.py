"""Numbers of a model's metadata, by any of the names that they have there.

Owns checking their types. Knows nothing of what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgelm.errors import ModelError


class Values:
    """Numbers of a mapping, by any of their names, with their types checked."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self._values = values
        self._prefix = prefix
        self._defaults = defaults or {}

    def get(self, *names: str) -> Any:
        there = [self._prefix + name for name in names if self._prefix + name in self._values]
        if there:  # null is a value: it says that there is none
            return next((self._values[key] for key in there if self._values[key] is not None), None)
        return next((self._defaults[name] for name in names if name in self._defaults), None)

    def number(self, *names: str, default: float | None = None) -> float:
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._unusable(names[0])
        return float(value)

    def integer(self, *names: str, default: int | None = None, most: int = 2**40) -> int:
        """Return a number from 0 to `most`. A list counts as one where all its entries are equal."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, Sequence) and not isinstance(value, str):
            if any(entry != value[0] for entry in value):
                raise ModelError(f"layers that differ in {names[0]} are not supported")
            value = value[0] if len(value) else None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self._unusable(names[0])
        return value

    def entries(self, name: str, least: int = 0) -> list[Any]:
        """Return a list, its first `least` entries where that is given; empty where there is none."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < least:
            raise self._unusable(name)
        return list(value[:least] if least else value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers above zero; empty where there is none."""
        entries = self.entries(name)
        if any(isinstance(each, bool) or not isinstance(each, int | float) or not each > 0 for each in entries):
            raise self._unusable(name)
        return tuple(map(float, entries))

    def part(self, *names: str) -> Mapping[str, Any]:
        """Return a mapping, empty where there is none."""
        value = self.get(*names)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._unusable(names[0])
        return value

    @staticmethod
    def _unusable(name: str) -> ModelError:
        return ModelError(f"the model's configuration has no usable {name}", "download the model again")
