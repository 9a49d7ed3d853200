"""Real models behind the endpoint: tools, JSON, drafts, vectors, memory, a restart, and programs of others."""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import huggingface_hub
import openai
import pytest

from tests.server.harness import Front, serving

QUESTION = "Where is Berlin?"  # what a model of this size is sure of
TEXT = "The river runs from the mountains to the sea, past the old mill and the bridge. " * 20
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "Get the time", "parameters": {"type": "object"}},
}


def answer(front: Front, text: str, **fields: object) -> str:
    reply = front.chat("smollm2", text, **{"max_tokens": 60, "temperature": 0} | fields)
    assert reply.is_success, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def test_it_knows_something(front: Front) -> None:
    assert "Berlin" in answer(front, QUESTION)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_tool_is_called_once_with_its_argument(front: Front, choice: object) -> None:
    reply = front.chat(
        "smollm2",
        "What is the weather in Paris?",
        tools=[CLOCK, WEATHER],
        tool_choice=choice,
        max_tokens=80,
        temperature=0,
    )
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    if choice != "required":
        assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == ({"city"} if call["function"]["name"] == "weather" else set())


def test_a_free_tool_is_called_or_not_and_a_result_is_read(front: Front) -> None:
    fields = {"tools": [WEATHER], "max_tokens": 60, "temperature": 0}
    message = front.chat("smollm2", "What is the weather in Paris?", **fields).json()["choices"][0]["message"]
    assert message.get("tool_calls") or message["content"]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "17 degrees and rain"},
    ]
    reply = front.chat("smollm2", messages=messages, tool_choice="none", **fields)
    assert reply.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_json_by_a_schema_is_valid(front: Front, model: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    for seed in range(2):
        fields = {"prompt": "A person as JSON:"} if model == "gemma" else {}
        if fields:  # a base model has no chat template
            request = fields | {"model": model, "max_tokens": 80, "seed": seed, "structured_outputs": {"json": SCHEMA}}
            choice = front.http.post("/v1/completions", json=request).json()["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
        else:
            reply = front.chat(model, "Invent a person.", max_tokens=120, seed=seed, response_format=form)
            choice = reply.json()["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert reason == "stop", text
        person = json.loads(text)
        assert person.keys() == {"name", "age", "colour"}
        assert person["colour"] in ("red", "green", "blue")
        assert 0 <= person["age"] <= 120


def test_a_base_model_continues_a_text(front: Front) -> None:
    request = {"model": "gemma", "prompt": "One, two, three, four, five,", "max_tokens": 8, "temperature": 0}
    assert "six" in front.http.post("/v1/completions", json=request).json()["choices"][0]["text"]


def test_the_predicted_memory_is_enough_and_not_far_off(front: Front) -> None:
    answer(front, QUESTION)
    front.http.post("/v1/completions", json={"model": "gemma", "prompt": TEXT, "max_tokens": 4})
    for name in ("smollm2", "gemma"):
        state = front.ps(name)
        assert state["memory_bytes"] <= state["predicted_bytes"], state
        assert state["predicted_bytes"] < 2.5 * state["memory_bytes"], state


def test_vectors_tell_texts_apart(front: Front) -> None:
    client = openai.OpenAI(base_url=f"{front.address}/v1", api_key="none")
    texts = ["The cat sleeps on the sofa.", "A cat is asleep on the couch.", "Interest rates rose by half a percent."]
    one, same, other = (each.embedding for each in client.embeddings.create(model="smollm2", input=texts).data)

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert cosine(one, one) == pytest.approx(1, abs=1e-3)
    assert cosine(one, same) > cosine(one, other)


def test_programs_of_others_get_answers(front: Front) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    one = openai.OpenAI(base_url=f"{front.address}/v1", api_key="none")
    chunks = one.chat.completions.create(model="smollm2", messages=messages, max_tokens=40, temperature=0, stream=True)  # type: ignore[call-overload]
    assert "Berlin" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    two = anthropic.Anthropic(base_url=front.address, api_key="none")
    message = two.messages.create(model="smollm2", messages=messages, max_tokens=40, extra_body={"temperature": 0})  # type: ignore[arg-type]
    assert "Berlin" in "".join(block.text for block in message.content if block.type == "text")
    three = huggingface_hub.InferenceClient(base_url=front.address)
    reply = three.chat_completion(messages, model="smollm2", max_tokens=40, temperature=0)
    assert "Berlin" in (reply.choices[0].message.content or "")


def test_drafts_change_the_steps_and_not_the_answer(own: dict[str, str], smollm2: Path, tmp_path: Path) -> None:
    texts, drafted = [], []
    question = f"Repeat this text: {TEXT[:240]}"
    for spec in ("off", "auto"):
        with serving(own | {"EDGELM_SPEC": spec, "EDGELM_KV": "int8"}, smollm2, log=tmp_path / "log") as front:
            reply = front.chat(smollm2.stem, question, max_tokens=60, temperature=0).json()
            texts.append(reply["choices"][0]["message"]["content"])
            drafted.append(reply["edgelm"]["speculation"]["drafted"])
    assert texts[0] == texts[1]
    assert drafted[0] == 0
    assert drafted[1] > 0


def test_a_conversation_continues_from_disk_after_a_restart(own: dict[str, str], smollm2: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": f"{TEXT} What runs to the sea?"}]
    with serving(own, smollm2, log=tmp_path / "log") as front:
        first = front.chat(smollm2.stem, messages=messages, max_tokens=24, temperature=0).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        front.end()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And what does it pass?"}]
    with serving(own, smollm2, log=tmp_path / "log") as front:
        second = front.chat(smollm2.stem, messages=messages, max_tokens=24, temperature=0).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"], second["usage"]
