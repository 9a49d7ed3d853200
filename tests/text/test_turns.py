"""A chat whose texts do not alternate is answered, whatever order the model's template demands."""

from __future__ import annotations

from typing import Any

import pytest

from edgelm.text.chat import render_chat
from edgelm.text.template import ChatTemplate
from tests.real_data import template
from tests.text.test_history import MISTRAL, calling, result
from tests.text.test_template import TOOLS

# Ministral 3: calls and results do not count, and an answer has text or calls.
MINISTRAL = """{%- set ns = namespace(index=0) %}
{%- for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
    {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and not m.content and not m.tool_calls %}
        {{- raise_exception('Assistant message must have a string') }}
    {%- endif %}
    {{- '[' ~ m.role ~ ']' ~ m.content }}
    {%- for c in m.tool_calls %}{{ '[CALL]' ~ c.function|tojson }}{% endfor %}
    {{- '</s>' if m.role == 'assistant' }}
{%- endfor %}"""
# As Mistral's, but a result counts as the user's and a call as the assistant's.
COUNTS_ALL = """{%- for m in messages %}
    {%- if (m.role == 'assistant') != (loop.index0 % 2 == 1) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '[' ~ m.role ~ ']' ~ m.content }}
    {%- for c in m.tool_calls %}{{ '[CALL]' ~ c.function|tojson }}{% endfor %}
{%- endfor %}"""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CALL, RESULT = calling("Bern"), result(0, "blue")
CHATS = {
    "behind a result": [user("U1"), CALL, RESULT, user("U2"), answer("A1"), user("U3")],
    "behind two results": [user("U1"), CALL, RESULT, CALL, RESULT, user("U2"), CALL, RESULT, user("U3")],
    "behind a call": [user("U1"), CALL, user("U2"), answer("A1")],
    "begins with the assistant": [{"role": "system", "content": "S1"}, answer("A1"), user("U1"), answer("A2")],
    "begins with a call": [CALL, RESULT, answer("A1"), user("U1")],
    "a call behind an answer": [user("U1"), answer("A1"), CALL, RESULT, answer("A2"), user("U2")],
    "an empty answer": [user("U1"), answer(""), user("U2"), answer("A1")],
    "reasoning": [user("U1"), {**answer("A1"), "reasoning_content": "Hm."}, answer("A2"), user("U2")],
}
every_chat = pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)


def rendered(source: str, chat: list[dict[str, Any]]) -> str:
    return render_chat(ChatTemplate(source, eos="</s>"), chat, tools=TOOLS).text


@every_chat
@pytest.mark.parametrize("source", [MINISTRAL, template(MISTRAL)], ids=["Ministral", "Nemo"])
def test_each_text_of_a_chat_is_shown_and_the_prompt_only_grows(source: str, chat: list[dict[str, Any]]) -> None:
    before = ""
    for end in range(1, len(chat) + 1):
        text = rendered(source, chat[:end])
        missing = [m["content"] for m in chat[:end] if m["content"] and m["content"] not in text]
        assert not [word for word in missing if word != "S1"], "Nemo shows instructions with the last question"
        assert "Bern" in text or CALL not in chat[:end]
        if source is MINISTRAL:  # Nemo moves the tools
            assert text.startswith(before)
        before = text


def test_a_users_message_behind_a_result_stays_the_users() -> None:
    assert rendered(MINISTRAL, [user("U1"), CALL, RESULT, user("U2")]) == (
        '[user]U1[assistant][CALL]{"name": "weather", "arguments": {"city": "Bern"}}</s>'
        "[tool]blue[assistant](no answer)</s>[user]U2"
    )
    assert rendered(MINISTRAL, [answer("A1"), user("U1")]) == "[user](no message)[assistant]A1</s>[user]U1"


def test_nothing_is_added_where_the_template_shows_the_order() -> None:
    chat = [user("U1"), CALL, RESULT, user("U2"), answer(""), answer("A1"), CALL]
    every = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    assert "(no" not in rendered(every, chat)
    assert rendered(COUNTS_ALL, [user("U1"), CALL, user("U2")]).count("[") == 4
    assert rendered(COUNTS_ALL, [user("U1"), CALL, RESULT, user("U2")]).endswith("blue[assistant](no answer)[user]U2")


def test_a_template_that_fails_without_tools_gets_the_order_that_it_shows() -> None:
    source = "{{ tools[0].type }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert rendered(source, [user("U1"), user("U2")]).endswith("[user]U1[user]U2")
