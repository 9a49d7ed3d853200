"""What the user wrote before, for the Up key.

Owns the walk through it and the text that was being written. Knows nothing of widgets.
"""

from __future__ import annotations

from collections.abc import Iterable


class History:
    """Earlier texts, oldest first, and where in them the user is."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: list[str] = []
        self._at = 0
        self._draft = ""
        self.load(texts)

    def load(self, texts: Iterable[str]) -> None:
        """Put older texts before those of this session."""
        self._texts = [*texts, *self._texts]
        self._at = len(self._texts)

    def add(self, text: str) -> None:
        """Remember a text that was sent."""
        if not self._texts or self._texts[-1] != text:
            self._texts.append(text)
        self._at = len(self._texts)
        self._draft = ""

    def back(self, current: str) -> str | None:
        """Return the text before; None at the oldest."""
        return self._move(current, -1)

    def forward(self, current: str) -> str | None:
        """Return the text after, at last the one that was being written; None behind it."""
        return self._move(current, 1)

    def _move(self, current: str, by: int) -> str | None:
        to = self._at + by
        if not 0 <= to <= len(self._texts):
            return None
        if self._at == len(self._texts):
            self._draft = current
        self._at = to
        return self._draft if to == len(self._texts) else self._texts[to]
