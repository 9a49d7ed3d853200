"""An agent's loop through /v1/responses and /v1/messages: real templates, a tiny model of random weights.

Thinking, calls and results travel through the client and back; a prompt that continues a conversation is cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from edgelm.backends.model import LoadedModel
from tests.served import Served, models_of_templates, served

TEMPLATES = ["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "gemma-2-format"]
TURNS = 5
CACHE = {"type": "ephemeral"}
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["cat", "dog"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LoadedModel]]:
    with models_of_templates(tmp_path_factory.mktemp("models"), TEMPLATES) as loaded:
        yield loaded


async def responses(edgelm: Served, history: list[Any], *, last: bool) -> tuple[int, int]:
    """Take a turn; return the lengths of the prompt and of its cached part."""
    fields: dict[str, Any] = {
        "model": "m", "input": history, "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "tool_choice": "none" if last else "required", "parallel_tool_calls": False, "store": False,
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "none"},
        "max_output_tokens": 20 if last else 200, "temperature": 1.0,
    }  # fmt: skip
    async with edgelm.client.responses.stream(**fields) as stream:
        events = [event async for event in stream]
    response = events[-1].response
    assert response.status == "completed" or last
    for item in response.output:
        plain = item.to_dict()
        if plain["type"] == "reasoning":
            assert plain.pop("content")[0]["text"]
            assert plain["encrypted_content"]
        history.append(plain)
    if not last:
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert json.loads(call.arguments)["city"] in ("cat", "dog")
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    return response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens


async def messages(edgelm: Served, history: list[Any], *, last: bool) -> tuple[int, int]:
    """Take a turn; return the lengths of the prompt and of its cached part."""
    client = anthropic.AsyncAnthropic(
        base_url="http://edgelm", auth_token="key", http_client=edgelm.client._client, max_retries=0
    )
    choice = {"type": "none"} if last else {"type": "any", "disable_parallel_tool_use": True}
    async with client.messages.stream(
        model="m",
        messages=history,
        tools=[{"name": "weather", "input_schema": SCHEMA}],
        tool_choice=choice,  # type: ignore[arg-type]
        max_tokens=20 if last else 200,
        thinking={"type": "enabled", "budget_tokens": 5},
    ) as stream:
        message = await stream.get_final_message()
    history.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
    if not last:
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use"
        assert call.input in ({"city": "cat"}, {"city": "dog"})
        parts = [{"type": "text", "text": "rain"}, {"type": "text", "text": "12 degrees", "cache_control": CACHE}]
        failed = len(history) == 6  # the third turn's
        result = {"type": "tool_result", "tool_use_id": call.id, "content": parts, "is_error": failed}
        history.append({"role": "user", "content": [result, {"type": "text", "text": "Go on."}]})
    cached = message.usage.cache_read_input_tokens or 0
    return message.usage.input_tokens + cached, cached


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("take_turn", [responses, messages])
async def test_five_turns(models: dict[str, LoadedModel], name: str, take_turn: Any) -> None:
    async with served(models[name]) as edgelm:
        history: list[Any] = [{"role": "user", "content": f"How is the weather? {take_turn.__name__}"}]
        lens = [await take_turn(edgelm, history, last=turn == TURNS - 1) for turn in range(TURNS)]
    print(lens)
    prompts, cached = zip(*lens, strict=True)
    assert list(prompts[:-1]) == sorted(set(prompts[:-1]))
    for turn in range(1, TURNS - 1):  # the last prompt has no tools
        assert cached[turn] >= prompts[turn - 1] - 24, "without the beginning of its answer, which templates change"
