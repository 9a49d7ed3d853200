"""/v1/messages: Anthropic's fields and blocks as a request in our words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgelm.base.workers.grammars import GrammarSpec
from edgelm.jobs.request import AnswerRequest
from edgelm.server.api.dialects import error_body_of, parse_request
from edgelm.server.api.errors import ApiError
from edgelm.text.calls.format import ToolChoice

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = {"name": "weather", "description": "d", "input_schema": SCHEMA}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
CACHE = {"cache_control": {"type": "ephemeral"}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def answer_request(**fields: Any) -> AnswerRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [user("hi")]} | fields
    (request,) = parse_request("/v1/messages", body).answer_requests()
    return request


def messages(*given: Any) -> list[dict[str, Any]]:
    return list(answer_request(messages=list(given)).messages)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        answer_request(**fields)
    assert caught.value.status == 400
    return caught.value


def test_sampling_reaches_the_request() -> None:
    request = answer_request(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a", "b"])
    assert request.sampling == {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 3}
    assert request.stop == ("a", "b")
    assert answer_request().sampling == {"max_tokens": 9}


def test_max_tokens_is_required_for_an_answer_alone() -> None:
    body = {"model": "m", "messages": [user("hi")]}
    with pytest.raises(ApiError, match="max_tokens is missing"):
        parse_request("/v1/messages", body)
    parse_request("/v1/messages/count_tokens", body)


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("be brief", "be brief"),
        ([text("be"), text("brief", **CACHE)], "be\n\nbrief"),
        ([text("x-anthropic-billing-header: cc_version=2; cch=ab1;"), text("be brief")], "be brief"),
        ([text("x-anthropic-billing-header: cch=ab1;\nbe brief")], "be brief"),
        ("x-anthropic-billing-header: cch=ab1;\n\nbe brief", "be brief"),
        ("x-anthropic-billing-header: cch=ab1;", None),
        ([], None),
        ("", None),
    ],
)
def test_system_prompts(system: Any, expected: str | None) -> None:
    first = [] if expected is None else [{"role": "system", "content": expected}]
    assert answer_request(system=system).messages == [*first, user("hi")]


def test_a_system_message_in_the_middle_stays_there() -> None:
    found = messages(user("a"), {"role": "system", "content": [text("now in French")]}, user("b"))
    assert [message["role"] for message in found] == ["user", "system", "user"]
    assert found[1]["content"] == "now in French"


def test_texts_of_a_turn_are_joined() -> None:
    assert messages(user([text("a", citations=None), text("b", **CACHE)])) == [user("a\n\nb")]


def test_documents_of_text_are_read() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain"}}
    parts = {"type": "document", "source": {"type": "content", "content": [text("one"), text("two")]}}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [text("hit")]}
    assert messages(user([document, parts, found]))[0]["content"] == "plain\n\none\ntwo\n\nhit"
    assert messages(user([{**document, "title": "A page"}]))[0]["content"] == "A page\nplain"
    assert messages(user([{**document, "title": ["odd"]}]))[0]["content"] == "plain"


def test_an_assistants_turn() -> None:
    turn = [
        {"type": "thinking", "thinking": "hm ", "signature": "x"},
        {"type": "redacted_thinking", "data": "secret"},
        text("I look"),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}, "cache_control": None},
        {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
    ]
    results = [
        text("and now?"),
        {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [text("a"), text("b")], **CACHE},
    ]
    found = messages(user("q"), {"role": "assistant", "content": turn}, user(results))
    calls = found[1].pop("tool_calls")
    assert [call["id"] for call in calls] == ["t1", "t2"]
    assert calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert found[1:] == [
        {"role": "assistant", "content": "I look", "reasoning_content": "hm "},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "content": "a\n\nb"},
        user("and now?"),
    ]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({"content": "not found", "is_error": True}, "Error: not found"),
        ({"content": "Error: no", "is_error": True}, "Error: no"),
        ({"is_error": True}, "Error"),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": []}, ""),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": [{"type": "tool_reference", "tool_name": "grep"}]}, "grep"),
    ],
)
def test_forms_of_a_result(result: dict[str, Any], content: str) -> None:
    (message,) = messages(user([{"type": "tool_result", "tool_use_id": "t"} | result]))
    assert message == {"role": "tool", "tool_call_id": "t", "content": content}


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ([{"type": "image", "source": {"type": "file", "file_id": "f"}}], "messages.0.content.0"),
        ([{"type": "document", "source": {"type": "base64", "data": ""}}], "messages.0.content.0"),
        ([text("a"), {"type": "tool_result", "content": [{"type": "image"}]}], "messages.0.content.1.content.0"),
        ([{"type": "poem"}], "messages.0.content.0"),
        ([{"type": "text"}], "messages.0.content.0"),
        ([{"type": "tool_result", "tool_use_id": "t", "content": 5}], "messages.0.content.0.content"),
        (5, "messages.0.content"),
        (["a"], "messages.0.content.0"),
    ],
)
def test_content_that_no_model_reads(content: Any, where: str) -> None:
    error = refused(messages=[user(content)])
    assert error.body["error"]["param"] == where
    assert error_body_of("/v1/messages", error)["error"]["type"] == "invalid_request_error"
    assert where in str(error)


def test_pictures_stand_between_texts() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("c"), IMAGE], "is_error": True}
    read = answer_request(messages=[user([text("a"), text("b"), IMAGE, result])]).messages
    assert [message["content"] for message in read] == [
        [{"type": "text", "text": "c"}, picture],
        [{"type": "text", "text": "a\n\nb"}, picture],
    ]


def test_messages_are_required() -> None:
    refused(messages=[])
    refused(messages=[{"role": "tool", "content": "a"}])


def test_the_last_turn_of_an_assistant_is_continued() -> None:
    request = answer_request(messages=[user("hi"), {"role": "assistant", "content": "Once upon"}])
    assert request.continues_last
    assert not answer_request().continues_last
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    error = refused(messages=[user("hi"), {"role": "assistant", "content": [call]}])
    assert "tool_result" in str(error)


def test_tools_are_functions_and_those_of_servers_are_dropped() -> None:
    tools = [
        WEATHER | CACHE | {"defer_loading": True},
        {"type": "custom", "name": "b", "input_schema": SCHEMA, "strict": True},
        {"type": "web_search_20260209", "name": "web_search"},
    ]
    found = answer_request(tools=tools).tools
    assert [tool["function"]["name"] for tool in found] == ["weather", "b"]
    assert found[0] == {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
    assert found[1]["function"]["strict"] is True
    refused(tools=[{"name": "x", "input_schema": 5}])
    refused(tools=[{"input_schema": SCHEMA}])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", frozenset({"weather"}))),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: ToolChoice) -> None:
    assert answer_request(tools=[WEATHER], tool_choice=choice).tool_choice == expected
    assert answer_request(tools=[WEATHER], tool_choice=choice).parallel_tool_calls is None
    for disabled in (True, False):
        request = answer_request(tools=[WEATHER], tool_choice=choice | {"disable_parallel_tool_use": disabled})
        assert request.parallel_tool_calls is not disabled


@pytest.mark.parametrize("kind", ["auto", "any", "tool"])
@pytest.mark.parametrize("disabled", [None, False, True])
def test_a_forced_call_is_the_only_one_unless_the_client_asks_for_more(kind: str, disabled: bool | None) -> None:
    choice: dict[str, Any] = {"type": kind, "disable_parallel_tool_use": disabled}
    if kind == "tool":
        choice["name"] = "weather"
    several = {"auto": disabled is not True, "any": disabled is False, "tool": False}[kind]
    assert answer_request(tools=[WEATHER], tool_choice=choice).has_several_calls is several


def test_tool_choice_that_is_wrong() -> None:
    refused(tools=[WEATHER], tool_choice={"type": "tool"})
    assert "unknown" in str(refused(tools=[WEATHER], tool_choice={"type": "tool", "name": "unknown"}))
    refused(tools=[WEATHER], tool_choice={"type": "required"})


def test_thinking() -> None:
    on = answer_request(thinking={"type": "enabled", "budget_tokens": 2000})
    assert on.template_kwargs["enable_thinking"] is True
    assert on.thinking_budget == 2000
    assert answer_request(thinking={"type": "disabled"}).template_kwargs["enable_thinking"] is False
    adaptive = answer_request(thinking={"type": "adaptive", "display": "summarized"}, output_config={"effort": "low"})
    assert adaptive.template_kwargs["reasoning_effort"] == "low"
    assert adaptive.thinking_budget is None
    refused(thinking={"type": "maybe"})


def test_output_config() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    expected = GrammarSpec("json_schema", json.dumps(SCHEMA))
    assert answer_request(output_config={"format": form}).grammar == expected
    assert answer_request(output_format=form).grammar == expected  # its name in the beta
    refused(output_config={"format": {"type": "yaml"}})


def test_unknown_fields_and_betas_are_ignored() -> None:
    answer_request(
        metadata={"user_id": "u"}, betas=["x"], context_management={"edits": []}, container="c", mcp_servers=[],
        service_tier="auto", unknown_of_2027=[1], **CACHE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (405, "invalid_request_error"), (413, "request_too_large"),
        (415, "invalid_request_error"), (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form(status: int, kind: str) -> None:
    body = error_body_of("/v1/messages/count_tokens", ApiError(status, "x", "why"))
    request_id = body.pop("request_id")
    assert request_id.startswith("req_")
    assert body == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_a_long_prompt_has_the_words_on_which_clients_shorten_it() -> None:
    body = error_body_of("/v1/messages", ApiError(400, "context_length_exceeded", "600 tokens"))
    assert body["error"]["message"] == "Prompt is too long: 600 tokens"
