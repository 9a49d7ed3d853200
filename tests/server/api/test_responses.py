"""/v1/responses: its fields and items as a request in our words."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from edgelm.base.workers.grammars import GrammarSpec
from edgelm.jobs.request import AnswerRequest
from edgelm.server.api.dialects import parse_request
from edgelm.server.api.errors import ApiError
from edgelm.server.api.responses import UNREADABLE, encoded
from edgelm.text.calls.format import ToolChoice

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


def answer_request(**fields: Any) -> AnswerRequest:
    (request,) = parse_request("/v1/responses", {"model": "m", "input": "hi"} | fields).answer_requests()
    return request


def messages(*items: Any) -> list[dict[str, Any]]:
    return list(answer_request(input=list(items)).messages)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        answer_request(**fields)
    assert caught.value.status == 400
    return caught.value


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_text_is_a_user_message_and_instructions_come_first() -> None:
    assert answer_request().messages == [user("hi")]
    assert answer_request(instructions="be brief").messages == [{"role": "system", "content": "be brief"}, user("hi")]


def test_sampling_reaches_the_request() -> None:
    request = answer_request(max_output_tokens=5, temperature=0.5, top_p=0.9, frequency_penalty=1, presence_penalty=-1)
    assert request.sampling == {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "frequency_penalty": 1, "presence_penalty": -1,
    }  # fmt: skip
    assert answer_request().sampling == {}


def test_fields_of_other_apis_have_their_effect() -> None:
    request = answer_request(
        seed=7, stop=["END"], top_k=3, min_p=0.1, logit_bias={"5": 1}, speculation=False, repeat_penalty=1.1,
        reasoning={"effort": "none"}, chat_template_kwargs={"enable_thinking": True, "own": 1},
    )  # fmt: skip
    assert request.sampling == {
        "seed": 7, "top_k": 3, "min_p": 0.1, "logit_bias": ((5, 1.0),), "draft": "off", "repetition_penalty": 1.1,
    }  # fmt: skip
    assert request.stop == ("END",)
    assert request.template_kwargs["enable_thinking"] is True
    assert request.template_kwargs["own"] == 1
    assert answer_request(n=1)
    assert refused(n=2).body["error"]["param"] == "n"


def test_metadata_has_limits() -> None:
    answer_request(metadata={f"{index:064}": "x" * 512 for index in range(16)})
    for metadata in ({str(index): "" for index in range(17)}, {"k" * 65: ""}, {"k": "x" * 513}):
        assert refused(metadata=metadata).body["error"]["param"] == "metadata"
    assert refused(user="u" * 10_000).body["error"]["param"] == "user"


def test_log_probabilities_are_requested_by_number_or_by_include() -> None:
    assert answer_request(top_logprobs=3).sampling == {"num_logprobs": 3}
    assert answer_request(include=["message.output_text.logprobs"]).sampling == {"num_logprobs": 0}
    refused(top_logprobs=21)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "user", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "id": "x",
            "status": "completed",
            "role": "user",
            "content": [{"type": "text", "text": "a"}],
        },
    ],
)
def test_forms_of_a_message(item: dict[str, Any]) -> None:
    assert messages(item) == [user("a")]


def test_parts_of_a_text_are_left_to_the_template() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]}
    parts = [{"type": "text", "text": text} for text in "ab"]
    assert messages(item) == [{"role": "user", "content": parts}]


def test_items_of_a_turn_become_one_message() -> None:
    found = messages(
        user("q"),
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "assistant", "content": "done"},
        user("thanks"),
    )
    call = {"type": "function"}
    assert found == [
        user("q"),
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", **call, "function": {"name": "weather", "arguments": '{"a": 1}'}},
                {"id": "c2", **call, "function": {"name": "weather", "arguments": '{"a": 2}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "done"},
        user("thanks"),
    ]


def test_messages_of_other_agents_are_read() -> None:
    """Codex sends the tasks and results of its sub-agents again in every later turn of the thread."""
    item = {"type": "agent_message", "author": "/root/tests", "recipient": "/root"}
    text = {"type": "input_text", "text": "All tests pass"}
    secret = {"type": "encrypted_content", "encrypted_content": "gAAAA"}
    _, message, last = messages(user("q"), item | {"content": [text, secret]}, user("go on"))
    words = "".join(part["text"] for part in message["content"])
    assert message["role"] == "user"
    assert words.startswith("Message of another agent (author /root/tests, recipient /root):\nAll tests pass")
    assert "gAAAA" not in words, "only its provider can read it"
    assert last == user("go on")
    (plain,) = messages(item | {"content": "In short"})
    assert plain["content"][-1]["text"] == "In short"
    assert messages({"type": "context_compaction", "encrypted_content": "x"}, user("q")) == [user("q")]


def test_values_that_clients_write_otherwise_than_the_reference() -> None:
    turn, *results = messages(
        {"role": "assistant", "content": None},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": {"a": "größer"}},
        {"type": "function_call_output", "call_id": "c1", "output": None},
        {"type": "function_call_output", "call_id": None, "output": [{"type": "encrypted_content"}]},
    )
    assert turn["content"] == ""
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"a": "größer"}'
    assert [(result["tool_call_id"], result["content"]) for result in results] == [("c1", ""), ("", UNREADABLE)]


def test_a_second_message_of_the_model_is_a_message_of_its_own() -> None:
    found = messages({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"})
    assert [message["content"] for message in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]}, "ab"),
        ({"summary": [{"type": "summary_text", "text": "short"}]}, "short"),
        ({"encrypted_content": encoded("naïve 🙂")}, "naïve 🙂"),
        ({"encrypted_content": encoded("all"), "summary": [{"type": "summary_text", "text": "short"}]}, "all"),
        ({"encrypted_content": "gAAAA-of-another-provider", "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"encrypted_content": "naïve"}, None),
        ({"encrypted_content": 5, "content": None}, None),
    ],
)
def test_reasoning_comes_back_to_the_template(item: dict[str, Any], text: str | None) -> None:
    turn = {"type": "message", "role": "assistant", "content": "x"}
    (message,) = messages({"type": "reasoning", "id": "rs", "summary": []} | item, turn)
    assert message.get("reasoning_content") == text


def test_every_item_type_of_the_official_client_is_read_or_skipped() -> None:
    kinds = {get_args(get_type_hints(kind)["type"])[0] for kind in get_args(ResponseInputItemParam)} - {None}
    kinds = {kind if isinstance(kind, str) else get_args(kind)[0] for kind in kinds}
    ours = {"message", "function_call_output", "custom_tool_call_output", "item_reference"}
    assert len(kinds) > 20
    for kind in sorted(kinds - ours):
        assert messages({"type": kind, "id": "x"}, user("q"))[-1] == user("q")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "poem"}, "input.0"),
        ({"type": 5}, "input.0.type"),
        ({"content": "a"}, "input.0.type"),
        ({"type": "poem", "role": "assistant", "content": "a"}, "input.0"),
        ({"role": "critic", "content": "a"}, "input.0.role"),
        ({"role": "user", "content": None}, "input.0.content"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input.0.content.0"),
        ({"role": "user", "content": ["a"]}, "input.0.content.0"),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}, "input.0.output.0"),
        ({"type": "function_call_output", "call_id": "c"}, "input.0.output"),
        ({"type": "item_reference", "id": "msg_1"}, "input.0"),
    ],
)
def test_items_that_are_refused(item: dict[str, Any], param: str) -> None:
    assert refused(input=[item]).body["error"]["param"] == param


def test_a_body_needs_an_input() -> None:
    with pytest.raises(ApiError, match="input is missing"):
        parse_request("/v1/responses", {"model": "m"})
    assert refused(input=[]).body["error"]["param"] == "input"
    assert refused(input=[{"type": "web_search_call", "id": "x"}]).body["error"]["param"] == "input"


@pytest.mark.parametrize("name", ["background", "conversation", "prompt"])
def test_features_that_we_do_not_have_are_refused(name: str) -> None:
    assert refused(**{name: True if name == "background" else {"id": "x"}}).body["error"]["param"] == name


def test_unknown_and_harmless_fields_are_ignored() -> None:
    answer_request(client_metadata={"a": 1}, background=False, truncation="auto", service_tier="auto", verbosity="low")


# -- tools ---------------------------------------------------------------------------------------------------------


def test_tools_are_functions() -> None:
    custom = {"type": "custom", "name": "patch", "description": "Write a patch", "format": {"type": "text"}}
    names = {"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send", "parameters": None}]}
    hosted = {"type": "web_search"}
    tools = answer_request(tools=[WEATHER, custom, names, hosted]).tools
    assert [tool["function"]["name"] for tool in tools] == ["weather", "patch", "send"]
    assert tools[0]["function"] == {"name": "weather", "description": "", "parameters": SCHEMA, "strict": True}
    assert list(tools[1]["function"]["parameters"]["properties"]) == ["input"]
    assert tools[2]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_a_custom_call_of_the_history_is_a_function_call() -> None:
    (first, result) = messages(
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "größer\n"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    )
    assert first["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "größer\\n"}'}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "ok"}


def test_functions_of_one_name_in_two_namespaces_are_told_apart() -> None:
    def space(name: str) -> dict[str, Any]:
        return {
            "type": "namespace",
            "name": name,
            "tools": [{"type": "function", "name": "search", "parameters": SCHEMA}],
        }

    past = {"type": "function_call", "call_id": "c", "name": "search", "namespace": "web", "arguments": "{}"}
    request = answer_request(tools=[space("mail"), space("web")], input=[past, user("go on")])
    names = [tool["function"]["name"] for tool in request.tools]
    assert len(set(names)) == 2
    assert request.messages[0]["tool_calls"][0]["function"]["name"] == names[1]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "weather"}, ToolChoice("required", frozenset({"weather"}))),
        ({"type": "custom", "name": "patch"}, ToolChoice("required", frozenset({"patch"}))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
            ToolChoice("auto", frozenset({"weather"})),
        ),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "weather"}]},
            ToolChoice("auto", frozenset({"weather"})),
        ),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice) -> None:
    tools = [WEATHER, {"type": "custom", "name": "patch"}]
    assert answer_request(tools=tools, tool_choice=choice).tool_choice == expected


def test_tool_choice_that_is_wrong() -> None:
    assert refused(tool_choice="weather").body["error"]["param"] == "tool_choice"
    named = {"type": "function", "name": "unknown"}
    assert refused(tools=[WEATHER], tool_choice=named).body["error"]["param"] == "tool_choice"
    assert refused(tools=[{"type": "function"}]).body["error"]["param"] == "tools.0.name"
    assert refused(tools=[WEATHER | {"parameters": "x"}]).body["error"]["param"] == "tools.0.parameters"


def test_parallel_calls() -> None:
    assert answer_request().has_several_calls
    assert not answer_request(parallel_tool_calls=False).has_several_calls
    required: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"}
    assert not answer_request(**required).has_several_calls
    assert not answer_request(**required, parallel_tool_calls=False).has_several_calls
    assert answer_request(**required, parallel_tool_calls=True).has_several_calls
    required["tool_choice"] = {"type": "function", "name": "weather"}
    assert not answer_request(**required, parallel_tool_calls=True).has_several_calls


# -- text and reasoning --------------------------------------------------------------------------------------------


def test_text_format() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    assert answer_request(text={"format": form}).grammar == GrammarSpec("json_schema", json.dumps(SCHEMA))
    assert answer_request(text={"format": {"type": "json_object"}}).grammar == GrammarSpec("json_object")
    assert answer_request(text={"format": {"type": "text"}, "verbosity": "low"}).grammar is None
    assert refused(text={"format": {"type": "yaml"}}).body["error"]["param"] == "text.format"
    loose = answer_request(text={"format": form | {"strict": False}}).grammar
    assert loose == GrammarSpec("json_schema", json.dumps(SCHEMA), strict=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a+"},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"grammar": 'root ::= "a"'},
    ],
)
def test_grammars_of_other_apis(fields: dict[str, Any]) -> None:
    assert answer_request(**fields).grammar is not None
    assert answer_request(**fields, text={"format": {"type": "text"}}).grammar is not None
    assert refused(**fields, text={"format": {"type": "json_object"}}).body["error"]["param"] == "text.format"


def test_effort_turns_thinking_on_and_off() -> None:
    assert answer_request(reasoning={"effort": "none"}).template_kwargs["enable_thinking"] is False
    on = answer_request(reasoning={"effort": "high", "summary": "auto"}).template_kwargs
    assert on["enable_thinking"] is True
    assert on["reasoning_effort"] == "high"
    assert answer_request(reasoning={"summary": "auto"}).template_kwargs == {}
