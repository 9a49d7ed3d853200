"""The text that a quantization is calibrated and measured on: the user's, or a built-in one.

Owns the choice of the built-in text. Knows nothing of tokens and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import edgelm
from edgelm.base.errors import RequestError
from edgelm.chats.knowledge.guide import TOPICS, page, question_groups, sections
from edgelm.checkpoints.files import shown

MAX_CHARS = 2**26  # of a file: far more than is used
PART_CHARS = 3000  # guide and code take turns, so that the beginning of the text has both
CODE = (
    "engine/core.py",
    "engine/scheduler.py",
    "engine/sampling/reference.py",
    "text/template.py",
    "checkpoints/gguf_parse.py",
)


def calibration_text(file: Path | None) -> str:
    """Return the text of a file; without one, the built-in text. Raises RequestError."""
    if file is None:
        return _built_in_text()
    try:
        if file.exists() and not file.is_file():
            raise RequestError(f"{shown(str(file), 200)} is no file", "give a text file")
        with file.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(MAX_CHARS)
    except OSError as error:
        raise RequestError(f"{shown(str(file), 200)} cannot be read: {error.strerror}", "give a text file") from None
    if not text.strip():
        raise RequestError(f"{shown(str(file), 200)} is empty", "give a text of some thousand words")
    return text


def built_in_chats() -> Sequence[tuple[tuple[str, str], ...]]:
    """Return short chats as roles and texts: questions about sections of the guide, answered by the section."""
    answers = {(section.topic, section.title): section.text for section in sections()}
    groups = [(topic, group) for topic in TOPICS for group in question_groups(topic)]
    asked = [(group.questions[0], group.answer or answers.get((topic, group.title), "")) for topic, group in groups]
    return [(("user", question), ("assistant", answer)) for question, answer in asked if answer]


def _built_in_text() -> str:
    """Return the pages of the guide and some of our code, in turns."""
    guide = _parts("\n\n".join(map(page, TOPICS)))
    folder = Path(edgelm.__file__).parent
    code = _parts("\n\n".join((folder / name).read_text(encoding="utf-8") for name in CODE))
    return "\n\n".join(part for pair in zip_longest(guide, code) for part in pair if part)


def _parts(text: str) -> list[str]:
    """Cut a text at the ends of lines, into parts of about PART_CHARS."""
    parts, lines, size = [], [], 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= PART_CHARS:
            parts.append("".join(lines))
            lines, size = [], 0
    return [*parts, "".join(lines)]
