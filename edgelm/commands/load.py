"""`edgelm load` and `edgelm unload`: which models a running server keeps in memory."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Annotated, Any
from urllib.parse import quote

import typer

from edgelm.base.config import load_config
from edgelm.base.durations import keep_alive_text, parse_keep_alive
from edgelm.base.errors import EdgeLMError, UsageError
from edgelm.base.places import expand_home
from edgelm.base.runtime import FrontRecord, find_fronts
from edgelm.commands.flags import Json, Model
from edgelm.commands.running import ask_front, get_state, require_front
from edgelm.library.names import shown
from edgelm.library.ollama_store import LATEST

LOAD_LIMIT_S = 1200.0
POLL_S = 0.3


def load_model(
    model: Model,
    keep_alive: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Unload it after so long without a request: 90, 5m, 1h; -1: never."),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Let the running server load a model, and wait until it is loaded. Raises EdgeLMError."""
    body: dict[str, Any] = {"model": _name_for(model)}
    if keep_alive is not None:
        try:
            body["keep_alive"] = keep_alive_text(parse_keep_alive(keep_alive))
        except ValueError as error:
            raise UsageError(f"--keep-alive is {keep_alive!r}", f"give {error}") from None
    front = require_front(load_config({}))
    began = time.monotonic()
    with _progress(front, body["model"]) if sys.stderr.isatty() else nullcontext():
        ask_front(front, "POST", "/models/load", body, limit_s=LOAD_LIMIT_S)
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps({"model": model, "loaded": True, "seconds": round(seconds, 3)}))
    else:
        print(f"{shown(model)} is loaded ({seconds:.1f} s)")


def unload_models(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As `edgelm ps` shows it.", show_default=False)
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Unload all models.")] = False,
    as_json: Json = False,
) -> None:
    """Let the server that has a model unload it, or all servers all. Raises EdgeLMError, also for one in use."""
    if (model is None) == (not every):
        raise UsageError("name the model to unload, or give --all")
    config = load_config({})
    first = require_front(config)
    fronts = find_fronts(config.places.runtime, config.library)
    targets: list[tuple[FrontRecord, str]] = []
    problems = []
    done = []
    if model is not None:
        name = _name_for(model)
        called = config.model_name(name.removesuffix(LATEST))
        targets = [(next((front for front in fronts if _has(front, name, called)), first), name)]
    else:
        for front in fronts:
            try:
                targets += [(front, loaded["model"]) for loaded in _loaded(front)]
            except EdgeLMError as error:
                problems.append(error)
    for front, name in targets:
        try:
            ask_front(front, "POST", "/models/unload", {"model": name}, limit_s=60.0)
            done.append(name)
        except EdgeLMError as error:
            problems.append(error)
    if as_json:
        print(json.dumps({"unloaded": done}))
    else:
        for name in done:
            print(f"{shown(name)} is unloaded")
        if not (targets or problems):
            print("no model is loaded")
    if problems:
        raise EdgeLMError("; ".join(str(problem) for problem in problems))


def _name_for(name: str) -> str:
    """Return a name as the server understands it, which may run in another folder."""
    path = os.path.abspath(expand_home(name))  # noqa: PTH100 - pathlib raises for names of no file
    is_file = name.endswith(".gguf") or os.sep in name
    return path if is_file and os.path.exists(path) else name  # noqa: PTH110 - as above


def _has(front: FrontRecord, name: str, called: str) -> bool:
    """Return whether a server has a model loaded, or loads it. `called` is its own name where `name` is an alias."""
    with suppress(EdgeLMError, KeyError, TypeError):  # it has no such model now, or does not answer
        if ask_front(front, "GET", f"/v1/models/{quote(name)}")["status"]["value"] != "unloaded":
            return True
    with suppress(EdgeLMError):  # also one whose file is gone, or where another file has its name now
        loaded = _loaded(front)
        return any(model["model"].casefold() == called.casefold() or model["path"] == name for model in loaded)
    return False


def _loaded(front: FrontRecord) -> list[dict[str, Any]]:
    """Return the models that a server has in memory, or loads: none that other servers run."""
    gone = ("stopping", "failed")
    models = get_state(front)["models"]
    return [model for model in models if model["state"] not in gone and model["engine"] != "remote"]


@contextmanager
def _progress(front: FrontRecord, name: str) -> Iterator[None]:
    """Show the progress in a line that overwrites itself, until the block ends."""
    done = threading.Event()
    thread = threading.Thread(target=_show_progress, args=(front, name, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show_progress(front: FrontRecord, name: str, done: threading.Event) -> None:
    while not done.is_set():
        try:
            status = ask_front(front, "GET", f"/v1/models/{quote(name)}")["status"]
        except EdgeLMError:
            status = {}
        share = status.get("progress")
        text = f"{share:.0%}" if share is not None else ""
        if blocker := status.get("waits_for"):
            text = f"waits for memory: {shown(blocker)}"
        sys.stderr.write(f"\r\x1b[Kloading {shown(name)} {text}")
        sys.stderr.flush()
        done.wait(POLL_S)
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()
