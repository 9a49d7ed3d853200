"""Every real template compared with transformers, each convention of templates, and the generic templates."""

from __future__ import annotations

import random
import re
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.base.errors import ModelError, RequestError
from edgelm.text.chat import Rendered, render_chat
from edgelm.text.history import normalized, shaped
from edgelm.text.patterns import any_of
from edgelm.text.template import ChatTemplate, RefusedError, TemplateFailedError, TooLongError
from tests.counts import Count
from tests.real_data import data_files, template

CHATS = Count(test=30, soak=1000)
NAMES = [path.stem for path in data_files("templates", ".jinja")]
every_template = pytest.mark.parametrize("name", NAMES)

BOS, EOS = "<|bos|>", "<|eos|>"
SPECIALS = frozenset(
    {BOS, EOS, "<|im_start|>", "<|im_end|>", "<|eot_id|>", "[INST]", "[/INST]", "<\uff5cUser\uff5c>", "<s>"}
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather <now>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where & 'when'"},
                    "days": {"type": "array", "items": {"type": "integer"}, "description": "é 日"},
                },
                "required": ["city"],
            },
        },
    }
]
ANSWER = {"role": "assistant", "content": "Hello."}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "abcdefgh1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich <&>", "days": [1, 2]}},
        }
    ],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefgh1", "content": '{"sky": "blue"}'}
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
REFUSALS = {("google-gemma-2-2b-it", "tool"): ALTERNATE, ("gemma-2-format", "tool"): ALTERNATE}
NEEDS_NO_PROMPT = {"mistralai-Mistral-Nemo-Instruct-2407"}  # the answer follows [/INST]
TOOL_WORDS = ["Zürich <&>", "weather", "blue"]
OMITS_CALLS = {"HuggingFaceTB-SmolLM3-3B", "microsoft-Phi-3.5-mini-instruct"}  # they are written as text


@cache
def load(name: str, special_strings: frozenset[str] = frozenset()) -> ChatTemplate:
    source = template(name)
    return ChatTemplate(source, bos=BOS, eos=EOS, special_strings=special_strings)


def restored(rendered: Rendered) -> str:
    return "".join(rendered.plain.get(char, char) for char in rendered.text)


def ours(name: str, messages: list[dict[str, Any]], special_strings: frozenset[str], **options: Any) -> str:
    return restored(render_chat(load(name, special_strings), messages, **options))


def theirs(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = load(name).source
    options = {"add_generation_prompt": True, "bos_token": BOS, "eos_token": EOS, **options}
    (text,), _ = utils.render_jinja_template([messages], chat_template=source, **options)
    return str(text)


def check_same(
    name: str, messages: list[dict[str, Any]], special_strings: frozenset[str], **options: Any
) -> str | None:
    """Compare a rendering with that of transformers; a refusal must have the same message."""
    expected, refusal, today = "", "", None
    given = shaped(normalized(messages, load(name)), load(name)) if name in OMITS_CALLS else messages
    while today != datetime.now().date():  # noqa: DTZ005 - templates write the local date
        today = datetime.now().date()  # noqa: DTZ005
        try:
            expected = theirs(name, given, **options)
        except (TypeError, AttributeError, jinja2.UndefinedError):
            refusal = ".*"
        except jinja2.TemplateError as error:
            refusal = re.escape(" ".join(str(error).split()))
        try:
            text = ours(name, messages, special_strings, **options)
        except RequestError as error:
            text, words = None, error.message
    if text is None:
        # In the form that we try, a template may refuse something else.
        assert refusal
        assert re.fullmatch(refusal, words, re.DOTALL) or words in load(name).source
    elif not refusal:  # otherwise another form of the messages was found, which transformers does not try
        assert text == expected
    return text


@every_template
@pytest.mark.parametrize("prompt", [True, False])
def test_every_template_renders_every_kind_of_turn(name: str, prompt: bool) -> None:
    user = {"role": "user", "content": "What is <new> in Zürich & 東京?"}
    chat = [user, ANSWER, {"role": "user", "content": "And then?"}]
    text = check_same(name, chat, frozenset(), add_generation_prompt=prompt)
    assert text is not None
    assert "Zürich & 東京?" in text
    assert text.index("東京") < text.index("Hello.") < text.index("And then?")

    for kind, messages in {
        "system": [{"role": "system", "content": "Speak kindly."}, *chat],
        "tool": [user, CALL, RESULT, ANSWER, {"role": "user", "content": "Thanks."}],
    }.items():
        tools = TOOLS if kind == "tool" else None
        text = check_same(name, messages, frozenset(), add_generation_prompt=prompt, tools=tools)
        if words := REFUSALS.get((name, kind)):
            with pytest.raises(RefusedError) as refusal:
                render_chat(load(name), messages, add_generation_prompt=prompt, tools=tools)
            assert refusal.value.message == words
        else:
            assert text is not None
            expected = ["Speak kindly."] if kind == "system" else TOOL_WORDS
            assert [word for word in expected if word in text] == expected


@every_template
def test_a_generation_prompt_only_adds_to_the_text(name: str) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    with_prompt = ours(name, chat, frozenset())
    without = ours(name, chat, frozenset(), add_generation_prompt=False).removesuffix(EOS)
    assert with_prompt.startswith(without)
    assert (with_prompt != without) == (name not in NEEDS_NO_PROMPT)


texts = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(sorted(SPECIALS)),
        st.sampled_from(
            ["<think>\n", "</think>", "\n\n", " ", "{{ x }}", "{% y %}", "/no_think", "<", "[", "<tool_response>"]
        ),
    ),
    max_size=6,
).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if draw(st.booleans()):
        chat.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 3))):
        chat.append({"role": "user", "content": draw(texts)})
        if draw(st.booleans()):
            for number in range(draw(st.integers(1, 2))):
                function = {
                    "name": draw(st.sampled_from(["f", "<s>g"])),
                    "arguments": draw(st.dictionaries(texts, values)),
                }
                call = {"id": f"abcdefgh{number}", "type": "function", "function": function}
                content = draw(st.sampled_from([{}, {"content": ""}, {"content": "Let me see."}]))
                result = {"role": "tool", "name": "f", "tool_call_id": call["id"], "content": draw(texts)}
                chat += [{"role": "assistant", **content, "tool_calls": [call]}, result]
        reasoning = draw(st.sampled_from([{}, {"reasoning_content": "Hmm <s>."}]))
        chat.append({"role": "assistant", "content": draw(texts), **reasoning})
    if draw(st.booleans()):
        chat.append({"role": "user", "content": draw(texts)})
    return chat


@every_template
@settings(max_examples=CHATS)
@given(
    chat=conversations(),
    tools=st.sampled_from([None, TOOLS]),
    thinking=st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]),
    prompt=st.booleans(),
)
def test_random_conversations_render_as_in_transformers(
    name: str, chat: list[dict[str, Any]], tools: Any, thinking: dict[str, bool], prompt: bool
) -> None:
    check_same(name, chat, frozenset(), tools=tools, add_generation_prompt=prompt, **thinking)


@every_template
@settings(max_examples=CHATS)
@given(chat=conversations(), tools=st.sampled_from([None, TOOLS]))
def test_placeholders_do_not_change_the_text(name: str, chat: list[dict[str, Any]], tools: Any) -> None:
    """Special strings of a user appear where transformers writes them, as text."""
    check_same(name, chat, SPECIALS, tools=tools)


def render(source: str, **names: Any) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render([{"role": "user", "content": "Hi"}], **names)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}", "0"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'b': '<é&\\'>', 'a': [1, none, true]} | tojson }}", '{"b": "<é&\'>", "a": [1, null, true]}'),
        ("{{ {'é': 1} | tojson(indent=2, ensure_ascii=true) }}", '{\n  "\\u00e9": 1\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{% generation %}x{% set y = 1 %}{% endgeneration %}{{ y is defined }}", "xFalse"),
        ("{{ [tools, documents, add_generation_prompt] }}{{ enable_thinking is defined }}", "[None, None, True]False"),
        ("{{ strftime_now('%%') }}{{ messages[0].content }}{{ messages[0]['role'] }}", "%Hiuser"),
        ("{{ '<b>' }}", "<b>"),
        ("{% set x = [1] %}{% set _ = x.append(2) %}{{ x.pop(0) }}{{ x }}", "1[2]"),  # Kimi K2
        ("{% set _ = messages.append(1) %}{{ messages|length }}", "2"),
        ("{{ messages|map(attribute='role')|tojson }}", '["user"]'),
    ],
)  # fmt: skip
def test_conventions_of_templates(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_template_changes_copies_only() -> None:
    messages = [{"role": "user", "content": ["a"], "tool_calls": [{"x": {"y": [1]}}]}]
    documents = [{"text": "d"}]
    before = repr((messages, documents))
    source = (
        "{% set _ = messages[0].content.append('b') %}{% set _ = messages[0].pop('role') %}"
        "{% set _ = messages[0].tool_calls[0].x.y.append(2) %}{% set _ = documents.append(1) %}"
        "{{ messages }}{{ documents|length }}"
    )
    text = ChatTemplate(source).render(messages, documents=documents)
    assert text == "[{'content': ['a', 'b'], 'tool_calls': [{'x': {'y': [1, 2]}}]}]2"
    assert repr((messages, documents)) == before


def test_names_are_passed_through() -> None:
    source = "{{ enable_thinking }}{{ documents[0].text }}{{ tools|length }}{{ date_string }}"
    names = {"enable_thinking": False, "documents": [{"text": "d"}], "tools": TOOLS, "date_string": "1 May"}
    assert render(source, **names) == "Falsed11 May"
    assert render("{{ bos_token }}", bos_token="other") == "<s>"


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("{{ raise_exception('Only  <one> user') }}", RefusedError, "Only <one> user"),
        ("{{ messages[0].content + none }}", TemplateFailedError, "TypeError"),
        ("{{ messages[7].content.x }}", TemplateFailedError, "has no element 7"),
        ("{{ 1 // 0 }}", TemplateFailedError, "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TemplateFailedError, "RecursionError"),
        ("a\n{% if %}", ModelError, "line 2"),
        ("{{ x | nothing }}", ModelError, "No filter named 'nothing'"),
        ("{% for %}", ModelError, "is broken"),
        ("{{ ''.__class__.__mro__ }}", ModelError, "__class__"),
        ("{{ raise_exception.__globals__.os }}", ModelError, "__globals__"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", ModelError, "__class__"),
        ("{{ (''|attr('__class__')).x }}", ModelError, "__class__"),
        ("{% include '/etc/passwd' %}", TemplateFailedError, "loader"),
    ],
)
def test_a_forbidden_operation_of_a_template_is_one_clear_error(source: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_output_is_bounded_while_it_is_made() -> None:
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}é{% endfor %}{% endfor %}"
    with pytest.raises(TooLongError, match="more than 1,000 bytes"):
        render(endless, max_bytes=1000)
    assert render("éé", max_bytes=4) == "éé"
    with pytest.raises(TooLongError):
        render("éé", max_bytes=3)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


def test_generic_template_is_chatml_where_the_vocabulary_has_it() -> None:
    template = ChatTemplate(None, special_strings=frozenset({"<|im_start|>", "<|im_end|>"}))
    assert template.render(CHAT[1:2]) == "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in CHAT]
    assert template.render(CHAT, add_generation_prompt=False) == "".join(turns)
    assert template.stop_strings == ()


def test_generic_template_of_other_models_is_text_to_continue() -> None:
    template = ChatTemplate(None, bos="<s>", special_strings=frozenset({"<s>"}))
    assert template.render(CHAT) == "<s>Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant:"
    assert template.render(CHAT[:3], add_generation_prompt=False) == "<s>Be brief.\n\nUser: Hi\n\nAssistant: Hello."
    assert template.stop_strings == ("\nUser:",)


@pytest.mark.parametrize(
    ("effort", "used"),
    [("low", "low"), ("medium", "medium"), ("minimal", "low"), ("high", "xhigh"), ("max", "xhigh"), (None, "none")],
)
def test_an_effort_that_a_template_refuses_becomes_the_nearest(effort: str | None, used: str) -> None:
    """Qwen 3.8 takes three of the efforts that clients send, and refuses the request for any other."""
    qwen = ChatTemplate(
        "{%- if reasoning_effort is defined and reasoning_effort not in ('xhigh', 'medium', 'low') %}"
        "{{ raise_exception('Unexpected reasoning effort ' ~ reasoning_effort) }}{% endif %}"
        "{{ reasoning_effort|default('none') }}"
    )
    kwargs = {} if effort is None else {"reasoning_effort": effort}
    rendered = render_chat(qwen, [{"role": "user", "content": "Hi"}], **kwargs)
    assert rendered.text == used
    assert rendered.effort == ("" if used in (effort, "none") else used)


OFF = {"enable_thinking": False, "thinking": False}
THINKS = "{{ '<think></think>' if %s else '<think>' }}"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (THINKS % "enable_thinking is false", "<think></think>"),
        (THINKS % "thinking_budget == 0", "<think></think>"),  # Seed-OSS
        (THINKS % "reasoning_effort is defined and reasoning_effort|lower == 'none'", "<think></think>"),  # Cohere
        (THINKS % "reasoning is false", "<think></think>"),
        (THINKS % "not enable_thinking", "<think></think>"),  # off unless a request says otherwise
        ("{{ reasoning_effort|default('medium') }}", "low"),  # gpt-oss
        ("{{ 'Strength ' ~ (reasoning_strength or 'high') }}", "Strength low"),
        ("<think></think>{{ raise_exception('none') if reasoning_effort == 'none' }}", "<think></think>"),
        ("no thoughts", "no thoughts"),
    ],
)
def test_reasoning_is_turned_off_in_the_way_of_the_template(source: str, shown: str) -> None:
    rendered = render_chat(ChatTemplate(source), [{"role": "user", "content": "Hi"}], **OFF)
    assert rendered.text == shown
    assert rendered.effort == ("low" if "low" in shown else "")
    assert rendered.stays_on == ("raise" in source)
    for own in ({}, {"enable_thinking": False}, {"enable_thinking": True, "thinking": True}):
        assert render_chat(ChatTemplate(source), [], **own).text == ChatTemplate(source).render([], **own)
    if "low" in shown:
        name = "reasoning_effort" if "effort" in source else "reasoning_strength"
        assert "own" in render_chat(ChatTemplate(source), [], **OFF, **{name: "own"}).text
        assert "xhigh" in render_chat(ChatTemplate(source), [], reasoning_effort="xhigh").text


def test_what_turns_reasoning_off_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template, count = ChatTemplate(THINKS % "reasoning is false"), 0
    render = ChatTemplate.render

    def counted(self: ChatTemplate, /, *args: Any, **kwargs: Any) -> str:
        nonlocal count
        count += 1
        return render(self, *args, **kwargs)

    render_chat(template, [], **OFF)
    monkeypatch.setattr(ChatTemplate, "render", counted)
    for number in range(1, 4):
        render_chat(template, [], **OFF)
        assert count == number


def test_a_refusal_for_another_reason_is_the_templates_own() -> None:
    template = ChatTemplate("{{ raise_exception('only ' ~ reasoning_effort) }}")
    for effort in ("high", "17", ["high"]):
        with pytest.raises(RefusedError, match=r"only (high|17|.+high.+)"):
            render_chat(template, [], reasoning_effort=effort)


def test_a_refusal_that_names_no_effort_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ raise_exception('roles must follow each other') }}")
    efforts: list[object] = []
    render = template.render

    def counted(*messages: Any, **names: Any) -> str:
        efforts.append(names.get("reasoning_effort"))
        return render(*messages, **names)

    monkeypatch.setattr(template, "render", counted)
    with pytest.raises(RefusedError, match="roles must"):
        render_chat(template, [], reasoning_effort="low")
    assert list(filter(None, efforts)) == ["low"], "the others are probes"


@pytest.mark.parametrize("specials", [frozenset(), frozenset({"<|im_start|>", "<|im_end|>"})])
def test_generic_templates_refuse_what_they_cannot_write(specials: frozenset[str]) -> None:
    template = ChatTemplate(None, special_strings=specials)
    user = {"role": "user", "content": "Hi"}
    with pytest.raises(RefusedError, match="has no tools"):
        template.render([user], tools=TOOLS)
    with pytest.raises(RefusedError, match='no role "tool"'):
        template.render([user, RESULT])
    with pytest.raises(RefusedError, match="no tool calls"):
        template.render([user, CALL])


def test_any_of_finds_the_longest_string_at_each_place() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(300):
        strings = {"".join(rng.choices("ab|[.é", k=rng.randint(0, 6))) for _ in range(rng.randint(0, 12))}
        text = "".join(rng.choices("ab|[.é", k=60))
        expected, at = [], 0
        while at < len(text):
            longest = max((string for string in strings if string and text.startswith(string, at)), key=len, default="")
            expected += [longest] if longest else []
            at += len(longest) or 1
        assert any_of(strings).findall(text) == expected, f"seed {seed}"
