"""A client of one OpenAI-compatible endpoint, on the official `openai` package: its models, and streamed answers.

Owns the requests, the differences between edgelm and other endpoints, and the reading of answers. Knows nothing of
chats and screens. `openai` is imported at the first call, on a thread, because that takes half a second.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgelm.client.addresses import is_loopback, is_same_server, normalize_address
from edgelm.client.failures import explained, no_protocol
from edgelm.client.json_values import clean_text, mapping, number, read_vectors, whole
from edgelm.client.turns import Turn, as_messages, may_refuse_system, with_joined_system
from edgelm.errors import EngineError, RequestError, StillLoadingError

if TYPE_CHECKING:
    import ssl

    import httpx2
    import openai

OWN_OPTIONS = frozenset({"top_k", "min_p", "repetition_penalty"})  # not in OpenAI's API: sent to edgelm only
OPTIONAL = ("stream_options", "reasoning_content")  # fields that are omitted after an endpoint has refused them
CONNECT_S, READ_S, SHORT_S, EMBED_S = 10.0, 900.0, 10.0, 120.0


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that the endpoint offers. A field is None or empty if the endpoint does not report it."""

    id: str
    bytes: int | None = None
    context: int | None = None
    architecture: str = ""
    quantization: str = ""
    loaded: bool | None = None
    path: str = ""  # on the endpoint's machine
    kind: str = ""  # text, embedding or rerank


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for an answer. The keys of `options` are OpenAI's sampling parameters and `OWN_OPTIONS`.

    `past` are earlier turns that the model does not see; an edgelm endpoint takes draft tokens from them. If there are
    `choices`, an edgelm endpoint answers with one of them.
    """

    model: str
    turns: tuple[Turn, ...]
    options: Mapping[str, float | int | str] = field(default_factory=dict)
    past: tuple[Turn, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of the answer, or of the reasoning before it."""

    text: str = ""
    reasoning: str = ""
    drafted: tuple[tuple[int, int], ...] = ()  # spans of `text` from accepted draft tokens: begin, end


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Statistics of an answer. None: the endpoint does not report it. `reasoning_ms` is measured by the caller."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_ms: float | None = None
    tokens_per_second: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    context_used: int | None = None
    context_size: int | None = None
    engine: str = ""
    device: str = ""
    reasoning_ms: float | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer. `reason`: stop, length, context, content_filter, or the endpoint's own."""

    reason: str
    stats: AnswerStats


@dataclass(frozen=True, slots=True)
class Loading:
    """The state of an engine that is not ready; `progress` is 0 to 1, None if unknown."""

    state: str
    progress: float | None
    error: str


class Client:
    """A connection to one endpoint. Every method raises EdgeLMError; cancelling a call ends its request."""

    def __init__(self, address: str, api_key: str | None = None, *, verify: ssl.SSLContext | bool = True) -> None:
        self.base_url = normalize_address(address)
        self.is_edgelm = False  # set by `connect`
        self._api_key = api_key
        self._verify = verify  # as httpx2 has it
        self._root = self.base_url.removesuffix("/v1")
        self._opened: openai.AsyncOpenAI | None = None
        self._refused: set[str] = set()  # those of `OPTIONAL`
        self._takes_late_system = True

    @property
    def address(self) -> str:
        """The address as a person would write it."""
        return self._root

    async def connect(self) -> None:
        """Find out whether the endpoint answers, and whether it is edgelm."""
        client = await self._client()
        import openai

        with explained(self.address):
            try:
                state = await client.get(f"{self._root}/edgelm/ps", cast_to=object, options={"timeout": SHORT_S})
            except openai.APIStatusError:
                self.is_edgelm = False
            else:
                self.is_edgelm = isinstance(state, dict) and "models" in state

    async def models(self) -> list[ModelEntry]:
        """Return the models that the endpoint offers."""
        client = await self._client()
        with explained(self.address):
            body: Any = await client.get("/models", cast_to=object, options={"timeout": SHORT_S, "max_retries": 1})
        # Parsed by hand: the package's own types fail in odd ways on answers that do not have OpenAI's shape.
        entries = body.get("data") if isinstance(body, dict) else None
        if not isinstance(entries, list):
            raise no_protocol(self.address)
        return [_model_entry(item) for item in entries if isinstance(item, dict) and isinstance(item.get("id"), str)]

    async def loading(self, model: str) -> Loading | None:
        """Return the loading state of a model's engine; None if it is ready or the endpoint does not report it."""
        item = await self._engine(model)
        if item.get("state", "ready") == "ready":
            return None
        return Loading(str(item["state"]), number(item.get("progress")), str(item.get("error") or ""))

    async def context(self, model: str) -> int | None:
        """Return the context size of a model's engine; None if it is not loaded or the endpoint does not report it."""
        return whole((await self._engine(model)).get("context"))

    async def _engine(self, model: str) -> dict[str, Any]:
        """Return the state of a model's engine; empty where there is none or the endpoint is not edgelm."""
        if not self.is_edgelm:
            return {}
        client = await self._client()
        with explained(self.address):
            body: Any = await client.get(f"{self._root}/edgelm/ps", cast_to=object, options={"timeout": SHORT_S})
        items = mapping(body).get("models")
        engines = map(mapping, items if isinstance(items, list) else ())
        return next((engine for engine in engines if engine.get("model") == model), {})

    async def chat(self, request: ChatRequest) -> AsyncIterator[Delta | Finished]:
        """Stream an answer; the last item is Finished.

        Waits for an engine that is still starting. Raises EngineError if the answer is cut off.
        """
        started = time.perf_counter()
        joined = False  # tried with late system turns in the user's
        while True:
            try:
                async with aclosing(self._stream(request, started)) as items:
                    async for item in items:
                        yield item
                return
            except StillLoadingError as loading:
                await asyncio.sleep(loading.retry_after_s or 0.0)
            except (RequestError, EngineError) as error:
                refused = {name for name in OPTIONAL if name in error.message} - self._refused
                if refused and isinstance(error, RequestError):
                    self._refused |= refused  # retry without them
                elif self._takes_late_system and may_refuse_system(error, request.turns):
                    self._takes_late_system, joined = False, True
                else:
                    self._takes_late_system |= joined  # that was not the reason
                    raise

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """Return the vector of each text."""
        client = await self._client()
        body = {"model": model, "input": list(texts)}
        with explained(self.address):
            reply = await client.post("/embeddings", body=body, cast_to=object, options={"timeout": EMBED_S})
        if (vectors := read_vectors(reply, len(texts))) is None:
            raise no_protocol(self.address)
        return vectors

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _stream(self, request: ChatRequest, started: float) -> AsyncGenerator[Delta | Finished, None]:
        reading = _Reading(started)
        client = await self._client()
        import openai
        from openai.types.chat import ChatCompletionChunk

        with explained(self.address, reading):
            # `chat.completions.create` walks all messages in Python: 0.2 s for a conversation of 400.
            async with await client.post(
                "/chat/completions",
                body=self._body(request),
                options={"headers": {"Prefer": "wait"}} if self.is_edgelm else {},
                cast_to=ChatCompletionChunk,
                stream=True,
                stream_cls=openai.AsyncStream[ChatCompletionChunk],
            ) as stream:
                async for chunk in stream:
                    delta = reading.take(chunk)
                    if delta is not None:
                        yield delta
        if not reading.chunks:
            raise no_protocol(self.address)
        if reading.reason is None:
            raise EngineError(f"the connection to {self.address} broke", "regenerate the answer")
        yield reading.finish()

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            name: value for name, value in request.options.items() if self.is_edgelm or name not in OWN_OPTIONS
        }
        body["model"] = request.model
        with_reasoning = self.is_edgelm and "reasoning_content" not in self._refused
        turns = request.turns if self._takes_late_system else with_joined_system(request.turns)
        body["messages"] = as_messages(turns, with_reasoning)
        if request.past and self.is_edgelm:
            body["edgelm"] = {"past": as_messages(request.past, with_reasoning)}
        if request.choices and self.is_edgelm:
            body["structured_outputs"] = {"choice": request.choices}
        body["stream"] = True
        if "stream_options" not in self._refused:
            body["stream_options"] = {"include_usage": True}
        return body

    async def _client(self) -> openai.AsyncOpenAI:
        if self._opened is None:
            self._opened = await asyncio.to_thread(self._open)
        return self._opened

    def _open(self) -> openai.AsyncOpenAI:
        import openai

        client = openai.AsyncOpenAI(
            base_url=self.base_url,
            # Never the key in OPENAI_API_KEY: it is not meant for this endpoint.
            api_key=self._api_key or "none",
            max_retries=0,
            timeout=openai.Timeout(READ_S, connect=CONNECT_S),
            # A proxy from the environment cannot reach this machine's own ports.
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=not is_loopback(self.base_url),
                verify=self._verify,
                event_hooks={"response": [_check_redirect]},
            ),
        )
        importlib.import_module("openai.types.chat")  # here on the thread: it takes another half second
        return client


async def _check_redirect(response: httpx2.Response) -> None:
    """Raise RequestError for a redirect to another server: the user has not said that the conversation may go there."""
    if response.has_redirect_location:
        url = response.request.url
        target = url.join(response.headers["location"])
        if not is_same_server(str(url), str(target)):
            origins = [f"{place.scheme}://{place.netloc.decode()}" for place in (url, target)]
            raise RequestError(" redirects to ".join(origins), "give that address with --endpoint")


class _Reading:
    """An answer while it is read: the times of its tokens, and the endpoint's own statistics."""

    def __init__(self, started: float) -> None:
        self.reason: str | None = None
        self.begun = False
        self.chunks = 0
        self._started = started
        self._first = self._last = 0.0
        self._deltas = 0
        self._usage: Any = None
        self._own: dict[str, Any] = {}

    def take(self, chunk: Any) -> Delta | None:
        self.chunks += 1
        own = mapping((chunk.model_extra or {}).get("edgelm"))
        self._own |= own
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        self.reason = choice.finish_reason or self.reason
        extra = choice.delta.model_extra or {} if choice.delta else {}
        text = clean_text((choice.delta.content or "") if choice.delta else "")
        reasoning = clean_text(_reasoning(extra))
        if not text and not reasoning:
            return None
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._deltas += 1
        self.begun = True
        return Delta(text, reasoning, _spans(own, len(text)))

    def finish(self) -> Finished:
        own, usage = self._own, self._usage
        timings, speculation, context = (mapping(own.get(name)) for name in ("timings", "speculation", "context"))
        completion = whole(getattr(usage, "completion_tokens", None))
        prompt = whole(getattr(usage, "prompt_tokens", None))
        measured = 1000 * (self._first - self._started) if self._first else None
        used = whole(context.get("used"))
        if used is None and prompt is not None and completion is not None:
            used = prompt + completion
        first_token_ms = number(timings.get("first_token_ms"))
        details = getattr(usage, "completion_tokens_details", None)
        return Finished(
            str(own.get("finish_reason") or self.reason),
            AnswerStats(
                prompt_tokens=prompt,
                cached_tokens=whole(own.get("cached_tokens")),
                completion_tokens=completion,
                first_token_ms=measured if first_token_ms is None else first_token_ms,
                tokens_per_second=number(timings.get("decode_tokens_per_second")) or self._speed(completion),
                drafted=whole(speculation.get("drafted")),
                accepted=whole(speculation.get("accepted")),
                context_used=used,
                context_size=whole(context.get("size")),
                engine=str(own.get("engine") or ""),
                device=str(own.get("device") or ""),
                reasoning_tokens=whole(getattr(details, "reasoning_tokens", None)) or None,
            ),
        )

    def _speed(self, completion_tokens: int | None) -> float | None:
        count, seconds = (completion_tokens or self._deltas) - 1, self._last - self._first
        return count / seconds if count > 0 and seconds > 0 else None


def _model_entry(entry: Mapping[str, Any]) -> ModelEntry:
    own = mapping(entry.get("edgelm"))
    loaded = own.get("loaded")
    return ModelEntry(
        id=entry["id"],
        bytes=whole(own.get("bytes")),
        context=whole(own.get("context")) or whole(entry.get("max_model_len")),  # vLLM's name
        architecture=str(own.get("architecture") or ""),
        quantization=str(own.get("quantization") or ""),
        loaded=loaded if isinstance(loaded, bool) else None,
        path=str(own.get("path") or ""),
        kind=str(own.get("kind") or ""),
    )


def _reasoning(delta: Mapping[str, Any]) -> str:
    """Return the reasoning of a delta: endpoints use one of two names, or both with equal text."""
    texts = (delta.get(name) for name in ("reasoning_content", "reasoning"))
    return next((text for text in texts if isinstance(text, str) and text), "")


def _spans(own: Mapping[str, Any], length: int) -> tuple[tuple[int, int], ...]:
    """Return the drafted spans of a text of this length; none if they are not valid."""
    items = own.get("drafted")
    spans: list[tuple[int, int]] = []
    for item in items if isinstance(items, list) else ():
        begin, end = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not (type(begin) is int and type(end) is int and (spans[-1][1] if spans else 0) <= begin < end <= length):
            return ()
        spans.append((begin, end))
    return tuple(spans)


def stats_to_json(stats: AnswerStats) -> str:
    """Return the stats as JSON, without unknown values."""
    values = {name: getattr(stats, name) for name in AnswerStats.__slots__}
    return json.dumps({name: value for name, value in values.items() if value not in (None, "")})


def stats_from_json(text: str) -> AnswerStats | None:
    """Parse stats that `stats_to_json` wrote, possibly in another version; None for an empty text."""
    names = AnswerStats.__slots__
    return AnswerStats(**{name: value for name, value in json.loads(text).items() if name in names}) if text else None
