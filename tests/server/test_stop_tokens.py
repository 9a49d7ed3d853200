"""Stop strings that name control tokens, and vLLM's `stop_token_ids`, with a real tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from edgelm.backends.model import LoadedModel
from edgelm.jobs.stop_tokens import stop_tokens
from edgelm.server.api.chat import ChatRequest
from edgelm.server.api.completions import CompletionsRequest
from edgelm.server.api.fields import validated
from edgelm.server.remotes.wire import body_of
from edgelm.text.template_runner import TemplateRunner
from tests.served import Served, loaded_model, served
from tests.tiny import EOS, write_tiny

CONTROL = ("<|im_start|>", "<|im_end|>", "<|note|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    path = write_tiny(folder / "tiny.gguf", chat_template=TEMPLATE, endless=True, control=CONTROL)
    with loaded_model(path, context=512) as loaded:
        yield loaded


@pytest.fixture
async def edgelm(model: LoadedModel) -> AsyncIterator[Served]:
    async with served(model) as made:
        yield made


def token(model: LoadedModel, text: str) -> int:
    (only,) = model.tokenizer.encode(text, special=True, bos=False)
    return only


async def ended_by(edgelm: Served, generated: int, **fields: Any) -> tuple[str, str, int]:
    """Return the text, reason and length of an answer in which a token is the likeliest one behind each other."""
    asked: dict[str, Any] = {"model": "m", "prompt": "once upon", "max_tokens": 6, "temperature": 0}
    asked["logit_bias"] = {str(generated): 100}
    extra = {"stop_token_ids": fields.pop("stop_token_ids", None)}
    answer = await edgelm.client.completions.create(**asked | fields, extra_body=extra)
    return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens


@pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_start|>user", "<|im_start|>user\n"])
async def test_a_stop_string_that_names_a_control_token_ends_the_answer(edgelm: Served, stop: str) -> None:
    generated = token(edgelm.loaded, "<|im_start|>")
    assert await ended_by(edgelm, generated, stop=["never", stop]) == ("", "stop", 1)


async def test_another_control_token_does_not(edgelm: Served) -> None:
    generated = token(edgelm.loaded, "<|im_start|>")
    assert await ended_by(edgelm, generated, stop=["<|im", "<|im_end|>", "<|note|>"]) == ("", "length", 6)


async def test_stop_token_ids_end_the_answer_before_the_text_of_the_token(edgelm: Served) -> None:
    for text in ("<|im_start|>", "e"):
        generated = edgelm.loaded.tokenizer.encode(text, special=True, bos=False)[-1]
        assert (await ended_by(edgelm, generated))[1:] == ("length", 6)
        assert await ended_by(edgelm, generated, stop_token_ids=[2**30, generated]) == ("", "stop", 1)


async def test_the_string_that_was_found_is_reported(edgelm: Served) -> None:
    generated = token(edgelm.loaded, "<|im_start|>")
    for stop, ids, reported in (
        (("x", "<|im_start|>user"), (), "<|im_start|>user"),
        (("x",), (generated,), "<|im_start|>"),
        ((), (), None),
    ):
        body = {"model": "m", "prompt": "once", "max_tokens": 3, "stop": list(stop), "stop_token_ids": list(ids)}
        (request,) = validated(CompletionsRequest, body | {"logit_bias": {str(generated): 100}}).answer_requests()
        deltas = [delta async for delta in edgelm.answerer.answer(await edgelm.answerer.prepare(request))]
        assert deltas[-1].stop == reported


async def test_the_stop_token_of_a_request_is_not_kept_as_part_of_the_conversation(
    edgelm: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated, kept = token(edgelm.loaded, "<|im_start|>"), []

    async def keep(_self: Any, _prompt: Any, answer: list[int], _message: Any = None) -> None:
        kept.append(answer)

    monkeypatch.setattr(TemplateRunner, "cache_answer", keep)
    for bias, stop in ((generated, ["<|im_start|>"]), (generated, []), (EOS, [])):
        await edgelm.client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=3,
            logit_bias={str(bias): 100},
            temperature=0,
            stop=stop,
        )
    assert kept == [[generated] * 3, [EOS]]


def test_what_a_stop_string_stands_for(model: LoadedModel) -> None:
    start, note = token(model, "<|im_start|>"), token(model, "<|note|>")
    tokenizer, strings = model.tokenizer, ["<|im_start|>", "<|note|>\n"]
    assert stop_tokens(tokenizer, ["\n", "a<|im_start|>", "im_start"], (), ()) == {}
    assert stop_tokens(tokenizer, strings, (), ()) == {start: "<|im_start|>", note: "<|note|>\n"}
    assert stop_tokens(tokenizer, strings, (), {"<|im_start|>", "<|note|>"}) == {start: "<|im_start|>"}
    assert stop_tokens(tokenizer, ["</s>", "<|im_end|>"], (EOS,), ()) == {}, "they end every answer"


def test_another_server_gets_the_ids() -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "stop_token_ids": [7, 5]}
    (request,) = validated(ChatRequest, body).answer_requests()
    assert body_of([request], "m", frozenset())["stop_token_ids"] == [5, 7]
