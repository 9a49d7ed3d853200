"""llama-server's requests in our words, and its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgelm.jobs.request import AnswerRequest
from edgelm.server.api.dialects import parse_request, reply_to
from edgelm.server.api.errors import ApiError
from edgelm.server.api.llama_texts import MAX_TEXT_BYTES
from edgelm.text.parse import Content
from tests.server.api.scripted import CONTEXT, delta, end


def answer_request(path: str, **fields: Any) -> AnswerRequest:
    (request,) = parse_request(path, fields).answer_requests()
    return request


def test_infill_reads_an_editors_fields() -> None:
    request = answer_request(
        "/infill",
        id_slot=0,
        input_prefix="def f():\n",
        prompt="    return ",
        input_suffix="\n\nprint(f())",
        input_extra=[{"filename": "/etc/passwd", "text": "chunk", "time": 3}, {"text": "no name"}],
        n_predict=128,
        n_indent=4,
        t_max_predict_ms=500,
        samplers=["top_k", "infill"],
        cache_prompt=True,
        t_max_prompt_ms=500,
    )
    assert (request.prompt, request.suffix) == ("def f():\n    return ", "\n\nprint(f())")
    assert request.files == [("/etc/passwd", "chunk"), ("tmp", "no name")], "names are labels"
    assert (request.least_indent, request.time_limit_ms, request.sampling) == (4, 500, {"max_tokens": 128})
    assert request.interactive
    warm = answer_request("/infill", input_prefix="a", n_predict=0)
    assert (warm.sampling, warm.suffix, warm.interactive) == ({"max_tokens": 0}, "", False)


@pytest.mark.parametrize("prompt", ["once", [1, 2, 3]])
def test_completion_takes_a_text_or_tokens(prompt: Any) -> None:
    assert answer_request("/completion", prompt=prompt, n_predict=-1) == AnswerRequest(prompt=prompt)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/completion", {}),
        ("/completion", {"prompt": ["a", "b"]}),
        ("/completion", {"prompt": "a", "n_probs": 3}),
        ("/completion", {"prompt": "a", "image_data": [{"data": "AA==", "id": 1}]}),
        ("/infill", {"image_data": [{"data": "AA==", "id": 1}]}),
        ("/infill", {"input_extra": "x"}),
        ("/infill", {"n_predict": -5}),
        ("/tokenize", {"content": ["a"]}),
        ("/tokenize", {}),
        ("/tokenize", {"content": "a", "prompt": "a"}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/apply-template", {}),
    ],
)
def test_errors(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(path, fields)
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["content", "prompt"])
def test_a_text_to_tokenize_has_an_end(name: str) -> None:
    text = "é" * (MAX_TEXT_BYTES // 2)
    parse_request("/tokenize", {name: text})
    with pytest.raises(ApiError) as caught:
        parse_request("/tokenize", {name: text + "a"})
    assert (caught.value.status, caught.value.body["error"]["param"]) == (413, name)


DELTAS = [delta(Content("he")), delta(Content("llo")), end("stop", stop="END")]


def test_the_whole_and_the_stream() -> None:
    request = parse_request("/completion", {"prompt": "x", "n_predict": 9})
    whole = reply_to("/completion", request, CONTEXT).whole(DELTAS)
    assert (whole["content"], whole["stop"], whole["stop_type"], whole["stopping_word"]) == (
        "hello",
        True,
        "word",
        "END",
    )
    assert (whole["tokens_predicted"], whole["tokens_evaluated"]) == (9, 30)
    assert (whole["timings"]["prompt_n"], whole["timings"]["cache_n"]) == (10, 20)
    stream = reply_to("/completion", request, CONTEXT)
    events = [json.loads(event[6:]) for event in b"".join(map(stream.delta, DELTAS)).decode().split("\n\n")[:-1]]
    assert "".join(event["content"] for event in events) == "hello"
    assert [event["stop"] for event in events] == [False, False, True]


def test_only_the_fields_that_are_requested() -> None:
    fields = ["content", "timings/prompt_n", "timings", "nothing", "content/deeper"]
    request = parse_request("/infill", {"input_prefix": "x", "response_fields": fields})
    whole = reply_to("/infill", request, CONTEXT).whole(DELTAS)
    assert whole.keys() == {"content", "timings/prompt_n", "timings"}
    assert whole["timings/prompt_n"] == whole["timings"]["prompt_n"]
