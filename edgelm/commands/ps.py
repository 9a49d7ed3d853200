"""`edgelm ps`: the models that a running server has loaded, and their memory: predicted and measured."""

from __future__ import annotations

import json
import re
from typing import Any

from rich.table import Table

from edgelm import __version__
from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import find_fronts
from edgelm.commands.flags import Json
from edgelm.commands.list import plain_console
from edgelm.commands.running import get_state
from edgelm.library.progress import size_text

GPU = "GPU"
TITLES = ("MODEL", "STATE", "PID", "MEMORY", "PREDICTED", GPU, "CONTEXT", "ENGINE", "REQUESTS", "ENDS IN")
LEFT = ("MODEL", "STATE", "ENGINE")


def show_processes(*, as_json: Json = False) -> None:
    """Print the engine processes of the running server, and the addresses of others.

    Raises EdgeLMError if no server runs.
    """
    config = load_config({})
    fronts = find_fronts(config.places.runtime, config.library)
    if not fronts:
        raise EdgeLMError("no edgelm server is running", "start one with `edgelm serve`")
    front, *others = fronts
    state = get_state(front)
    if as_json:
        more = [{"pid": other.pid, "address": other.address} for other in others]
        own = {"ollama_address": front.ollama} if front.ollama else {}
        print(json.dumps(state | own | {"other_servers": more}, ensure_ascii=False))
        return
    _show(state, front.ollama)
    if _order(state["version"]) < _order(__version__):  # a service goes on through an upgrade
        again = "restart it (a service: `edgelm service install`)"
        print(f"the server still runs {state['version']}, and this command is {__version__}: {again}")
    for other in others:
        print(f"another edgelm is at {other.address} (pid {other.pid})")


def _order(version: str) -> tuple[list[int], bool, list[int]]:
    """Return what versions are compared by: the release, and before it those of it that are not released."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return numbers[:3], not re.search(r"[a-z]", version), numbers[3:]


def _show(state: dict[str, Any], ollama: str) -> None:
    also = f", for Ollama's clients at {ollama}" if ollama else ""
    print(f"edgelm {state['version']} at {state['address']}{also} (pid {state['pid']})")
    if not state["models"]:
        print("no model is loaded")
        return
    plain_console().print(_table(state))
    print(_memory_line(state))
    for model in state["models"]:
        if model["waits_for"] is not None:
            print(f"{model['model']} waits for memory: {model['waits_for']}")
        if model.get("doing"):
            print(f"{model['model']}: {model['doing']}")
        if model.get("unused_gpu"):  # an older server does not tell it
            print(f"{model['model']}: {model['unused_gpu']}")
        elif model.get("cuda_problem"):
            print(f"{model['model']}: CUDA is not used: {model['cuda_problem']}")
        if note := (model.get("predicted") or {}).get("note"):
            print(f"{model['model']}: {note}")
        if model.get("silent_s"):
            print(f"{model['model']}: its process is frozen for {model['silent_s']:.0f} s; it is ended soon")
        if model["error"] is not None:
            print(f"{model['model']}: {model['error']}")


def _table(state: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    on_gpu = any(model.get("gpu_bytes") for model in state["models"])
    for title in TITLES:
        if title != GPU or on_gpu:
            table.add_column(title, justify="left" if title in LEFT else "right")
    for model in state["models"]:
        table.add_row(*(cell for title, cell in zip(TITLES, _row(model), strict=True) if title != GPU or on_gpu))
    return table


def _memory_line(state: dict[str, Any]) -> str:
    """Return the sums: what is measured, what was predicted, and what is left for another model."""
    measured = sum(model["memory_bytes"] or 0 for model in state["models"])
    predicted = sum(model["predicted_bytes"] or 0 for model in state["models"])
    line = f"memory: {size_text(measured)} in use, {size_text(predicted)} predicted with full contexts"
    if limit := state["memory"]["limit_bytes"]:
        line += f", --max-memory {size_text(limit)}"
    line += f"; {size_text(state['memory']['free_bytes'])} are free"
    if on_gpu := sum(model.get("gpu_bytes") or 0 for model in state["models"]):
        free = state["memory"]["gpu_free_bytes"]
        line += f"\nGPU: {size_text(on_gpu)} predicted" + ("" if free is None else f"; {size_text(free)} are free")
    return line


def _row(model: dict[str, Any]) -> list[str]:
    state = model["state"]
    if state == "starting" and model["progress"] is not None:
        state = f"{state} {model['progress']:.0%}"
    memory, predicted, gpu = (
        size_text(nbytes) if (nbytes := model.get(key)) is not None else ""
        for key in ("memory_bytes", "predicted_bytes", "gpu_bytes")
    )
    engine = "" if model["engine"] is None else f"{model['engine']} on {model['device']}"
    context = "" if model["context"] is None else f"{model['context']:,}"
    pid = "" if model["pid"] is None else str(model["pid"])
    requests = str(model["requests"])
    return [model["model"], state, pid, memory, predicted, gpu, context, engine, requests, _end_text(model)]


def _end_text(model: dict[str, Any]) -> str:
    if model["pinned"]:
        return "never"
    if model["expires_in_s"] is None:
        return ""
    seconds = model["expires_in_s"]
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
