"""Paths that the user types: read as a shell reads them, and completed by Tab.

Owns which commands take a path. Knows nothing of widgets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from edgelm.base.places import expand_home
from edgelm.chats.knowledge.files import real_root
from edgelm.tui.commands.table import Suggestion

MAX_SUGGESTED = 200
_CALL = re.compile(r"(/know\s+(?:off\s+)?|/attach\s+)(\S.*)?", re.DOTALL)


def absolute_path(text: str) -> str:
    """Return the absolute form of a typed path, which may begin with ~ and stand in quotes. Raises EdgeLMError."""
    return real_root(unquoted(text))


def unquoted(text: str) -> str:
    """Return a typed path without quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def file_to_write(text: str) -> Path:
    """Return the absolute form of a typed path; a user that ~ names and that is unknown stays as it is written."""
    return Path(expand_home(text)).absolute()


def suggest_paths(text: str) -> list[Suggestion]:
    """Return what the path at the end of a command may become; none where the text is no command with a path."""
    match = _CALL.fullmatch(text)
    if match is None:
        return []
    call, typed = match[1], match[2] or ""
    folder, name = os.path.split(typed)
    try:
        entries = sorted(os.scandir(Path(folder or ".").expanduser()), key=lambda entry: entry.name)
    except (OSError, RuntimeError):  # RuntimeError: a home that is not known
        return []
    fits = (entry for entry in entries if entry.name.startswith(name) and _is_shown(entry.name, name))
    suggestions = []
    for entry in islice(fits, MAX_SUGGESTED):
        shown = entry.name + ("/" if entry.is_dir() else "")
        suggestions.append(Suggestion(call + typed[: len(typed) - len(name)] + shown, shown))
    return suggestions


def common_start(suggestions: Sequence[Suggestion]) -> str:
    """Return what the texts of all suggestions begin with."""
    texts = [suggestion.text for suggestion in suggestions]
    first, last = min(texts), max(texts)
    length = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:length]


def _is_shown(entry: str, typed: str) -> bool:
    """Tell whether a name can be typed, and is hidden only if the user did not begin with a dot."""
    return entry.isprintable() and (typed.startswith(".") or not entry.startswith("."))
