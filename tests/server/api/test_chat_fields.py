"""Which bodies /v1/chat/completions takes, what their fields mean in our words, and which are refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase as OldParamsBase

from edgelm.base.sampling import MAX_SEED, SamplingParams
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.jobs.request import AnswerRequest
from edgelm.server.api.chat import ChatRequest
from edgelm.server.api.completions import CompletionsRequest
from edgelm.server.api.dialects import parse_request
from edgelm.server.api.errors import ApiError
from edgelm.server.api.field_table import CHAT, COMPLETIONS
from edgelm.server.api.fields import MAX_CHOICES, MAX_ENTRIES, MAX_STOPS
from edgelm.server.api.json_body import read_json
from edgelm.text import stream
from edgelm.text.calls.format import ToolChoice

ROUTE = "/v1/chat/completions"
MINIMAL = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse(**fields: Any) -> AnswerRequest:
    (request,) = parse_request(ROUTE, MINIMAL | fields).answer_requests()
    return request


def refused(route: str = ROUTE, **fields: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse_request(route, MINIMAL | fields).answer_requests()
    assert caught.value.status == 400
    error: dict[str, Any] = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_every_sampling_field_arrives() -> None:
    sampling = parse(
        max_tokens=5,
        temperature=0.25,
        top_p=0.75,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"4": -100, "17": 2.5},
        top_n_sigma=0,  # off, as SillyTavern sends it
        logprobs=True,
        top_logprobs=4,
        seed=12345,
        speculation=False,
    ).sampling
    assert sampling == {
        "max_tokens": 5,
        "temperature": 0.25,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": ((4, -100.0), (17, 2.5)),
        "seed": 12345,
        "num_logprobs": 4,
        "draft": "off",
    }
    SamplingParams(**sampling)


def test_missing_fields_and_null_leave_the_settings() -> None:
    assert parse().sampling == {}
    assert parse(temperature=None, top_k=None, seed=None, logprobs=None, stop=None, n=None).sampling == {}
    assert parse(speculation=True, draft=None).sampling == {}


@pytest.mark.parametrize("draft", ["auto", "ngram", "mtp", "off"])
def test_a_request_chooses_who_drafts(draft: str) -> None:
    assert parse(draft=draft).sampling == {"draft": draft}
    assert parse(draft=draft, speculation=False).sampling == {"draft": "off"}


def test_an_unknown_drafter_is_refused() -> None:
    assert refused(draft="oracle")["param"] == "draft"


def test_zero_is_a_value() -> None:
    values = {"temperature": 0, "top_k": 0, "min_p": 0, "seed": 0}
    assert parse(**values).sampling == values


def test_max_completion_tokens_wins() -> None:
    assert parse(max_completion_tokens=6).sampling["max_tokens"] == 6
    assert parse(max_tokens=5, max_completion_tokens=6).sampling["max_tokens"] == 6
    assert parse(max_tokens=10**9).sampling["max_tokens"] == 10**9


def test_seeds_may_be_negative() -> None:
    assert parse(seed=-1).sampling["seed"] == MAX_SEED


def test_logprobs_alone_have_no_alternatives() -> None:
    assert parse(logprobs=True).sampling["num_logprobs"] == 0
    assert "num_logprobs" not in parse(logprobs=False).sampling


def test_llama_servers_name_of_a_penalty() -> None:
    assert parse(repeat_penalty=1.5).sampling["repetition_penalty"] == 1.5
    assert parse(repeat_penalty=1.5, repetition_penalty=1.25).sampling["repetition_penalty"] == 1.25


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"audio": {"voice": "x"}}, "unsupported_parameter", "audio"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
        ({"min_tokens": 3}, "unsupported_parameter", "min_tokens"),
        ({"min_tokens": False}, "unsupported_parameter", "min_tokens"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": MAX_CHOICES + 1}, "invalid_value", "n"),
        ({"temperature": "0.5"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"seed": 2**64}, "invalid_value", "seed"),
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"min_p": 1}, "invalid_value", "min_p"),
        ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "invalid_type", "logit_bias.5"),
        ({"logit_bias": [[5, 1], ["text", 1]]}, "invalid_type", "logit_bias"),
        ({"logit_bias": [[5, 101]]}, "invalid_value", "logit_bias"),
        ({"top_n_sigma": 1.0}, "unsupported_parameter", "top_n_sigma"),
        ({"stop": 1}, "invalid_type", "stop"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hello"}, "invalid_type", "messages"),
        ({"messages": [1]}, "invalid_type", "messages.0"),
        ({"messages": [{"content": ""}]}, "missing_required_parameter", "messages.0.role"),
        ({"messages": [{"role": "robot", "content": ""}]}, "invalid_type", "messages.0.role"),
        ({"messages": [{"role": "user", "content": 1}]}, "invalid_type", "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_type", "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "invalid_type", "messages.0.tool_calls.0"),
        ({"model": ""}, "invalid_value", "model"),
        ({"tools": [{"type": "function"}]}, "invalid_type", "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_type", "tools.0"),
        ({"tools": [{"type": "retrieval"}]}, "invalid_type", "tools.0"),
        ({"functions": [{"name": "f"}, {"nam": "g"}]}, "invalid_type", "functions.1"),
        ({"tool_choice": "some"}, "invalid_value", "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
                },
            },
            "invalid_value",
            "tool_choice",
        ),
        ({"tool_choice": {"type": "function"}}, "invalid_value", "tool_choice"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value", "add_generation_prompt"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": "f"}]}}},
            "invalid_value",
            "tool_choice",
        ),
        ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {}}, "invalid_value", "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "invalid_value", "guided_json"),
        ({"guided_json": "[]"}, "invalid_value", "guided_json"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "invalid_value", "grammar"),
        ({"response_format": {"type": "json_object"}, "json_schema": {}}, "invalid_value", "json_schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs.choice"),
    ],
)
def test_refused_fields_are_named(fields: dict[str, Any], code: str, param: str) -> None:
    error = refused(**fields)
    assert (error["code"], error["param"]) == (code, param)
    assert param.split(".", maxsplit=1)[0] in error["message"]


def test_fields_of_nobody_are_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgelm.server.api.dialects")
    fields = {"client_metadata": {"a": 1}, "odd": None, "user": "me", "store": True}
    assert parse(**fields) == parse()
    assert not caplog.text  # in an engine process
    parse_request(ROUTE, MINIMAL | fields, logs_ignored=True)
    assert "'client_metadata', 'odd'" in caplog.text
    assert "user" not in caplog.text.replace("unknown", "")
    message = {"role": "user", "content": "hello", "typo": 1}
    assert parse(messages=[message]) == parse()


def test_fields_that_request_nothing_are_taken() -> None:
    nothing = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "store": False,
        "n": 1,
        "modalities": ["text"],
        "audio": None,
        "min_tokens": 0,
        "typical_p": 1.0,
        "stop_token_ids": [],
        "grammar": "",
        "parallel_tool_calls": None,
    }
    assert parse(**nothing) == parse()
    message = {"role": "assistant", "content": "hi", "tool_calls": None, "refusal": None, "annotations": []}
    assert parse(messages=[message]).messages == [{"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    ("params", "model", "table"),
    [(CompletionCreateParamsBase, ChatRequest, CHAT), (OldParamsBase, CompletionsRequest, COMPLETIONS)],
    ids=["chat", "completions"],
)
def test_every_field_of_openais_client_is_known(params: Any, model: Any, table: Any) -> None:
    fields = {*params.__annotations__, "stream"}
    assert fields - model.model_fields.keys() - table.ignored.keys() - table.refused.keys() == set()
    assert not model.model_fields.keys() & (table.ignored.keys() | table.refused.keys())
    assert not table.ignored.keys() & table.refused.keys()


@pytest.mark.parametrize("picture", [{"image_url": {"url": "data:"}}, {"image_url": "data:"}])
@pytest.mark.parametrize("kind", ["image_url", "input_image"])
def test_pictures_are_read(kind: str, picture: dict[str, Any]) -> None:
    if kind == "input_image" and not isinstance(picture["image_url"], str):
        assert refused(messages=[{"role": "user", "content": [{"type": kind, **picture}]}])
        return
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, **picture}]
    (message,) = parse(messages=[{"role": "user", "content": parts}]).messages
    assert message["content"] == [parts[0], {"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize("kind", ["image", "input_audio", "file"])
def test_other_parts_are_not_read(kind: str) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:"}}]
    error = refused(messages=[{"role": "user", "content": parts}])
    assert (error["code"], error["param"]) == ("unsupported_content", "messages.0.content.1")
    assert kind in error["message"]
    assert "is not read here" in error["message"]
    past = {"past": [{"role": "user", "content": parts}]}
    assert refused(edgelm=past)["param"] == "edgelm.past.0.content.1"


def test_no_error_names_our_classes() -> None:
    for fields in ({"messages": [1]}, {"edgelm": 1}, {"stream_options": []}, {"edgelm": {"past": [[]]}}):
        assert refused(**fields)["message"].endswith(": input should be an object")
    assert refused(response_format=1)["message"] == "response_format: input should be an object"
    assert refused(messages=[])["message"] == "messages is empty"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [MINIMAL["messages"][0]] * (MAX_ENTRIES + 1)}, "messages"),  # type: ignore[index]
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ({"logit_bias": {str(token): 1 for token in range(MAX_ENTRIES + 1)}}, "logit_bias"),
        ({"metadata": {str(key): "" for key in range(MAX_ENTRIES + 1)}}, "metadata"),
        ({"tools": [{}] * (MAX_ENTRIES + 1)}, "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_entries_than_anyone_needs(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert "at most" in error["message"]


def test_the_stream_takes_the_stop_strings_of_a_request_and_of_its_template() -> None:
    assert MAX_STOPS < stream.MAX_STOPS
    assert parse(stop=["x"] * MAX_STOPS).stop == ("x",) * MAX_STOPS
    assert parse(stop="x").stop == ("x",)
    assert parse().stop == ()


def test_messages_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a", "prompt_cache_breakpoint": {}}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    custom = {"id": "2", "type": "custom", "custom": {"name": "g", "input": 'say "x"'}}
    thoughts = [{"type": "redacted_thinking", "data": "x"}, {"type": "reasoning", "text": "be it"}]
    thoughts += [{"type": "thinking", "thinking": None}, {"type": "text", "text": ""}]
    messages = parse(
        messages=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "name": "me", "content": parts},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call, custom]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant", "function_call": {"name": "h", "arguments": ""}},
            {"role": "function", "name": "h", "content": "three"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "so "}, *thoughts],
                "tool_calls": [call],
            },
        ]
    ).messages
    custom_function = {"name": "g", "arguments": '{"input": "say \\"x\\""}'}
    parts = [{"type": "text", "text": text} for text in "ab"]  # the template joins them
    assert messages == [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts, "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [call, {"id": "2", "type": "function", "function": custom_function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "", "type": "function", "function": {"name": "h", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "", "name": "h", "content": "three"},
        {"role": "assistant", "content": "", "reasoning_content": "so be it", "tool_calls": [call]},
    ]


def test_the_past_of_a_shortened_conversation() -> None:
    assert parse().past == parse(edgelm=None).past == parse(edgelm={}).past == []
    answer = {"role": "assistant", "content": [{"type": "text", "text": "hello"}], "refusal": None}
    assert parse(edgelm={"past": [answer]}).past == [{"role": "assistant", "content": "hello"}]
    assert refused(edgelm={"past": [{"role": "robot", "content": ""}]})["param"] == "edgelm.past.0.role"
    assert refused(edgelm=[])["param"] == "edgelm"


def test_a_prediction_is_a_text_or_parts() -> None:
    assert parse(prediction={"type": "content", "content": "abc"}).prediction == "abc"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(prediction={"type": "content", "content": parts}).prediction == "ab"
    assert parse().prediction == ""


FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}


def test_tools_of_all_forms_are_functions() -> None:
    assert parse(tools=[{"type": "function", "function": FUNCTION}]).tools == [
        {"type": "function", "function": FUNCTION}
    ]
    older = parse(functions=[FUNCTION])
    assert older.tools == [{"type": "function", "function": FUNCTION}]
    assert not older.has_several_calls
    (bare,) = parse(tools=[{"type": "function", "function": {"name": "f"}}]).tools
    assert bare["function"]["parameters"] == {"type": "object", "properties": {}}
    (custom,) = parse(tools=[{"type": "custom", "custom": {"name": "g", "description": "d"}}]).tools
    assert custom["function"]["name"] == "g"
    assert custom["function"]["parameters"]["required"] == ["input"]


def test_a_forced_call_is_the_only_one_unless_the_client_asks_for_more() -> None:
    def several(choice: Any, parallel: bool | None) -> bool:
        tools = [{"type": "function", "function": {**FUNCTION, "name": name}} for name in "fg"]
        return parse(tools=tools, tool_choice=choice, parallel_tool_calls=parallel).has_several_calls

    both = [{"type": "function", "function": {"name": name}} for name in "fg"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": both}}
    assert [several("auto", parallel) for parallel in (None, False, True)] == [True, False, True]
    assert [several("required", parallel) for parallel in (None, False, True)] == [False, False, True]
    assert [several(allowed, parallel) for parallel in (None, False, True)] == [False, False, True]
    assert [several(both[0], parallel) for parallel in (None, False, True)] == [False] * 3


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice()),
        ({"tool_choice": "auto"}, ToolChoice()),
        ({"tool_choice": "none"}, ToolChoice("none")),
        ({"tool_choice": "required"}, ToolChoice("required")),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ToolChoice("required", frozenset("f"))),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, ToolChoice("required", frozenset("f"))),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [
                            {"type": "function", "function": {"name": "f"}},
                            {"type": "custom", "custom": {"name": "g"}},
                        ],
                    },
                },
            },
            ToolChoice("auto", frozenset("fg")),
        ),
        ({"function_call": "none"}, ToolChoice("none")),
        ({"function_call": {"name": "f"}}, ToolChoice("required", frozenset("f"))),
        ({"function_call": "none", "tool_choice": "auto"}, ToolChoice()),
    ],
)
def test_tool_choices(fields: dict[str, Any], choice: ToolChoice) -> None:
    assert parse(**fields).tool_choice == choice


def schema_spec(strict: bool = True) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(SCHEMA), strict)


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, schema_spec()),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, schema_spec()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            schema_spec(False),
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}, schema_spec()),
        ({"json_schema": SCHEMA}, schema_spec()),
        ({"guided_json": SCHEMA}, schema_spec()),
        ({"guided_json": json.dumps(SCHEMA)}, schema_spec()),
        ({"structured_outputs": {"json": SCHEMA}}, schema_spec()),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
        ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a", "b"]')),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a", "b"]')),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec("lark", 'start: "a"')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarSpec("lark", 'start: "a"')),
        ({"grammar": 'root ::= "a"'}, GrammarSpec("gbnf", 'root ::= "a"')),
    ],
)
def test_grammars_by_every_name(fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    assert parse(**fields).grammar == spec
    (request,) = parse_request("/v1/completions", {"model": "m", "prompt": "x", **fields}).answer_requests()
    assert request.grammar == spec


def test_thinking_fields_reach_the_template() -> None:
    on = {"enable_thinking": True, "thinking": True}
    assert parse(reasoning_effort="high").template_kwargs == on | {"reasoning_effort": "high"}
    assert parse(reasoning_effort="none").template_kwargs == {"enable_thinking": False, "thinking": False}
    assert parse(enable_thinking=True).template_kwargs == on
    assert parse(chat_template_kwargs={"a": 1}).template_kwargs == {"a": 1}
    assert parse(reasoning_budget=0).thinking_budget == parse(thinking_budget_tokens=0).thinking_budget == 0
    assert parse(thinking_budget_tokens=-1).thinking_budget is None, "llama-server's name, and its value for no limit"
    assert parse(thinking_budget_tokens=5, reasoning_budget=7).thinking_budget == 7


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
INNER = LEAF | st.lists(LEAF, max_size=2) | st.dictionaries(st.text(max_size=5), LEAF, max_size=2)
JSON = INNER | st.lists(INNER, max_size=3) | st.dictionaries(st.text(max_size=5), INNER, max_size=3)
NAMES = {
    ROUTE: st.sampled_from([*ChatRequest.model_fields, *CHAT.refused, *CHAT.ignored, "odd"]),
    "/v1/completions": st.sampled_from([*CompletionsRequest.model_fields, *COMPLETIONS.refused, "odd"]),
}


@pytest.mark.parametrize("route", NAMES)
@given(st.data(), st.booleans())
def test_any_json_is_taken_or_refused(route: str, data: st.DataObject, minimal: bool) -> None:
    fields = data.draw(st.dictionaries(NAMES[route], JSON, max_size=6))
    refusal: ApiError | None = None
    try:
        body = read_json(json.dumps((MINIMAL | {"prompt": "x"} if minimal else {}) | fields).encode())
        for request in parse_request(route, body).answer_requests():
            sampling = request.sampling
            SamplingParams(**(sampling | {"max_tokens": sampling.get("max_tokens") or 1}))
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        json.dumps(refusal.body, allow_nan=False)
