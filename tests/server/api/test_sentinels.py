"""Values that mean off, in every API: they are taken as other servers take them."""

from __future__ import annotations

from typing import Any

import pytest

from edgelm.jobs.request import AnswerRequest
from edgelm.server.api.dialects import parse_request
from edgelm.server.api.sentinels import LEAST_TOP_P

MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES,
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/api/chat": MESSAGES,
    "/api/generate": {"model": "m", "prompt": "hi"},
}
LIMITS = {
    "/v1/responses": "max_output_tokens", "/completion": "n_predict", "/api/chat": "num_predict",
    "/api/generate": "num_predict",
}  # fmt: skip
STOPS = {"/v1/messages": "stop_sequences"}


def request_of(path: str, **fields: Any) -> AnswerRequest:
    body = BODIES[path] | ({"options": fields} if path.startswith("/api/") else fields)
    if path == "/v1/messages":
        body = {"max_tokens": 9, **body}
    (request,) = parse_request(path, body).answer_requests()
    return request


@pytest.mark.parametrize("path", BODIES)
def test_values_that_mean_off(path: str) -> None:
    assert request_of(path, top_k=-1).sampling["top_k"] == 0
    assert request_of(path, top_p=0).sampling["top_p"] == LEAST_TOP_P
    assert request_of(path, top_p=0.0).sampling["top_p"] == LEAST_TOP_P
    stop = STOPS.get(path, "stop")
    assert request_of(path, **{stop: ["", "a", ""]}).stop == ("a",)
    assert request_of(path, **{stop: [""]}).stop == ()
    if path != "/v1/messages":  # there it is a list
        assert request_of(path, stop="").stop == ()
    assert "max_tokens" not in request_of(path, **{LIMITS.get(path, "max_tokens"): -1}).sampling


@pytest.mark.parametrize("path", BODIES)
def test_no_tokens(path: str) -> None:
    """Where there is a text to continue, 0 is a number of tokens; in a conversation it is no limit."""
    sampling = request_of(path, **{LIMITS.get(path, "max_tokens"): 0}).sampling
    assert sampling.get("max_tokens") == (0 if path in ("/v1/completions", "/completion") else None)


def test_other_fields_that_are_off() -> None:
    path = "/v1/chat/completions"
    assert "max_tokens" not in request_of(path, max_completion_tokens=-1).sampling
    assert request_of(path, reasoning_budget=-1).thinking_budget is None
    assert request_of(path, top_logprobs=0).sampling == {}
