"""The files and folders that an @word may mean, best match first.

Owns the match of typed letters with names, and which folder is listed: the current one with all below it, or the one
that a typed path names. Knows nothing of widgets.
"""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

from edgelm.chats.folders import Entry, Walk
from edgelm.tui.commands.table import Suggestion

MAX_MATCHES = 100
_WORD = re.compile(r"(?:^|\s)(@(\S*))$")


def word_before(line: str) -> tuple[int, str] | None:
    """Return where the @word at the end of a line begins, and the word without its @; None where there is none."""
    match = _WORD.search(line)
    return (match.start(1), match[2]) if match else None


class FileList:
    """The files below the current folder, walked once for each list that is opened. Threads may share it."""

    def __init__(self) -> None:
        self._entries: dict[bool, list[Entry]] = {}  # by whether hidden ones are among them
        self._walks = {False: threading.Lock(), True: threading.Lock()}  # one each at a time

    def matches(self, word: str) -> list[Suggestion]:
        """Return what an @word may mean; the text of a suggestion is the path of a file, relative or absolute."""
        if word.startswith(("/", "~", "../")) or word in (".", ".."):
            return _of_folder(word)
        hidden = word.startswith(".") or "/." in word
        with self._walks[hidden]:
            if hidden not in self._entries:
                try:
                    self._entries[hidden] = list(Walk(str(Path.cwd()), hidden=hidden).entries())
                except OSError:  # the current folder is gone
                    return []
        return _ranked(self._entries[hidden], word)


def _of_folder(word: str) -> list[Suggestion]:
    """Return what lies in the folder that a typed path names, and begins with the rest of it."""
    if word in ("~", ".", ".."):
        return [Suggestion(f"{word}/", f"{word}/", "folder")]
    folder, name = os.path.split(word)
    folder = folder if folder.endswith("/") else f"{folder}/"
    try:
        with os.scandir(Path(folder).expanduser()) as scan:
            items = sorted((item.name, item.is_dir()) for item in scan if item.name.isprintable())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a home that is not known
        return []
    shown = [
        (item, is_folder)
        for item, is_folder in items
        if item.lower().startswith(name.lower()) and (name.startswith(".") or not item.startswith("."))
    ]
    own = [] if name else [Suggestion(folder, folder, "this folder")]
    return own + [_suggestion(f"{folder}{item}", is_folder=is_folder) for item, is_folder in shown[:MAX_MATCHES]]


def _ranked(entries: Iterable[Entry], word: str) -> list[Suggestion]:
    """Return the entries whose names have the letters of a word in their order, the closest first."""
    typed = word.lower()
    best: list[tuple[tuple[int, int, str], Entry]] = []
    own: list[Suggestion] = []
    for entry in entries:
        name = entry.name.lower() + ("/" if entry.is_folder else "")
        if typed and name == typed:  # the folder that was opened
            own = [Suggestion(f"{entry.name}/", f"{entry.name}/", "this folder")]
            continue
        rank = _rank(name, typed)
        if rank is None:
            continue
        key = (rank, len(name) if typed else entry.name.count("/"), entry.name)
        if len(best) == MAX_MATCHES and key >= best[-1][0]:
            continue
        best.insert(bisect_left(best, key, key=lambda match: match[0]), (key, entry))
        del best[MAX_MATCHES:]
    return own + [_suggestion(entry.name, is_folder=entry.is_folder) for _, entry in best]


def _rank(name: str, typed: str) -> int | None:
    """Return how well typed letters fit a name, 0 best; None where they do not."""
    if not typed:
        return 0
    base = name.rstrip("/").rpartition("/")[2]
    if name.startswith(typed):
        return 0 if "/" in typed or base.startswith(typed) else 2
    if base.startswith(typed):
        return 1
    if typed in base:
        return 3
    if typed in name:
        return 4
    if _has_letters(base, typed):
        return 5
    return 6 if _has_letters(name, typed) else None


def _has_letters(name: str, typed: str) -> bool:
    place = 0
    for letter in typed:
        place = name.find(letter, place) + 1
        if not place:
            return False
    return True


def _suggestion(name: str, *, is_folder: bool) -> Suggestion:
    name = f"{name}/" if is_folder else name
    return Suggestion(name, name, "folder" if is_folder else "")
