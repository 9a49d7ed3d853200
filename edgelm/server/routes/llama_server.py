"""The routes of other servers that the front answers itself: llama-server's /props and /slots, vLLM's /tokenizer_info.

And which model is meant without a name.

Owns their answers. A request to look loads no model, and moves no idle clock.
"""

from __future__ import annotations

import contextlib
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgelm import __version__
from edgelm.library.scan import LocalModel, printable
from edgelm.server.access import may_name_paths
from edgelm.server.api.errors import ApiError
from edgelm.server.engines.table import EngineTable
from edgelm.server.keys import NAMESPACE
from edgelm.server.models import ModelNames
from edgelm.server.remotes.models import RemoteModel
from edgelm.server.routes.stored import namespace_of

ASK_LIMIT_S = 1.0
ALIASES = {  # llama-server's other names of its routes
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/completion",
    "/embeddings": "/v1/embeddings",
    "/reranking": "/rerank",
    "/v1/reranking": "/v1/rerank",
}


def llama_routes(table: EngineTable, models: ModelNames, num_slots: int) -> list[Route]:
    """Return the routes that need no engine."""

    async def described(request: Request) -> tuple[LocalModel, dict[str, Any]]:
        """Return the model of a request and its card. Raises ApiError."""
        model = await find_or_default(request, table, models, request.query_params.get("model", ""))
        card = await models.card(model)
        if "error" in card:
            raise ApiError(400, "model_failed", card["error"], param="model")
        return model, card

    async def tokenizer_info(request: Request) -> Response:
        _, card = await described(request)
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "unk": "unk", "padding": "pad", "pad": "pad"}
        special = {f"{names[name]}_token": text for name, text in card["special"].items() if name in names}
        missing = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"))
        return JSONResponse({**missing, **special, "chat_template": card["template"]})

    async def props(request: Request) -> Response:
        if (remote := models.remotes.find(request.query_params.get("model", ""))) is not None:
            return JSONResponse(_remote_props(remote))
        model, card = await described(request)
        slot = table.slots.get(model.path)
        info = slot.process.info if slot is not None and slot.process is not None else None
        has_tools = "tools" in card["capabilities"]
        return JSONResponse(
            {
                "default_generation_settings": {"n_ctx": table.context(model, card["context"])},
                "total_slots": num_slots,
                "model_alias": model.name,
                "model_path": printable(str(model.path)),
                "modalities": {"vision": "vision" in card["capabilities"], "audio": False},
                "chat_template": card["template"] or "",
                "chat_template_caps": {"supports_tools": has_tools, "supports_tool_calls": has_tools},
                "bos_token": card["special"].get("bos", ""),
                "eos_token": card["special"].get("eos", ""),
                "build_info": f"edgelm {__version__}",
                "is_sleeping": info is None,
            }
        )

    async def slots(request: Request) -> Response:
        """Return the open requests of the asking key, those of all models or of one."""
        name = request.query_params.get("model", "")
        if models.remotes.find(name) is not None:
            return JSONResponse([])  # they are the other server's
        if name:
            model = await models.find(name, paths=may_name_paths(request))
        chosen = [table.slots.get(model.path)] if name else [*table.slots.values()]
        found: list[dict[str, Any]] = []
        for slot in chosen:
            if slot is None or slot.state != "ready" or slot.process is None:
                continue
            headers = {NAMESPACE: namespace_of(request)}
            with contextlib.suppress(httpx2.HTTPError, ValueError):  # it is ending
                found += (await slot.process.client.get("/slots", headers=headers, timeout=ASK_LIMIT_S)).json()
        return JSONResponse([slot | {"id": index} for index, slot in enumerate(found)])

    return [Route("/props", props), Route("/slots", slots), Route("/tokenizer_info", tokenizer_info)]


def _remote_props(model: RemoteModel) -> dict[str, Any]:
    """Return /props of a model that another server runs: what is known of it here."""
    return {
        "default_generation_settings": {"n_ctx": model.context or 0},
        "total_slots": sum(int(box.limit) for box in model.boxes),
        "model_alias": model.name,
        "model_path": "",
        "modalities": {"vision": False, "audio": False},
        "chat_template": "",
        "chat_template_caps": {"supports_tools": True, "supports_tool_calls": True},
        "bos_token": "",
        "eos_token": "",
        "build_info": f"edgelm {__version__}, the model at {model.where}",
        "is_sleeping": model.state != "ready",
    }


class Aliases:
    """ASGI middleware: a route has other names too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if path := ALIASES.get(scope.get("path", "")):
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


async def find_or_default(request: Request, table: EngineTable, models: ModelNames, name: str) -> LocalModel:
    """Return the model of a name; without one, the first that `edgelm serve` was given, or else the one used last.

    Raises ApiError.
    """
    if name:
        return await models.find(name, paths=may_name_paths(request))
    model = await models.first_given()
    if model is None:
        loaded = [slot for slot in table.slots.values() if slot.state in ("starting", "ready")]
        model = min(loaded, key=lambda slot: slot.idle_s).model if loaded else await models.only()
    if model is None:
        message = "model is missing: no model is loaded, and there are several; GET /v1/models lists them"
        raise ApiError(400, "missing_required_parameter", message, param="model")
    return model
