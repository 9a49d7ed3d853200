"""/v1/messages of a real front, as Anthropic's client meets it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ToolUseBlock

from tests.server.harness import ENDLESS, LIMIT_S, Front, serving

MODEL = "starter"
CACHE: Any = {"cache_control": {"type": "ephemeral"}}
GREEDY = {"temperature": 0}  # the client has no such field any more
HELLO: Any = [{"role": "user", "content": "Say hello"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Return the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    **CACHE,
}


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.address, api_key="any", timeout=LIMIT_S, max_retries=0) as made:
        yield made


def create(client: anthropic.Anthropic, **fields: Any) -> Message:
    message = client.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 16} | fields)
    assert isinstance(message, Message)
    return message


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def test_an_answer_whole_and_streamed(client: anthropic.Anthropic) -> None:
    message = create(client, extra_body=GREEDY, system=[{"type": "text", "text": "be brief", **CACHE}])
    Message.model_validate(message.model_dump(exclude_unset=True))
    assert text_of(message)
    assert message.stop_reason in ("max_tokens", "end_turn")
    with client.messages.stream(
        model=MODEL, messages=HELLO, max_tokens=16, extra_body=GREEDY, system="be brief"
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(message)
    assert final.stop_reason == message.stop_reason
    assert final.usage.output_tokens == message.usage.output_tokens

    def prompt_len(usage: Any) -> int:
        return int(usage.input_tokens + usage.cache_read_input_tokens)

    assert prompt_len(final.usage) == prompt_len(message.usage)
    assert final.usage.cache_read_input_tokens


def test_the_query_and_headers_of_betas_are_ignored(client: anthropic.Anthropic) -> None:
    message = client.beta.messages.create(
        model=MODEL, messages=HELLO, max_tokens=4, betas=["context-1m-2025-08-07"], thinking={"type": "adaptive"}
    )
    assert message.usage.output_tokens


def test_tokens_are_counted_without_max_tokens(client: anthropic.Anthropic) -> None:
    usage = create(client, tools=[WEATHER], system="be brief").usage
    count = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=[WEATHER], system="be brief")
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models(client: anthropic.Anthropic) -> None:
    models = list(client.models.list())
    assert MODEL in [model.id for model in models]
    model = client.models.retrieve(MODEL)
    assert (model.type, model.id) == ("model", MODEL)
    assert model.created_at
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught.value.body["error"]["message"]  # type: ignore[index]


def test_a_stop_sequence(client: anthropic.Anthropic) -> None:
    whole = text_of(create(client, extra_body=GREEDY, max_tokens=40))
    stop = whole.split()[2]
    message = create(client, extra_body=GREEDY, max_tokens=40, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]


def test_the_last_turn_of_an_assistant_is_continued(client: anthropic.Anthropic) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "Hello, my name is"}]
    message = create(client, messages=begun, extra_body=GREEDY)
    assert text_of(message)
    assert not text_of(message).startswith("Hello, my name is")
    count = client.messages.count_tokens(model=MODEL, messages=begun)
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_an_answer_has_the_form_that_is_asked_for(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "large": {"type": "boolean"}},
        "required": ["name", "large"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    answer = json.loads(text_of(create(client, output_config=form, max_tokens=200)))
    assert answer.keys() == {"name", "large"}


def test_tools_must_or_must_not_be_called(client: anthropic.Anthropic) -> None:
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    clock: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    fields: dict[str, Any] = {"tools": [WEATHER, clock, hosted], "max_tokens": 200}
    message = create(client, tool_choice={"type": "tool", "name": "clock", "disable_parallel_tool_use": True}, **fields)
    (block,) = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert (block.name, block.input, message.stop_reason) == ("clock", {}, "tool_use")
    assert message.model_extra
    assert message.model_extra["edgelm"]["notes"] == ["ignored tools: web_search"]
    message = create(client, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **fields)
    assert [block.type for block in message.content].count("tool_use") == 1
    message = create(client, tool_choice={"type": "none"}, **fields)
    assert "tool_use" not in [block.type for block in message.content]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_are_typed(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(client, model="no-such-model")
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"].startswith("req_")
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="reads no images"):
        create(client, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="Prompt is too long"):
        create(client, messages=[{"role": "user", "content": "word " * 100_000}])
    with pytest.raises(anthropic.BadRequestError, match="no tools"):
        create(client, tools=[{"type": "web_search_20250305", "name": "web_search"}], tool_choice={"type": "any"})
    with pytest.raises(anthropic.BadRequestError, match="Prompt is too long"):
        list(
            client.messages.create(
                model=MODEL, max_tokens=4, stream=True, messages=[{"role": "user", "content": "word " * 100_000}]
            )
        )


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("status", "kind", "fields"),
    [
        (400, "invalid_request_error", {"content": b"{"}),
        (400, "invalid_request_error", {"content": b'{"model": "starter"}'}),
        (403, "permission_error", {"content": b"{}", "headers": {"host": "evil.example"}}),
        (403, "permission_error", {"content": b"{}", "headers": {"origin": "https://evil.example"}}),
        (413, "request_too_large", {"content": b" " * (17 * 2**20)}),
        (415, "invalid_request_error", {"content": b"{}", "headers": {"content-type": "text/plain"}}),
    ],
)
def test_every_refusal_has_anthropics_form(front: Front, path: str, status: int, kind: str, fields: Any) -> None:
    headers = {"content-type": "application/json"} | fields.get("headers", {})
    answer = front.http.post(path, content=fields["content"], headers=headers)
    body = answer.json()
    assert answer.status_code == status
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"]
    assert front.http.get(path).json()["type"] == "error"
    assert front.http.get("/v1/messages/unknown").json()["error"]["type"] == "not_found_error"


def test_keys_and_a_model_that_is_not_there_yet(own: dict[str, str], tmp_path: Path) -> None:
    with serving(own | {"EDGELM_API_KEY": "secret-key-1"}, log=tmp_path / "log") as front:
        with anthropic.Anthropic(base_url=front.address, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                create(client)
            assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with anthropic.Anthropic(base_url=front.address, auth_token="secret-key-1", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as loading:
                create(client, extra_headers={"Prefer": "wait=0"})
            assert loading.value.status_code == 529
            assert loading.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
            assert int(loading.value.response.headers["retry-after"]) >= 1
        with anthropic.Anthropic(base_url=front.address, api_key="secret-key-1", max_retries=0) as client:
            assert create(client).content


def test_an_engine_that_dies_is_an_error_of_the_stream(front: Front, client: anthropic.Anthropic) -> None:
    stream = client.messages.create(model="long", messages=HELLO, max_tokens=20_000, stream=True, extra_body=ENDLESS)
    assert next(iter(stream)).type == "message_start"
    os.kill(front.ps("long")["pid"], signal.SIGKILL)
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(stream)
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
