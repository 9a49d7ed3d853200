"""One OpenAI-compatible endpoint: its models, and answers as they stream. Over the official `openai` package.

Owns the requests, what is sent to which kind of endpoint, and the reading of answers. Knows nothing of chats and
screens. `openai` is imported at the first call, on a thread: it takes half a second.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from edgelm.client.failures import StillLoadingError, explained, no_protocol
from edgelm.errors import EngineError, RequestError

if TYPE_CHECKING:
    import openai

OWN_OPTIONS = frozenset({"top_k", "min_p", "repetition_penalty"})  # not OpenAI's: sent to edgelm only
LOOPBACK = ("localhost", "127.", "[::1]", "::1")
CONNECT_S, READ_S, SHORT_S = 10.0, 900.0, 10.0


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that the endpoint offers; what is None or empty, the endpoint does not say."""

    id: str
    bytes: int | None = None
    context: int | None = None
    architecture: str = ""
    quantization: str = ""
    loaded: bool | None = None
    path: str = ""  # on the endpoint's machine


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation as it is sent: role `system`, `user` or `assistant`."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is asked for. `options` are OpenAI's names of sampling parameters, and `OWN_OPTIONS`.

    `past` is what was said before `turns` and is not for the model: an edgelm endpoint drafts from it.
    """

    model: str
    turns: tuple[Turn, ...]
    options: Mapping[str, float | int] = field(default_factory=dict)
    past: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of the answer, or of the model's reasoning before it."""

    text: str = ""
    reasoning: str = ""
    drafted: tuple[tuple[int, int], ...] = ()  # the parts of `text` that were drafted and accepted: begin, end


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """What an answer cost. None: the endpoint does not say."""

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


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer. `reason`: stop, length, context, content_filter, or what the endpoint says."""

    reason: str
    stats: AnswerStats


@dataclass(frozen=True, slots=True)
class Loading:
    """An engine that is not ready: `progress` is 0 to 1 where it is known."""

    state: str
    progress: float | None
    error: str


def normalize_address(address: str) -> str:
    """Return the base URL of an endpoint: a bare host gets http, an empty path gets /v1. Raises RequestError."""
    given = address.strip()
    if "://" not in given:
        given = f"http://{given}"
    try:
        parts = urlsplit(given)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        port_ok = False
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok or parts.query or parts.fragment:
        raise RequestError(f"{address!r} is not an endpoint", "give a URL such as http://127.0.0.1:11500")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


class Client:
    """A connection to one endpoint. Every method raises EdgeLMError; cancelling a call ends its request."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.base_url = normalize_address(address)
        self.is_edgelm = False  # until `connect` has asked
        self._api_key = api_key
        self._root = self.base_url.removesuffix("/v1")
        self._opened: openai.AsyncOpenAI | None = None
        self._wants_usage = True

    @property
    def address(self) -> str:
        """Return the address as a person would write it."""
        return self._root

    async def connect(self) -> None:
        """Find out whether the endpoint is there and is edgelm."""
        client = await self._client()
        import openai

        with explained(self.address):
            try:
                found = await client.get(f"{self._root}/edgelm/ps", cast_to=object, options={"timeout": SHORT_S})
            except openai.APIStatusError:
                self.is_edgelm = False
            else:
                self.is_edgelm = isinstance(found, dict) and "models" in found

    async def models(self) -> list[ModelEntry]:
        """Return the models that the endpoint offers."""
        client = await self._client()
        with explained(self.address):
            found: Any = await client.get("/models", cast_to=object, options={"timeout": SHORT_S, "max_retries": 1})
        # Read by hand: the package's own types fail in odd ways on what is not OpenAI's shape.
        entries = found.get("data") if isinstance(found, dict) else None
        if not isinstance(entries, list):
            raise no_protocol(self.address)
        return [_model_entry(each) for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)]

    async def loading(self, model: str) -> Loading | None:
        """Return how far the engine of a model is; None where it is ready or the endpoint does not say."""
        if not self.is_edgelm:
            return None
        client = await self._client()
        with explained(self.address):
            found: Any = await client.get(f"{self._root}/edgelm/ps", cast_to=object, options={"timeout": SHORT_S})
            for each in found.get("models", []) if isinstance(found, dict) else []:
                if each.get("model") == model and each.get("state") != "ready":
                    return Loading(str(each.get("state")), _number(each.get("progress")), str(each.get("error") or ""))
        return None

    async def chat(self, request: ChatRequest) -> AsyncIterator[Delta | Finished]:
        """Stream an answer; the last item is Finished.

        An engine that is still starting is waited for. Raises EngineError where the answer breaks off.
        """
        started = time.perf_counter()
        while True:
            try:
                async with aclosing(self._stream(request, started)) as items:
                    async for item in items:
                        yield item
                return
            except StillLoadingError as loading:
                await asyncio.sleep(loading.retry_s)
            except RequestError as error:
                if self.is_edgelm or not self._wants_usage or "stream_options" not in error.message:
                    raise
                self._wants_usage = False  # an endpoint that does not know the field: once more without it

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _stream(self, request: ChatRequest, started: float) -> AsyncGenerator[Delta | Finished, None]:
        reading = _Reading(started)
        client = await self._client()
        import openai
        from openai.types.chat import ChatCompletionChunk

        with explained(self.address, reading):
            # Not `chat.completions.create`: it walks through all messages in Python, 0.2 s for a conversation of 400.
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
            raise EngineError("the answer broke off: the endpoint closed the connection", "regenerate it")
        yield reading.finish()

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            name: value for name, value in request.options.items() if self.is_edgelm or name not in OWN_OPTIONS
        }
        body["model"] = request.model
        body["messages"] = _messages(request.turns)
        if request.past and self.is_edgelm:
            body["edgelm"] = {"past": _messages(request.past)}
        body["stream"] = True
        if self._wants_usage:
            body["stream_options"] = {"include_usage": True}
        return body

    async def _client(self) -> openai.AsyncOpenAI:
        if self._opened is None:
            self._opened = await asyncio.to_thread(self._open)
        return self._opened

    def _open(self) -> openai.AsyncOpenAI:
        import openai

        local = (urlsplit(self.base_url).hostname or "").startswith(LOOPBACK)
        client = openai.AsyncOpenAI(
            base_url=self.base_url,
            # Never the key in OPENAI_API_KEY, which is not meant for whatever endpoint this is.
            api_key=self._api_key or "none",
            max_retries=0,
            timeout=openai.Timeout(READ_S, connect=CONNECT_S),
            # A proxy of the environment has no way to this machine's own ports.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not local),
        )
        importlib.import_module("openai.types.chat")  # here, on a thread: it takes as long again
        return client


class _Reading:
    """An answer as it is read: when its tokens came, and what the endpoint says about it."""

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
        own = _mapping((chunk.model_extra or {}).get("edgelm"))
        self._own |= own
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        self.reason = choice.finish_reason or self.reason
        extra = choice.delta.model_extra or {} if choice.delta else {}
        text = _clean((choice.delta.content or "") if choice.delta else "")
        reasoning = extra.get("reasoning_content") or extra.get("reasoning") or ""
        reasoning = _clean(reasoning) if isinstance(reasoning, str) else ""
        if not text and not reasoning:
            return None
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._deltas += 1
        self.begun = True
        return Delta(text, reasoning, _spans(own, len(text)))

    def finish(self) -> Finished:
        own, usage = self._own, self._usage
        timings, speculation, context = (_mapping(own.get(name)) for name in ("timings", "speculation", "context"))
        completion = _whole(getattr(usage, "completion_tokens", None))
        prompt = _whole(getattr(usage, "prompt_tokens", None))
        measured = 1000 * (self._first - self._started) if self._first else None
        used = _whole(context.get("used"))
        if used is None and prompt is not None and completion is not None:
            used = prompt + completion
        first_token_ms = _number(timings.get("first_token_ms"))
        return Finished(
            str(own.get("finish_reason") or self.reason),
            AnswerStats(
                prompt_tokens=prompt,
                cached_tokens=_whole(own.get("cached_tokens")),
                completion_tokens=completion,
                first_token_ms=measured if first_token_ms is None else first_token_ms,
                tokens_per_second=_number(timings.get("decode_tokens_per_second")) or self._speed(completion),
                drafted=_whole(speculation.get("drafted")),
                accepted=_whole(speculation.get("accepted")),
                context_used=used,
                context_size=_whole(context.get("size")),
                engine=str(own.get("engine") or ""),
                device=str(own.get("device") or ""),
            ),
        )

    def _speed(self, completion_tokens: int | None) -> float | None:
        count, seconds = (completion_tokens or self._deltas) - 1, self._last - self._first
        return count / seconds if count > 0 and seconds > 0 else None


def _model_entry(entry: Mapping[str, Any]) -> ModelEntry:
    own = _mapping(entry.get("edgelm"))
    loaded = own.get("loaded")
    return ModelEntry(
        id=entry["id"],
        bytes=_whole(own.get("bytes")),
        context=_whole(own.get("context")) or _whole(entry.get("max_model_len")),  # vLLM's name
        architecture=str(own.get("architecture") or ""),
        quantization=str(own.get("quantization") or ""),
        loaded=loaded if isinstance(loaded, bool) else None,
        path=str(own.get("path") or ""),
    )


def _messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.text} for turn in turns]


def _spans(own: Mapping[str, Any], length: int) -> tuple[tuple[int, int], ...]:
    """Return the drafted parts of a text of this length; none where they make no sense."""
    found = own.get("drafted")
    spans: list[tuple[int, int]] = []
    for each in found if isinstance(found, list) else ():
        begin, end = each if isinstance(each, list) and len(each) == 2 else (None, None)
        if not (type(begin) is int and type(end) is int and (spans[-1][1] if spans else 0) <= begin < end <= length):
            return ()
        spans.append((begin, end))
    return tuple(spans)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _clean(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can carry and nothing else can."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text


def stats_to_json(stats: AnswerStats) -> str:
    """Return the stats as JSON without what is not known."""
    known = {name: getattr(stats, name) for name in AnswerStats.__slots__}
    return json.dumps({name: value for name, value in known.items() if value not in (None, "")})


def stats_from_json(text: str) -> AnswerStats | None:
    """Return stats that `stats_to_json` wrote, possibly of another version; None for no text."""
    known = AnswerStats.__slots__
    return AnswerStats(**{name: value for name, value in json.loads(text).items() if name in known}) if text else None
