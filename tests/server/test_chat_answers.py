"""/v1/chat/completions as OpenAI's typed client meets it, with a real tiny model."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from edgelm.backends.model import LoadedModel
from edgelm.engine.speculation.ngram_drafter import NgramDrafter
from edgelm.library.local import find_local
from tests.served import Served, loaded_model, served
from tests.tiny import write_tiny

MESSAGES: Any = [{"role": "user", "content": "hello friend"}]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
    "{# <think> </think> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"happy": {"type": "boolean"}, "cat": {"enum": ["dog", "tree"]}},
    "required": ["happy", "cat"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    path = write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=TEMPLATE, endless=True)
    with loaded_model(path, NgramDrafter(), context=1024) as loaded:
        yield loaded


@pytest.fixture
async def edgelm(model: LoadedModel) -> AsyncIterator[Served]:
    async with served(model) as made:
        yield made


def create(edgelm: Served, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    fields = {"model": "m", "messages": MESSAGES, "max_tokens": 12, "seed": 1} | fields
    return edgelm.client.chat.completions.create(**fields, extra_body=extra or {})


async def test_several_choices_whole_and_streamed(edgelm: Served) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 1, "logprobs": True, "top_logprobs": 2}
    whole = await create(edgelm, **fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert whole.usage.completion_tokens == 36
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 36
    single = await create(edgelm, temperature=1)
    assert whole.usage.prompt_tokens == single.usage.prompt_tokens, "a prompt counts once"
    texts, tokens, roles = ["", "", ""], [[], [], []], ["", "", ""]
    usage = None
    async for chunk in await create(edgelm, **fields, stream=True, stream_options={"include_usage": True}):
        assert (chunk.object, chunk.model) == ("chat.completion.chunk", "m")
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
            tokens[choice.index] += [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant"] * 3
    assert tokens == [[entry.token for entry in choice.logprobs.content] for choice in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 36)


async def test_the_clients_stream_helper_gives_the_whole_answer(edgelm: Served) -> None:
    whole = await create(edgelm, temperature=0)
    async with edgelm.client.chat.completions.stream(
        model="m", messages=MESSAGES, max_tokens=12, seed=1, temperature=0
    ) as events:
        kinds = {event.type async for event in events}
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            await events.get_final_completion()
    final = caught.value.completion
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content


class Answer(BaseModel):
    happy: bool
    cat: Literal["dog", "tree"]


async def test_pydantic_models_are_parsed(edgelm: Served) -> None:
    fields: dict[str, Any] = {
        "model": "m",
        "messages": MESSAGES,
        "temperature": 1,
        "response_format": Answer,
        "max_tokens": 120,
        "extra_body": {"reasoning_budget": 4},  # random weights may begin a thought, which lasts until the limit
    }
    answer = await edgelm.client.chat.completions.parse(**fields)
    assert isinstance(answer.choices[0].message.parsed, Answer)
    assert answer.choices[0].finish_reason == "stop"
    async with edgelm.client.chat.completions.stream(**fields) as events:
        final = await events.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "json"),
        ({"extra": {"json_schema": SCHEMA}}, "json"),
        ({"extra": {"guided_json": SCHEMA}}, "json"),
        ({"extra": {"structured_outputs": {"json": SCHEMA}}}, "json"),
        ({"extra": {"guided_regex": "(cat|dog){2,3}"}}, "(cat|dog){2,3}"),
        ({"extra": {"structured_outputs": {"regex": "a/b+"}}}, "a/b+"),
        ({"extra": {"guided_choice": ["yes", "no"]}}, "yes|no"),
        ({"extra": {"structured_outputs": {"choice": ["yes", 'n"o']}}}, 'yes|n"o'),
        ({"extra": {"guided_grammar": 'start: "x" ("y" | "z")'}}, "x[yz]"),
        ({"extra": {"grammar": 'root ::= "x" ("y" | "z")'}}, "x[yz]"),
    ],
)
async def test_forms_of_the_answer(edgelm: Served, thinks: bool, fields: dict[str, Any], pattern: str) -> None:
    """With thinking, the form is that of the content behind the thought."""
    extra = {**fields.get("extra", {}), "enable_thinking": thinks, "reasoning_budget": 6}
    rest = {name: value for name, value in fields.items() if name != "extra"}
    answer = await create(edgelm, extra, **rest, temperature=1.0, max_tokens=120)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    if pattern == "json":
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    else:
        assert re.fullmatch(pattern, choice.message.content)
    if thinks:
        assert choice.message.reasoning_content
        assert choice.message.reasoning == choice.message.reasoning_content
        assert 1 <= answer.usage.completion_tokens_details.reasoning_tokens < 40


async def test_json_objects(edgelm: Served) -> None:
    answer = await create(edgelm, response_format={"type": "json_object"}, temperature=1.0, max_tokens=300)
    (choice,) = answer.choices
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_regex": "(a"},
        {"grammar": "root ::= ("},
        {"guided_grammar": "start: ("},
        {"json_schema": {"type": "strange"}},
        {"guided_json": {"$ref": "#/nowhere"}},
    ],
)
async def test_a_grammar_that_cannot_be_used_is_refused(edgelm: Served, extra: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(edgelm, extra, stream=stream)
        assert len(str(caught.value)) > 40


async def test_a_relaxed_schema_is_noted(edgelm: Served) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "not": {"uniqueItems": True}}
    relaxed = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": False}}
    answer = await create(edgelm, response_format=relaxed, max_tokens=300)
    assert any("not enforced: not" in note for note in answer.model_extra["edgelm"]["notes"])
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match='"not"'):
        await create(edgelm, response_format=strict)


async def test_a_thought_ends_within_its_budget(edgelm: Served) -> None:
    extra = {"enable_thinking": True, "reasoning_budget": 5}
    answer = await create(edgelm, extra, max_tokens=60, temperature=1.0)
    details = answer.usage.completion_tokens_details
    assert 5 <= details.reasoning_tokens <= 20
    assert answer.choices[0].message.content
    reasoning, content = "", ""
    async for chunk in await create(edgelm, extra, max_tokens=60, temperature=1.0, stream=True):
        delta = chunk.choices[0].delta
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        content += delta.content or ""
    assert reasoning == answer.choices[0].message.reasoning_content
    assert content == answer.choices[0].message.content
    free = await create(edgelm, {"enable_thinking": True}, max_tokens=60, temperature=1.0)
    assert free.usage.completion_tokens_details.reasoning_tokens > 20


@pytest.fixture(scope="module")
def starter() -> Iterator[LoadedModel]:
    """A model that writes the tokens into which its text is encoded."""
    with loaded_model(find_local("starter").path, NgramDrafter(), context=512) as loaded:
        yield loaded


async def test_a_prediction_raises_the_accepted_tokens(starter: LoadedModel) -> None:
    async with served(starter) as edgelm:
        await check_prediction(edgelm)


async def check_prediction(edgelm: Served) -> None:
    question = [{"role": "user", "content": "Who are you, and what can you do?"}]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 150, "messages": question}
    plain = await create(edgelm, {"speculation": False}, **fields)
    text = plain.choices[0].message.content
    assert plain.model_extra["edgelm"]["speculation"] == {"drafted": 0, "accepted": 0}
    assert "drafted" not in plain.model_extra["edgelm"]
    without = await create(edgelm, **fields)
    predicted = await create(edgelm, **fields, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == without.choices[0].message.content == text
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > without.model_extra["edgelm"]["speculation"]["accepted"]
    spans = predicted.model_extra["edgelm"]["drafted"]
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
    streamed, shown = [], ""
    async for chunk in await create(
        edgelm, **fields, prediction={"type": "content", "content": text}, stop=[text[-12:-8]], stream=True
    ):
        content = chunk.choices[0].delta.content or ""
        inside = (chunk.model_extra.get("edgelm") or {}).get("drafted", [])
        assert all(0 <= start < end <= len(content) for start, end in inside)
        streamed += [(start + len(shown), end + len(shown)) for start, end in inside]
        shown += content
    assert shown == text[: text.index(text[-12:-8])]
    assert sum(end - start for start, end in streamed) > len(shown) // 2


async def test_a_stop_string_ends_the_answer_before_it(edgelm: Served) -> None:
    text = (await create(edgelm, temperature=0, max_tokens=30)).choices[0].message.content
    stop = text[5:8]
    answer = await create(edgelm, temperature=0, max_tokens=30, stop=[stop, "never"])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


async def test_more_tokens_than_there_is_room_for_are_clamped(edgelm: Served) -> None:
    answer = await create(edgelm, max_tokens=32_000)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model_extra["edgelm"]["finish_reason"] == "context"
    assert answer.usage.total_tokens == 1024


async def test_an_answer_is_continued(edgelm: Served) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "once upon"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await create(edgelm, extra, messages=messages, temperature=0)
    assert answer.choices[0].message.content
    ids = edgelm.loaded.tokenizer.encode("<|user|>hello friend\n<|assistant|>once upon", special=True, bos=True)
    assert answer.usage.prompt_tokens == len(ids)
    with pytest.raises(openai.BadRequestError, match="no tools"):
        await create(edgelm, tool_choice="required")


async def test_roles_and_forms_of_content(edgelm: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1'}}
    messages: Any = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "three"}]},
    ]
    assert (await create(edgelm, messages=messages)).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="reads no images"):
        await create(
            edgelm, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]
        )
