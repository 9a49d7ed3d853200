"""Calls that a client forces, in every dialect: a model that never ends calls once, without invented arguments.

Stop tokens are biased away, as they are for a small model that does not know when to stop.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from edgelm.backends.model import LoadedModel
from edgelm.jobs.answer import CUT, REPEATED
from tests.served import Served, models_of_templates, served

TEMPLATES = [
    "Qwen-Qwen3-0.6B",
    "Qwen3.5-4B",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
    "gemma-2-format",
]
ONE_CITY = {"type": "object", "properties": {"city": {"enum": ["cat"]}}, "required": ["city"]}
WITHOUT_PARAMETERS: list[Any] = [None, {"type": "object"}, {"type": "object", "properties": {}}, {}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LoadedModel]]:
    with models_of_templates(tmp_path_factory.mktemp("models"), TEMPLATES) as loaded:
        yield loaded


@asynccontextmanager
async def endless(model: LoadedModel) -> AsyncIterator[tuple[Served, dict[str, Any]]]:
    """Answer with a model that never ends by itself; yield the fields of a chat request, too."""
    bias = {str(token): -100 for token in model.tokenizer.stop_ids}
    fields = {
        "model": "m", "messages": [{"role": "user", "content": "How is the weather?"}], "temperature": 1.0, "seed": 1,
        "max_tokens": 300, "logit_bias": bias, "extra_body": {"reasoning_budget": 2},
    }  # fmt: skip
    async with served(model) as edgelm:
        yield edgelm, fields


def tools(**schemas: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in schemas.items()]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("choice", ["named", "required"])
async def test_a_forced_call_ends_the_answer(models: dict[str, LoadedModel], name: str, choice: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    async with endless(models[name]) as (edgelm, fields):
        fields |= {"tools": tools(weather=ONE_CITY), "tool_choice": named if choice == "named" else choice}
        for parallel in (None, False, True):
            if parallel is not None:
                fields["parallel_tool_calls"] = parallel
            answer = await edgelm.client.chat.completions.create(**fields)
            (only,) = answer.choices
            assert only.finish_reason == "tool_calls"
            (call,) = only.message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "cat"}
            assert (REPEATED in answer.to_dict()["edgelm"].get("notes", ())) <= (parallel is True)
            async with edgelm.client.chat.completions.stream(**fields) as events:
                async for _event in events:
                    pass
                final = (await events.get_final_completion()).choices[0]
            assert [one.function.arguments for one in final.message.tool_calls] == [call.function.arguments]
            assert final.finish_reason == "tool_calls"


async def test_several_calls_that_the_client_asks_for_differ(models: dict[str, LoadedModel]) -> None:
    """There are three possible calls, so that an endless model ends with a repetition."""
    schema = {"type": "object", "properties": {"city": {"enum": ["cat", "dog", "tree"]}}, "required": ["city"]}
    counts, noted = set(), 0
    async with endless(models["Qwen-Qwen3-0.6B"]) as (edgelm, fields):
        fields |= {"tools": tools(weather=schema), "tool_choice": "required", "parallel_tool_calls": True}
        for seed in range(8):
            answer = await edgelm.client.chat.completions.create(**fields | {"seed": seed})
            calls = [call.function.arguments for call in answer.choices[0].message.tool_calls]
            assert len(set(calls)) == len(calls)
            assert answer.choices[0].finish_reason == "tool_calls"
            counts.add(len(calls))
            noted += REPEATED in answer.to_dict()["edgelm"]["notes"]
    assert max(counts) > 1
    assert noted == 8


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_tool_without_parameters_gets_no_arguments(models: dict[str, LoadedModel], name: str) -> None:
    async with endless(models[name]) as (edgelm, fields):
        for schema in WITHOUT_PARAMETERS:
            answer = await edgelm.client.chat.completions.create(
                **fields, tools=tools(now=schema), tool_choice="required"
            )
            assert [call.function.arguments for call in answer.choices[0].message.tool_calls] == ["{}"]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_tool_gets_no_arguments_that_it_does_not_name(models: dict[str, LoadedModel], name: str) -> None:
    inner = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    schema = {"type": "object", "properties": {"city": {"enum": ["cat"]}, "more": inner}, "required": ["more"]}
    async with endless(models[name]) as (edgelm, fields):
        for seed in range(6):
            answer = await edgelm.client.chat.completions.create(
                **fields | {"seed": seed}, tools=tools(weather=schema), tool_choice="required"
            )
            (call,) = answer.choices[0].message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() <= {"city", "more"}
            assert arguments["more"].keys() <= {"ok"}


async def test_a_response_format_stays_open(models: dict[str, LoadedModel]) -> None:
    """By the letter of JSON Schema, an answer may have other keys, unlike the arguments of a tool."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a", "z"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with endless(models["gemma-2-format"]) as (edgelm, fields):
        answer = await edgelm.client.chat.completions.create(**fields, response_format=form)
        assert '"z": ' in answer.choices[0].message.content


@pytest.mark.parametrize("kind", ["any", "tool"])
async def test_messages(models: dict[str, LoadedModel], kind: str) -> None:
    import anthropic
    import httpx2

    tool: Any = {"name": "weather", "input_schema": ONE_CITY}
    choice: Any = {"type": kind, **({"name": "weather"} if kind == "tool" else {})}
    async with served(models["Qwen-Qwen3-0.6B"]) as edgelm:
        for disabled in (None, True, False):
            body = {
                "model": "m", "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}], "tools": [tool],
                "tool_choice": choice | ({} if disabled is None else {"disable_parallel_tool_use": disabled}),
                "thinking": {"type": "disabled"},
            }  # fmt: skip
            answer = await edgelm.client.post("/messages", body=body, cast_to=httpx2.Response)
            content = anthropic.types.Message.model_validate(answer.json()).content
            assert [block.input for block in content if block.type == "tool_use"] == [{"city": "cat"}]
            assert answer.json()["stop_reason"] == "tool_use"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_responses(models: dict[str, LoadedModel], choice: Any) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": ONE_CITY}
    now: Any = {"type": "function", "name": "now", "parameters": {"type": "object"}}
    async with served(models["Qwen-Qwen3-0.6B"]) as edgelm:
        fields: dict[str, Any] = {
            "model": "m",
            "input": "hi",
            "max_output_tokens": 300,
            "reasoning": {"effort": "none"},
        }
        answer = await edgelm.client.responses.create(**fields, tools=[tool], tool_choice=choice)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [call.arguments for call in calls] == ['{"city": "cat"}']
        answer = await edgelm.client.responses.create(**fields, tools=[now], tool_choice="required")
        assert [item.arguments for item in answer.output if item.type == "function_call"] == ["{}"]


@pytest.mark.parametrize("form", [{"regex": "[a-z ]+"}, {"json": {"type": "string"}}, {"grammar": "root ::= [a-z]*"}])
async def test_a_form_without_an_end_ends_at_the_limit_and_says_so(models: dict[str, LoadedModel], form: Any) -> None:
    async with endless(models["gemma-2-format"]) as (edgelm, fields):
        fields |= {"max_tokens": 40, "extra_body": {"structured_outputs": form}}
        answer = await edgelm.client.chat.completions.create(**fields)
        assert answer.choices[0].finish_reason == "length"
        assert answer.to_dict()["edgelm"]["notes"] == [CUT]


async def test_a_schema_leaves_no_room_for_white_space_without_an_end(models: dict[str, LoadedModel]) -> None:
    """A model that only wants to write spaces and line breaks still ends: JSON has one form."""
    loaded = models["gemma-2-format"]
    blank = {
        str(token): 100
        for token in range(loaded.tokenizer.num_tokens)
        if (piece := loaded.tokenizer.piece(token)) and not piece.strip()
    }
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "maxItems": 1}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    schema["properties"]["b"]["items"] = {"type": "null"}  # type: ignore[index]
    async with endless(loaded) as (edgelm, fields):
        fields |= {"logit_bias": blank, "extra_body": {"structured_outputs": {"json": schema}}}
        answer = await edgelm.client.chat.completions.create(**fields)
        assert answer.choices[0].finish_reason == "stop"
        assert json.loads(answer.choices[0].message.content).keys() == {"a", "b"}
