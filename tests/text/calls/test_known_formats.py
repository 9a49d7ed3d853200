"""Every known format: calls that are written are read again, however they are cut; and no text is lost."""

from __future__ import annotations

import json
import random
import secrets

import pytest

from edgelm.text.calls.format import CallFormat, write_calls
from edgelm.text.calls.generic import GENERIC
from edgelm.text.calls.known import KNOWN, known_formats
from edgelm.text.parse import AnswerParser, CallBegin
from tests.counts import Count
from tests.text.calls.random_calls import (
    THINK,
    Answer,
    as_tokens,
    collected,
    control_strings,
    parsed,
    random_calls,
    random_text,
    random_tools,
)

ANSWERS = Count(test=40, soak=700)  # a format
MUTANTS = Count(test=60, soak=1500)
FORMS = [form for _, form in KNOWN]
forms = pytest.mark.parametrize("form", FORMS, ids=[f"{index}-{form.name}" for index, form in enumerate(FORMS)])


def answer_text(rng: random.Random, form: CallFormat, calls: str) -> tuple[str, str, str]:
    """Return the text of an answer, its reasoning and its content."""
    if form.body == "harmony":
        body = calls.removeprefix("<|start|>assistant")
        return f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{body}", "hm", ""
    thoughts = rng.choice(["", "I think.", "line\nline é"])
    said = "" if form.at_start else rng.choice(["", "I will look.", "a < b [x] {y}"])
    text = (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + (f"{said}\n" if said else "") + calls
    return text, thoughts, said


@forms
def test_calls_are_read_as_written(form: CallFormat) -> None:
    seed = secrets.randbelow(2**32)
    rng = random.Random(seed)
    for number in range(ANSWERS):
        tools = random_tools(rng)
        calls = random_calls(rng, tools, form)
        text, thoughts, said = answer_text(rng, form, write_calls(form, calls))
        strings = control_strings(form, THINK) if rng.random() < 0.5 or form.body == "harmony" else []
        marks = {mark: 1000 + index for index, mark in enumerate(strings)}
        state = f"seed {seed}, answer {number}: {text!r}, marks {marks}"

        def parser(tools: list[dict[str, object]] = tools, marks: dict[str, int] = marks) -> AnswerParser:
            return AnswerParser(form, THINK, "", tools, marks=marks, new_id=lambda: "new")

        whole = parsed(parser(), as_tokens(text, marks, None))
        assert whole.values == [(call.name, dict(call.arguments)) for call in calls], state
        assert (whole.reasoning, whole.content) == (thoughts, said), state
        assert all(complete for *_, complete in whole.calls), state
        assert parsed(parser(), as_tokens(text, marks, rng)) == whole, state


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        match rng.randrange(4):
            case 0:
                text = text[:at] + text[at + rng.randint(1, 8) :]
            case 1:
                text = text[:at] + random_text(rng, 5) + text[at:]
            case 2:
                text = text[:end] + text[at:end] + text[end:]
            case 3:
                text = text[:end]
    return text


@forms
def test_broken_calls_lose_no_text(form: CallFormat) -> None:
    seed = secrets.randbelow(2**32)
    rng = random.Random(seed)
    for number in range(MUTANTS):
        tools = random_tools(rng)
        calls = write_calls(form, random_calls(rng, tools, form))
        text = f"BEFORE\n{mutated(rng, calls)} and AFTER it"  # half a key at the end is no text
        marks = {mark: 1000 + index for index, mark in enumerate(control_strings(form, THINK))} if number % 2 else {}
        state = f"seed {seed}, answer {number}: {text!r}, marks {marks}"

        def read(cuts: random.Random | None, reason: str, text: str = text, marks: dict[str, int] = marks) -> Answer:
            parser = AnswerParser(form, THINK, "", tools, marks=marks, new_id=lambda: "new")  # noqa: B023
            return parsed(parser, as_tokens(text, marks, cuts), reason)

        for reason in ("stop", "length"):
            whole = read(None, reason)
            assert whole.content.startswith("BEFORE"), state
            shown = whole.reasoning + whole.content + "".join(args for _, args, _ in whole.calls)
            assert "AFTER" in shown or reason == "length", state  # a call that is begun and cut is no text
            assert read(rng, reason) == whole, state


@forms
def test_a_truncated_call_gives_what_came(form: CallFormat) -> None:
    seed = secrets.randbelow(2**32)
    rng = random.Random(seed)
    for number in range(ANSWERS // 4):
        tools = random_tools(rng)
        calls = random_calls(rng, tools, form)[:1]
        text = write_calls(form, calls).removeprefix("<|start|>assistant")
        marks = {mark: 1000 + index for index, mark in enumerate(control_strings(form, None))}
        tokens = as_tokens(text, marks, rng)
        whole = parsed(AnswerParser(form, None, "", tools, marks=marks), tokens)
        size = rng.randrange(len(tokens))
        parser = AnswerParser(form, None, "", tools, marks=marks)
        cut = parsed(parser, tokens[:size], "length")
        state = f"seed {seed}, answer {number}: {tokens[:size]!r}"
        assert parser.finish_reason("length") == "length", state
        if cut.calls and cut.calls[0][2]:
            assert cut.values == whole.values, state


def test_templates_are_known_by_their_marks() -> None:
    assert [form.name for form in known_formats("{{ '<tool_call>' }}")] == ["Hermes"]
    assert known_formats("{{ '<tool_call><function=' }}")[0].name == "Qwen3-Coder"
    assert known_formats("{{ messages }}") == []
    assert [form.name for form in known_formats("", {"[TOOL_CALLS]"})] == ["Mistral list"]


def test_a_finished_answer_gives_no_parts() -> None:
    parser = AnswerParser(None, None)
    assert collected(parser.push(None, "text") + parser.flush() + parser.flush()).content == "text"


@pytest.mark.parametrize(
    ("call_id", "is_kept"),
    [
        ("call_1.a:b-c", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("", False),
        ("a b", False),
        ("a/b", False),
        ("é", False),
        ("x\n", False),
        ("\ud83d", False),
    ],
)
def test_an_id_that_clients_cannot_send_back_is_replaced(call_id: str, is_kept: bool) -> None:
    written = json.dumps({"id": call_id, "name": "f", "arguments": {}})
    parser = AnswerParser(GENERIC, None, "", new_id=lambda: "new")
    parts = [*parser.push(None, f"<tool_call>{written}</tool_call>"), *parser.flush("stop")]
    (begin,) = [part for part in parts if isinstance(part, CallBegin)]
    assert begin.id == (call_id if is_kept else "new")
