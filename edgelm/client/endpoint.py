"""A client of one OpenAI-compatible endpoint, on the official `openai` package: its models, and streamed answers.

Owns the requests, and the differences between edgelm and other endpoints in them. Knows nothing of chats and screens.
`openai` is imported at the first call, on a thread, because that takes half a second.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from edgelm.base.errors import EdgeLMError, EngineError, RequestError, StillLoadingError
from edgelm.base.sampling import SAMPLING
from edgelm.client.addresses import is_loopback, is_same_server, normalize_address
from edgelm.client.answer_stream import AnswerStream, Delta, Finished
from edgelm.client.events import server_events
from edgelm.client.failures import detail_of, explained, no_protocol
from edgelm.client.json_values import clean_text, mapping, number, read_vectors, whole
from edgelm.client.turns import FunctionTool, SmallPictures, Turn, as_messages, may_refuse_system, with_joined_system
from edgelm.client.watching import Seen, watch

if TYPE_CHECKING:
    import ssl

    import httpx2
    import openai

# Not in OpenAI's API: sent to edgelm only.
OWN_OPTIONS = frozenset(name for name, param in SAMPLING.items() if not param.in_openai)
OPTIONAL = ("stream_options", "reasoning_content")  # fields that are omitted after an endpoint has refused them
CONNECT_S, READ_S, SHORT_S, EMBED_S = 10.0, 900.0, 10.0, 120.0
DRAIN_S = 0.25


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
    pictures: bool | None = None  # whether it reads them
    remote: str = ""  # the servers that run it, behind an edgelm endpoint


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for an answer. The keys of `options` are OpenAI's sampling parameters and `OWN_OPTIONS`.

    `past` are earlier turns that the model does not see; an edgelm endpoint takes draft tokens from them. If there are
    `choices`, an edgelm endpoint answers with one of them. With `begun`, a turn of the assistant, an edgelm endpoint
    goes on from its text, and only the new text is the answer. `num_logprobs` is the number of likeliest tokens whose
    probabilities an edgelm endpoint computes for each token. The model may call `tools`.
    """

    model: str
    turns: tuple[Turn, ...]
    options: Mapping[str, float | int | str] = field(default_factory=dict)
    past: tuple[Turn, ...] = ()
    choices: tuple[str, ...] = ()
    begun: Turn | None = None
    num_logprobs: int = 0
    tools: tuple[FunctionTool, ...] = ()
    request_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")  # in the steps of the engine


@dataclass(frozen=True, slots=True)
class Loading:
    """The state of an engine that is not ready; `progress` is 0 to 1, None if unknown."""

    state: str
    progress: float | None
    error: str
    doing: str = ""  # beside reading weights


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
        self._paths: dict[str, str] = {}  # of models that are asked for by another name than their engines have
        self._takes_late_system = True
        self._pictures = SmallPictures()

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

    async def knows(self, model: str) -> bool:
        """Return whether an edgelm endpoint has a model by this name."""
        return await self.described(model) is not None

    async def described(self, model: str) -> ModelEntry | None:
        """Return what an edgelm endpoint tells of a model, also by a path or a name that it does not list."""
        if not self.is_edgelm:
            return None
        client = await self._client()
        import openai

        with explained(self.address):
            try:
                body: Any = await client.get(
                    f"/models/{quote(model, safe='')}", cast_to=object, options={"timeout": SHORT_S}
                )
            except openai.NotFoundError:
                return None
        return _model_entry({**mapping(body), "id": model})

    async def loading(self, model: str) -> Loading | None:
        """Return the loading state of a model's engine; None if it is ready or the endpoint does not report it."""
        item = await self._engine(model)
        if item.get("state", "ready") == "ready":
            return None
        doing = str(item.get("doing") or "")
        return Loading(str(item["state"]), number(item.get("progress")), str(item.get("error") or ""), doing)

    async def context(self, model: str) -> int | None:
        """Return the context size of a model's engine; None if it is not loaded or the endpoint does not report it."""
        return whole((await self._engine(model)).get("context"))

    async def unused_gpu(self, model: str) -> str:
        """Return the line about a GPU that a model's engine does not use; empty: there is no such GPU."""
        line = (await self._engine(model)).get("unused_gpu")
        return line if isinstance(line, str) else ""

    async def is_idle(self, model: str) -> bool:
        """Return whether an edgelm endpoint has a model loaded and no engine of it works on a request."""
        engines = await self._engines()
        is_loaded = (await self._of(model, engines)).get("state") == "ready"
        return is_loaded and not any(engine.get("requests") for engine in engines)

    async def _engine(self, model: str) -> dict[str, Any]:
        """Return the state of a model's engine; empty where there is none or the endpoint is not edgelm."""
        return await self._of(model, await self._engines())

    async def _of(self, model: str, engines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the engine of a model, which may be asked for by its path or an alias; empty: there is none."""
        if not engines:
            return {}
        if (named := next((engine for engine in engines if engine.get("model") == model), None)) is not None:
            return named
        if model not in self._paths:
            try:
                entry = await self.described(model)
            except EdgeLMError:
                return {}
            if entry is None:
                return {}
            self._paths[model] = entry.path
        path = self._paths[model]
        return next((engine for engine in engines if path and engine.get("path") == path), {})

    async def _engines(self) -> list[dict[str, Any]]:
        """Return the states of all engines; empty where the endpoint is not edgelm."""
        if not self.is_edgelm:
            return []
        client = await self._client()
        with explained(self.address):
            body: Any = await client.get(f"{self._root}/edgelm/ps", cast_to=object, options={"timeout": SHORT_S})
        items = mapping(body).get("models")
        return list(map(mapping, items if isinstance(items, list) else ()))

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

    async def answer_at_once(self, request: ChatRequest) -> dict[str, Any]:
        """Return a whole answer in OpenAI's form."""
        return await self._post(f"{self.base_url}/chat/completions", self._body(request), READ_S)

    async def post_own(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of one of edgelm's own paths, such as /tokenize."""
        return await self._post(f"{self._root}{path}", body, READ_S)

    async def _post(self, url: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        client = await self._client()
        headers = {"Prefer": "wait"} if self.is_edgelm else {}
        with explained(self.address):
            reply: Any = await client.post(
                url, body=body, cast_to=object, options={"timeout": timeout_s, "headers": headers}
            )
        return mapping(reply)

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """Return the vector of each text."""
        reply = await self._post(f"{self.base_url}/embeddings", {"model": model, "input": list(texts)}, EMBED_S)
        if (vectors := read_vectors(reply, len(texts))) is None:
            raise no_protocol(self.address)
        return vectors

    def watch(self, model: str | None) -> AsyncGenerator[Seen, None]:
        """Yield the steps of a model's engine as they happen; None: of the first that is loaded."""
        headers = {"authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        return watch(self._root, headers, self._verify, model)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _stream(self, request: ChatRequest, started: float) -> AsyncGenerator[Delta | Finished, None]:
        reading = AnswerStream(started, tags=not self.is_edgelm)
        if any(turn.images for turn in (*request.turns, *request.past)):
            turns, past = await asyncio.to_thread(lambda: [*map(self._pictures.apply, (request.turns, request.past))])
            request = replace(request, turns=turns, past=past)
        client = await self._client()
        import openai

        with explained(self.address, reading):
            # `chat.completions.create` walks all messages in Python: 0.2 s for a conversation of 400.
            async with await client.post(
                "/chat/completions",
                body=self._body(request) | self._stream_options(),
                options={"headers": {"Prefer": "wait", "X-Request-Id": request.request_id}} if self.is_edgelm else {},
                cast_to=object,
                stream=True,
                stream_cls=openai.AsyncStream[object],
            ) as stream:
                # Its own reader knows neither the byte order mark nor events without data.
                received = stream.response.aiter_bytes()
                async with aclosing(server_events(received)) as events:
                    async for event in events:
                        if event.data.startswith("[DONE]"):
                            await _drain(received)
                            break
                        chunk = mapping(json.loads(event.data))
                        if error := chunk.get("error"):
                            raise openai.APIError(detail_of(error), stream.response.request, body=error)
                        if (delta := reading.take(chunk)) is not None:
                            yield delta
        if (rest := reading.rest()) is not None:
            yield rest
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
        if request.begun and self.is_edgelm:
            turns = (*turns, request.begun)
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        body["messages"] = as_messages(turns, with_reasoning)
        if request.past and self.is_edgelm:
            body["edgelm"] = {"past": as_messages(request.past, with_reasoning)}
        if request.choices and self.is_edgelm:
            body["structured_outputs"] = {"choice": request.choices}
        if request.tools:
            body["tools"] = [tool.as_json() for tool in request.tools]
        if request.num_logprobs and self.is_edgelm:
            body |= {"logprobs": True, "top_logprobs": request.num_logprobs}
        return body

    def _stream_options(self) -> dict[str, Any]:
        usage = {} if "stream_options" in self._refused else {"stream_options": {"include_usage": True}}
        return {"stream": True, **usage}

    async def _client(self) -> openai.AsyncOpenAI:
        if self._opened is None:
            self._opened = await asyncio.to_thread(self._open)
        return self._opened

    def _open(self) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(
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


async def _drain(received: AsyncIterator[bytes]) -> None:
    """Read the end of an answer, so that its connection can be used again."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in received:
                pass


async def _check_redirect(response: httpx2.Response) -> None:
    """Raise RequestError for a redirect to another server: the user has not said that the conversation may go there."""
    if response.has_redirect_location:
        url = response.request.url
        target = url.join(response.headers["location"])
        if not is_same_server(str(url), str(target)):
            origins = [f"{place.scheme}://{place.netloc.decode()}" for place in (url, target)]
            raise RequestError(" redirects to ".join(origins), "give that address with --endpoint")


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
        pictures=pictures if isinstance(pictures := own.get("pictures"), bool) else None,
        remote=clean_text(remote) if isinstance(remote := own.get("remote"), str) else "",
    )
