"""`edgelm chats import`: bring chats of other programs into the history.

Owns the progress, and the lines about what was left out. Each chat is written as a whole or not at all.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from edgelm.base.errors import EdgeLMError
from edgelm.chats.formats import Source
from edgelm.chats.imports.draft import BadChatError
from edgelm.chats.imports.files import read_file
from edgelm.chats.imports.save import save_draft
from edgelm.chats.presets import Parse
from edgelm.chats.printable import printable
from edgelm.chats.store import Store
from edgelm.commands.chats import open_store
from edgelm.commands.flags import Json

MAX_NAMED = 20  # conversations of a file that are left out, in lines
PROGRESS_STEP = 50  # conversations
_WORDS = {
    "new": "imported",
    "grown": "got new messages",
    "same": "were here already",
    "deleted": "are in the trash (edgelm chats restore)",
    "skipped": "left out",
}


def import_chats(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="A .json or .zip that was exported, or Ollama's db.sqlite.")
    ],
    source: Annotated[Source, typer.Option("--from", help="The program that the chats are from.")] = "auto",
    *,
    as_json: Json = False,
) -> int:
    """Import the chats of files, and print how many; return the exit code."""
    from edgelm.tui.dialogs.params import PARAMS  # what it imports is slow, and only this command needs it

    parsers = {param.name: param.parse for param in PARAMS}
    counts: Counter[str] = Counter()
    dropped = _Dropped()
    num_failed = 0
    with open_store() as store:
        for name in files:
            try:
                _import_file(store, Path(name).expanduser(), source, parsers, counts, dropped)
            except EdgeLMError as error:
                num_failed += 1
                _clear()
                print(printable(f"error: {error}"), file=sys.stderr)
    dropped.print()
    if as_json:
        print(json.dumps({name: counts[name] for name in _WORDS} | {"failed_files": num_failed}))
    elif counts:
        print(", ".join(f"{counts[name]:,} {words}" for name, words in _WORDS.items() if counts[name]))
    has_chats = any(counts[name] for name in _WORDS if name != "skipped")
    return 1 if num_failed or not has_chats else 0


@dataclass(slots=True)
class _Dropped:
    """Values that the import dropped, because only the user may set them."""

    num_chats: int = 0
    words: dict[str, None] = field(default_factory=dict)  # in their order

    def add(self, words: Sequence[str]) -> None:
        if words:
            self.num_chats += 1
            self.words |= dict.fromkeys(words)

    def print(self) -> None:
        if self.words:
            noun = "1 chat" if self.num_chats == 1 else f"{self.num_chats:,} chats"
            print(f"note: left out of {noun}, as only you choose them: {', '.join(self.words)}", file=sys.stderr)


def _import_file(
    store: Store, path: Path, source: Source, parsers: Mapping[str, Parse], counts: Counter[str], dropped: _Dropped
) -> None:
    """Import the chats of a file. Raises EdgeLMError."""
    num_skipped = 0
    name = printable(path.name)
    for number, item in enumerate(read_file(path, source, parsers), 1):
        try:
            if isinstance(item, BadChatError):
                raise item
            outcome = save_draft(store, item)
            counts[outcome] += 1
            if outcome in ("new", "grown"):
                dropped.add(item.dropped)
        except BadChatError as reason:
            counts["skipped"] += 1
            num_skipped += 1
            if num_skipped <= MAX_NAMED:
                _clear()
                print(f"note: conversation {number:,} of {name} is left out: {printable(str(reason))}", file=sys.stderr)
        if number % PROGRESS_STEP == 0 and sys.stderr.isatty():
            print(f"\r\x1b[Kimporting {name}: {number:,} conversations", end="", file=sys.stderr, flush=True)
    _clear()
    if num_skipped > MAX_NAMED:
        print(f"note: and {num_skipped - MAX_NAMED:,} more of {name} are left out", file=sys.stderr)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
