"""What an engine process answers, over an engine whose every token a test hands out."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import current_thread
from typing import Any, cast

import httpx2
import pytest
from starlette.types import Message

from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import BusyError, EngineError, OutOfMemoryError, RequestError
from edgelm.engine.core import Event, FinishReason, Sampled, SamplingParams, Stats
from edgelm.engine.counters import Counters
from edgelm.jobs.answer import Answerer
from edgelm.jobs.prompts import MAX_PAST_CHARS
from edgelm.server import answers as module
from edgelm.server.engine_process.app import EngineParts, engine_app
from edgelm.server.keys import CLIENT, NAMESPACE
from edgelm.text.chat import Rendered
from edgelm.text.prompt_token_cache import Prompt
from edgelm.text.template import too_long
from tests.engine.fake import info

STATS = Stats(
    prompt_tokens=3,
    cached_tokens=1,
    completion_tokens=2,
    drafted=4,
    accepted=3,
    queue_ms=1,
    prompt_ms=2,
    first_token_ms=3,
    decode_ms=4,
)
LIMIT_S = 30
SEARCH = b'<|channel|>commentary to=browser.search code<|message|>{"q": 1}<|end|><|start|>assistant'
WORDS = {1: b"one", 2: b" two", 3: b"\xe6\x97", 4: SEARCH, 5: b"<|channel|>final<|message|>Hi", 9: b""}


class FakeTokenizer:
    stop_ids = frozenset({9})
    special_strings: frozenset[str] = frozenset()
    num_tokens = 40
    bos_id = None

    def piece(self, token: int) -> bytes:
        return WORDS[token]

    def text_of(self, token: int) -> str:
        return f"<{token}>"

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        assert special == bos, "of a user's text, only a prompt has special tokens"
        if "\u2603" in text:
            raise RequestError("the vocabulary cannot write it")
        return [len(word) for word in text.split()]

    def decode(self, tokens: list[int], *, strip_prefix_space: bool = False) -> str:
        return "".join(map(str, tokens))


class FakeTemplates:
    stop_strings: tuple[str, ...] = ()
    error: RequestError | None = None
    prompt = (5, 6, 7)
    effort = ""
    stays_on = False
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def __init__(self) -> None:
        self.learnt: list[tuple[list[int], Any]] = []
        self.cache_namespace = ""

    async def template(self) -> FakeTemplates:
        return self

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> Rendered:
        return Rendered("".join(message["content"] for message in messages))

    async def render_prompt(self, messages: list[dict[str, Any]], *, cache_namespace: str, **options: Any) -> Prompt:
        self.cache_namespace = cache_namespace
        if self.error is not None:
            raise self.error
        return Prompt(list(self.prompt), Rendered("", effort=self.effort, stays_on=self.stays_on), {})

    async def cache_answer(self, prompt: Prompt, answer: list[int], message: Any) -> None:
        assert prompt.ids == list(self.prompt)
        self.learnt.append((answer, message))


Step = Event | Exception | asyncio.Event


class FakeStream:
    """Plays steps: an exception is raised, an asyncio.Event is awaited."""

    def __init__(self, steps: tuple[Step, ...], on_end: Callable[[Event], None] | None = None) -> None:
        self.steps = list(steps)
        self.on_end = on_end
        self.closed = asyncio.Event()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Event:
        while self.steps:
            step = self.steps.pop(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Event):
                if step.finish_reason and self.on_end:
                    self.on_end(step)
                return step
            await step.wait()
        raise StopAsyncIteration

    async def stop(self) -> Stats:
        self.closed.set()
        return STATS

    async def aclose(self) -> None:
        self.closed.set()


class FakeEngine:
    """Plays a script for each request: by its choice, or the last one."""

    num_requests = 2
    num_running = 1
    kv_usage = 0.5

    def __init__(self) -> None:
        self.counters = Counters()
        self.info = info(context=100)
        self.scripts: list[tuple[Step, ...]] = []
        self.streams: list[FakeStream] = []
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.options: dict[str, Any] = {}

    def submit(self, tokens: list[int], params: SamplingParams, matcher: Any = None, **options: Any) -> FakeStream:
        self.params.append(params)
        self.prompts.append(tokens)
        self.options = options
        if any(token >= self.info.num_vocab for token, _ in params.logit_bias):
            raise RequestError("logit_bias has a token id outside of the vocabulary")
        usage = options.get("usage")
        on_end = usage.begin(counts_prompt=params.choice == 0) if usage else None
        self.streams.append(FakeStream(self.scripts[min(len(self.streams), len(self.scripts) - 1)], on_end))
        return self.streams[-1]


def event(*ids: int, reason: FinishReason | None = None, logprob: float | None = None, accepted: int = 0) -> Event:
    sampled = tuple(Sampled(token, logprob) for token in ids)
    return Event(0, sampled, reason, stats=STATS if reason else None, accepted=accepted)


END = event(2, 9, reason="stop")


@pytest.fixture
def templates() -> FakeTemplates:
    return FakeTemplates()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(templates: Any, engine: Any) -> Any:
    tokenizer, grammars, prompt_tokens = [cast(Any, part) for part in (FakeTokenizer(), None, None)]
    loaded = LoadedModel("fake", engine, tokenizer, prompt_tokens)
    return engine_app(EngineParts(loaded, Answerer(loaded, templates, grammars, Settings())), "key")


@asynccontextmanager
async def client(app: Any, key: str = "key") -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"authorization": f"Bearer {key}", NAMESPACE: "of a key", CLIENT: "somebody"}
    async with (
        asyncio.timeout(LIMIT_S),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://x", headers=headers) as made,
    ):
        yield made


async def post(app: Any, engine: FakeEngine, *steps: Step, **fields: Any) -> httpx2.Response:
    """Send a chat whose answers all play these steps."""
    engine.scripts = [steps]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    async with client(app) as http:
        return await http.post("/v1/chat/completions", json=body)


def events(answer: httpx2.Response) -> list[Any]:
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    return [line if line == "data: [DONE]" or line[0] == ":" else json.loads(line[6:]) for line in lines]


async def test_a_namespace_reaches_all_that_is_kept_of_its_requests(
    app: Any, engine: FakeEngine, templates: FakeTemplates
) -> None:
    assert (await post(app, engine, END)).status_code == 200
    assert engine.options["cache_namespace"] == "of a key", "prefixes, and past answers"
    assert templates.cache_namespace == "of a key", "the tokens of prompts"
    assert engine.options["client"] == "somebody", "whose turn it is in the queue"


async def test_the_shape_of_a_whole_answer(app: Any, engine: FakeEngine, templates: FakeTemplates) -> None:
    answer = (await post(app, engine, event(1), END)).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("edgelm-")
    message = {"role": "assistant", "content": "one two", "refusal": None}
    assert answer == {
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "edgelm": {
            "finish_reason": "stop",
            "timings": {
                "queue_ms": 1,
                "prompt_ms": 2,
                "first_token_ms": 3,
                "decode_ms": 4,
                "decode_tokens_per_second": 250,
            },
            "speculation": {"drafted": 4, "accepted": 3},
            "cached_tokens": 1,
            "context": {"used": 5, "size": 100},
            "engine": info().engine,
            "device": info().device,
        },
    }
    assert templates.learnt == [([1, 2, 9], {"role": "assistant", "content": "one two"})]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize("own", [False, True])
async def test_an_effort_that_the_template_refuses_is_named(
    app: Any, engine: FakeEngine, templates: FakeTemplates, own: bool, fields: dict[str, Any]
) -> None:
    templates.effort = "xhigh"
    effort = {"reasoning_effort": "max"}
    answer = await post(app, engine, END, **({"chat_template_kwargs": effort} if own else effort), **fields)
    last = events(answer)[-2] if fields else answer.json()
    assert last["edgelm"]["notes"] == ["the model's chat template refuses the reasoning effort 'max': 'xhigh' is used"]


@pytest.mark.parametrize(
    ("rendered", "note"),
    [
        (Rendered("", effort="low"), "the effort 'low' is used"),
        (Rendered("", stays_on=True), "the model's chat template has no way"),
    ],
)
async def test_reasoning_that_cannot_be_turned_off_is_named(
    app: Any, engine: FakeEngine, templates: FakeTemplates, rendered: Rendered, note: str
) -> None:
    templates.effort, templates.stays_on = rendered.effort, rendered.stays_on
    answer = (await post(app, engine, END, reasoning_effort="none")).json()
    assert answer["edgelm"]["notes"] == [f"the reasoning cannot be turned off: {note}"]


async def test_without_tools_gpt_oss_calls_nothing(app: Any, engine: FakeEngine, templates: FakeTemplates) -> None:
    templates.source = "{# <|channel|> <|message|> <|call|> #}"
    choice = (await post(app, engine, event(4), event(5, 9, reason="stop"))).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "Hi"
    assert not choice["message"].get("tool_calls")


async def test_tokens_that_show_nothing_yet_make_no_chunk(app: Any, engine: FakeEngine) -> None:
    chunks = events(await post(app, engine, event(3), event(1), END, stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "\ufffdone"},
        {"content": " two"},
    ]
    assert chunks[-1] == "data: [DONE]"


async def test_drafted_text_is_marked(app: Any, engine: FakeEngine) -> None:
    steps = (event(1), event(2, 1, accepted=1), event(2, 9, reason="stop", accepted=2))
    whole = (await post(app, engine, *steps)).json()
    assert whole["choices"][0]["message"]["content"] == "one twoone two"
    assert whole["edgelm"]["drafted"] == [[3, 7], [10, 14]]
    chunks = events(await post(app, engine, *steps, stream=True))[1:-1]
    assert [chunk.get("edgelm", {}).get("drafted") for chunk in chunks] == [None, [[0, 4]], [[0, 4]]]
    assert chunks[-1]["edgelm"]["speculation"] == {"drafted": 4, "accepted": 3}, "it stands with the rest"
    assert "drafted" not in (await post(app, engine, END)).json()["edgelm"]


async def test_the_past_and_the_prediction_reach_the_engine_as_plain_tokens(app: Any, engine: FakeEngine) -> None:
    past = [
        {"role": "user", "content": "a bcd"},
        {"role": "assistant", "content": "\u2603"},
        {"role": "user", "content": "ef"},
    ]
    prediction = {"type": "content", "content": "abcd abcde"}
    assert (await post(app, engine, END, edgelm={"past": past}, prediction=prediction)).status_code == 200
    assert engine.options["past"] == [1, 3, 2, 4, 5], "a text that cannot be encoded is left out"
    await post(app, engine, END, prediction={"type": "content", "content": "\u2603"})
    assert engine.options["past"] == []
    await post(app, engine, END)
    assert engine.options["past"] == []


async def test_of_a_long_past_the_newest_is_read(app: Any, engine: FakeEngine) -> None:
    past = [{"role": "user", "content": text} for text in ("x" * MAX_PAST_CHARS, "ab", "c" * 5)]
    await post(app, engine, END, edgelm={"past": past})
    assert engine.options["past"] == [2, 5]


@pytest.mark.parametrize("few", [0, module.FEW_TOKENS])
async def test_log_probabilities_that_json_cannot_hold(
    app: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    threads = []
    pieces = module.json_pieces
    monkeypatch.setattr(module, "FEW_TOKENS", few)
    monkeypatch.setattr(module, "json_pieces", lambda value: threads.append(current_thread()) or pieces(value))
    first = Event(0, (Sampled(1, -math.inf, ((9, -0.5), (3, -math.inf))),))
    answer = (await post(app, engine, first, END, logprobs=True, top_logprobs=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "one",
        "logprob": -9999.0,
        "bytes": [111, 110, 101],
        "top_logprobs": [
            {"token": "<9>", "logprob": -0.5, "bytes": []},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xE6, 0x97]},
        ],
    }
    assert [entry["token"] for entry in content] == ["one", " two"], "the stop token is no part of the answer"
    assert len(threads) == (few == 0)
    assert current_thread() not in threads, "the event loop does not encode many tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BusyError("full"), 429, "queue_full"),
        (RequestError("odd"), 400, "invalid_value"),
        (EngineError("broke"), 503, "engine_died"),
        (OutOfMemoryError("used up"), 503, "out_of_memory"),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_a_failure_before_the_first_token_is_a_status(
    app: Any, engine: FakeEngine, stream: bool, error: Exception, status: int, code: str, n: int
) -> None:
    answer = await post(app, engine, error, stream=stream, n=n)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_later_failure_is_the_last_event(app: Any, engine: FakeEngine, templates: FakeTemplates) -> None:
    answer = await post(app, engine, event(1), EngineError("broke"), stream=True)
    assert answer.status_code == 200
    assert events(answer)[-1]["error"]["code"] == "engine_died"
    assert (await post(app, engine, event(1), EngineError("broke"))).status_code == 503
    assert [ids for ids, _ in templates.learnt] == [[1], [1]], "its tokens are no answer, and still a prefix"


async def test_one_failing_choice_ends_the_stream(app: Any, engine: FakeEngine) -> None:
    engine.scripts = [(event(1), asyncio.Event()), (event(1), EngineError("broke")), (event(1), asyncio.Event())]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 3, "stream": True}
    async with client(app) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert events(answer)[-1]["error"]["code"] == "engine_died"
    assert all(stream.closed.is_set() for stream in engine.streams)


async def test_several_choices_are_numbered_and_their_prompt_counts_once(app: Any, engine: FakeEngine) -> None:
    whole = (await post(app, engine, event(1), END, n=3)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in whole["choices"]} == {"one two"}
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (3, 6)
    assert [params.choice for params in engine.params] == [0, 1, 2]
    fields = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await post(app, engine, event(1), END, **fields))
    assert chunks.pop() == "data: [DONE]"
    assert chunks.pop()["usage"] == whole["usage"]
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2], "the roles come first"
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == "one two"
        assert [choice["finish_reason"] for choice in own] == [None, None, "stop"]


async def test_signs_of_life_before_a_late_first_token(
    app: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(module, "PING_S", 0.01)
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, late.set)
    shown = events(await post(app, engine, late, event(1), END, stream=True))
    assert shown[0]["choices"][0]["delta"]["role"] == "assistant"
    assert shown[1].startswith(":")
    assert shown[-2]["choices"][0]["finish_reason"] == "stop"
    late.clear()
    asyncio.get_running_loop().call_later(0.2, late.set)
    assert events(await post(app, engine, late, EngineError("broke"), stream=True))[-1]["error"]


async def test_a_prompt_that_does_not_fit(app: Any, templates: FakeTemplates, engine: FakeEngine) -> None:
    templates.prompt = (5,) * 100
    error = (await post(app, engine, END)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "has 100 tokens" in error["message"]
    assert "holds 100 tokens" in error["message"]
    templates.error = too_long(123_456)
    error = (await post(app, engine, END)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "123,456" in error["message"]
    templates.error = RequestError("the template says no")
    assert "says no" in (await post(app, engine, END)).json()["error"]["message"]


async def test_stop_strings_of_the_template_are_added(app: Any, templates: FakeTemplates, engine: FakeEngine) -> None:
    templates.stop_strings = (" two",)
    choice = (await post(app, engine, event(1), END, stop=["x"])).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")


async def test_a_bias_of_no_token_of_the_model(app: Any, engine: FakeEngine) -> None:
    last = info().num_vocab - 1
    assert (await post(app, engine, END, logit_bias={str(last): 1})).status_code == 200
    answer = await post(app, engine, END, logit_bias={str(last + 1): 1})
    assert answer.status_code == 400
    assert "logit_bias" in answer.json()["error"]["message"]


async def test_a_request_beats_a_setting_that_beats_the_models_file(engine: FakeEngine, templates: Any) -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05}
    loaded = LoadedModel("fake", cast(Any, engine), cast(Any, FakeTokenizer()), cast(Any, None), sampling=recommended)
    settings = Settings(top_k=30, top_p=0.8)
    app = engine_app(EngineParts(loaded, Answerer(loaded, templates, None, settings)), "key")
    await post(app, engine, END, top_p=0.7)
    (params,) = engine.params
    assert (params.top_p, params.top_k, params.temperature, params.min_p) == (0.7, 30, 0.6, 0.05)
    assert params.repetition_penalty == 1.05


async def test_the_settings_fill_what_a_request_omits(app: Any, engine: FakeEngine) -> None:
    await post(app, engine, END)
    await post(app, engine, END)
    one, other = engine.params
    assert (one.temperature, one.top_k, one.top_p, one.min_p) == (0.8, 40, 0.95, 0.05)
    assert one.stop_ids == {9}
    assert one.draft == "auto"
    assert one.seed != other.seed, "without a seed, each request has its own"
    await post(app, engine, END, temperature=0, seed=0, max_tokens=10**9, speculation=False)
    last = engine.params[-1]
    assert (last.temperature, last.seed, last.max_tokens, last.drafts) == (0, 0, 10**9, False)


async def test_only_the_holder_of_the_key_is_answered(app: Any) -> None:
    async with client(app) as http:
        stats = (await http.get("/stats")).json()
        assert stats["requests"] == 2
        assert stats["rss_bytes"] > 2**20
        assert (stats["running"], stats["waiting"], stats["kv_usage"]) == (1, 1, 0.5)
        assert stats["counters"]["counts"]["generation_tokens_total"] == 0
    for wrong in ("", "other", "key2"):
        async with client(app, wrong) as http:
            assert (await http.get("/stats")).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("begun", [0, 1, 2])
async def test_a_client_that_leaves_ends_its_request(
    app: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, stream: bool, n: int, begun: int
) -> None:
    """Every sequence is cancelled at once, before and after the first token, streamed or not."""
    monkeypatch.setattr(module, "PATIENCE_S", LIMIT_S)
    engine.scripts = [(*[event(1)] * begun, asyncio.Event())]
    sent = await leave(app, {"n": n, "stream": stream}, lambda: len(engine.streams) == (n if begun else 1))
    assert sent[0].get("status") == (200 if stream and begun else 499)
    assert all(stream.closed.is_set() for stream in engine.streams)


async def test_a_client_that_leaves_while_its_prompt_is_rendered(
    app: Any, engine: FakeEngine, templates: FakeTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def render_prompt(*_: Any, **__: Any) -> Prompt:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    monkeypatch.setattr(templates, "render_prompt", render_prompt)
    sent = await leave(app, {}, began.is_set)
    assert sent[0].get("status") == 499
    assert cancelled.is_set()
    assert not engine.streams


async def leave(app: Any, fields: dict[str, Any], begun: Callable[[], bool]) -> list[Message]:
    """Send a chat and leave when it has begun; return the messages of the response."""
    leaving = asyncio.Event()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    bodies = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await leaving.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer key"), (b"content-type", b"application/json")],
    }
    async with asyncio.timeout(LIMIT_S):
        answering = asyncio.create_task(app(scope, receive, send))
        while not begun():  # noqa: ASYNC110  the fakes tell only their state
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not answering.done()
        leaving.set()
        await answering
    return sent


async def test_signs_of_life_after_the_first_token(
    app: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_S", 0.02)
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, late.set)
    shown = events(await post(app, engine, event(1), late, END, stream=True))
    first, last = (
        next(index for index, chunk in enumerate(shown) if isinstance(chunk, dict) and text in json.dumps(chunk))
        for text in ('"one"', '"stop"')
    )
    assert any(isinstance(chunk, str) and chunk.startswith(":") for chunk in shown[first:last])


async def test_only_openais_count_of_tokens_names_its_kind(app: Any, templates: FakeTemplates) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with client(app) as http:
        answer = await http.post("/v1/messages/count_tokens", json={"model": "m", "messages": messages})
        assert answer.json() == {"input_tokens": len(templates.prompt)}
        answer = await http.post("/v1/responses/input_tokens", json={"model": "m", "input": "hi"})
        assert answer.json() == {"object": "response.input_tokens", "input_tokens": len(templates.prompt)}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_front_is_told_once_what_a_request_cost(app: Any, engine: FakeEngine, stream: bool) -> None:
    engine.scripts = [(event(1), event(2, reason="length"))]
    async with client(app) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": stream}
        headers = {"x-edgelm-usage": "first", "x-request-id": "mine"}
        assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        report = (await http.get("/usage/first")).json()
        assert report.pop("time_to_first_token_s") >= 0.003
        assert report == {"prompt_tokens": 3, "cached_tokens": 1, "generated_tokens": 4, "finish_reason": "length"}
        assert engine.options["usage"].request_id == "mine"
        for name in ("first", "other"):
            assert (await http.get(f"/usage/{name}")).status_code == 404
