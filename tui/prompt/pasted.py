"""What a pasted text is: a long text, or the paths of files that were dropped on the terminal.

Owns how terminals write such paths: quoted, with escaped spaces, or as URLs. Knows nothing of widgets.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

LONG_CHARS = 2000
LONG_LINES = 40
MAX_PATHS = 20
_BEGINNINGS = ("/", "~/", "'/", '"/', "file:///")


def is_long(text: str) -> bool:
    """Tell whether a text is better attached than put into the prompt."""
    return len(text) > LONG_CHARS or len(text.splitlines()) >= LONG_LINES  # terminals paste line ends as \r


def may_be_paths(text: str) -> bool:
    """Tell whether a text looks like the paths of files."""
    text = text.strip()
    return text.startswith(_BEGINNINGS) and len(text.splitlines()) == 1


def existing_paths(text: str) -> list[str]:
    """Return the absolute paths that a text consists of, if all of them exist; none for another text."""
    text = text.strip()
    if (whole := _existing(text)) is not None:
        return [whole]
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote
        return []
    paths = [path for word in words[:MAX_PATHS] if (path := _existing(word)) is not None]
    return paths if len(paths) == len(words) else []


def _existing(word: str) -> str | None:
    """Return the absolute path that a word means; None if there is no such file."""
    try:
        path = Path(unquote(urlsplit(word).path) if word.startswith("file://") else word).expanduser()
        path.stat()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a home that is not known
        return None
    return str(path) if path.is_absolute() else None
