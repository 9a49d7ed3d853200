"""Hints: the effect of a key in a word or two; a click has the same effect.

Owns how hints are written. The widgets say which ones they have; the status line shows those of the focused widget, a
dialog its own in its lower border.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from textual.content import Content
from textual.style import Style


class Hint(NamedTuple):
    """A key and its effect; a click runs `action`, by default of the widget that the hint is from."""

    key: str
    label: str
    action: str
    optional: bool = False  # the figures of the status line are more important


@runtime_checkable
class HasHints(Protocol):
    """A widget with hints for the status line, the most important first."""

    @property
    def hints(self) -> list[Hint]: ...


def link(text: str, action: str) -> Content:
    """Return a text that runs an action where it is clicked."""
    return Content.styled(text, Style.from_meta({"@click": action}))


def footer(hints: Iterable[Hint], after: str = "") -> Content:
    """Return the hints of a dialog, for its lower border: `Enter saves, Esc cancels`."""
    links = [link(f"{hint.key} {hint.label}".strip(), hint.action) for hint in hints]
    return Content(", ").join(links) + after


CANCEL = Hint("Esc", "cancels", "screen.dismiss(None)")
