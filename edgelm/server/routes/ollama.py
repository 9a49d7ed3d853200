"""The routes of Ollama's API that the front answers itself: /api/version, tags, show, ps, pull; and loading.

Owns their answers. A request to look loads no model, and moves no idle clock.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edgelm import __version__
from edgelm.backends.choice import is_partial
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.places import HUB_TOKENS
from edgelm.base.workers.parent import Worker
from edgelm.library.progress import (
    EVENTS,
    Checking,
    Event,
    Listed,
    Progress,
    Pulled,
    PullJob,
    Retrying,
    StandingIn,
    Waiting,
)
from edgelm.server.access import may_administer, may_name_paths, permitted_keep_alive
from edgelm.server.api.errors import ApiError, as_api_error
from edgelm.server.api.json_body import read_json
from edgelm.server.api.ollama import OllamaRequest, error_event, line
from edgelm.server.api.ollama_reply import loaded_reply, timestamp
from edgelm.server.bodies import Bodies
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.engines.table import EngineTable
from edgelm.server.models import LATEST, ModelNames, remote_entry
from edgelm.server.models import Listed as ListedModel
from edgelm.server.remotes.models import RemoteModel
from edgelm.server.routes.admin import wait_limit_s
from edgelm.server.sse import NDJSON, EventStream, unless_client_leaves

OLLAMA_VERSION = "0.13.0"  # whose API this is: clients compare it
PULL_WORKER = "edgelm.library.pull_worker"
PULL_COMMAND: tuple[str, ...] = ()  # replaces the worker in tests
PULL_STOP_S = 3.0  # for a worker to end when its client has left
CONTEXT = ".context_length"  # the end of the name of GGUF, behind the architecture
FOREVER_S = 100 * 365 * 86_400.0  # in a date


def ollama_routes(table: EngineTable, models: ModelNames, bodies: Bodies) -> list[Route]:
    """Return the routes that need no engine."""

    async def named(request: Request) -> tuple[str, dict[str, Any]]:
        """Return the model's name in a body, and the body. Raises ApiError."""
        async with bodies.read(request) as body:
            data = await bodies.parse(body, read_json)
        name = data.get("model") or data.get("name")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "invalid_type", "model is not the name of a model", param="model")
        return name, data

    async def root(_: Request) -> Response:
        return PlainTextResponse("Ollama is running")  # clients compare the text

    async def version(_: Request) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION, "edgelm": __version__})

    async def tags(_: Request) -> Response:
        listed = [model for model in await models.list() if "error" not in model.known]
        return JSONResponse({"models": [_entry(model) for model in listed]})

    async def show(request: Request) -> Response:
        name, _ = await named(request)
        return JSONResponse(await _shown(name, may_name_paths(request), table, models))

    async def ps(_: Request) -> Response:
        ready = {path: slot for path, slot in table.slots.items() if slot.state == "ready"}
        listed = await models.described([slot.model for slot in ready.values()])
        remote = [_running_elsewhere(model) for model in models.remotes.models if model.state == "ready"]
        return JSONResponse({"models": [*(_running(model, ready[model.path]) for model in listed), *remote]})

    async def pull(request: Request) -> Response:
        if not may_administer(request):
            message = "pulling needs a key marked admin, or a program on the server's own machine"
            raise ApiError(403, "not_admin", message)
        name, data = await named(request)
        stack = AsyncExitStack()
        lines = _pull(models, _plain(name), paths=may_name_paths(request))
        stack.push_async_callback(lines.aclose)
        if data.get("stream") is not False:
            return EventStream(_as_lines(lines), stack, media_type=NDJSON)
        async with stack:
            try:
                return JSONResponse(await unless_client_leaves(request, _last(lines)))
            except ModelError as error:
                raise ApiError(404, "model_not_found", str(error), param="model") from None

    return [
        Route("/", root),
        Route("/api/version", version),
        Route("/api/tags", tags),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/ps", ps),
        Route("/api/pull", pull, methods=["POST"]),
    ]


def _running(model: ListedModel, slot: EngineSlot) -> dict[str, Any]:
    """Return the entry of /api/ps for a loaded model."""
    entry, info = _entry(model), slot.process.info if slot.process else None
    planned = slot.footprint
    total = planned.ram_bytes + planned.gpu_bytes if planned else entry["size"]
    on_gpu = planned.gpu_bytes if planned and info and is_partial(info.device) else total  # a part of it, or all
    left_s = FOREVER_S if math.isinf(slot.keep_alive_s) else max(slot.keep_alive_s - slot.idle_s, 0.0)
    return entry | {
        "expires_at": timestamp(time.time() + left_s),
        "size": total,
        "size_vram": on_gpu if info and info.device != "cpu" else 0,
        "context_length": info.context if info else 0,
    }


def _running_elsewhere(model: RemoteModel) -> dict[str, Any]:
    """Return the entry of /api/ps for a model that another server has loaded, as far as we know."""
    entry = _entry(remote_entry(model, model.name))
    own = {"size_vram": 0, "context_length": model.context or 0}
    return entry | {"expires_at": timestamp(time.time() + FOREVER_S)} | own


async def load_or_unload(request: Request, asked: OllamaRequest, table: EngineTable, models: ModelNames) -> Response:
    """Answer a request without a prompt: it loads its model, or with `keep_alive: 0` unloads it. Raises ApiError."""
    model = await models.find(asked.model, paths=may_name_paths(request))
    if asked.keep_alive != 0:
        await models.require_engine(model)
        async with table.lease(model, permitted_keep_alive(request, asked.keep_alive)) as slot:
            await unless_client_leaves(request, slot.ready(wait_limit_s(request)))
        return JSONResponse(loaded_reply(asked, "load"))
    if not may_administer(request):
        message = "unloading needs a key marked admin, or a program on the server's own machine"
        raise ApiError(403, "not_admin", message)
    table.release(model, 0)
    return JSONResponse(loaded_reply(asked, "unload"))


def _plain(name: str) -> str:
    return name.removesuffix(LATEST)


def _tagged(name: str) -> str:
    """Return a name as Ollama writes it: with a tag."""
    return name if ":" in name else name + LATEST


def _entry(model: ListedModel) -> dict[str, Any]:
    """Return the entry of /api/tags for one model."""
    name = _tagged(model.name)
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(model.created),
        "size": model.known.get("bytes", 0),
        # Clients tell models apart by it; the hash of gigabytes would take seconds.
        "digest": hashlib.sha256(f"{model.path} {model.known.get('bytes')} {model.created}".encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ListedModel) -> dict[str, Any]:
    known = model.known
    family = known.get("architecture", "")
    return {
        "parent_model": "",
        "format": "safetensors" if model.path.is_dir() else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _size_text(known.get("parameters", 0)),
        "quantization_level": known.get("quantization", ""),
    }


def _size_text(parameters: int) -> str:
    """Return a number of parameters: 8.0B, 135.5M."""
    for least, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= least:
            return f"{parameters / least:.1f}{unit}"
    return str(parameters)


async def _shown(name: str, paths: bool, table: EngineTable, models: ModelNames) -> dict[str, Any]:
    """Return the answer of /api/show. Raises ApiError for a file that cannot be read.

    Clients fill the context that it tells: that is the one which the model has here, not the one of its training.
    """
    model = await models.describe(name, paths=paths)
    if "remote" in model.known:
        card, context = _remote_card(model), model.known.get("context")
    else:
        local = await models.find(name, paths=paths)
        card = await models.card(local)
        context = table.context(local, card.get("context"))
    if "error" in card:
        raise ApiError(400, "model_failed", card["error"], param="model")
    info = card["model_info"].items()
    return {
        "license": card["licence"] or "",
        "modelfile": f"# made by edgelm\nFROM {_tagged(model.name)}\n",
        "parameters": f"num_ctx {context}" if context else "",
        "template": card["template"] or "",
        "details": _details(model),
        "model_info": {key: context if context and key.endswith(CONTEXT) else value for key, value in info},
        "capabilities": card["capabilities"],
        "modified_at": timestamp(model.created),
    }


def _remote_card(model: ListedModel) -> dict[str, Any]:
    """Return what clients ask of a model that another server runs: it answers, and may call tools."""
    info = {"general.architecture": "remote"}
    info |= {"remote.context_length": model.known["context"]} if "context" in model.known else {}
    return {"template": "", "licence": "", "model_info": info, "capabilities": ["completion", "tools"]}


async def _as_lines(objects: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yield lines; a failure is the last one."""
    try:
        async for one in objects:
            yield line(one)
    except EdgeLMError as error:
        yield error_event(as_api_error(error))


async def _last(objects: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async for one in objects:
        last = one
    return last


async def _pull(models: ModelNames, name: str, *, paths: bool = False) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the progress of a pull in Ollama's words. Leaving the iterator ends it. Raises EdgeLMError."""
    yield {"status": "pulling manifest"}
    if await models.has(name, paths=paths):
        yield {"status": "success"}
        return
    worker = Worker(
        PULL_WORKER, replies=EVENTS, errors=(ModelError,), keys=HUB_TOKENS, grace_s=PULL_STOP_S, command=PULL_COMMAND
    )
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    try:
        worker.send(PullJob(name))
        is_done = False
        while not is_done and (event := await worker.areceive()) is not None:
            is_done = isinstance(event, Pulled)
            yield _pull_status(event, digest)
        if not is_done:
            raise EdgeLMError(f"the pull of {name} broke off", "pull it again to continue")
    finally:
        await worker.aclose()


def _pull_status(event: Event, digest: str) -> dict[str, Any]:
    match event:
        case Listed(files=files):
            total, done = sum(file.size for file in files), sum(file.here for file in files)
        case Progress():
            total, done = event.total, event.done
        case Waiting():
            return {"status": "another process pulls it"}
        case Retrying(_, reason, wait_s):
            return {"status": f"{reason}; again in {wait_s:.0f} s"}
        case StandingIn(_, model):
            return {"status": f"the hub cannot be reached; pulling {model} in its place"}
        case Checking():
            return {"status": "verifying sha256 digest"}
        case Pulled():
            return {"status": "success"}
        case _:
            return {"status": "pulling"}
    return {"status": f"pulling {digest[7:19]}", "digest": digest, "total": total, "completed": done}
