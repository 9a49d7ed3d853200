"""GET /events of an engine process: its steps and its KV cache as server-sent events.

Owns the form of the events, and the rule of privacy: a key sees counts of all requests, but texts, tokens and
probabilities only of its own. Knows nothing of how records are made.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgelm.backends.model import LoadedModel
from edgelm.engine.core import KVRegion, Sampled
from edgelm.engine.watch import ChunkRecord, KVRecord, Record, StepRecord, Watcher
from edgelm.server.api.logprobs import finite, token_text
from edgelm.server.keys import NAMESPACE
from edgelm.server.sse import PING, PING_S, EventStream, named_event
from edgelm.text.tokenizer import Tokenizer

BATCH_S = 0.25  # between two writes: a write for each step would cost more than the events


def event_routes(loaded: LoadedModel) -> list[Route]:
    """Return the route."""

    async def events(request: Request) -> Response:
        stack = AsyncExitStack()
        watcher = loaded.engine.watch()
        stack.callback(watcher.close)
        name = request.query_params.get("model", loaded.name)
        return EventStream(_events(watcher, loaded, name, request.headers.get(NAMESPACE, "")), stack)

    return [Route("/events", events)]


async def _events(watcher: Watcher, loaded: LoadedModel, name: str, namespace: str) -> AsyncIterator[bytes]:
    yield named_event("engine", engine_document(loaded, name))
    form = EventForm(loaded.tokenizer, namespace)
    while True:
        try:
            async with asyncio.timeout(PING_S):
                num_lost, records = await watcher.take()
        except TimeoutError:
            yield PING
            continue
        lost = named_event("lost", {"records": num_lost}) if num_lost else b""
        yield lost + b"".join(map(form.event, records))
        await asyncio.sleep(BATCH_S)


def engine_document(loaded: LoadedModel, name: str) -> dict[str, Any]:
    """Return the facts that do not change while an engine lives; `name` is that of the model for clients."""
    info, footprint = loaded.engine.info, loaded.footprint
    return {
        "model": name,
        "engine": info.engine,
        "device": info.device,
        "context": info.context,
        "capacity": info.capacity,
        "slots": info.max_sequences,
        "step_tokens": info.max_tokens,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "weights_bytes": footprint.weights_bytes if footprint else 0,
    }


@dataclass(frozen=True, slots=True)
class EventForm:
    """The events for one key, whose cache namespace is `namespace`."""

    tokenizer: Tokenizer
    namespace: str

    def event(self, record: Record) -> bytes:
        """Return the event of a record."""
        if isinstance(record, StepRecord):
            return named_event("step", self._step(record))
        return named_event("kv", self._kv(record))

    def _step(self, record: StepRecord) -> dict[str, Any]:
        return {
            "step": record.number,
            "at": round(record.at_s, 4),
            "ms": round(1000 * record.step_s, 3),
            "running": record.num_running,
            "waiting": record.num_waiting,
            "chunks": [self._chunk(chunk) for chunk in record.chunks],
        }

    def _chunk(self, chunk: ChunkRecord) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "sequence": chunk.seq_id,
            "prompt": chunk.prompt_len,
            "cached": chunk.cached,
            "start": chunk.start,
            "computed": chunk.num_tokens,
            "drafted": chunk.drafted,
            "forced": chunk.forced,
            "accepted": chunk.accepted,
            "new": len(chunk.sampled),
        }
        if chunk.drafted_by:
            counts["drafted_by"] = chunk.drafted_by
        end = {"finish_reason": chunk.finish_reason} if chunk.finish_reason else {}
        if chunk.cache_namespace != self.namespace:
            return counts | end
        tokens = [self._token(sample) for sample in chunk.sampled]
        return counts | end | {"request_id": chunk.request_id, "tokens": tokens}

    def _token(self, sample: Sampled) -> dict[str, Any]:
        token = {"id": sample.id, "text": self._text(sample.id)}
        if sample.logprob is None:
            return token
        top = [{"id": other, "text": self._text(other), "logprob": finite(value)} for other, value in sample.top]
        return token | {"logprob": finite(sample.logprob), "top": top}

    def _text(self, token: int) -> str:
        return token_text(self.tokenizer, token)

    def _kv(self, record: KVRecord) -> dict[str, Any]:
        """Return the regions of this key one by one, and the sums of the others'."""
        own = [region for region in record.regions if region.cache_namespace == self.namespace]
        others: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for region in record.regions:
            if region.cache_namespace != self.namespace:
                others[region.kind] += region.num_tokens
                nbytes[region.kind] += region.nbytes
        return {
            "at": round(record.at_s, 4),
            "usage": round(record.usage, 4),
            "regions": [_region(region) for region in own],
            "others": [{"kind": kind, "tokens": tokens, "bytes": nbytes[kind]} for kind, tokens in others.items()],
        }


def _region(region: KVRegion) -> dict[str, Any]:
    sequence = {} if region.seq_id is None else {"sequence": region.seq_id}
    return {"kind": region.kind, "tokens": region.num_tokens, "bytes": region.nbytes} | sequence
