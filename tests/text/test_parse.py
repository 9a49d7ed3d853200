"""Answers in parts: reasoning, content and calls, as a client sees them while tokens come."""

from __future__ import annotations

import random
import secrets
from typing import Any

import pytest

from edgelm.text.calls.format import HARMONY_MARKS, CallFormat
from edgelm.text.calls.generic import GENERIC
from edgelm.text.calls.known import KNOWN
from edgelm.text.parse import AnswerParser, Args, CallBegin, CallEnd, Content, Part, Reasoning, control_marks
from edgelm.text.reasoning import ReasoningFormat, find_reasoning, is_thinking
from tests.text.calls.random_calls import THINK, collected, parsed, tool

WEATHER = tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"])
NOW = tool("now", {})
TOOLS = [WEATHER, NOW]


def known(name: str) -> CallFormat:
    return next(form for _, form in KNOWN if form.name == name)


def read(text: str, form: CallFormat | None = GENERIC, *, prefill: str = "", reason: str = "stop") -> list[Part]:
    """Return the parts of a text that comes one character at a time, neighbours put together."""
    parser = AnswerParser(form, THINK, prefill, TOOLS, new_id=lambda: "new")
    parts = [part for char in text for part in parser.push(None, char)] + parser.flush(reason)
    joined: list[Part] = []
    for part in parts:
        match (joined[-1] if joined else None), part:
            case (Content(a), Content(b)):
                joined[-1] = Content(a + b)
            case (Reasoning(a), Reasoning(b)):
                joined[-1] = Reasoning(a + b)
            case (Args(index, a), Args(_, b)):
                joined[-1] = Args(index, a + b)
            case _:
                joined.append(part)
    return joined


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z\\u00fc"}}\n</tool_call>'


def test_text_before_and_after_calls() -> None:
    assert read(f"Let me see.\n{CALL}\n{CALL}\nDone.") == [
        Content("Let me see."),
        CallBegin(0, "new", "get_weather"),
        Args(0, '{"city": "Z\\u00fc"}'),
        CallEnd(0),
        CallBegin(1, "new", "get_weather"),
        Args(1, '{"city": "Z\\u00fc"}'),
        CallEnd(1),
        Content("\n\nDone."),
    ]


def test_arguments_come_before_the_call_is_over() -> None:
    parser = AnswerParser(GENERIC, None, "", TOOLS, new_id=lambda: "new")
    assert parser.push(None, '<tool_call>\n{"name": "now"') == [CallBegin(0, "new", "now")]
    assert parser.push(None, ', "arguments": {"a": ') == [Args(0, '{"a": ')]
    assert parser.push(None, '"b') == [Args(0, '"b')]
    assert parser.push(None, '"}}') == [Args(0, '"}')]
    assert parser.push(None, "\n</tool_call>") == [CallEnd(0)]


def test_a_call_without_parameters_gives_an_empty_object() -> None:
    begin, args, end = read('<tool_call>\n{"name": "now"}\n</tool_call>')
    assert (begin, args, end) == (CallBegin(0, "new", "now"), Args(0, "{}"), CallEnd(0))
    assert read("<tool_call>now</tool_call>", known("GLM 4.5"))[1] == Args(0, "{}")
    assert read("[TOOL_CALLS]now[ARGS]", known("Mistral [ARGS]"))[1:] == [Args(0, "{}"), CallEnd(0)]


@pytest.mark.parametrize("text", ["a <tool_call", "a <tool_call> b", "a <tool_call>\n[1]</tool_call>", "x <b> y"])
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(text) == [Content(text)]


def test_a_call_of_an_unknown_tool_is_reported() -> None:
    assert read('<tool_call>{"name": "other", "arguments": {}}</tool_call>')[0] == CallBegin(0, "new", "other")


def test_bare_json_is_a_call_only_for_a_tool_and_only_as_the_whole_answer() -> None:
    form = known("Llama 3")
    assert read('{"name": "now", "parameters": {}}', form)[0] == CallBegin(0, "new", "now")
    assert read('{"type": "function", "function": "now", "parameters": {}}', form)[0] == CallBegin(0, "new", "now")
    assert read('{"name": "Ann", "parameters": {}}', form) == [Content('{"name": "Ann", "parameters": {}}')]
    text = 'Say {"name": "now", "parameters": {}}'
    assert read(text, form) == [Content(text)]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"arguments": {"a": 1}, "name": "now"}', '{"a": 1}'),
        ('{"type": "function", "function": {"name": "now", "parameters": {"a": 1}}}', '{"a": 1}'),
        ('{ "name" :"now","arguments":{ "a":1 } }', '{ "a":1 }'),
    ],
)
def test_other_spellings_of_a_call(text: str, arguments: str) -> None:
    assert read(f"<tool_call>{text}</tool_call>") == [CallBegin(0, "new", "now"), Args(0, arguments), CallEnd(0)]


def test_tagged_values_are_typed_by_the_schema() -> None:
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
        '<parameter=days>\n3\n</parameter>\n<parameter=x>\n{"a": "</parameter>"}\n</parameter>\n</function>\n'
        "</tool_call>"
    )
    expected = Args(0, '{"city": "12", "days": 3, "x": {"a": "</parameter>"}}')
    assert read(text, known("Qwen3-Coder"))[1] == expected
    assert read(text.removeprefix("<tool_call>").removesuffix("</tool_call>"), known("Qwen3-Coder"))[1] == expected


def test_a_tagged_string_is_escaped_while_it_comes() -> None:
    parser = AnswerParser(known("Qwen3-Coder"), None, "", TOOLS, new_id=lambda: "new")
    parser.push(None, "<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.push(None, 'say "hi"') == [Args(0, 'say \\"hi\\"')]
    assert parser.push(None, "\nyou") == [Args(0, "\\nyou")]
    parser.push(None, "\n</parameter>\n</function>\n</tool_call>")
    assert parser.finish_reason("stop") == "tool_calls"


def test_a_call_cut_off_gives_what_came_and_the_reason() -> None:
    parser = AnswerParser(GENERIC, None, "", TOOLS)
    answer = parsed(parser, [(None, b'<tool_call>\n{"name": "now", "arguments": {"a": "b')], "length")
    assert answer.calls == [["now", '{"a": "b', False]]
    assert parser.finish_reason("length") == "length"


def test_a_call_may_end_without_its_mark() -> None:
    parser = AnswerParser(GENERIC, None, "", TOOLS)
    answer = parsed(parser, [(None, b'<tool_call>\n{"name": "now", "arguments": {}}')])
    assert answer.calls == [["now", "{}", True]]
    assert parser.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize("size", range(len('\n<tool_call>\n{"name": "get_weather"')))
def test_the_beginning_of_a_call_that_is_cut_is_no_text(size: int) -> None:
    begun = '\n<tool_call>\n{"name": "get_weather"'[:size]
    assert read(f"Let me see.{begun}", reason="length") == [Content("Let me see." + "\n" * (size == 1))]
    cut = collected(read(f"{CALL}{begun}", reason="length"))
    assert (cut.content, cut.calls) == ("", collected(read(CALL)).calls)
    assert collected(read(f"{CALL}{begun}")).content == begun.lstrip(), "the model ended it"


@pytest.mark.parametrize("size", range(len("\n</tool_call>")))
def test_the_end_of_a_call_that_is_cut_is_no_text(size: int) -> None:
    cut = collected(read(CALL.removesuffix("\n</tool_call>") + "\n</tool_call>"[:size], reason="length"))
    assert (cut.content, cut.calls) == ("", collected(read(CALL)).calls)


def test_text_that_is_no_beginning_of_a_call_stays_where_it_is_cut() -> None:
    for text in ("a <tool_call> b", "a <b> c", "1 < 2", "{", '{"name": "An', "[get_wea"):
        for form in (GENERIC, known("Llama 3")):
            assert read(text, form, reason="length") == [Content(text)]


def test_an_answer_that_must_be_calls_has_no_text_before_them() -> None:
    for name, text in (
        ("Llama 3", '{"name": "get_we'),
        ("Llama 4 list", "[get_we"),
        ("Qwen3-Coder", "<tool_call>\n<function=get_we"),
    ):
        form = next(form for _, base in KNOWN for form in (base, *base.also) if form.name == name)
        for size in range(len(text) + 1):
            parser = AnswerParser(form, THINK, "", TOOLS, must_call=True)
            assert parser.push(None, "  \n" + text[:size]) + parser.flush("length") == [], (name, size)
            assert parser.finish_reason("length") == "length"


@pytest.mark.parametrize("header", ["<|channel|>commentary to=functions.get_wea", " to=functions.now <|chan"])
def test_a_harmony_header_that_is_cut_is_no_text(header: str) -> None:
    assert read(header, known("Harmony"), reason="length") == []
    assert read("to be", known("Harmony"), reason="length") == [Content("to be")]


# ---- reasoning


@pytest.mark.parametrize(
    ("prefill", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nHi", "hm", "Hi"),
        ("<|assistant|><think>\n", "hm\n</think>\n\nHi", "hm", "Hi"),
        ("<think>\n\n</think>\n\n", "Hi", "", "Hi"),
        ("<|assistant|></think>", "Hi", "", "Hi"),
        ("<think>\n", "hm", "hm", ""),
        ("<think>\n", "hm</think>\n</think>\nHi", "hm", "Hi"),
        ("", "Hi <think> is a tag, </think> too", "", "Hi <think> is a tag, </think> too"),
        ("", "  Hi\n", "", "  Hi\n"),
        ("Tell me about <think> tags<|assistant|>", "Hi", "", "Hi"),
        ("<think>", "</think>Hi", "", "Hi"),
    ],
)
def test_reasoning_begins_where_the_prompt_says(prefill: str, text: str, reasoning: str, content: str) -> None:
    answer = collected(read(text, prefill=prefill))
    assert (answer.reasoning, answer.content) == (reasoning, content)
    without_tools = collected(read(text, None, prefill=prefill))
    assert (without_tools.reasoning, without_tools.content) == (reasoning, content)


def test_a_call_ends_reasoning_if_it_is_one_of_a_tool() -> None:
    assert collected(read(f"hm {CALL}", prefill="<think>")).calls[0][0] == "get_weather"
    text = 'I could write <tool_call>{"name": "x"}</tool_call> now'
    assert read(text, prefill="<think>") == [Reasoning(text)]


@pytest.mark.parametrize(
    ("template", "opened"),
    [
        ("{{ '<think>\\n' }}{{ '</think>' }}", "<think>"),
        ("[THINK]..[/THINK]", "[THINK]"),
        ("<|channel>thought\\n<channel|>", "<|channel>thought\n"),
        ("<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>"),
        ("<seed:think></seed:think>", "<seed:think>"),
    ],
)
def test_the_marks_of_reasoning_stand_in_the_template(template: str, opened: str) -> None:
    form = find_reasoning(template)
    assert form is not None
    assert form.opened == opened
    assert is_thinking(form, f"<|assistant|>{opened}")
    assert not is_thinking(form, f"{opened}{form.closed}\n\n")


def test_reasoning_marks_in_the_vocabulary() -> None:
    assert find_reasoning("{{ messages }}") is None
    assert find_reasoning("{{ messages }}", {"<think>", "</think>"}) == THINK


def test_reasoning_tokens_are_counted() -> None:
    parser = AnswerParser(None, THINK, "<think>\n")
    for piece in ("a", " b", " c", "</think>", "x", "y"):
        parser.push(None, piece)
    assert parser.reasoning_tokens == 4


# ---- Harmony

HARMONY_IDS = {mark: 900 + index for index, mark in enumerate(HARMONY_MARKS)}


def harmony(text: str, **options: Any) -> list[Part]:
    parser = AnswerParser(
        known("Harmony"), None, "<|start|>assistant", TOOLS, marks=HARMONY_IDS, new_id=lambda: "new", **options
    )
    parts: list[Part] = []
    while text:
        mark = next((mark for mark in HARMONY_IDS if text.startswith(mark)), "")
        parts += parser.push(HARMONY_IDS.get(mark), b"" if mark else text[0].encode())
        text = text[len(mark) or 1 :]
    return parts + parser.flush()


def test_harmony_channels() -> None:
    answer = collected(
        harmony("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>")
    )
    assert (answer.reasoning, answer.content) == ("hm", "Hi")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json",
        " to=functions.now<|channel|>commentary json",
        "<|channel|>commentary json to=functions.now",
        "<|channel|>analysis to=functions.now code",
    ],
)
def test_harmony_calls(header: str) -> None:
    parts = harmony(f'{header}<|message|>{{"a": 1}}<|call|>')
    assert [part for part in parts if not isinstance(part, Args)] == [CallBegin(0, "new", "now"), CallEnd(0)]
    assert collected(parts).values == [("now", {"a": 1})]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=browser.search code",
        " to=functions.now<|channel|>commentary json",
        "<|channel|>commentary to=assistant<|channel|>commentary",
        " to=functions.now",
    ],
)
def test_without_tools_a_message_of_harmony_to_a_tool_is_reasoning(header: str) -> None:
    final = "<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"
    answer = collected(harmony(f'{header}<|message|>{{"a": 1}}{final}', may_call=False))
    assert (answer.reasoning, answer.content, answer.calls) == ('{"a": 1}', "Hi", [])
    final = "<|channel|>final to=user<|message|>Hi<|return|>"
    assert collected(harmony(final, may_call=False)).content == "Hi"
    assert len(collected(harmony(f"{header}<|message|>{{}}")).calls) == 1


@pytest.mark.parametrize("text", ["Hello, to you", "<|channel|>Hello", "<|channel|>finally<|message|>Hello"])
def test_harmony_without_a_header_is_content(text: str) -> None:
    assert collected(harmony(text)).content.endswith("Hello" if "Hello" in text[-6:] else text)


# ---- tokens


class Vocabulary:
    """The part of a tokenizer that `control_marks` reads."""

    special_strings = frozenset(("[TOOL_CALLS]", "<think>", "[INST]"))

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        return [["[TOOL_CALLS]", "<think>"].index(text)]

    def piece(self, token: int) -> bytes:
        return b"" if token == 0 else b"<think>"


def test_only_control_tokens_of_the_formats_are_marks() -> None:
    assert control_marks(Vocabulary(), known("Mistral [ARGS]"), THINK) == {"[TOOL_CALLS]": 0}  # type: ignore[arg-type]


def test_a_control_token_is_a_mark_and_its_spelling_is_text() -> None:
    parser = AnswerParser(known("Mistral [ARGS]"), None, "", TOOLS, marks={"[TOOL_CALLS]": 5, "[ARGS]": 6})
    text = '[TOOL_CALLS]now[ARGS]{"a": 1}'
    assert parser.push(None, text) == [Content(text)]
    answer = parsed(parser, [(5, b""), (None, b"now"), (6, b""), (None, b"{}")])
    assert answer.calls == [["now", "{}", True]]


def test_utf8_is_decoded_across_tokens() -> None:
    parser = AnswerParser(None, THINK)
    pieces = ["🦙é".encode()[i : i + 1] for i in range(6)]
    assert [part for piece in pieces for part in parser.push(None, piece)] == [Content("🦙"), Content("é")]
    assert parser.push(None, b"\xf0") == []
    assert parser.flush() == [Content("\ufffd")]


def test_stop_strings_end_the_content_only() -> None:
    parser = AnswerParser(GENERIC, THINK, "<think>", TOOLS, stop=["END"])
    assert parser.push(None, "END of thought</think>") == [Reasoning("END of thought")]
    assert parser.push(None, "\nan answer EN") == [Content("an answer ")]
    assert parser.push(None, "D and more") == []
    assert parser.stopped
    assert parser.stop == "END"
    assert parser.finish_reason("stop") == "stop"
    assert parser.flush() == []


def test_a_held_back_stop_string_is_shown_before_a_call() -> None:
    parser = AnswerParser(GENERIC, None, "", TOOLS, stop=["END"])
    assert parser.push(None, "an EN") == [Content("an ")]
    parts = parser.push(None, CALL)
    assert parts[0] == Content("EN")
    assert isinstance(parts[1], CallBegin)


def test_drafted_characters_are_marked() -> None:
    parser = AnswerParser(GENERIC, THINK, "<think>")
    parts = parser.push(1, "ab") + parser.push(2, "cd", drafted=True) + parser.push(3, "e</think> x", drafted=True)
    assert parts == [Reasoning("ab"), Reasoning("cd", True), Reasoning("e", True), Content("x", True)]
    assert parser.push(4, "<tool", drafted=True) == []
    assert parser.push(5, " y") == [Content("<tool", True), Content(" y")]


def test_without_formats_text_is_shown_at_once() -> None:
    seed = secrets.randbelow(2**32)
    rng = random.Random(seed)
    parser = AnswerParser(None, None)
    for _ in range(200):
        piece = "".join(rng.choices(" \n<think>[é", k=rng.randint(1, 4)))
        assert parser.push(None, piece) == [Content(piece)], f"seed {seed}"


def test_long_answers_take_linear_time() -> None:
    parser = AnswerParser(GENERIC, THINK, "", TOOLS)
    text = '<tool_call>\n{"name": "now", "arguments": {"a": "' + "<tool_call>x" * 20_000 + '"}}\n</tool_call>'
    parts = [part for index in range(0, len(text), 7) for part in parser.push(None, text[index : index + 7])]
    assert collected(parts + parser.flush()).calls[0][2]


def test_granite_marks_around_the_answer_are_no_text() -> None:
    form = find_reasoning("<think></think><response></response>")
    assert form == ReasoningFormat("<think>", "</think>", ("<response>", "</response>"))
    parser = AnswerParser(None, form)
    answer = parsed(parser, [(None, b"<think>hm</think><response>Hi</response>")])
    assert (answer.reasoning, answer.content) == ("hm", "Hi")
