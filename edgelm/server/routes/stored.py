"""Stored responses in the front: a turn continues a stored conversation, its response is stored, and can be read.

Owns the routes of single responses. The engine sees whole conversations only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgelm.base.errors import EdgeLMError
from edgelm.server.api.dialects import parse_request
from edgelm.server.api.errors import NO_RETRY, ApiError
from edgelm.server.api.json_body import read_json
from edgelm.server.api.responses import REFERENCE
from edgelm.server.bodies import Bodies
from edgelm.server.keys import Key
from edgelm.server.sse import EventStream
from edgelm.server.stored import MAX_RESPONSE_BYTES, ResponseStore

RESPONSES = "/v1/responses"
STORED_ROUTES = (RESPONSES, "/v1/responses/input_tokens")  # routes with the field `previous_response_id`
PAGE_LEN = 20  # input items of one answer
MAX_PAGE_LEN = 100
MAX_REFERENCES = 64  # of one request
_IN_PLACE = {"role": "user", "content": ""}  # of a reference while the other fields are checked
_LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")

# One, as the store serves one call at a time: waiting ones take no thread of the other routes.
_THREAD = ThreadPoolExecutor(1, "responses")

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """A request with the conversation that it continues."""

    body: bytes  # for the engine
    model: str
    streamed: bool
    keep_alive: float | None
    items: list[dict[str, Any]]  # its own input
    store: ResponseStore | None  # None: the client wants nothing stored
    namespace: str

    async def stored(self, response: Response) -> Response:
        """Return the response; it is stored before the client has the whole of it."""
        if self.store is None or response.status_code != 200:
            return response
        if isinstance(response, EventStream):
            without_body = replace(self, body=b"")  # the engine has it, and a stream may take long
            response.pass_through(without_body.storing)
        else:
            response.body = await self._kept(bytes(response.body))
            response.headers["content-length"] = str(len(response.body))
        return response

    async def storing(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events of the response, and store it before the last one."""
        async for some in events:
            kind = next((kind for kind in _LAST_EVENTS if kind in some), None)
            if kind is None:
                yield some
                continue
            begin = some.index(b"data: ", some.index(kind)) + len(b"data: ")
            end = some.index(b"\n\n", begin)
            yield some[:begin] + await self._kept(some[begin:end]) + some[end:]

    async def _kept(self, document: bytes) -> bytes:
        """Store a response, or that of an event, and return the document; one that is not stored says so."""
        store = self.store
        assert store
        try:
            if len(document) > MAX_RESPONSE_BYTES:
                raise EdgeLMError(f"it is too large: at most {MAX_RESPONSE_BYTES:,} bytes are allowed")
            await _in_thread(lambda: store.put(self.namespace, _response_in(json.loads(document)), self.items))
        except EdgeLMError as error:
            reason = error.message
            log.warning("a response is not stored: %s", error)
            return await _in_thread(lambda: _not_stored(document, reason))
        return document


def _response_in(document: dict[str, Any]) -> dict[str, Any]:
    """Return the response of an event, or the document itself."""
    response: dict[str, Any] = document.get("response", document)
    return response


def _not_stored(document: bytes, reason: str) -> bytes:
    """Return a response, or its event, which says that it was not stored."""
    data = json.loads(document)
    response = _response_in(data)
    more = response.get("edgelm", {})
    notes = [*more.get("notes", ()), f"this response is not stored, and its id leads to nothing: {reason}"]
    response |= {"store": False, "edgelm": more | {"notes": notes}}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def namespace_of(request: Request) -> str:
    """Return the name under which the data of a request's API key is kept."""
    key: Key | None = request.state.key
    return "" if key is None else key.cache_namespace


async def read_turn(store: ResponseStore, namespace: str, path: str, body: bytes, bodies: Bodies) -> Turn:
    """Return a checked request of a route, with stored items in place of references. Raises ApiError."""
    data: dict[str, Any] = await bodies.parse(body, read_json)
    own: Any = data.get("input")
    references = [item["id"] for item in own if _is_reference(item)] if isinstance(own, list) else []
    if len(references) > MAX_REFERENCES:
        message = f"input has {len(references):,} item references: at most {MAX_REFERENCES} are allowed"
        raise ApiError(400, "invalid_value", message, param="input")
    shown = data
    if references:  # a stored item is known to be valid
        shown = data | {"input": [_IN_PLACE if _is_reference(item) else item for item in own]}
    request = await bodies.parse(body, lambda _: parse_request(path, shown, logs_ignored=True))
    if references:
        stored = await _ask_store(store.items_of, namespace, set(references))
        if missing := [name for name in references if name not in stored]:
            raise _unknown("item", missing[0], "input")
        data["input"] = own = [stored[item["id"]] if _is_reference(item) else item for item in own]
    items = [_stored_form(item) for item in (own if isinstance(own, list) else [{"role": "user", "content": own}])]
    previous = data.get("previous_response_id")
    if previous is not None:
        earlier = await _ask_store(store.conversation, namespace, previous)
        if earlier is None:
            raise _unknown("response", previous, "previous_response_id")
        data["input"] = [*earlier, *items]
    if previous is not None or references:
        body = await _in_thread(lambda: json.dumps(data, ensure_ascii=False).encode())
    kept = store if path == RESPONSES and data.get("store") is not False else None
    return Turn(body, request.model, request.streamed, request.keep_alive, items, kept, namespace)


def stored_routes(store: ResponseStore) -> list[Route]:
    """Return the routes of single responses."""

    async def read(request: Request) -> Response:
        name = request.path_params["name"]
        if request.query_params.get("stream") == "true":
            message = "a stored response has no events: omit stream"
            raise ApiError(400, "unsupported_parameter", message, param="stream")
        response = await _ask_store(store.get, namespace_of(request), name)
        if response is None:
            raise _unknown("response", name)
        return JSONResponse(response)

    async def delete(request: Request) -> Response:
        name = request.path_params["name"]
        if not await _ask_store(store.delete, namespace_of(request), name):
            raise _unknown("response", name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def items(request: Request) -> Response:
        name, query = request.path_params["name"], request.query_params
        data = await _ask_store(store.items, namespace_of(request), name)
        if data is None:
            raise _unknown("response", name)
        if query.get("order", "desc") == "desc":
            data = data[::-1]
        if after := query.get("after"):
            ids = [item["id"] for item in data]
            data = data[ids.index(after) + 1 :] if after in ids else []
        limit = query.get("limit", str(PAGE_LEN))
        if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_PAGE_LEN:
            raise ApiError(400, "invalid_value", f"limit is not within 1 to {MAX_PAGE_LEN}", param="limit")
        page, rest = data[: int(limit)], data[int(limit) :]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return JSONResponse(
            {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": bool(rest)}
        )

    return [
        Route(RESPONSES + "/{name}/input_items", items),
        Route(RESPONSES + "/{name}", read),
        Route(RESPONSES + "/{name}", delete, methods=["DELETE"]),
    ]


async def _ask_store(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return the result of a call of the store, in a thread. Raises ApiError if the store cannot be used."""
    try:
        return await _in_thread(partial(call, *arguments, **named))
    except EdgeLMError as error:
        raise ApiError(503, "storage_failed", str(error), headers=NO_RETRY) from error


async def _in_thread(call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREAD, call)


def _is_reference(item: object) -> bool:
    """Tell whether an item of the input stands for a stored one; its type may be omitted."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return item.get("type") == REFERENCE or (item.keys() <= {"id", "type"} and item.get("type") is None)


def _stored_form(item: dict[str, Any]) -> dict[str, Any]:
    """Return an input item as it is read back: with an id, and with parts for a text."""
    role, content = item.get("role"), item.get("content")
    if role is None or item.get("type", "message") != "message":
        return item if item.get("id") else {**item, "id": f"item_{secrets.token_hex(12)}"}
    if isinstance(content, str):
        answered = {"type": "output_text", "text": content, "annotations": []}
        content = [answered if role == "assistant" else {"type": "input_text", "text": content}]
    name = item.get("id") or f"msg_{secrets.token_hex(12)}"
    return {"status": "completed", **item, "type": "message", "id": name, "content": content}


def _unknown(kind: str, name: str, param: str | None = None) -> ApiError:
    message = f"there is no stored {kind} {name[:100]}"
    return ApiError(404, f"{kind}_not_found", message, param=param)
