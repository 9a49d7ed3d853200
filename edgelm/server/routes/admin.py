"""The routes that show, load and unload models: GET /models, POST /models/load and /models/unload, GET /edgelm/ps.

Owns what clients see of models and engines, and who may load and unload. A request to look wakes no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgelm import __version__
from edgelm.base.durations import parse_keep_alive
from edgelm.library.scan import printable
from edgelm.server.access import may_administer, may_name_paths
from edgelm.server.api.errors import ApiError
from edgelm.server.api.json_body import read_json
from edgelm.server.bodies import Bodies
from edgelm.server.engines.memory import Measured
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.engines.table import EngineTable
from edgelm.server.models import Listed, ModelNames
from edgelm.server.remotes.models import RemoteModel
from edgelm.server.sse import unless_client_leaves

START_LIMIT_S = 600.0  # a request waits this long for an engine, unless `Prefer: wait=SECONDS` says less
STATS_LIMIT_S = 1.0
STATUS = {"waiting": "loading", "starting": "loading", "ready": "loaded", "stopping": "unloaded", "failed": "unloaded"}


def admin_routes(address: str, table: EngineTable, models: ModelNames, bodies: Bodies) -> list[Route]:
    """Return the routes; /models, /models/load and /models/unload are those of llama-server's router."""

    async def list_models(request: Request) -> Response:
        listed = await models.list()
        if "anthropic-version" in request.headers:
            return JSONResponse(_anthropic_list(listed))
        return JSONResponse({"object": "list", "data": [_model(table, model) for model in listed]})

    async def one_model(request: Request) -> Response:
        model = await models.describe(request.path_params["name"], paths=may_name_paths(request))
        anthropic = "anthropic-version" in request.headers
        return JSONResponse(_anthropic_model(model) if anthropic else _model(table, model))

    async def ps(_: Request) -> Response:
        slots = table.all_slots()
        measured = await table.memory.measure(slots)
        processes = await asyncio.gather(*(_process(slot, measured) for slot in slots))
        entries = [*processes, *map(_remote, models.remotes.models)]
        state = {"pid": os.getpid(), "version": __version__, "address": address, "models": entries}
        outstanding = table.memory.outstanding(slots, measured)
        memory = {
            "free_bytes": max(0, measured.free_bytes - outstanding),
            "outstanding_bytes": outstanding,
            "limit_bytes": table.memory.limit_bytes,
            "gpu_free_bytes": table.memory.gpu_free(slots, measured),
        }
        return JSONResponse(state | {"memory": memory})

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/models", list_models),
        Route("/edgelm/ps", ps),
        *_loading_routes(table, models, bodies),
    ]


def _loading_routes(table: EngineTable, models: ModelNames, bodies: Bodies) -> list[Route]:
    """Return the routes that change which models are loaded."""

    async def administered(request: Request) -> tuple[str, float | None]:
        """Return the name of the model that a request loads or unloads, and its `keep_alive`. Raises ApiError."""
        if not may_administer(request):
            message = "loading and unloading needs a key marked admin, or a program on the server's own machine"
            raise ApiError(403, "not_admin", message)
        async with bodies.read(request) as body:
            data = await bodies.parse(body, read_json)
        name, keep_alive = data.get("model"), data.get("keep_alive")
        if not isinstance(name, str):
            raise ApiError(400, "invalid_type", "model is not the name of a model", param="model")
        try:
            keep_alive_s = None if keep_alive is None else parse_keep_alive(keep_alive)
        except ValueError as error:
            raise ApiError(400, "invalid_value", f"keep_alive: give {error}", param="keep_alive") from None
        return name, keep_alive_s

    async def load(request: Request) -> Response:
        wait_s = wait_limit_s(request)
        name, keep_alive_s = await administered(request)
        model = await models.find(name, paths=may_name_paths(request))
        await models.require_engine(model)
        async with table.lease(model, keep_alive_s) as slot:
            await unless_client_leaves(request, slot.ready(wait_s))
        return JSONResponse({"success": True})

    async def unload(request: Request) -> Response:
        name, _ = await administered(request)
        loaded = [slot.model for slot in table.slots.values()]
        try:
            model = await models.find(name, paths=may_name_paths(request))
        except ApiError:  # its file is gone
            if (found := models.find_loaded(name, loaded)) is None:
                raise
            model = found
        if model.path not in table.slots:  # another file has its name now, or it was never loaded
            model = models.find_loaded(name, loaded, exact=model.is_called(name)) or model
        slot = table.slots.get(model.path)
        if slot is None:
            raise ApiError(400, "model_not_loaded", f"{model.name} is not loaded", param="model")
        if slot.leases:
            message = f"{model.name} is in use: unload it when its requests have ended"
            raise ApiError(409, "model_in_use", message, param="model")
        await table.unload(slot)
        return JSONResponse({"success": True})

    return [Route("/models/load", load, methods=["POST"]), Route("/models/unload", unload, methods=["POST"])]


def wait_limit_s(request: Request) -> float:
    """Return how long a request waits for its engine to start; `Prefer: wait=SECONDS` (RFC 7240) shortens it."""
    prefer = ", ".join(request.headers.getlist("prefer"))
    match = re.search(r"(?:^|[,;\s])wait(?:\s*=\s*\"?(\d{1,9})\"?)?\s*(?:$|[,;])", prefer, re.IGNORECASE)
    return min(float(match[1]), START_LIMIT_S) if match and match[1] else START_LIMIT_S


def _model(table: EngineTable, model: Listed) -> dict[str, Any]:
    """Return the entry of /v1/models for one model."""
    if "remote" in model.known:
        own = {**model.known, "loaded": True}
        return {"id": model.name, "object": "model", "created": 0, "owned_by": "edgelm", "edgelm": own} | {
            "status": {"value": "loaded"}
        }
    slot = table.slots.get(model.path)
    loaded = slot is not None and slot.state == "ready"
    status: dict[str, Any] = {"value": "unloaded" if slot is None else STATUS[slot.state]}  # of llama-server's router
    if slot is not None and slot.progress is not None and not loaded:
        status["progress"] = slot.progress
    if slot is not None and slot.blocker:
        status["waits_for"] = slot.blocker
    if slot is not None and slot.state == "failed":
        status |= {"failed": True, "error": str(slot.error)}
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "edgelm",
        "status": status,
        "edgelm": {"path": printable(str(model.path)), **model.known, "loaded": loaded},
    }


def _anthropic_list(models: Sequence[Listed]) -> dict[str, Any]:
    """Return /v1/models in Anthropic's form."""
    data = [_anthropic_model(model) for model in models]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _anthropic_model(model: Listed) -> dict[str, Any]:
    """Return the entry of one model in Anthropic's form."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _remote(model: RemoteModel) -> dict[str, Any]:
    """Return the entry of /edgelm/ps for a model that another server runs, with the fields of an engine process."""
    unknown = ["path", "progress", "doing", "pid", "unused_gpu", "cuda_problem", "rss_bytes", "memory_bytes"]
    unknown += ["predicted_bytes", "gpu_bytes", "predicted", "waits_for", "expires_in_s"]
    return dict.fromkeys(unknown) | {
        "model": model.name,
        "state": model.state,
        "context": model.context,
        "engine": "remote",
        "device": model.where,
        "requests": model.num_running + model.num_waiting,
        "promised_bytes": 0,
        "idle_s": 0.0,
        "keep_alive_s": -1,
        "pinned": True,
        "silent_s": 0.0,
        "error": "; ".join(model.problems) or None,
        "remote": [
            {"address": box.name, "requests": box.num_open, "limit": int(box.limit), "problem": box.problem or None}
            for box in model.boxes
        ],
    }


async def _process(slot: EngineSlot, measured: Measured) -> dict[str, Any]:
    """Return the entry of /edgelm/ps for one engine process."""
    process, info, footprint = slot.process, slot.process.info if slot.process else None, slot.footprint
    stats: dict[str, Any] = {"requests": slot.leases, "rss_bytes": None}
    if process is not None and slot.state == "ready":
        with contextlib.suppress(httpx2.HTTPError, ValueError):  # it is ending: show what the front itself knows
            stats = (await process.client.get("/stats", timeout=STATS_LIMIT_S)).json()
    keep_alive_s, expires_in_s = slot.keep_alive_s, slot.expires_in_s
    return {
        "model": slot.model.name,
        "path": printable(str(slot.model.path)),
        "state": slot.state,
        "progress": slot.progress,
        "doing": (process.doing or None) if process and slot.state == "starting" else None,
        "pid": process.pid if process else None,
        "context": info.context if info else None,
        "engine": info.engine if info else None,
        "device": info.device if info else None,
        "unused_gpu": (info.unused_gpu or None) if info else None,
        "cuda_problem": (process.cuda_problem or None) if process else None,
        "requests": stats["requests"],
        "rss_bytes": stats["rss_bytes"],
        # Of all its processes; pages that several of them share, such as a draft model's, count in equal parts.
        "memory_bytes": measured.resident_bytes.get(process.pid, stats["rss_bytes"]) if process else None,
        "predicted_bytes": (footprint.ram_bytes or None) if footprint else None,  # our kernels' is not predicted
        "gpu_bytes": (footprint.gpu_bytes or None) if footprint else None,  # predicted, too: no process's is measured
        "predicted": asdict(footprint) if footprint else None,
        "promised_bytes": slot.promised.ram,
        "waits_for": slot.blocker or None,
        "idle_s": round(slot.idle_s, 3),
        "keep_alive_s": -1 if math.isinf(keep_alive_s) else keep_alive_s,
        "expires_in_s": None if math.isinf(expires_in_s) else round(expires_in_s, 3),
        "pinned": slot.pinned,
        "silent_s": round(slot.silent_s, 1),  # how long its process has been frozen
        "error": None if slot.error is None else str(slot.error),
    }
