"""Tool calls, end to end: real templates, a tiny model of random weights, and OpenAI's client.

A model of random weights writes anything that it may, so the calls are as good as the grammar.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from edgelm.backends.model import LoadedModel
from edgelm.engine.core import Sequence
from tests.engine.fake import SimpleDrafter
from tests.real_data import template
from tests.served import loaded_model, models_of_templates, served
from tests.tiny import write_tiny

TEMPLATES = [
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3.5-4B",
    "llama-3-format",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
    "gemma-2-format",  # it does not know tools
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["cat", "dog"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 99},
                    "exact": {"type": "boolean"},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "tell",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "maxLength": 6}},
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
MESSAGES: Any = [{"role": "user", "content": "How is the weather?"}]


class Nonsense(SimpleDrafter):
    """Drafts the past and random letters."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def propose(self, seq: Sequence, marginal_cost: Any, forced: Any = ()) -> list[int]:
        choices = [*range(2, 500), *seq.tokens, *[3 + byte for byte in b'"{}:, ']]
        return [self.rng.choice(choices) for _ in range(self.rng.randrange(4))][: len(marginal_cost)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LoadedModel]]:
    """One model for each template; they draft."""
    with models_of_templates(tmp_path_factory.mktemp("models"), TEMPLATES, Nonsense) as loaded:
        yield loaded


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


async def streamed(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> Any:
    """Return the answer that the client's helper collects from a stream."""
    async with client.chat.completions.stream(**fields) as events:
        async for _event in events:
            pass
        try:
            return await events.get_final_completion()
        except openai.LengthFinishReasonError as error:
            return error.completion


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("choice", ["required", "named", "auto"])
async def test_calls_obey_their_schemas(models: dict[str, LoadedModel], name: str, choice: str) -> None:
    """Streamed and whole, with drafts and without, it is the same answer."""
    rng = random.Random(seed := secrets.randbits(32))
    print("seed", seed)
    tool_choice: Any = {"type": "function", "function": {"name": "tell"}} if choice == "named" else choice
    finished = 0
    async with served(models[name]) as edgelm:
        for number in range(3):
            fields: dict[str, Any] = {
                "model": "m",
                "messages": MESSAGES,
                "tools": TOOLS,
                "tool_choice": tool_choice,
                "temperature": 1.0,
                "seed": rng.randrange(2**31),
                "max_completion_tokens": 300 if choice != "auto" else 40,
                "parallel_tool_calls": (None, False, True)[number],
                "extra_body": {"reasoning_budget": 5},
            }
            whole = await edgelm.client.chat.completions.create(**fields)
            (answer,) = whole.choices
            calls = calls_of(answer.message)
            if answer.finish_reason == "tool_calls":
                finished += 1
                assert calls
                check_calls(calls)
            else:
                check_calls(calls[:-1])  # the last one is cut off
            if choice == "named":
                assert {name for name, _ in calls} <= {"tell"}
            if choice != "auto" and answer.finish_reason == "tool_calls" and not fields["parallel_tool_calls"]:
                assert len(calls) == 1
            final = (await streamed(edgelm.client, fields)).choices[0]
            assert calls_of(final.message) == calls
            assert (final.message.content or "") == (answer.message.content or "")
            assert final.finish_reason == answer.finish_reason
            plain = await edgelm.client.chat.completions.create(
                **fields | {"extra_body": {"reasoning_budget": 5, "speculation": False}}
            )
            assert calls_of(plain.choices[0].message) == calls
            assert plain.choices[0].message.content == answer.message.content
    if choice != "auto":
        assert finished, "no answer was finished"


LOOP_SYSTEM = (
    "You are a helpful assistant that looks facts up before it answers. " * 40
)  # agents send thousands of tokens
LOOP_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["cat", "dog"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
LOOP_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"The tool {name}. " * 16, "parameters": LOOP_PARAMETERS},
    }
    for name in ("weather", "traffic")
]


async def cached_shares(model: LoadedModel, turns: int) -> list[tuple[float, int]]:
    """Return the cached share of each prompt, and how many tokens the model has seen before and computes again."""
    messages: list[Any] = [
        {"role": "system", "content": LOOP_SYSTEM},
        {"role": "user", "content": "How are the cities?"},
    ]
    shares, seen = [], 0
    async with served(model) as edgelm:
        for turn in range(turns):
            answer = await edgelm.client.chat.completions.create(
                model="m",
                messages=messages,
                tools=LOOP_TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=1,
                seed=turn,
                max_tokens=400,
                extra_body={"reasoning_budget": 8},
            )
            usage, (choice,) = answer.usage, answer.choices
            assert usage
            assert usage.prompt_tokens_details
            cached = usage.prompt_tokens_details.cached_tokens or 0
            shares.append((cached / usage.prompt_tokens, max(seen - cached, 0)))
            seen = usage.total_tokens
            assert choice.finish_reason == "tool_calls"
            message: dict[str, Any] = choice.message.model_dump(exclude_none=True)
            message.pop("reasoning", None)
            for call in message["tool_calls"]:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"It is {turn} degrees"}
                for call in message["tool_calls"]
            ]
    return shares


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "openai-gpt-oss-120b"])
async def test_a_parameter_that_nothing_conforms_to_takes_no_tool_with_it(
    models: dict[str, LoadedModel], name: str
) -> None:
    """Lists that are made as a program runs may be empty."""
    for odd in ({"enum": []}, {"type": "integer", "minimum": 5, "maximum": 1}, {"type": "string", "const": 5}):
        parameters = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": odd}}
        tool: Any = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
        async with served(models[name]) as edgelm:
            answer = await edgelm.client.chat.completions.create(
                model="m", messages=MESSAGES, tools=[tool], tool_choice="required", max_completion_tokens=200
            )
        ((called, arguments),) = calls_of(answer.choices[0].message)
        assert (called, json.loads(arguments).keys() <= {"a"}) == ("odd", True)


async def test_a_loop_of_calls_computes_only_new_tokens(tmp_path: Path) -> None:
    """Though a grammar ends the answers, and the client spells the arguments in its own way."""
    source = template("Qwen-Qwen3-0.6B")
    controls = ("<|im_start|>", "<|im_end|>")
    path = write_tiny(tmp_path / "tiny.gguf", chat_template=source, control=controls, context=8192, quant="q8_0")
    with loaded_model(path, context=8192) as model:
        shares = await cached_shares(model, 4)
    assert max(lost for _, lost in shares) <= 2, shares
    assert min(share for share, _ in shares[1:]) >= 0.95, shares
