"""`edgelm rm`: remove models that `edgelm pull` can download again, and unfinished downloads.

Owns the confirmation, and the refusals: the user's own files and models loaded by a running server are not removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx2
import typer

from edgelm.base.config import Config, load_config
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.runtime import FrontRecord, find_fronts
from edgelm.commands.flags import Json, Yes
from edgelm.commands.running import model_or_served
from edgelm.library.adapters import pulled_adapter
from edgelm.library.hub_cache import Unfinished, unfinished_of
from edgelm.library.local import installed_model
from edgelm.library.names import HubReference, LocalPath, parse_name, shown
from edgelm.library.progress import size_text
from edgelm.library.removal import Removal, plan_removal, remove, remove_unfinished
from edgelm.library.scan import LocalModel, forget_use, scan

REQUEST_LIMIT_S = 2.0
WRONG_USAGE = 2


def remove_models(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="As `edgelm list` shows it.")],
    *,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Remove only downloads that are not finished.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> int:
    """Remove models of the hub's cache after a confirmation; return the exit code. Raises EdgeLMError."""
    config = load_config({})
    hub = config.places.hub
    chosen, dated, downloads = _resolve(models, config, unfinished_only=unfinished)
    plans = plan_removal(chosen, hub, dated=dated)
    _refuse_loaded(chosen, config)
    if not yes:
        if not sys.stdin.isatty():
            print("error: rm asks for confirmation, which needs a terminal; add --yes", file=sys.stderr)
            return WRONG_USAGE
        if not _confirmed(chosen, downloads, plans):
            print("nothing was removed", file=sys.stderr)
            return 1
    identities = [model.identity for model in chosen]  # read before the files are gone
    freed_parts = remove_unfinished(downloads, hub)
    removed_parts = [download for download in downloads if download not in freed_parts.held]
    if not chosen and not removed_parts:
        raise EdgeLMError(f"{_joined(chosen, downloads)} is in progress", "wait until it is done, or stop it")
    freed = freed_parts.nbytes + remove(chosen, hub, dated=dated)
    for identity in identities:
        forget_use(config.places.data, Path(identity))
    along = [download for plan in plans for download in plan.unfinished]
    if as_json:
        removed_parts += [part for part in along if not part.part.exists() and part not in removed_parts]
        document = {"removed": [_document(model) for model in chosen], "freed_bytes": freed}
        print(json.dumps({**document, "unfinished": [_part_document(part) for part in removed_parts]}))
    else:
        print(f"removed {_joined(chosen, removed_parts)}: {size_text(freed)} freed")
        _print_kept(plans)
    for part in dict.fromkeys((*freed_parts.held, *(part for part in along if part.part.exists()))):
        print(f"note: {_joined([], [part])} is in progress: it is kept", file=sys.stderr)
    return 0


def _resolve(
    names: Sequence[str], config: Config, *, unfinished_only: bool
) -> tuple[list[LocalModel], set[Path], list[Unfinished]]:
    """Return the models, the paths of those named by one revision, and the unfinished downloads of other names.

    Raises ModelError for a name with neither.
    """
    models: dict[str, LocalModel] = {}
    dated: set[Path] = set()
    unfinished: dict[Path, Unfinished] = {}
    for name in names:
        if unfinished_only:
            parts = unfinished_of(parse_name(name), config.places.hub)
            if not parts:
                raise ModelError(f"{shown(name)} has no unfinished download", "`edgelm list` shows them")
            unfinished |= {part.part: part for part in parts}
            continue
        try:
            model = _in_library(model_or_served(name, config, installed_model), config)
        except ModelError:
            if adapter := _adapter_of(name, config):
                models[adapter.identity] = adapter
                continue
            parts = _parts_of(name, config)
            if not parts:
                raise
            unfinished |= {part.part: part for part in parts}
            continue
        models[model.identity] = model
        if _is_dated(name):
            dated.add(model.path)
    return list(models.values()), dated, list(unfinished.values())


def _adapter_of(name: str, config: Config) -> LocalModel | None:
    try:
        reference = parse_name(name)
    except ModelError:
        return None
    return pulled_adapter(reference, config.places.hub) if isinstance(reference, HubReference) else None


def _parts_of(name: str, config: Config) -> list[Unfinished]:
    try:
        return unfinished_of(parse_name(name), config.places.hub)
    except ModelError:
        return []  # not a valid name; the error of the model search explains it better


def _in_library(model: LocalModel, config: Config) -> LocalModel:
    """Return the cache's own entry for a model that was named by its path in the cache."""
    if model.place != "given":
        return model
    return next((cached for cached in scan(config.places.hub).models if cached.is_at(model.path)), model)


def _is_dated(name: str) -> bool:
    reference = parse_name(name)
    return isinstance(reference, LocalPath) or (isinstance(reference, HubReference) and reference.revision is not None)


def _confirmed(models: list[LocalModel], unfinished: list[Unfinished], plans: list[Removal]) -> bool:
    along = [download for plan in plans for download in plan.unfinished]
    nbytes = sum(plan.bytes for plan in plans) + sum(part.nbytes for part in {*unfinished, *along})
    print(f"Remove {_joined(models, unfinished)}: frees {size_text(nbytes)}", file=sys.stderr)
    if along:
        print(f"note: this also removes {_joined([], along)}", file=sys.stderr)
    _print_kept(plans)
    print("Remove? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


def _joined(models: list[LocalModel], unfinished: list[Unfinished]) -> str:
    parts = dict.fromkeys(f"the unfinished download of {shown(part.name)}" for part in unfinished)
    return ", ".join([*(model.name for model in models), *parts])


def _print_kept(plans: list[Removal]) -> None:
    for plan in plans:
        if plan.kept:
            print(f"note: other files of {plan.repository} use the bytes of {', '.join(plan.kept)}", file=sys.stderr)


def _refuse_loaded(models: list[LocalModel], config: Config) -> None:
    """Raise ModelError for a model that a running server has loaded. A server that does not answer is ignored."""
    for front in find_fronts(config.places.runtime):
        paths = _loaded_paths(front)
        for model in models:
            if paths & {os.path.realpath(file) for file in (model.path, *model.files)}:
                message = f"{shown(model.name)} is loaded by the edgelm server (pid {front.pid})"
                stop = f"stop the server at {front.address}"  # one of another library may not know the name
                raise ModelError(
                    message, f"edgelm unload {shown(model.name)}, or {stop}" if front.serves(config.library) else stop
                )


def _loaded_paths(front: FrontRecord) -> set[str]:
    loaded: list[str] = []
    with (
        contextlib.suppress(httpx2.HTTPError, ValueError, KeyError, TypeError),
        httpx2.Client(timeout=REQUEST_LIMIT_S, trust_env=False, headers=front.headers, verify=front.tls()) as client,
    ):
        loaded = [model["path"] for model in client.get(f"{front.address}/edgelm/ps").json()["models"]]
    return {os.path.realpath(path) for path in loaded}


def _document(model: LocalModel) -> dict[str, object]:
    return {"name": model.name, "path": str(model.path), "files": [str(file) for file in model.files]}


def _part_document(part: Unfinished) -> dict[str, object]:
    return {"repository": part.repository, "file": part.file, "bytes": part.nbytes}
