"""`edgelm rm`: free the disk of models that `edgelm pull` can fetch again, and of what came of those it did not finish.

Owns the question, and the refusals: nothing of the user's own is removed, and nothing that a running server holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx2

from edgelm.commands.choice import any_model
from edgelm.config import Config, load_config
from edgelm.errors import EdgeLMError, ModelError
from edgelm.library.local import LocalModel, scan
from edgelm.library.names import HubReference, LocalPath, parse_name, shown
from edgelm.library.removal import Removal, plan_removal, remove, remove_unfinished
from edgelm.library.unfinished import Unfinished, meant_by
from edgelm.library.units import size_text
from edgelm.library.usage import forget_use
from edgelm.server.runtime import find_front

ASK_LIMIT_S = 2.0
WRONG_USAGE = 2


def remove_models(names: Sequence[str], flags: Mapping[str, object], *, yes: bool, as_json: bool) -> int:
    """Remove models of the hub's cache, after a question; return the exit code. Raises EdgeLMError."""
    config = load_config(flags)
    hub = config.places.hub
    models, dated, unfinished = _wanted(names, config)
    plans = plan_removal(models, hub, dated=dated)
    _refuse_loaded(models, config)
    if not yes:
        if not sys.stdin.isatty():
            print("error: rm asks before it removes, and there is nobody to ask; add --yes", file=sys.stderr)
            return WRONG_USAGE
        if not _confirmed(models, unfinished, plans):
            print("nothing was removed", file=sys.stderr)
            return 1
    identities = [model.identity for model in models]  # as long as the files are there
    parts = remove_unfinished(unfinished, hub)
    gone = [each for each in unfinished if each not in parts.held]
    if not models and not gone:
        raise EdgeLMError(f"{_named(models, unfinished)} is being fetched just now", "wait for that, or end it")
    freed = parts.nbytes + remove(models, hub, dated=dated)
    for identity in identities:
        forget_use(config.places.data, Path(identity))
    if as_json:
        gone += [each for plan in plans for each in plan.unfinished if not each.part.exists() and each not in gone]
        removed = {"removed": [_document(model) for model in models], "freed_bytes": freed}
        print(json.dumps({**removed, "unfinished": [_part_document(each) for each in gone]}))
    else:
        print(f"removed {_named(models, gone)}: {size_text(freed)} freed")
        _say_what_stays(plans)
    along = [each for plan in plans for each in plan.unfinished if each.part.exists()]
    for each in dict.fromkeys((*parts.held, *along)):
        print(f"note: {_named([], [each])} is being fetched just now: it stays", file=sys.stderr)
    return 0


def _wanted(names: Sequence[str], config: Config) -> tuple[list[LocalModel], set[Path], list[Unfinished]]:
    """Return the models, those of which one revision alone is meant, and downloads where there is no model.

    Raises ModelError for a name of which nothing is here.
    """
    models: dict[str, LocalModel] = {}
    dated: set[Path] = set()
    unfinished: dict[Path, Unfinished] = {}
    for name in names:
        try:
            model = _in_library(any_model(name, config), config)
        except ModelError:
            parts = _parts_called(name, config)
            if not parts:
                raise
            unfinished |= {each.part: each for each in parts}
            continue
        models[model.identity] = model
        if _is_dated(name):
            dated.add(model.path)
    return list(models.values()), dated, list(unfinished.values())


def _parts_called(name: str, config: Config) -> list[Unfinished]:
    try:
        return meant_by(parse_name(name), config.places.hub)
    except ModelError:
        return []  # no name at all, or none of the catalogue: why there is no model says it better


def _in_library(model: LocalModel, config: Config) -> LocalModel:
    """Return a model that was named by a path as the cache's own, if it lies there."""
    if model.place != "given":
        return model
    return next((each for each in scan(config.places.hub).models if each.is_at(model.path)), model)


def _is_dated(name: str) -> bool:
    reference = parse_name(name)
    return isinstance(reference, LocalPath) or (isinstance(reference, HubReference) and reference.revision is not None)


def _confirmed(models: list[LocalModel], unfinished: list[Unfinished], plans: list[Removal]) -> bool:
    along = [each for plan in plans for each in plan.unfinished]
    nbytes = sum(plan.bytes for plan in plans) + sum(each.nbytes for each in {*unfinished, *along})
    print(f"Remove {_named(models, unfinished)}: frees {size_text(nbytes)}", file=sys.stderr)
    if along:
        print(f"note: {_named([], along)}, which goes along, was not finished", file=sys.stderr)
    _say_what_stays(plans)
    print("Remove? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


def _named(models: list[LocalModel], unfinished: list[Unfinished]) -> str:
    parts = dict.fromkeys(f"what came of {shown(each.name)}" for each in unfinished)
    return ", ".join([*(model.name for model in models), *parts])


def _say_what_stays(plans: list[Removal]) -> None:
    for plan in plans:
        if plan.kept:
            print(f"note: other files of {plan.repository} use the bytes of {', '.join(plan.kept)}", file=sys.stderr)


def _refuse_loaded(models: list[LocalModel], config: Config) -> None:
    """Raise ModelError for a model that a running server holds; one that does not answer holds up nobody."""
    front = find_front(config.places.runtime)
    if front is None:
        return
    headers = {} if config.settings.api_key is None else {"authorization": f"Bearer {config.settings.api_key}"}
    loaded: list[str] = []
    with (
        contextlib.suppress(httpx2.HTTPError, ValueError, KeyError, TypeError),
        httpx2.Client(timeout=ASK_LIMIT_S, trust_env=False, headers=headers) as client,
    ):
        loaded = [each["path"] for each in client.get(f"{front.address}/edgelm/ps").json()["models"]]
    held = {os.path.realpath(path) for path in loaded}
    for model in models:
        if held & {os.path.realpath(file) for file in (model.path, *model.files)}:
            message = f"{shown(model.name)} is loaded by the edgelm server (pid {front.pid})"
            raise ModelError(message, "end that, or wait until it unloads the model")


def _document(model: LocalModel) -> dict[str, object]:
    return {"name": model.name, "path": str(model.path), "files": [str(file) for file in model.files]}


def _part_document(unfinished: Unfinished) -> dict[str, object]:
    return {"repository": unfinished.repository, "file": unfinished.file, "bytes": unfinished.nbytes}
