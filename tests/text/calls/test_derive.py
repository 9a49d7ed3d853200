"""The call format of a model, found from its template: known, derived, or the generic one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgelm.text.calls.derive import ToolSupport, find_support
from edgelm.text.calls.format import Call, write_calls
from edgelm.text.calls.generic import GENERIC, tools_text, with_plain_calls, with_tools_text
from edgelm.text.chat import render_chat
from edgelm.text.history import MAX_VALUES
from edgelm.text.parse import AnswerParser
from edgelm.text.template import ChatTemplate
from tests.real_data import template, with_template
from tests.text.calls.random_calls import parsed, tool

TOOLS = [tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}})]
CALLS = [Call("get_weather", {"city": "Zürich <3", "days": 2}, "id1"), Call("now", {}, "id2")]

HEAD = """{%- if tools %}Tools: {{ tools|tojson }}
{% endif %}{%- for message in messages %}<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{% set call = call.function %}"""
TAIL = """{%- endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# Formats of no model that we know, and what is derived from them.
ODD = {
    "json in tags": ("json", """<do>{{ {"tool": call.name, "with": call.arguments}|tojson }}</do>"""),
    "json behind a line": ("json", "\n<do>\n{{ {'name': call.name, 'args': call.arguments}|tojson }}\n</do>"),
    "name and json": ("name_json", "<|use|>{{ call.name }}<|with|>{{ call.arguments|tojson }}<|done|>"),
    "tags": (
        "tagged",
        """<use tool='{{ call.name }}'>
{% for k, v in call.arguments|items %}<with key='{{ k }}'>{{ v if v is string else v|tojson }}</with>
{% endfor %}</use>""",
    ),
}  # fmt: skip


def support(source: str, special: tuple[str, ...] = ()) -> ToolSupport:
    template = ChatTemplate(source, bos="<s>", eos="</s>")

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        return template.render(messages, tools=tools, add_generation_prompt=False)

    return find_support(source, special, render)


@pytest.mark.parametrize("name", ODD)
def test_an_unknown_format_is_derived_and_verified(name: str) -> None:
    body, call = ODD[name]
    source = HEAD + call + TAIL
    found = support(source)
    assert (found.source, found.form.body) == ("derived", body)
    assert found.describes_tools
    assert found.writes_calls
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in CALLS
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    rendered = ChatTemplate(source).render(messages, add_generation_prompt=False)
    text = rendered.removeprefix("<|assistant|>").removesuffix("<|end|>\n")
    assert write_calls(found.form, CALLS).strip() == text.strip()
    answer = parsed(AnswerParser(found.form, None, "", TOOLS), [(None, text.encode())])
    assert answer.values == [(one.name, dict(one.arguments)) for one in CALLS]


@pytest.mark.parametrize(
    "call",
    [
        "{{ call.name }}: {{ call.arguments|tojson }}",  # nothing marks a call
        "<do>{{ call.name|upper }} {{ call.arguments|tojson }}</do>",  # not the name itself
        "<do>{{ call.name }} {{ call.arguments|length }}</do>",
        "",
    ],
)
def test_a_format_that_is_not_understood_is_the_generic_one(call: str) -> None:
    found = support(HEAD + call + TAIL)
    assert (found.form, found.source) == (GENERIC, "generic")
    assert not found.describes_tools
    assert not found.writes_calls


def test_a_template_that_fails_with_tools_has_the_generic_format() -> None:
    found = support("{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}")
    assert (found.form, found.describes_tools) == (GENERIC, False)


def test_a_known_format_needs_no_calls_in_the_template() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{# <|tool_call_start|> #}"
    found = support(source)
    assert (found.form.body, found.source, found.writes_calls) == ("python", "marks", False)
    assert support("{{ messages[0].content }}", ("[TOOL_CALLS]",)).form.name == "Mistral list"


def test_calls_that_the_history_writes_are_not_those_of_the_template() -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{# <|tool_list_start|> #}"
    template = ChatTemplate(source)
    found = find_support(
        source,
        (),
        lambda messages, tools: render_chat(template, messages, tools=tools, add_generation_prompt=False).text,
    )
    assert (found.form.body, found.source, found.writes_calls) == ("python", "marks", False)


def test_one_call_a_turn_is_noticed() -> None:
    two = "{% if m.tool_calls and m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}"
    source = "{% for m in messages %}" + two + "{% endfor %}" + HEAD + ODD["json in tags"][1] + TAIL
    found = support(source)
    assert (found.source, found.form.parallel) == ("derived", False)


SHARED = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("Hermes", "exact"),
    "Qwen-Qwen2.5-7B-Instruct": ("Hermes", "exact"),
    "Qwen-Qwen3-0.6B": ("Hermes", "exact"),
    "Qwen3.5-4B": ("Qwen3-Coder", "exact"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("DeepSeek R1 and V3", "exact"),
    "ibm-granite-granite-4.0": ("Hermes", "exact"),
    "meta-llama-Llama-3.2-3B-Instruct": ("Llama 3", "exact"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("Mistral list", "exact"),
    "openai-gpt-oss-120b": ("Harmony", "exact"),
    "google-gemma-2-2b-it": ("Hermes", "generic"),
    "gemma-2-format": ("Hermes", "generic"),
    "llama-3-format": ("Llama 3", "exact"),
    "microsoft-Phi-3.5-mini-instruct": ("Hermes", "generic"),
}


@pytest.mark.parametrize("name", with_template(SHARED))
def test_real_templates(name: str) -> None:
    source = template(name)
    found = support(source)
    assert (found.form.name, found.source) == SHARED[name]


# ---- the generic format


def test_the_tools_are_described_in_the_system_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    read = with_tools_text(messages, GENERIC, TOOLS)
    assert read[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(TOOLS[0]["function"]) in read[0]["content"]
    assert "<tool_call>" in read[0]["content"]
    assert read[1:] == messages[1:]
    assert with_tools_text(messages[1:], GENERIC, TOOLS)[0] == {
        "role": "system", "content": tools_text(GENERIC, TOOLS)
    }  # fmt: skip


def test_calls_and_results_become_ordinary_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "now", "arguments": '{"a'}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Wait.", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
    ]
    assistant, results = with_plain_calls(messages, GENERIC)
    answer = parsed(AnswerParser(GENERIC, None), [(None, assistant["content"].encode())])
    assert answer.content == "Wait."
    assert answer.values == [("now", {"a": 1}), ("now", {"__raw": '{"a'})]
    assert results == {
        "role": "user",
        "content": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>",
    }


def test_arguments_of_millions_of_values_are_not_read() -> None:
    """It took 0.3 s, in which no other Python thread ran."""
    many = "[" + "1," * MAX_VALUES + "1]"
    call = {"id": "1", "function": {"name": "now", "arguments": f'{{"a": {many}}}'}}
    (message,) = with_plain_calls([{"role": "assistant", "content": "", "tool_calls": [call]}], GENERIC)
    assert json.loads(message["content"].partition("\n")[2].rpartition("\n")[0])["arguments"] == {
        "__raw": f'{{"a": {many}}}'
    }
