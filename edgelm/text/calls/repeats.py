"""RepeatedCalls: holds back a call that may be the same as an earlier one of the answer, and drops one that is.

A small model that may call several tools calls the same one with the same arguments until its limit. No grammar can
refer to what was written before. Knows no format: it reads the parts of an answer (output.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgelm.text.calls.output import Args, CallBegin, CallEnd, Part


class RepeatedCalls:
    """Filters the parts of one answer. `found`: a call was the same as an earlier one; the answer ends before it."""

    def __init__(self) -> None:
        self.found = False
        self._seen: set[tuple[str, str]] = set()  # names and arguments of the complete calls
        self._name, self._arguments = "", ""  # of the current call
        self._held: list[Part] = []  # of a call that has begun like an earlier one

    def take(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that are certainly no repetition, those that were held back first."""
        decided: list[Part] = []
        for part in parts:
            if self.found:
                break
            match part:
                case CallBegin():
                    self._name, self._arguments = part.name, ""
                case Args():
                    self._arguments += part.json_text
                case CallEnd():
                    self.found = (self._name, self._arguments) in self._seen
                    self._seen.add((self._name, self._arguments))
                case _:
                    decided.append(part)
                    continue
            self._held.append(part)
            if self.found or (not isinstance(part, CallEnd) and self._may_repeat()):
                continue
            decided += self._held
            self._held.clear()
        return decided

    def _may_repeat(self) -> bool:
        return any(name == self._name and seen.startswith(self._arguments) for name, seen in self._seen)
