"""What was read for a question: a line under it and, where it is unfolded, the texts below.

Owns the wording of the line. Knows nothing of how passages are found and sent.
"""

from __future__ import annotations

from edgelm.chats.reading import Reading
from edgelm.tui.lines import FoldRow, NoteRow, PlainRow, Row, clean


def reading_words(reading: Reading) -> str:
    """Return the line about what was read: numbers and names, as the model sees them."""
    names = (f"{number} {one_line(passage.name)}" for number, passage in enumerate(reading.passages, 1))
    return f"read: {' · '.join(names)}"


def reading_rows(reading: Reading, *, unfolded: bool) -> list[Row]:
    """Return the rows of what was read."""
    if not reading.passages:
        return [NoteRow(f"read nothing: {reading.note}")] if reading.note else []
    rows: list[Row] = [FoldRow(reading_words(reading), unfolded=unfolded)]
    if unfolded:
        for number, passage in enumerate(reading.passages, 1):
            gap = "\n" if number > 1 else ""
            rows.append(PlainRow(f"{gap}{number} {one_line(passage.name)}\n\n{passage.text.strip()}", muted=True))
    return rows


def one_line(name: str) -> str:
    """Return a name, which may hold any character of a file name, on one line of the terminal."""
    return clean(" ".join(name.split()))
