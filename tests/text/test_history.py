"""Each message of a history reaches the model, in the form that its template takes, or the request says why not."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest

from edgelm.base.errors import RequestError
from edgelm.text.chat import render_chat
from edgelm.text.history import turn_key
from edgelm.text.template import ChatTemplate, RefusedError
from tests.real_data import data_files, template
from tests.text.test_template import TOOLS

QUESTION = {"role": "user", "content": "How is the weather?"}
GPT_OSS = "openai-gpt-oss-120b"
LLAMA = "llama-3-format"
DEEPSEEK = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
LAST_FIRST = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor %}{{ ns.system }}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
MISTRAL = "mistralai-Mistral-Nemo-Instruct-2407"
QWEN3 = "Qwen-Qwen3-0.6B"
REFUSES_TOOLS = {"google-gemma-2-2b-it", "gemma-2-format"}
EVERY_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
    "[{{ c.function.name }} {{ c.function.arguments|tojson }}]{% endfor %}{% endfor %}"
)


def calling(*cities: str, content: Any = None, ids: str = "abcdefgh", **more: Any) -> dict[str, Any]:
    calls = [
        {
            "id": f"{ids}{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for number, city in enumerate(cities)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def result(number: int, content: Any, ids: str = "abcdefgh") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"{ids}{number}", "content": content}


def rendered(source: str, *messages: dict[str, Any], tools: Any = TOOLS, **options: Any) -> str:
    return render_chat(ChatTemplate(source), messages, tools=tools, **options).text


@pytest.fixture(params=["null", "text", "reasoning", "two", "ids", "cut", "parts"])
def history(request: pytest.FixtureRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a history and the words that the model must see, in this order."""
    cut = calling("x")
    cut["tool_calls"][0]["function"]["arguments"] = '{"city": "Bern'
    histories: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
        "null": ([calling("Bern"), result(0, "blue")], ["Bern", "blue"]),
        "text": ([calling("Bern", content="Let me see."), result(0, "blue")], ["Bern", "blue"]),
        "reasoning": (
            [calling("Bern", content="Let me see.", reasoning_content="Hm."), result(0, "blue")],
            ["Bern", "blue"],
        ),
        "two": ([calling("Bern", "Chur"), result(1, "grey"), result(0, "blue")], ["Bern", "Chur", "blue", "grey"]),
        "ids": ([calling("Bern", ids="call_0123456789"), result(0, "blue", "call_0123456789")], ["Bern", "blue"]),
        "cut": ([cut, result(0, "blue")], ["Bern", "blue"]),
        "parts": (
            [calling("Bern", content=[{"type": "text", "text": ""}]), result(0, [{"type": "text", "text": "blue"}])],
            ["Bern", "blue"],
        ),
    }
    return histories[request.param]


def test_every_template_shows_every_call_and_result(history: tuple[list[dict[str, Any]], list[str]]) -> None:
    messages, words = history
    paths = data_files("templates", ".jinja")
    assert len(paths) >= 11
    for path in paths:
        chat = [QUESTION, *messages, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Thanks."}]
        template = ChatTemplate(path.read_text(encoding="utf-8"))
        if path.stem in REFUSES_TOOLS:
            with pytest.raises(RefusedError, match="must alternate"):
                render_chat(template, chat, tools=TOOLS)
            continue
        text = render_chat(template, chat, tools=TOOLS).text
        missing = [word for word in [*words, "Fine.", "Thanks."] if word not in text]
        assert not missing, path.stem
        assert "None" not in text.replace("None of", ""), path.stem


def test_every_template_shows_every_system_message() -> None:
    systems = [{"role": role, "content": f"Rule {n}."} for n, role in enumerate(["system", "developer", "system"])]
    chat = [systems[0], systems[1], QUESTION, {"role": "assistant", "content": "Fine."}, systems[2], QUESTION]
    for path in data_files("templates", ".jinja"):
        template = ChatTemplate(path.read_text(encoding="utf-8"))
        text = render_chat(template, chat).text
        assert [word for word in ("Rule 0.", "Rule 1.", "Rule 2.") if word not in text] == [], path.stem


def test_two_calls_become_call_result_call_result() -> None:
    chat = [QUESTION, calling("Bern", "Chur", content="Let me see."), result(1, "grey"), result(0, "blue")]
    for name in (LLAMA, GPT_OSS):
        text = rendered(template(name), *chat)
        places = [text.index(word) for word in ("Bern", "blue", "Chur", "grey")]
        assert places == sorted(places), name


def test_two_calls_without_all_results_are_refused() -> None:
    chat = [QUESTION, calling("Bern", "Chur"), result(0, "blue")]
    with pytest.raises(RefusedError) as refusal:
        rendered(template(LLAMA), *chat)
    assert refusal.value.message == "This model only supports single tool-calls at once!"
    with pytest.raises(RequestError, match="not all calls of a message have a result"):
        rendered(template(GPT_OSS), *chat)  # it would show the first call only


def test_gpt_oss_gets_text_beside_reasoning_and_a_call() -> None:
    chat = [QUESTION, calling("Bern", content="Let me see.", reasoning_content="Hm."), result(0, "blue")]
    text = rendered(template(GPT_OSS), *chat)
    assert "<|channel|>analysis<|message|>Hm.\n\nLet me see.<|end|>" in text


def test_ids_are_changed_alike_where_a_template_wants_nine_letters() -> None:
    chat = [QUESTION, calling("Bern", "Chur", ids="call-"), result(0, "blue", "call-"), result(1, "grey", "call-")]
    text = rendered(template(MISTRAL), *chat)
    calls, results = re.findall(r'"id": "(\w+)"', text), re.findall(r'"call_id": "(\w+)"', text)
    assert calls == results
    assert len(set(calls)) == 2
    assert {len(call_id) for call_id in calls} == {9}
    own = [QUESTION, calling("Bern"), result(0, "blue")]
    assert '"id": "abcdefgh0"' in rendered(template(MISTRAL), *own)


def test_a_result_gets_the_name_of_its_call() -> None:
    names = "{% for m in messages %}{% if m.role == 'tool' %}{{ m.name }}:{{ m.tool_call_id }} {% endif %}{% endfor %}"
    first, second = calling("Bern", "Chur"), calling("Chur", ids="xbcdefgh")
    first["tool_calls"][1]["function"]["name"] = "traffic"
    chat = [first, result(1, "a"), result(0, "b"), second, {"role": "tool", "content": "c"}, result(7, "d")]
    assert rendered(names, *chat) == "traffic:abcdefgh1 weather:abcdefgh0 weather:xbcdefgh0 :abcdefgh7 "
    named = {**result(0, "b"), "name": "own"}
    assert rendered(names, calling("Bern"), named) == "own:abcdefgh0 "


def test_an_empty_list_of_calls_is_no_call() -> None:
    source = "{% for m in messages %}{{ 'tool_calls' in m }}{{ m.content }}{% endfor %}"
    assert rendered(source, {"role": "assistant", "content": "a", "tool_calls": []}) == "Falsea"


def test_a_template_that_reads_parts_only_gets_parts() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}"
    assert rendered(source, QUESTION) == QUESTION["content"]
    assert rendered(EVERY_CALL, QUESTION) == f"<user>{QUESTION['content']}"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_of_a_text_are_joined_as_the_template_joins_them(role: str) -> None:
    parts = {"role": role, "content": [{"type": "text", "text": text} for text in ("One.", "Two.")]}
    joined = "{{ m.content if m.content is string else m.content|map(attribute='text')|join('\\n') }}"
    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{joined}{{% endfor %}}"
    assert rendered(source, QUESTION, parts).endswith(f"<{role}>One.\nTwo.")
    own = source.replace("m.content is string", f"m.content is string or m.role == '{role}'")
    assert rendered(own, QUESTION, parts).endswith(f"<{role}>One.Two."), "it would print the list"
    single = {**parts, "content": [{"type": "text", "text": "One."}, {"type": "text", "text": ""}]}
    assert rendered(source, QUESTION, single).endswith(f"<{role}>One.\n")
    assert rendered(source, QUESTION, {**parts, "content": []}).endswith(f"<{role}>")


def test_a_template_that_wants_calls_without_content_gets_none() -> None:
    """The template of DeepSeek R1 omits the calls of a message with content, even an empty one."""
    source = EVERY_CALL.replace("{{ m.content }}", "{{ m.content or '' }}").replace(
        "{% for c in m.tool_calls %}", "{% for c in m.tool_calls if m.content is none %}"
    )
    text = rendered(source, QUESTION, calling("Bern", content="Let me see."), result(0, "blue"))
    assert text.endswith('<assistant>Let me see.<assistant>[weather {"city": "Bern"}]<tool>blue')
    assert rendered(source, QUESTION, calling("Bern"), result(0, "b")).endswith(
        '<assistant>[weather {"city": "Bern"}]<tool>b'
    )


def test_arguments_are_strings_where_the_template_prints_objects() -> None:
    source = EVERY_CALL.replace("|tojson", "")
    assert '[weather {"city": "Bern"}]' in rendered(source, QUESTION, calling("Bern"), result(0, "blue"))


def test_calls_are_text_where_the_template_has_none() -> None:
    source = "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    chat = [QUESTION, calling("Bern", "Chur", content="Let me see."), result(0, "blue"), result(1, "grey")]
    assert rendered(source, *chat) == (
        "<user>How is the weather?<assistant>Let me see."
        '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Chur"}}\n</tool_call>'
        "<user><tool_response>\nblue\n</tool_response>\n<tool_response>\ngrey\n</tool_response>"
    )


def test_reasoning_is_a_part_of_the_content_where_the_template_shows_no_other() -> None:
    """As those of Magistral and Ministral 3."""
    part = "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}"
    parts = f"{{% for p in m.content %}}{part}{{% endfor %}}"
    content = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    source = EVERY_CALL.replace("{{ m.content }}", content)
    answer = {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm."}
    assert rendered(source, QUESTION, answer, QUESTION).endswith(
        "<assistant>[THINK]Hm.[/THINK]Fine.<user>How is the weather?"
    )
    thoughts = calling("Bern", reasoning="Hm, hm."), result(0, "blue")
    assert "<assistant>[THINK]Hm, hm.[/THINK][weather " in rendered(source, QUESTION, *thoughts)
    assert rendered(source, QUESTION, {**answer, "content": ""}).endswith("<assistant>[THINK]Hm.[/THINK]")
    spans = render_chat(ChatTemplate(source), [QUESTION, answer], with_spans=True).spans
    assert [span.shows_reasoning for span in spans] == [False, True]
    own = source.replace(content, content + "{{ m.reasoning_content }}{# thinking #}")
    assert rendered(own, QUESTION, answer).endswith("<assistant>Fine.Hm.")
    as_json = "{{ m.content if m.content is string else m.content|tojson }}"
    for printed in (EVERY_CALL, EVERY_CALL.replace("{{ m.content }}", as_json)):
        assert rendered(printed + "{# thinking #}", QUESTION, answer).endswith("<assistant>Fine.")


def test_system_messages_are_merged_only_where_the_template_shows_the_first_alone() -> None:
    system = {"role": "system", "content": "One."}
    chat = [system, QUESTION, {**system, "content": "Two."}, {**system, "content": ""}]
    assert rendered(EVERY_CALL, *chat) == "<system>One.<user>How is the weather?<system>Two.<system>"
    shown = "{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
    first_only = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    assert rendered(first_only, *chat) == "<system>One.<user>How is the weather?\n\nTwo."
    leading = [system, {**system, "content": "Two."}, QUESTION]
    assert rendered(first_only, *leading) == "<system>One.\n\nTwo.<user>How is the weather?"


def test_a_later_system_message_goes_into_the_users_message_behind_it() -> None:
    """At the front it would change the prompt before everything that is cached."""
    begin = [{"role": "system", "content": "One."}, QUESTION, {"role": "assistant", "content": "Fine."}]
    later = [{"role": "system", "content": "Two."}, {"role": "developer", "content": "Three."}]
    for kept in ("m.role != 'system' or loop.first", "m.role != 'system'"):  # the first alone; none
        shown = "<{{ m.role }}>{{ m.content }}"
        source = f"{{% for m in messages %}}{{% if {kept} %}}{shown}{{% endif %}}{{% endfor %}}"
        text = rendered(source, *begin, *later, {"role": "user", "content": "And now?"})
        assert text.endswith("<user>Two.\n\nThree.\n\nAnd now?")
        assert text.startswith(rendered(source, *begin))
        assert rendered(source, *begin[1:], *later, QUESTION).startswith(
            "<user>How is the weather?<assistant>Fine.<user>Two."
        )


def test_a_system_message_stays_where_it_is_while_the_conversation_grows() -> None:
    """Claude Code tells of something between the turns. Moved, it would change the prompt before what is cached."""
    shown = "{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
    source = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    note: dict[str, Any] = {"role": "system", "content": "Note."}
    answer = {"role": "assistant", "content": "Fine."}
    chat: list[dict[str, Any]] = [{"role": "system", "content": "One."}]
    before = ""
    for turn in (
        [QUESTION, note],  # behind the user's message
        [calling("Bern"), result(0, "blue"), note],  # behind a result
        [calling("Bern"), result(0, "grey"), note, note],
        [answer, note],  # behind an answer
        [answer, note, QUESTION],
        [answer, QUESTION],
    ):
        chat += turn
        text = rendered(source, *chat)
        assert text.startswith(before), turn
        assert text.count("Note.") == chat.count(note), "none is lost"
        before = text
    assert "<tool>grey\n\nNote.\n\nNote.<assistant>" in before
    within = rendered(source, *chat[:2], calling("Bern"), note, result(0, "{}"), QUESTION)
    assert "<tool>{}\n\nNote.<user>" in within, "a result may be JSON"
    assert before.count("<user>") == 4, "one of them is a note alone"


def test_a_later_system_message_goes_to_the_front_where_the_template_moves_it() -> None:
    """DeepSeek R1's template shows the last system message, before all turns."""
    answer, later = {"role": "assistant", "content": "Fine."}, {"role": "system", "content": "Two."}
    for source in (template(DEEPSEEK), LAST_FIRST):
        text = rendered(source, QUESTION, answer, later, QUESTION, tools=None)
        assert text == rendered(source, later, QUESTION, answer, QUESTION, tools=None)
        begin = {"role": "system", "content": "One."}
        text = rendered(source, begin, QUESTION, answer, later, QUESTION, tools=None)
        both = {"role": "system", "content": "One.\n\nTwo."}
        assert text == rendered(source, both, QUESTION, answer, QUESTION, tools=None)


def test_the_last_message_is_continued() -> None:
    begun = {"role": "assistant", "content": "The sky is "}
    for path in data_files("templates", ".jinja"):
        source = path.read_text(encoding="utf-8")
        text = rendered(source, QUESTION, begun, tools=None, continue_final_message=True)
        assert text.endswith("The sky is "), path.stem
        assert text.count("The sky is") == 1
    for last in (QUESTION, calling("Bern", content="a"), {"role": "assistant", "content": None}):
        with pytest.raises(RequestError, match="continue_final_message"):
            rendered(EVERY_CALL, QUESTION, last, continue_final_message=True)
    with pytest.raises(RequestError, match="continue_final_message"):
        rendered(EVERY_CALL, continue_final_message=True)
    with pytest.raises(RequestError, match="does not show the last message"):
        rendered("{{ messages[0].content }}", QUESTION, begun, continue_final_message=True)


def test_options_reach_the_template() -> None:
    source = template(QWEN3)
    assert rendered(source, QUESTION, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert "Reasoning: high" in rendered(template(GPT_OSS), QUESTION, reasoning_effort="high")


def test_the_key_of_a_message_is_its_meaning() -> None:
    one = calling("Bern", content=" a", reasoning_content="r\n")
    other = calling("Bern", content=[{"type": "text", "text": "a"}], ids="other", reasoning="r", refusal=None)
    other["tool_calls"][0]["function"]["arguments"] = {"city": "Bern"}
    assert turn_key(one) == turn_key(other)
    different = [
        calling("Bern", content="b", reasoning="r"),
        calling("Bern", content="a"),
        calling("Chur", content="a", reasoning="r"),
        calling("Bern", "Bern", content="a", reasoning="r"),
    ]
    assert len({turn_key(message) for message in [one, *different]}) == 5
    assert turn_key({"content": None}) == turn_key({"content": "", "tool_calls": []})


def test_arguments_of_a_million_values_stay_a_text() -> None:
    """Reading them would stop every other thread, and take a hundred times their memory."""
    arguments = '{"a": [' + "[]," * 500_000 + "1]}"
    message: Any = calling("Bern")
    message["tool_calls"][0]["function"]["arguments"] = arguments
    tracemalloc.start()
    turn_key(message)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 * len(arguments)


ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_messages_of_one_side_are_folded_where_the_template_demands_that_roles_alternate() -> None:
    chat = [
        {"role": "user", "content": "one"}, {"role": "user", "content": "two"}, {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "no"}, {"role": "user", "content": "three"},
    ]  # fmt: skip
    strict = ChatTemplate(ALTERNATES)
    assert render_chat(strict, chat).text == "<user>one\n\ntwo<assistant>yes\n\nno<user>three"
    free = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert render_chat(free, chat).text == "<user>one<user>two<assistant>yes<assistant>no<user>three"


def test_two_messages_of_the_user_are_shown_by_every_template() -> None:
    chat = [{"role": "user", "content": "first-of-two"}, {"role": "user", "content": "second-of-two"}]
    for path in data_files("templates", ".jinja"):
        text = render_chat(ChatTemplate(path.read_text()), chat).restored
        assert "first-of-two" in text, path.name
        assert "second-of-two" in text, path.name


def test_a_variable_of_the_template_may_have_any_name() -> None:
    """Names of the client never become arguments of our functions."""
    names = dict.fromkeys(("self", "messages_", "worker", "kwargs", "template_kwargs", "request"), 1)
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ worker }}"
    assert render_chat(ChatTemplate(source), [QUESTION], **names).text == "How is the weather?1"
