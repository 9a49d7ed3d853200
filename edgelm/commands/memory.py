"""`edgelm memory`: show or delete the past answers that speculation uses.

Owns the question and the output. Needs no engine: a running engine notices that its file is gone.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError
from edgelm.commands.flags import Json, Yes
from edgelm.engine.speculation import past_answers as answers
from edgelm.library.progress import size_text

WRONG_USAGE = 2


def show_answers(*, as_json: Json = False) -> None:
    """Print the contents of each tokenizer's file. Raises EdgeLMError for a folder that cannot be read."""
    config = load_config({})
    folder = answers.folder(config.places.data)
    files = _info(folder)
    if as_json:
        rows = [
            {"tokenizer": file.path.stem, "answers": file.answers, "tokens": file.tokens, "bytes": file.nbytes}
            | {"since": None if file.since is None else _local_time(file.since).isoformat()}
            for file in files
        ]
        print(json.dumps({"on": config.settings.memory, "folder": str(folder), "tokenizers": rows}))
        return
    print(f"{folder} ({'on' if config.settings.memory else 'off: answers are neither read nor added'})")
    if not files:
        print("no answers are remembered")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("TOKENIZER", "ANSWERS", "TOKENS", "SIZE", "SINCE"):
        table.add_column(title, justify="left" if title in ("TOKENIZER", "SINCE") else "right")
    for file in files:
        since = "" if file.since is None else f"{_local_time(file.since):%Y-%m-%d %H:%M}"
        table.add_row(file.path.stem, f"{file.answers:,}", f"{file.tokens:,}", size_text(file.nbytes), since)
    Console(highlight=False, markup=False).print(table)


def clear_answers(*, yes: Yes = False, as_json: Json = False) -> int:
    """Delete all past answers, after a question; return the exit code. Raises EdgeLMError."""
    folder = answers.folder(load_config({}).places.data)
    files = _info(folder)
    total = sum(file.answers for file in files)
    if files and not yes:
        if not sys.stdin.isatty():
            print("error: clear asks before it deletes, and there is no terminal to ask on; add --yes", file=sys.stderr)
            return WRONG_USAGE
        print(f"Delete {total:,} answers? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().casefold() not in ("y", "yes"):
            print("nothing was deleted", file=sys.stderr)
            return 1
    try:
        answers.clear(folder)
    except OSError as error:
        raise EdgeLMError(f"{folder} cannot be cleared: {error.strerror}", "delete the folder yourself") from None
    print(json.dumps({"answers": total}) if as_json else f"{total:,} answers are deleted")
    return 0


def _info(folder: Path) -> list[answers.Info]:
    try:
        return answers.info(folder)
    except OSError as error:
        raise EdgeLMError(f"{error.filename or folder} cannot be read: {error.strerror}") from None


def _local_time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()
