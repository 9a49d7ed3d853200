"""`edgelm ps`: what a running server holds."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from rich.console import Console
from rich.table import Table

from edgelm.config import load_config
from edgelm.errors import EdgeLMError
from edgelm.server.runtime import find_front

ASK_LIMIT_S = 5.0


def show_processes(*, as_json: bool) -> None:
    """Print the engine processes of the running server. Raises EdgeLMError where there is none."""
    config = load_config({})
    front = find_front(config.places.runtime)
    if front is None:
        raise EdgeLMError("no edgelm server runs", "start one with `edgelm serve`")
    state = _ask(front.address, config.settings.api_key)
    if as_json:
        print(json.dumps(state, ensure_ascii=False))
        return
    print(f"edgelm {state['version']} at {state['address']} (pid {state['pid']})")
    if not state["models"]:
        print("no model is loaded")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("MODEL", "STATE", "PID", "MEMORY", "CONTEXT", "ENGINE", "REQUESTS", "IDLE"):
        table.add_column(title, justify="left" if title in ("MODEL", "STATE", "ENGINE") else "right")
    for model in state["models"]:
        table.add_row(*_row(model))
    Console(highlight=False, markup=False).print(table)
    for model in state["models"]:
        if model["error"] is not None:
            print(f"{model['model']}: {model['error']}")


def _ask(address: str, api_key: str | None) -> dict[str, Any]:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        with httpx2.Client(timeout=ASK_LIMIT_S, trust_env=False, headers=headers) as client:
            answer = client.get(f"{address}/edgelm/ps")
    except httpx2.HTTPError as error:
        raise EdgeLMError(f"the edgelm server at {address} does not answer: {error}", "see its output") from None
    if answer.status_code == 401:
        raise EdgeLMError(f"the edgelm server at {address} wants a key", "set EDGELM_API_KEY to it")
    if answer.status_code != 200:
        raise EdgeLMError(f"{address} answers {answer.status_code}: is it an edgelm server?")
    found: dict[str, Any] = answer.json()
    return found


def _row(model: dict[str, Any]) -> list[str]:
    state = model["state"]
    if state == "starting" and model["progress"] is not None:
        state = f"{state} {model['progress']:.0%}"
    memory = "" if model["rss_bytes"] is None else f"{model['rss_bytes'] / 2**20:,.0f} MiB"
    engine = "" if model["engine"] is None else f"{model['engine']} on {model['device']}"
    context = "" if model["context"] is None else f"{model['context']:,}"
    pid = "" if model["pid"] is None else str(model["pid"])
    idle = "" if model["requests"] else f"{model['idle_s']:.0f} s"
    return [model["model"], state, pid, memory, context, engine, str(model["requests"]), idle]
