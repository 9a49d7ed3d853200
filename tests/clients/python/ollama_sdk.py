"""ollama-python: the typed client against every route of Ollama's API that we have."""

from __future__ import annotations

import asyncio
from typing import Any

import ollama
from checks import ADDRESS, MODEL, PATIENCE_S, check, error_of, main
from ollama import AsyncClient, Client
from pydantic import BaseModel

client = Client(host=ADDRESS, timeout=PATIENCE_S)
USER: list[Any] = [{"role": "user", "content": "Hello there, what is the weather?"}]
SHORT = {"num_predict": 8, "temperature": 0}


def weather(city: str, days: int) -> str:
    """Tell the weather.

    Args:
        city: where
        days: how many
    """
    return f"sunny in {city} for {days}"


class Weather(BaseModel):
    """A form of an answer."""

    city: str
    days: int


@check
def models() -> None:
    names = [model.model for model in client.list().models]
    assert f"{MODEL}:latest" in names, names
    entry = next(model for model in client.list().models if model.model == f"{MODEL}:latest")
    assert entry.size
    assert len(entry.digest or "") == 64
    assert entry.details
    assert entry.details.family == "llama"


@check
def show() -> None:
    for name in (MODEL, f"{MODEL}:latest"):
        shown = client.show(name)
        assert {"completion", "tools", "thinking"} <= set(shown.capabilities or []), shown.capabilities
        info = shown.modelinfo or {}
        assert info["general.architecture"] == "llama"
        assert info["llama.context_length"] == 65_536
        assert shown.template


@check
def chat() -> None:
    answer = client.chat(MODEL, USER)
    assert answer.message.content
    assert answer.done_reason == "stop"
    assert (answer.prompt_eval_count or 0) > 0
    assert (answer.eval_count or 0) > 0
    assert (answer.total_duration or 0) > 1_000_000, "nanoseconds"


@check
def a_stream_is_the_whole() -> None:
    whole = client.chat(MODEL, USER, options=SHORT)
    chunks = list(client.chat(f"{MODEL}:latest", USER, options=SHORT, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].done_reason == whole.done_reason == "length"
    assert chunks[-1].eval_count == 8


@check
def tools_are_called_and_their_results_are_read() -> None:
    messages = list(USER)
    for stream in (False, True):
        if stream:
            chunks = list(client.chat(MODEL, USER, tools=[weather], stream=True))
            calls = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
        else:
            answer = client.chat(MODEL, USER, tools=[weather])
            calls = list(answer.message.tool_calls or ())
            messages += [answer.message]
        assert [call.function.name for call in calls] == ["weather"]
        assert {"city", "days"} <= set(calls[0].function.arguments)
    messages.append({"role": "tool", "tool_name": "weather", "content": "sunny"})
    assert client.chat(MODEL, messages, tools=[weather]).message.content
    messages[-1] = {"role": "tool", "content": "sunny"}  # as Home Assistant sends it
    assert client.chat(MODEL, messages, tools=[weather]).message.content


@check
def thinking_stands_apart() -> None:
    for think in (True, "high"):
        answer = client.chat(MODEL, USER, think=think)  # type: ignore[arg-type]
        assert answer.message.thinking
        assert "<think>" not in (answer.message.content or "")
    assert not client.chat(MODEL, USER, think=False).message.thinking
    chunks = list(client.chat(MODEL, USER, think=True, stream=True))
    assert any(chunk.message.thinking for chunk in chunks)


@check
def formats() -> None:
    answer = client.chat(MODEL, USER, format=Weather.model_json_schema(), options={"num_predict": 200})
    assert Weather.model_validate_json(answer.message.content or "")
    assert client.chat(MODEL, USER, format="").message.content


@check
def logprobs() -> None:
    answer = client.chat(MODEL, USER, logprobs=True, top_logprobs=2, options=SHORT)
    assert answer.logprobs
    assert "".join(token.token for token in answer.logprobs) == answer.message.content
    assert all(len(token.top_logprobs or []) == 2 for token in answer.logprobs)


@check
def generate() -> None:
    answer = client.generate(MODEL, "Hello", system="Be brief", options=SHORT)
    assert answer.response
    raw = client.generate(MODEL, "the and of", raw=True, options=SHORT)
    assert raw.prompt_eval_count
    assert answer.prompt_eval_count
    assert raw.prompt_eval_count < answer.prompt_eval_count, "no template around it"
    chunks = list(client.generate(MODEL, "Hello", options=SHORT, stream=True))
    assert "".join(chunk.response for chunk in chunks)
    assert chunks[-1].done


@check
def options() -> None:
    given = {
        "temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["zzz"], "num_ctx": 4096,
        "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "num_predict": 4, "num_gpu": 99,
        "repeat_last_n": 64, "num_thread": 2,
    }  # fmt: skip
    first, second = (client.chat(MODEL, USER, options=given).message.content for _ in range(2))
    assert first == second
    stopped = client.chat(MODEL, USER, options={"temperature": 0, "stop": [" "]})
    assert " " not in (stopped.message.content or "").strip()


@check
def loading_and_ps() -> None:
    loaded = client.generate(MODEL, keep_alive="10m")
    assert loaded.done_reason == "load"
    (running,) = [model for model in client.ps().models if model.model == f"{MODEL}:latest"]
    assert running.context_length
    assert running.expires_at
    assert client.chat(MODEL, keep_alive=-1).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert client.chat(MODEL, USER, options=SHORT).message.content, "it is loaded again"


@check
def pull_of_a_model_that_is_here() -> None:
    assert client.pull(MODEL).status == "success"
    assert [one.status for one in client.pull(MODEL, stream=True)][-1] == "success"


@check
def errors() -> None:
    missing = error_of(ollama.ResponseError, lambda: client.chat("no-such-model", USER))
    assert missing.status_code == 404
    assert "no-such-model" in missing.error
    image = [{"role": "user", "content": "what is it?", "images": ["aGVsbG8="]}]
    seen = error_of(ollama.ResponseError, lambda: client.chat(MODEL, image))
    assert seen.status_code == 400
    assert "image" in seen.error
    long = [{"role": "user", "content": "the " * 70_000}]
    assert error_of(ollama.ResponseError, lambda: list(client.chat(MODEL, long, stream=True))).status_code == 400
    assert error_of(ollama.ResponseError, lambda: client.pull("not a name !")).error


@check
def async_client() -> None:
    async def ask() -> str:
        text = ""
        async for part in await AsyncClient(host=ADDRESS, timeout=PATIENCE_S).chat(MODEL, USER, stream=True):
            text += part.message.content or ""
        return text

    assert asyncio.run(ask())


@check
def embeddings() -> None:
    answer = client.embed(MODEL, ["hello", "world"])
    assert len(answer.embeddings) == 2
    assert abs(sum(value * value for value in answer.embeddings[0]) - 1) < 1e-3
    assert len(client.embed(MODEL, "hello", dimensions=8).embeddings[0]) == 8
    assert client.embeddings(MODEL, "hello").embedding


if __name__ == "__main__":
    main("ollama")
