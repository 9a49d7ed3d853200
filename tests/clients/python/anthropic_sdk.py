"""anthropic's Python client: typed messages, stream helpers, tools and structured output."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from anthropic import Anthropic
from checks import ADDRESS, MODEL, PATIENCE_S, check, error_of, main
from pydantic import BaseModel

client = Anthropic(base_url=ADDRESS, api_key="any", max_retries=0, timeout=PATIENCE_S)
USER: list[Any] = [{"role": "user", "content": "Hello there, what is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL: Any = {"name": "weather", "description": "Tells the weather", "input_schema": SCHEMA}


class Weather(BaseModel):
    """A form of an answer."""

    city: str
    sky: Literal["clear", "cloudy"]


@check
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@check
def one_model() -> None:
    model = client.models.retrieve(MODEL)
    assert model.type == "model"
    assert model.display_name


@check
def messages() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=200, messages=USER, system="Be brief.")
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0


@check
def stream_is_the_whole() -> None:
    fields: Any = {"model": MODEL, "max_tokens": 200, "messages": USER, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@check
def stop_reasons() -> None:
    short = client.messages.create(model=MODEL, max_tokens=1, messages=USER)
    assert short.stop_reason == "max_tokens"
    stopped = client.messages.create(
        model=MODEL, max_tokens=200, messages=USER, stop_sequences=[" the", " and", " of", " to"]
    )
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence in {" the", " and", " of", " to"}


@check
def tools_streamed_and_round_trip() -> None:
    with client.messages.stream(model=MODEL, max_tokens=300, messages=USER, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert "input_json" in kinds
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert "city" in call.input  # type: ignore[operator]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    more = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
    turns: list[Any] = [*USER, {"role": "assistant", "content": message.content}, more]
    assert client.messages.create(model=MODEL, max_tokens=300, messages=turns, tools=[TOOL]).content


@check
def tool_choice() -> None:
    other = TOOL | {"name": "traffic"}
    choices: list[Any] = [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "traffic"}]
    for choice in choices:
        answer = client.messages.create(
            model=MODEL, max_tokens=300, messages=USER, tools=[TOOL, other], tool_choice=choice
        )
        assert answer.content[-1].type == "tool_use"
        assert answer.content[-1].name == "traffic" or choice["type"] == "any"
    none = client.messages.create(
        model=MODEL, max_tokens=300, messages=USER, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert [block.type for block in none.content] == ["text"]


@check
def thinking() -> None:
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(model=MODEL, max_tokens=2000, messages=USER, thinking=enabled) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert "thinking" in kinds
    assert [block.type for block in message.content] == ["thinking", "text"]
    turns: list[Any] = [*USER, {"role": "assistant", "content": message.content}, *USER]
    assert client.messages.create(model=MODEL, max_tokens=300, messages=turns, thinking={"type": "adaptive"}).content


@check
def structured_output() -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=300, messages=USER, output_format=Weather)
    assert isinstance(answer.parsed_output, Weather)


@check
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=USER, tools=[TOOL], system="Be brief.")
    answer = client.messages.create(model=MODEL, max_tokens=300, messages=USER, tools=[TOOL], system="Be brief.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check
def many_fields() -> None:
    cached: Any = {"type": "ephemeral"}
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": cached}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    client.beta.messages.create(
        model=MODEL,
        max_tokens=300,
        messages=turns,
        system=[{"type": "text", "text": "Be brief.", "cache_control": cached}],
        tools=[TOOL | {"cache_control": cached}, {"type": "web_search_20250305", "name": "web_search"}],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 20, "top_p": 0.9},  # gone from the client's types, and still sent
        betas=["interleaved-thinking-2025-05-14"],
    )


@check
def errors() -> None:
    long = "the dog and the cat " * 40_000
    cases: list[tuple[type[anthropic.APIStatusError], str, dict[str, Any]]] = [
        (anthropic.NotFoundError, "not_found_error", {"model": "no-such-model"}),
        (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"temperature": "hot"}}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": [{"role": "user", "content": long}]}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": []}),
    ]
    for kind, name, fields in cases:
        request: Any = {"model": MODEL, "max_tokens": 20, "messages": USER} | fields
        error = error_of(kind, lambda request=request: client.messages.create(**request))
        assert error.body["error"]["type"] == name, error.body  # type: ignore[index]
        if long in str(fields):
            assert "too long" in str(error)


if __name__ == "__main__":
    main("anthropic")
