"""The client of GET /edgelm/events: an engine's steps and KV cache, read from server-sent events.

Owns their form on this side. Unknown events and fields are skipped: a newer server may send more. Knows nothing of how
they are shown.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgelm.base.errors import EdgeLMError, EngineError
from edgelm.client.addresses import is_loopback
from edgelm.client.events import server_events
from edgelm.client.json_values import clean_text, mapping, number, whole

if TYPE_CHECKING:
    import ssl

CONNECT_S, SILENT_S = 10.0, 30.0  # an idle server sends a comment every 10 s


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """The engine that is watched from now on."""

    model: str
    engine: str
    device: str
    context: int
    capacity: int  # positions of the KV cache
    slots: int
    kv_bytes_per_token: int
    weights_bytes: int  # 0: not known


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer; a probability is 0 to 1, None where the request did not ask for it."""

    text: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()  # texts and log-probabilities, the likeliest first


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a step that belongs to one request. `tokens` are empty for requests of other keys."""

    sequence: int
    prompt: int
    cached: int
    start: int
    computed: int
    drafted: int
    forced: int
    accepted: int
    new: int
    request_id: str = ""
    finish_reason: str = ""
    drafted_by: str = ""  # ngram, mtp or model; empty: no draft, or an older server, which does not say
    tokens: tuple[Token, ...] = ()

    @property
    def is_prompt(self) -> bool:
        """Whether the step read a part of the prompt."""
        return self.computed - self.drafted > 1

    @property
    def num_read(self) -> int:
        """The positions that are computed after the step, without a draft that was refused."""
        return self.start + self.computed - self.drafted + self.accepted


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One step of the engine."""

    number: int
    at_s: float  # when it ended, of the server's clock
    step_ms: float
    running: int
    waiting: int
    chunks: tuple[Chunk, ...]

    @property
    def num_new(self) -> int:
        return sum(chunk.new for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the KV cache, or a saved state. `sequence`: of a running request of the watcher's own key."""

    kind: str  # in the cache: running, idle, shared; in memory: snapshot, shared_snapshot; on disk: file
    tokens: int
    bytes: int
    own: bool
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class KVSeen:
    """The KV cache."""

    usage: float
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class LostSeen:
    """So many events were lost, because the watcher was slow."""

    events: int


@dataclass(frozen=True, slots=True)
class IdleSeen:
    """No engine is loaded."""


Seen = EngineSeen | StepSeen | KVSeen | LostSeen | IdleSeen


async def watch(
    address: str, headers: dict[str, str], verify: ssl.SSLContext | bool, model: str | None = None
) -> AsyncGenerator[Seen, None]:
    """Yield the events of the server at an address until it ends. Raises EdgeLMError."""
    import httpx2

    timeout = httpx2.Timeout(SILENT_S, connect=CONNECT_S)
    query = {"model": model} if model else {}
    try:
        async with (
            httpx2.AsyncClient(
                headers=headers, verify=verify, timeout=timeout, trust_env=not is_loopback(address)
            ) as client,
            client.stream("GET", f"{address}/edgelm/events", params=query) as answer,
        ):
            if answer.status_code != 200:
                raise refusal(answer.status_code, address, await answer.aread())
            async with aclosing(server_events(answer.aiter_bytes())) as events:
                async for event in events:
                    if (seen := read_event(event.name, event.data)) is not None:
                        yield seen
    except (httpx2.HTTPError, UnicodeDecodeError) as error:
        reason = str(error) or type(error).__name__
        raise EngineError(f"the connection to {address} broke: {reason}", "start the server again") from None


def refusal(status: int, address: str, body: bytes) -> EdgeLMError:
    """Return the error for an answer that is no stream of events."""
    if status in (401, 403):
        return EdgeLMError(f"the server at {address} refuses the key", "give the right --api-key, or EDGELM_API_KEY")
    try:
        message = _str(mapping(mapping(json.loads(body)).get("error")), "message")
    except ValueError:
        message = ""
    if message:
        return EdgeLMError(f"the server at {address}: {message}")
    return EdgeLMError(f"{address} answers {status}: is it an edgelm server of this version?")


def read_event(name: str, data: str) -> Seen | None:
    """Return an event; None: it is unknown or malformed."""
    try:
        document = mapping(json.loads(data))
    except ValueError:
        return None
    if name == "step":
        chunks = document.get("chunks")
        return StepSeen(
            _int(document, "step"),
            number(document.get("at")) or 0.0,
            number(document.get("ms")) or 0.0,
            _int(document, "running"),
            _int(document, "waiting"),
            tuple(_chunk(mapping(chunk)) for chunk in (chunks if isinstance(chunks, list) else ())),
        )
    if name == "kv":
        own = [_region(mapping(region), own=True) for region in _list(document, "regions")]
        others = [_region(mapping(region), own=False) for region in _list(document, "others")]
        return KVSeen(number(document.get("usage")) or 0.0, (*own, *others))
    if name == "engine":
        return EngineSeen(
            model=_str(document, "model"),
            engine=_str(document, "engine"),
            device=_str(document, "device"),
            context=_int(document, "context"),
            capacity=_int(document, "capacity"),
            slots=_int(document, "slots"),
            kv_bytes_per_token=_int(document, "kv_bytes_per_token"),
            weights_bytes=_int(document, "weights_bytes"),
        )
    if name == "lost":
        return LostSeen(_int(document, "records"))
    return IdleSeen() if name == "idle" else None


def _chunk(document: dict[str, Any]) -> Chunk:
    return Chunk(
        sequence=_int(document, "sequence"),
        prompt=_int(document, "prompt"),
        cached=_int(document, "cached"),
        start=_int(document, "start"),
        computed=_int(document, "computed"),
        drafted=_int(document, "drafted"),
        forced=_int(document, "forced"),
        accepted=_int(document, "accepted"),
        new=_int(document, "new"),
        request_id=_str(document, "request_id"),
        finish_reason=_str(document, "finish_reason"),
        drafted_by=_str(document, "drafted_by"),
        tokens=tuple(_token(mapping(token)) for token in _list(document, "tokens")),
    )


def _token(document: dict[str, Any]) -> Token:
    top = [(_str(mapping(one), "text"), number(mapping(one).get("logprob")) or 0.0) for one in _list(document, "top")]
    return Token(_str(document, "text"), number(document.get("logprob")), tuple(top))


def _region(document: dict[str, Any], *, own: bool) -> Region:
    kind, sequence = _str(document, "kind"), whole(document.get("sequence"))
    return Region(kind, _int(document, "tokens"), _int(document, "bytes"), own, sequence)


def _int(document: dict[str, Any], name: str) -> int:
    return whole(document.get(name)) or 0


def _list(document: dict[str, Any], name: str) -> list[Any]:
    value = document.get(name)
    return value if isinstance(value, list) else []


def _str(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    return clean_text(value) if isinstance(value, str) else ""
