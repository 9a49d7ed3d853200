"""/v1/chat/completions, as the official client and plain HTTP meet it, against real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.server.harness import ENDLESS, LIMIT_S, Front, body

PROMPT = [{"role": "system", "content": "play"}, {"role": "user", "content": "hello friend"}]


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    base_url = f"{front.address}/v1"
    with openai.OpenAI(base_url=base_url, api_key="any", timeout=LIMIT_S, default_headers={"Prefer": "wait"}) as made:
        yield made


def test_official_client_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=PROMPT, max_tokens=12, seed=3, extra_body=ENDLESS)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    extra = answer.model_extra["edgelm"]
    assert extra["finish_reason"] == "length"
    assert extra["context"] == {"used": answer.usage.total_tokens, "size": 512}
    assert extra["engine"] == "llama"
    assert extra["timings"].keys() == {
        "queue_ms",
        "prompt_ms",
        "first_token_ms",
        "decode_ms",
        "decode_tokens_per_second",
    }
    assert extra["speculation"].keys() == {"drafted", "accepted"}


def test_official_client_streamed_is_the_same_text(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "messages": PROMPT, "max_tokens": 40, "seed": 5}
    whole = client.chat.completions.create(**fields, temperature=0)
    stream = client.chat.completions.create(
        **fields, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    ends = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert [chunk.choices[0].finish_reason for chunk in ends] == [whole.choices[0].finish_reason]
    assert ends[0].model_extra["edgelm"]["finish_reason"] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert "timings" in chunks[-1].model_extra["edgelm"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_ends_with_done_and_has_no_usage_unasked(front: Front) -> None:
    answer = front.chat(stream=True, max_tokens=3)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert not any("usage" in json.loads(line[6:]) for line in lines[:-1])


def test_context_becomes_length(front: Front) -> None:
    answer = front.chat(max_tokens=4000, **ENDLESS).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["edgelm"]["finish_reason"] == "context"
    assert answer["edgelm"]["context"] == {"used": 512, "size": 512}


def test_logprobs_in_openais_shape(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "messages": PROMPT, "max_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**fields, extra_body=ENDLESS)
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    spelled = b"".join(bytes(each.bytes) for each in content)
    assert spelled.decode("utf-8", "replace") == answer.choices[0].message.content
    for each in content:
        assert each.logprob <= 0
        assert [top.logprob for top in each.top_logprobs] == sorted(top.logprob for top in each.top_logprobs)[::-1]
        assert len(each.top_logprobs) == 3
        assert each.logprob <= each.top_logprobs[0].logprob
    chunks = list(client.chat.completions.create(**fields, extra_body=ENDLESS, stream=True))
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in content]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"logit_bias": {"99999": 1}}, 400, "invalid_value", None),
        ({"tools": [{"type": "function"}]}, 400, "invalid_type", "tools.0"),
        ({"modalities": ["audio"]}, 400, "unsupported_parameter", "modalities"),
        ({"model": "absent"}, 404, "model_not_found", "model"),
        ({"model": "/absent/model.gguf"}, 404, "model_not_found", "model"),
    ],
)
def test_a_bad_request_is_named(front: Front, fields: dict, status: int, code: str, param: str | None) -> None:
    answer = front.chat(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello " * 700}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=messages, stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message
    assert any(int(word.replace(",", "")) > 700 for word in caught.value.message.split() if word[0].isdecimal())


def test_models_lists_what_was_given(client: openai.OpenAI, front: Front) -> None:
    front.chat()
    models = {model.id: model for model in client.models.list()}
    assert {"tiny", "long"} <= models.keys()
    ours = models["tiny"].model_extra["edgelm"]
    assert (ours["architecture"], ours["context"], ours["quantization"], ours["loaded"]) == ("llama", 512, "F32", True)
    assert ours["bytes"] > 100_000
    assert client.models.retrieve("long").id == "long"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")


def test_a_model_may_be_named_by_its_path(front: Front) -> None:
    path = front.ps("tiny")["path"]
    assert front.chat(model=path).json()["model"] == path
    assert len([each for each in front.ps()["models"] if each["path"] == path]) == 1


def test_unknown_paths_and_methods_have_openais_shape(front: Front) -> None:
    for answer, status in (
        (front.http.get("/v1/nothing"), 404),
        (front.http.get("/v1/chat/completions"), 405),
        (front.http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}), 400),
        (front.http.post("/v1/chat/completions", json=[body("tiny", "x")]), 400),
    ):
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
