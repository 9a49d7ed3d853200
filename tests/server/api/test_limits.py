"""The limits of fields that cost work, in every API: length and number."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from edgelm.server.api.dialects import DIALECTS, POOLED, TEXTS, parse_request, parse_routed
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import LONG, MAX_CHARS, MAX_STOP_LEN, MAX_STOPS
from edgelm.server.api.json_body import read_json
from edgelm.text.parse import AnswerParser, Content
from tests.server.api.test_sentinels import BODIES, STOPS
from tests.server.valid_requests import VALID

ROUTES = {**DIALECTS, **TEXTS, **POOLED}


def refused(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a body."""
    with pytest.raises(ApiError) as caught:
        parse_routed(path, read_json(json.dumps(body).encode()))
    assert caught.value.status == 400
    error: dict[str, Any] = caught.value.body["error"]
    return error


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "stop",
    ["x" * (MAX_STOP_LEN + 1), ["x", "x" * (MAX_STOP_LEN + 1)], ["x"] * (MAX_STOPS + 1)],
    ids=["long", "one is long", "many"],
)
def test_stop_strings(path: str, stop: str | list[str]) -> None:
    def body(stop: str | list[str]) -> dict[str, Any]:
        fields = {STOPS.get(path, "stop"): stop}
        return BODIES[path] | {"max_tokens": 9} | ({"options": fields} if path.startswith("/api/") else fields)

    assert "stop" in refused(path, body(stop))["param"]
    (request,) = parse_request(path, body(["x" * MAX_STOP_LEN] * MAX_STOPS)).answer_requests()
    assert request.stop == ("x" * MAX_STOP_LEN,) * MAX_STOPS


def test_a_stop_string_that_no_answer_begins_costs_nothing() -> None:
    """64 of 200,000 characters took a minute and gigabytes, again for each of several answers."""
    stops = ["ab" * 100_000 + str(index) for index in range(MAX_STOPS)]
    tracemalloc.start()
    parser = AnswerParser(None, None, stop=stops)
    parts = [*parser.push(1, b"abab, and so on"), *parser.flush()]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "".join(part.text for part in parts if isinstance(part, Content)) == "abab, and so on"
    assert peak_bytes < 2**20


@pytest.mark.parametrize("path", ROUTES)
def test_fields_beside_the_conversation(path: str) -> None:
    valid = (VALID.get(path) or [{"query": "x", "documents": ["x"], "input": "x"}])[0] | {"model": "m", "max_tokens": 1}
    fields = ROUTES[path].model.model_fields.keys() - LONG - ROUTES[path].table.refused.keys()
    for name in sorted(fields):
        for value in ("x" * (MAX_CHARS + 1), [["x" * MAX_CHARS], {"y": "z"}]):
            error = refused(path, valid | {name: value})
            assert (error["param"], "characters" in error["message"]) == (name, True)


def test_fields_that_nobody_reads_have_no_limit() -> None:
    body = BODIES["/v1/chat/completions"] | {"metadata": {"a": "x" * 2 * MAX_CHARS}, "unknown": "x" * 2 * MAX_CHARS}
    assert parse_routed("/v1/chat/completions", read_json(json.dumps(body).encode())).model == "m"
