"""Recorded sessions of agents, sent again: every request is accepted, and the SDKs' own parsers understand the answers.

record.py made the fixtures. The model is scripted, so the answers are known: it reasons, calls two of the agent's own
tools, and answers; the last request of a recording has an answer that does not end by itself.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from tests.clients.scripted import ANSWER, ENDLESS, TALK, THOUGHT, Call, write_scripted
from tests.served import loaded_model, served

if TYPE_CHECKING:  # a second, in each process that collects tests
    import anthropic

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.json"))
CONTEXT = 32_768
LIMIT = 24  # tokens of an answer that would not end


@dataclass(slots=True)
class Answer:
    """An answer as a client's parser has read it."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    cached: int = 0
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Client:
    """The SDKs, over one connection to the server."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """Send a body as it is; read the answer with the parser of the API's own SDK."""
        route = path.partition("?")[0].removeprefix("/v1")
        match route:
            case "/chat/completions":
                return await self._chat(body)
            case "/responses":
                return await self._responses(body)
            case "/messages":
                return await self._messages(body)
        raise AssertionError(f"no parser for {path}")

    async def _chat(self, body: dict[str, Any]) -> Answer:
        if not body.get("stream"):
            done = await self.openai.post("/chat/completions", body=body, cast_to=ChatCompletion)
        else:
            state = ChatCompletionStreamState()
            chunks = await self.openai.post(
                "/chat/completions", body=body, cast_to=ChatCompletion, stream=True,
                stream_cls=openai.AsyncStream[ChatCompletionChunk],
            )  # fmt: skip
            async for chunk in chunks:
                state.handle_chunk(chunk)
            done = state.current_completion_snapshot
        (choice,) = done.choices
        message, usage = choice.message, done.usage
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]  # type: ignore[union-attr]
        reasoning = getattr(message, "reasoning_content", None) or ""
        answer = Answer(message.content or "", reasoning, calls, choice.finish_reason == "length")
        if usage:
            assert usage.prompt_tokens_details
            answer.prompt, answer.cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0
        return answer

    async def _responses(self, body: dict[str, Any]) -> Answer:
        assert body.get("stream")
        state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
        events = await self.openai.post(
            "/responses", body=body, cast_to=Response, stream=True, stream_cls=openai.AsyncStream[ResponseStreamEvent]
        )
        async for event in events:
            state.handle_event(event)
            last = event
        assert last.type in ("response.completed", "response.incomplete")
        answer = Answer(is_cut=last.type == "response.incomplete")
        for item in last.response.output:
            if item.type == "message":
                answer.text += "".join(part.text for part in item.content if part.type == "output_text")
            elif item.type == "reasoning":
                answer.reasoning += "".join(part.text for part in item.content or item.summary)
            elif item.type == "function_call":
                answer.calls.append((item.name, json.loads(item.arguments)))
        usage = last.response.usage
        assert usage
        answer.prompt, answer.cached = usage.input_tokens, usage.input_tokens_details.cached_tokens
        return answer

    async def _messages(self, body: dict[str, Any]) -> Answer:
        import anthropic
        from anthropic.lib.streaming import AsyncMessageStream
        from anthropic.types import Message, RawMessageStreamEvent

        if body.get("stream"):
            raw = await self.anthropic.post(
                "/v1/messages?beta=true", body=body, cast_to=Message, stream=True,
                stream_cls=anthropic.AsyncStream[RawMessageStreamEvent],
            )  # fmt: skip
            done: Any = await AsyncMessageStream(raw, anthropic.NOT_GIVEN).get_final_message()
        else:
            done = await self.anthropic.post("/v1/messages?beta=true", body=body, cast_to=Message)
        answer = Answer(is_cut=done.stop_reason == "max_tokens")
        for block in done.content:
            if block.type == "text":
                answer.text += block.text
            elif block.type == "thinking":
                answer.reasoning += block.thinking
            elif block.type == "tool_use":
                answer.calls.append((block.name, block.input))
        answer.cached = done.usage.cache_read_input_tokens or 0
        answer.prompt = answer.cached + done.usage.input_tokens
        return answer


@dataclass(frozen=True, slots=True)
class Recording:
    """A fixture, and the scripted model of its agent."""

    name: str
    calls: list[tuple[str, Any]]
    requests: list[dict[str, Any]]
    model: LoadedModel

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        import anthropic

        async with served(self.model, Settings(max_tokens=LIMIT)) as edgelm:
            http = edgelm.client._client
            messages = anthropic.AsyncAnthropic(
                base_url="http://edgelm", auth_token="key", http_client=http, max_retries=0
            )
            yield Client(edgelm.client, messages)


@pytest.fixture(scope="module", params=FIXTURES, ids=lambda path: path.stem)
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    found = json.loads(request.param.read_text())
    calls = [(name, arguments) for name, arguments in found["calls"]]
    first, second = (Call(*call) for call in calls or [("none", {}), ("nothing", {})])
    path = tmp_path_factory.mktemp("scripted") / "scripted.gguf"
    write_scripted(path, first, second, ANSWER)
    with ExitStack() as stack:
        model = stack.enter_context(loaded_model(path, context=CONTEXT))
        yield Recording(request.param.stem, calls, found["requests"], model)


async def test_a_recorded_session_is_answered_as_it_was(recording: Recording) -> None:
    """Each answer is known from its request: by the tools, and by the results since the user's last message.

    System prompt and tools are computed once, for all turns and for the second session.
    """
    async with recording.client() as client:
        calls: list[tuple[str, Any]] = []
        for request in recording.requests:
            body = bounded(request["body"])
            answer = await client.ask(request["path"], body)
            assert not calls or not body.get("tools") or answer.cached >= 0.8 * answer.prompt
            calls += answer.calls
            if is_endless(body):
                assert answer.is_cut
                assert ENDLESS.strip() in answer.text
            elif answer.calls:
                assert not answer.text.strip()
            else:
                assert ANSWER in answer.text
            if answer.calls and answer.calls == recording.calls[:1]:
                assert answer.reasoning.strip() == THOUGHT.strip()
        assert calls[: len(recording.calls)] == recording.calls


def bounded(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with a limit that an endless answer reaches soon."""
    limits = {name: LIMIT for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if body.get(name)}
    return body | limits | {"temperature": 0}


def is_endless(body: dict[str, Any]) -> bool:
    """Tell whether the user's last message asks for an answer that does not end."""
    entries = [entry for entry in body.get("messages") or body["input"] if entry.get("role") == "user"]
    return TALK in json.dumps(entries[-1])
