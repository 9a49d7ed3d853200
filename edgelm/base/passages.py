"""A passage of a text, which a chat reads for a question and a worker gets."""

from __future__ import annotations

from dataclasses import dataclass

SEPARATOR = " › "  # in the name of a passage
FRAME_CHARS = 30  # around a passage in the system message


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a text, as it stands there: what is read for a question."""

    source: str  # a file name relative to the root that the user named, or a topic of the guide
    heading: str  # "Install › From a checkout"; empty where there is none
    text: str

    @property
    def name(self) -> str:
        return f"{self.source}{SEPARATOR}{self.heading}" if self.heading else self.source

    @property
    def size(self) -> int:
        """Its characters in the system message."""
        return len(self.name) + len(self.text) + FRAME_CHARS
