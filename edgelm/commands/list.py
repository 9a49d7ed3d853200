"""`edgelm list`: the models that are on this machine, each with its size, kind and last use."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from edgelm.commands.choice import model_dirs
from edgelm.commands.job import reader_may_leave
from edgelm.config import Config, load_config
from edgelm.library.local import LocalModel, scan
from edgelm.library.names import shown
from edgelm.library.readers import DESCRIBE, read_each
from edgelm.library.unfinished import all_unfinished
from edgelm.library.units import size_text
from edgelm.library.usage import last_use

DAY_S = 86_400
PIPE_WIDTH = 400


def list_models(flags: Mapping[str, object], *, as_json: bool) -> None:
    """Print the models that are here; what cannot be read is a line on standard error. Raises EdgeLMError."""
    config = load_config(flags)
    library = scan(config.places.hub, folders=model_dirs(config))
    rows = describe_models(library.models, config)
    with reader_may_leave():
        if as_json:
            print(json.dumps(rows))
        else:
            _print(rows)
    _say_unfinished(config.places.hub)
    for problem in library.problems:
        print(f"note: {problem}", file=sys.stderr)


def _say_unfinished(hub: Path) -> None:
    """Name each download that was not finished; the files of one model are one line."""
    came: dict[str, int] = {}
    for each in all_unfinished(hub):
        came[each.name] = came.get(each.name, 0) + each.nbytes
    for name, nbytes in came.items():
        does = f"`edgelm pull {shown(name)}` continues it, `edgelm rm {shown(name)}` frees it"
        print(f"not finished: {shown(name)}, {size_text(nbytes)} came; {does}", file=sys.stderr)


def describe_models(models: Iterable[LocalModel], config: Config) -> list[dict[str, Any]]:
    """Return what `list --json` shows of each model; `error` says why one cannot be read."""
    wanted = list(models)
    answers = read_each(DESCRIBE, [str(model.path) for model in wanted])
    return [_row(model, known, config) for model, known in zip(wanted, answers, strict=True)]


def size_on_disk(files: Iterable[Path]) -> int:
    """Return the bytes of all files, as far as they are there."""
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total


def place_of(model: LocalModel) -> str:
    """Say in a few words where a model lies."""
    if model.place == "built-in":
        return "part of edgelm"
    if model.place == "hub":
        return "hub cache"
    home, folder = str(Path.home()), str(model.path.parent)
    return f"~{folder[len(home) :]}" if folder == home or folder.startswith(f"{home}/") else folder


def age_text(seconds_ago: float | None) -> str:
    """Return how long ago something was, roughly."""
    if seconds_ago is None:
        return "never"
    for limit, unit, name in ((3600, 60, "minute"), (DAY_S, 3600, "hour"), (60 * DAY_S, DAY_S, "day")):
        if seconds_ago < limit:
            count = max(0, int(seconds_ago // unit))
            return "just now" if not count else f"{count} {name}{'s' if count > 1 else ''} ago"
    return f"{int(seconds_ago // (30 * DAY_S))} months ago"


def plain_console() -> Console:
    """Return standard output for tables; a file or a pipe has no width to fit into."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)


def last_used_at(model: LocalModel, config: Config) -> str | None:
    """Return when a model was used last, in ISO 8601; None: never, as far as is known."""
    used = last_use(config.places.data, model.path)
    return None if used is None else datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds")


def _row(model: LocalModel, known: dict[str, Any], config: Config) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "architecture": known.get("architecture"),
        "quantization": known.get("quantization") or model.quantization,
        "parameters": known.get("parameters"),
        "bytes": size_on_disk(model.files),
        "context": known.get("context"),
        "last_used": last_used_at(model, config),
        "place": model.place,
        "repository": model.repository,
        "revision": model.revision,
        "error": known.get("error"),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("NAME", "SIZE", "QUANT", "PARAMS", "CONTEXT", "LAST USED", "WHERE"):
        right = title in ("SIZE", "PARAMS", "CONTEXT")
        table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=title != "WHERE")
    for row in rows:
        table.add_row(*_cells(row))
    plain_console().print(table)
    for row in rows:
        if row["error"]:
            print(f"{row['name']}: {row['error']}", file=sys.stderr)
    if all(row["place"] == "built-in" for row in rows):
        print("no model was pulled yet; `edgelm pull` shows what there is", file=sys.stderr)


def _cells(row: dict[str, Any]) -> list[str]:
    used = None if row["last_used"] is None else time.time() - datetime.fromisoformat(row["last_used"]).timestamp()
    model = LocalModel(row["name"], Path(row["path"]), row["place"])
    return [
        row["name"],
        size_text(row["bytes"]),
        row["quantization"] or "?",
        "cannot be read" if row["error"] else parameters_text(row["parameters"]),
        f"{row['context']:,}" if row["context"] else "?",
        age_text(used),
        place_of(model),
    ]


def parameters_text(count: int | None) -> str:
    """Return a number of parameters as models are called: 135M, 4.02B."""
    if not count:
        return "?"
    if count < 1e6:
        return f"{count:,}"
    return f"{count / 1e6:.3g}M" if count < 999.5e6 else f"{count / 1e9:.3g}B"
