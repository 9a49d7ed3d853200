"""`edgelm list`: the models on this machine, each with its size, kind and last use."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from edgelm.base.config import Config, load_config
from edgelm.base.errors import ModelError
from edgelm.commands.flags import Flags, Json, SettingsOf
from edgelm.commands.job import reader_may_leave
from edgelm.library.hub_cache import all_unfinished, file_size
from edgelm.library.local import find_local
from edgelm.library.names import shown
from edgelm.library.progress import size_text
from edgelm.library.readers import Describe, read_each
from edgelm.library.scan import LocalModel, last_use, scan

DAY_S = 86_400
KINDS = {"text": "text", "embedding": "embeddings", "rerank": "ranking"}
PIPE_WIDTH = 400


def list_models(flags: Annotated[Flags, SettingsOf("list")], *, as_json: Json = False) -> None:
    """Print the models here, and on standard error a line for each problem. Raises EdgeLMError."""
    config = load_config(flags)
    library = scan(config.places.hub, folders=config.model_folders)
    rows = [*describe_models(library.models, config), *_remote_rows(config)]
    with reader_may_leave():
        if as_json:
            print(json.dumps(rows))
        else:
            _print(rows)
    _print_unfinished(config.places.hub)
    for problem in library.problems:
        print(f"note: {problem}", file=sys.stderr)


def describe_models(models: Iterable[LocalModel], config: Config) -> list[dict[str, Any]]:
    """Return the rows of `list --json`; `error` says why a model cannot be read, `problem` why not run."""
    models = list(models)
    headers = read_each(Describe(model.path) for model in models)
    return [_row(model, header, config) for model, header in zip(models, headers, strict=True)]


def size_on_disk(files: Iterable[Path]) -> int:
    """Return the total size of the files that exist, in bytes."""
    return sum(file_size(file) for file in files)


def place_of(model: LocalModel) -> str:
    """Return in a few words where a model is."""
    if model.place == "built-in":
        return "part of edgelm"
    if model.place == "hub":
        return "hub cache"
    if model.place == "ollama":
        return "Ollama"
    home, folder = str(Path.home()), str(model.path.parent)
    return f"~{folder[len(home) :]}" if folder == home or folder.startswith(f"{home}/") else folder


def age_text(seconds_ago: float | None) -> str:
    """Return roughly how long ago something happened."""
    if seconds_ago is None:
        return "never"
    for limit, unit, name in ((3600, 60, "minute"), (DAY_S, 3600, "hour"), (60 * DAY_S, DAY_S, "day")):
        if seconds_ago < limit:
            count = max(0, int(seconds_ago // unit))
            return "just now" if not count else f"{count} {name}{'s' if count > 1 else ''} ago"
    return f"{int(seconds_ago // (30 * DAY_S))} months ago"


def parameters_text(count: int | None) -> str:
    """Return a number of parameters in the usual short form: 135M, 4.02B."""
    if not count:
        return "?"
    if count < 1e6:
        return f"{count:,}"
    return f"{count / 1e6:.3g}M" if count < 999.5e6 else f"{count / 1e9:.3g}B"


def plain_console() -> Console:
    """Return standard output for tables; a file or a pipe has no width limit."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)


def last_used_at(model: LocalModel, config: Config) -> str | None:
    """Return when a model was last used, in ISO 8601; None if there is no record."""
    used = last_use(config.places.data, model.path)
    return None if used is None else datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds")


def _print_unfinished(hub: Path) -> None:
    """Print the unfinished downloads, one line a model."""
    sizes: dict[str, int] = {}
    for download in all_unfinished(hub):
        sizes[download.name] = sizes.get(download.name, 0) + download.nbytes
    for name, nbytes in sizes.items():
        rm = "rm --unfinished" if _is_complete(name, hub) else "rm"  # a plain rm removes the complete model
        hint = f"`edgelm pull {shown(name)}` resumes it, `edgelm {rm} {shown(name)}` removes it"
        print(f"not finished: {shown(name)}, {size_text(nbytes)} so far; {hint}", file=sys.stderr)


def _is_complete(name: str, hub: Path) -> bool:
    """Return whether a name means a model that is here."""
    try:
        find_local(name, hub, paths=False)
    except ModelError:
        return False
    return True


def _row(model: LocalModel, header: dict[str, Any], config: Config) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "architecture": header.get("architecture"),
        "quantization": header.get("quantization") or model.quantization,
        "parameters": header.get("parameters"),
        "bytes": size_on_disk(model.all_files),
        "context": header.get("context"),
        "kind": header.get("kind"),
        "projector": str(model.projector) if model.projector else None,
        "last_used": last_used_at(model, config),
        "place": model.place,
        "repository": model.repository,
        "revision": model.revision,
        "error": header.get("error"),
        "problem": header.get("problem"),
    }


def _remote_rows(config: Config) -> list[dict[str, Any]]:
    """Return the rows of models that other servers run; nobody asks these servers."""
    unknown = ["path", "format", "architecture", "quantization", "parameters", "bytes", "context", "projector"]
    unknown += ["last_used", "repository", "revision", "error", "problem"]
    return [
        dict.fromkeys(unknown)
        | {"name": table.name, "kind": "text", "place": "remote", "endpoints": list(table.remote.endpoints)}
        for table in config.models
        if table.remote is not None
    ]


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    kinds = any(row["kind"] not in (None, "text") or row["projector"] for row in rows)
    for title in ("NAME", "SIZE", "QUANT", "PARAMS", "CONTEXT", *(["USE"] if kinds else []), "LAST USED", "WHERE"):
        right = title in ("SIZE", "PARAMS", "CONTEXT")
        table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=title != "WHERE")
    for row in rows:
        table.add_row(*_cells(row, with_kind=kinds))
    plain_console().print(table)
    for row in rows:
        if reason := row["error"] or row["problem"]:
            print(f"{row['name']}: {reason}", file=sys.stderr)
    if all(row["place"] in ("built-in", "remote") for row in rows):
        print("no model has been pulled yet; `edgelm pull` shows the catalogue", file=sys.stderr)


def _cells(row: dict[str, Any], *, with_kind: bool) -> list[str]:
    if row["place"] == "remote":
        where = f"runs at {', '.join(row['endpoints'])}"
        return [row["name"], "", "", "", "", *([KINDS["text"]] if with_kind else []), "", where]
    used = None if row["last_used"] is None else time.time() - datetime.fromisoformat(row["last_used"]).timestamp()
    model = LocalModel(row["name"], Path(row["path"]), row["place"])
    return [
        row["name"],
        size_text(row["bytes"]),
        row["quantization"] or "?",
        "cannot be read" if row["error"] else "cannot be run" if row["problem"] else parameters_text(row["parameters"]),
        f"{row['context']:,}" if row["context"] else "?",
        *([KINDS.get(row["kind"], "?") + ", pictures" * bool(row["projector"])] if with_kind else []),
        age_text(used),
        place_of(model),
    ]
