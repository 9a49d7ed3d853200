"""`edgelm chats import`: bring chats of other programs into the history.

Owns the progress, and the lines about what was left out. Each chat is written as a whole or not at all.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from edgelm.chats.formats import Source
from edgelm.chats.imports.draft import BadChat
from edgelm.chats.imports.files import read_file
from edgelm.chats.imports.save import save_draft
from edgelm.chats.store import Store
from edgelm.commands.chats import open_store
from edgelm.errors import EdgeLMError

MAX_NAMED = 20  # conversations of a file that are left out, in lines
PROGRESS_STEP = 50  # conversations
_WORDS = {
    "new": "imported",
    "grown": "got new messages",
    "same": "were here already",
    "deleted": "are in the trash (edgelm chats restore)",
    "skipped": "left out",
}


def import_chats(files: Sequence[str], source: Source, *, as_json: bool) -> int:
    """Import the chats of files, and print how many; return the exit code."""
    counts: Counter[str] = Counter()
    num_failed = 0
    with open_store() as store:
        for name in files:
            try:
                _import_file(store, Path(name).expanduser(), source, counts)
            except EdgeLMError as error:
                num_failed += 1
                _clear()
                print(f"error: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({name: counts[name] for name in _WORDS} | {"failed_files": num_failed}))
    elif counts:
        print(", ".join(f"{counts[name]:,} {words}" for name, words in _WORDS.items() if counts[name]))
    has_chats = any(counts[name] for name in _WORDS if name != "skipped")
    return 1 if num_failed or not has_chats else 0


def _import_file(store: Store, path: Path, source: Source, counts: Counter[str]) -> None:
    """Import the chats of a file. Raises EdgeLMError."""
    num_skipped = 0
    for number, item in enumerate(read_file(path, source), 1):
        try:
            if isinstance(item, BadChat):
                raise item
            counts[save_draft(store, item)] += 1
        except BadChat as reason:
            counts["skipped"] += 1
            num_skipped += 1
            if num_skipped <= MAX_NAMED:
                _clear()
                print(f"note: conversation {number:,} of {path.name} is left out: {reason}", file=sys.stderr)
        if number % PROGRESS_STEP == 0 and sys.stderr.isatty():
            print(f"\r\x1b[Kimporting {path.name}: {number:,} conversations", end="", file=sys.stderr, flush=True)
    _clear()
    if num_skipped > MAX_NAMED:
        print(f"note: and {num_skipped - MAX_NAMED:,} more of {path.name} are left out", file=sys.stderr)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
