"""`edgelm memory`: what speculation remembers of past answers, and how to make it forget.

Owns the question, and what is printed. Needs no engine: a running one notices that its file is gone.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from edgelm.config import load_config
from edgelm.engine import answers
from edgelm.errors import EdgeLMError
from edgelm.library.units import size_text

WRONG_USAGE = 2


def show_answers(*, as_json: bool) -> None:
    """Print what each tokenizer's file holds. Raises EdgeLMError for a folder that cannot be read."""
    config = load_config({})
    folder = answers.folder(config.places.data)
    found = _info(folder)
    if as_json:
        rows = [
            {"tokenizer": each.path.stem, "answers": each.answers, "tokens": each.tokens, "bytes": each.nbytes}
            | {"since": None if each.since is None else _moment(each.since).isoformat()}
            for each in found
        ]
        print(json.dumps({"on": config.settings.memory, "folder": str(folder), "tokenizers": rows}))
        return
    print(f"{folder} ({'on' if config.settings.memory else 'off: nothing is read, nothing is added'})")
    if not found:
        print("no answers are remembered")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("TOKENIZER", "ANSWERS", "TOKENS", "SIZE", "SINCE"):
        table.add_column(title, justify="left" if title in ("TOKENIZER", "SINCE") else "right")
    for each in found:
        since = "" if each.since is None else f"{_moment(each.since):%Y-%m-%d %H:%M}"
        table.add_row(each.path.stem, f"{each.answers:,}", f"{each.tokens:,}", size_text(each.nbytes), since)
    Console(highlight=False, markup=False).print(table)


def clear_answers(*, yes: bool, as_json: bool) -> int:
    """Remove all that is remembered, after a question; return the exit code. Raises EdgeLMError."""
    folder = answers.folder(load_config({}).places.data)
    found = _info(folder)
    total = sum(each.answers for each in found)
    if found and not yes:
        if not sys.stdin.isatty():
            print("error: clear asks before it removes, and there is nobody to ask; add --yes", file=sys.stderr)
            return WRONG_USAGE
        print(f"Forget {total:,} answers? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().casefold() not in ("y", "yes"):
            print("nothing was removed", file=sys.stderr)
            return 1
    try:
        answers.clear(folder)
    except OSError as error:
        raise EdgeLMError(f"{folder} cannot be cleared: {error.strerror}", "remove the folder yourself") from None
    print(json.dumps({"answers": total}) if as_json else f"{total:,} answers are forgotten")
    return 0


def _info(folder: Path) -> list[answers.Info]:
    try:
        return answers.info(folder)
    except OSError as error:
        raise EdgeLMError(f"{error.filename or folder} cannot be read: {error.strerror}") from None


def _moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()
