"""openai-python: typed clients, stream helpers and parsing, against every route of OpenAI's API that we have."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from checks import ADDRESS, MODEL, PATIENCE_S, check, error_of, main
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{ADDRESS}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S)
USER: list[Any] = [{"role": "user", "content": "Hello there, what is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}


class Weather(BaseModel):
    """A tool, and a form of an answer."""

    city: str
    days: int
    sky: Literal["clear", "cloudy"]


@check
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def chat_stream_is_the_whole() -> None:
    fields: Any = {"model": MODEL, "messages": USER, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


@check
def chat_stream_helper_with_logprobs() -> None:
    with client.chat.completions.stream(model=MODEL, messages=USER, logprobs=True, top_logprobs=3) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds, kinds
    content = final.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert b"".join(bytes(token.bytes or b"") for token in content).decode() == final.choices[0].message.content


@check
def chat_parse_pydantic() -> None:
    for choices in (1, 2):
        answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Weather, n=choices)
        assert len(answer.choices) == choices
        assert all(isinstance(choice.message.parsed, Weather) for choice in answer.choices)


@check
def chat_stream_parse_pydantic() -> None:
    with client.chat.completions.stream(model=MODEL, messages=USER, response_format=Weather) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


@check
def chat_json_object() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@check
def chat_tool_call_parsed() -> None:
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    answer = client.chat.completions.parse(model=MODEL, messages=USER, tools=tools)
    call = answer.choices[0].message.tool_calls[0]  # type: ignore[index]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Weather)


@check
def chat_tool_choice() -> None:
    other = {"type": "function", "function": {"name": "traffic", "parameters": PARAMETERS}}
    forced: Any = {"type": "function", "function": {"name": "traffic"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [other]}}
    for choice in ("required", forced, allowed):
        answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL, other], tool_choice=choice)
        calls = answer.choices[0].message.tool_calls
        assert calls
        if choice != "required":
            assert calls[0].function.name == "traffic"  # type: ignore[union-attr]
    none = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL], tool_choice="none")
    assert not none.choices[0].message.tool_calls
    assert none.choices[0].message.content


@check
def chat_stream_helper_tool_events() -> None:
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds, kinds
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city", "days"}  # type: ignore[index]


@check
def chat_custom_tool() -> None:
    tool: Any = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command"}}
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[tool])
    call = answer.choices[0].message.tool_calls[0]  # type: ignore[index]
    assert call.type == "custom"
    assert call.custom.input


@check
def chat_round_trip_of_a_call() -> None:
    asked = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL])
    message = asked.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}  # type: ignore[index]
    for turn in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        answer = client.chat.completions.create(model=MODEL, messages=[*USER, turn, result], tools=[TOOL])
        assert answer.choices[0].message.content


@check
def chat_older_functions() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, functions=[TOOL["function"]])
    assert answer.choices[0].finish_reason == "function_call"
    assert answer.choices[0].message.function_call
    assert answer.choices[0].message.function_call.name == "weather"


@check
def chat_reasoning() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, reasoning_effort="low")
    assert answer.choices[0].message.model_extra
    assert answer.choices[0].message.model_extra["reasoning_content"]
    assert "<think>" not in (answer.choices[0].message.content or "")
    assert answer.usage
    assert answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens


@check
def chat_many_fields() -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "system", "content": "Be kind.", "name": "someone"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": "three"},
        ],
        max_completion_tokens=100_000,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        seed=-3,
        stop=["xyz"],
        logit_bias={"5": -3},
        metadata={"a": "b"},
        parallel_tool_calls=False,
        tools=[TOOL],
        prediction={"type": "content", "content": " the dog"},
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        store=False,
        top_p=0.9,
        user="u",
        verbosity="low",
    )


@check
def chat_errors() -> None:
    long = "the dog and the cat " * 40_000
    cases: list[tuple[type[openai.APIStatusError], str | None, dict[str, Any]]] = [
        (openai.NotFoundError, "model_not_found", {"model": "no-such-model"}),
        (openai.BadRequestError, None, {"temperature": "hot"}),
        (openai.BadRequestError, "context_length_exceeded", {"messages": [{"role": "user", "content": long}]}),
        (
            openai.BadRequestError,
            None,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": 5}, "name": "x", "strict": True},
                }
            },
        ),
        (
            openai.BadRequestError,
            None,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
                ]
            },
        ),
    ]
    for kind, code, fields in cases:
        for stream in (False, True):
            request: Any = {"model": MODEL, "messages": USER, "stream": stream} | fields
            error = error_of(kind, lambda request=request: client.chat.completions.create(**request))
            assert code in (None, error.code), (code, error.code)
            assert error.body, "an error without a body"


@check
def chat_async_and_cancelled() -> None:
    async def talk() -> None:
        async with AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as many:
            answers = await asyncio.gather(
                *(many.chat.completions.create(model=MODEL, messages=USER) for _ in range(6))
            )
            assert all(answer.choices[0].message.content for answer in answers)
            stream = await many.chat.completions.create(model=MODEL, messages=USER, stream=True)
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(talk())
    assert client.chat.completions.create(model=MODEL, messages=USER).choices


@check
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["Once upon", "a time"], max_tokens=5, n=2, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs
    assert len(answer.choices[0].logprobs.tokens or []) == len(answer.choices[0].logprobs.top_logprobs or [])
    echo = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=0, echo=True, logprobs=1)
    assert echo.choices[0].text == "Once upon"
    assert echo.choices[0].logprobs
    assert (echo.choices[0].logprobs.token_logprobs or [0])[0] is None
    parts = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, stream=True, temperature=0)
    text = "".join(part.choices[0].text for part in parts if part.choices)
    assert text == client.completions.create(model=MODEL, prompt="Once", max_tokens=8, temperature=0).choices[0].text
    ids = client.completions.create(model=MODEL, prompt=[300, 301], max_tokens=2)
    assert ids.usage
    assert ids.usage.prompt_tokens == 2


@check
def responses() -> None:
    answer = client.responses.create(model=MODEL, input="Hello", instructions="Be brief.")
    assert answer.status == "completed"
    assert answer.output_text
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


@check
def responses_stream_helper() -> None:
    with client.responses.stream(model=MODEL, input="Hello", reasoning={"effort": "low"}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text
    assert [item.type for item in final.output] == ["reasoning", "message"]


@check
def responses_parse_pydantic() -> None:
    answer = client.responses.parse(model=MODEL, input="Hello", text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)
    with client.responses.stream(model=MODEL, input="Hello", text_format=Weather) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Weather)


@check
def responses_tool_stream_and_round_trip() -> None:
    with client.responses.stream(model=MODEL, input="Hello", tools=[RESPONSES_TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds, kinds
    call = final.output[0]
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "days"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked: Any = [{"role": "user", "content": "Hello"}, call.model_dump(), result]
    assert client.responses.create(model=MODEL, input=asked, tools=[RESPONSES_TOOL], store=False).output_text
    then = client.responses.create(model=MODEL, previous_response_id=final.id, input=[result], tools=[RESPONSES_TOOL])
    assert then.output_text
    assert then.previous_response_id == final.id


@check
def responses_custom_tool_and_choices() -> None:
    custom: Any = {"type": "custom", "name": "patch", "description": "Applies a patch"}
    answer = client.responses.create(
        model=MODEL, input="Hello", tools=[custom, RESPONSES_TOOL], tool_choice={"type": "custom", "name": "patch"}
    )
    assert answer.output[0].type == "custom_tool_call"
    assert answer.output[0].input
    named: Any = {"type": "function", "name": "weather"}
    answer = client.responses.create(model=MODEL, input="Hello", tools=[custom, RESPONSES_TOOL], tool_choice=named)
    assert answer.output[0].type == "function_call"
    hosted: Any = [{"type": "web_search"}]
    assert client.responses.create(model=MODEL, input="Hello", tools=hosted).output_text


@check
def responses_stored() -> None:
    first = client.responses.create(model=MODEL, input="Hello")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert list(client.responses.input_items.list(first.id))
    client.responses.delete(first.id)
    kept = client.responses.create(model=MODEL, input="Hello", store=False)
    for gone in (first.id, kept.id, "resp_none"):
        error_of(openai.NotFoundError, lambda gone=gone: client.responses.retrieve(gone))


@check
def responses_encrypted_reasoning_round_trip() -> None:
    include: Any = ["reasoning.encrypted_content"]
    first = client.responses.create(
        model=MODEL, input="Hello", reasoning={"effort": "low"}, include=include, store=False
    )
    thought = first.output[0]
    assert thought.type == "reasoning"
    assert thought.encrypted_content
    items: Any = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in first.output)]
    again = client.responses.create(model=MODEL, input=[*items, {"role": "user", "content": "And?"}], store=False)
    assert again.output_text


@check
def responses_incomplete() -> None:
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=1, temperature=0)
    assert answer.status == "incomplete"
    assert answer.incomplete_details
    assert answer.incomplete_details.reason == "max_output_tokens"


@check
def responses_input_tokens() -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="Hello")
    answer = client.responses.create(model=MODEL, input="Hello")
    assert answer.usage
    assert counted.input_tokens == answer.usage.input_tokens


if __name__ == "__main__":
    main("openai")
