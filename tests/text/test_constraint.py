"""Grammars of answers: whatever a model that follows the grammar writes, is read as valid calls of the tools."""

from __future__ import annotations

import itertools
import json
import random
import secrets
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from edgelm.base.errors import RequestError
from edgelm.text.calls.format import CallFormat, ToolChoice, write_calls
from edgelm.text.calls.generic import GENERIC
from edgelm.text.calls.known import KNOWN
from edgelm.text.calls.lark import json_rule
from edgelm.text.constraint import AnswerFormat, Constraint
from edgelm.text.parse import AnswerParser
from edgelm.text.reasoning import ReasoningFormat
from tests.counts import Count
from tests.real_data import data_file, with_vocabulary
from tests.text.calls.random_calls import THINK, collected, control_strings, random_calls, tool
from tests.text.calls.vocabulary import RealVocabulary, Vocabulary, answer_grammar, check, walk

WALKS = Count(test=1, soak=25)  # for each format, choice, answer, ...
MAX_TOKENS = 300

TOOLS = [
    tool(
        "get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}}, ["city"]
    ),
    tool(
        "find",
        {
            "q": {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "string"}}},
                "additionalProperties": False,
            },
            "flag": {"type": "boolean"},
            "s": {"type": "string", "minLength": 2, "maxLength": 5},
        },
        ["q", "flag"],
    ),
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS: dict[str, Any] = {one["function"]["name"]: one["function"].get("parameters", {}) for one in TOOLS}
JSON = AnswerFormat(
    json_rule(
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    )
)
AUTO, REQUIRED, NAMED = ToolChoice(), ToolChoice("required"), ToolChoice("required", frozenset(["find"]))
CHOICES = [(AUTO, None), (REQUIRED, None), (NAMED, None), (AUTO, JSON)]
FORMS = [form for _, form in KNOWN]
forms = pytest.mark.parametrize("form", FORMS, ids=[f"{index}-{form.name}" for index, form in enumerate(FORMS)])


def known(name: str) -> CallFormat:
    return next(form for form in FORMS if form.name == name)


def grammar(form: CallFormat | None, tools: list[dict[str, Any]] = TOOLS, **options: Any) -> Constraint:
    constraint = answer_grammar(form, tools, **options)
    assert constraint is not None
    return constraint


def likely(vocabulary: Vocabulary) -> Callable[[int], float]:
    """Prefer the characters of calls and their ends, so that answers come to an end."""
    frequent, ends = frozenset(b'{[":,abcde01234 \n<>/='), frozenset(b'"}]>')

    def weight(token: int) -> float:
        if token in ends:
            return 6
        return 3 if token > 255 else 2 if token in frequent else 0.02

    return weight


@forms
def test_what_a_grammar_allows_is_read_as_valid_calls(form: CallFormat) -> None:
    seed = secrets.randbelow(2**32)
    rng = random.Random(seed)
    kinds = [True] if form.body == "harmony" else [True, False]  # whether its marks are control tokens
    thoughts: list[tuple[ReasoningFormat | None, str]] = [(None, "")]
    if form.body != "harmony":
        thoughts += [(THINK, ""), (THINK, "<|assistant|><think>\n")]
    num_calls = 0
    for is_control, (reasoning, prefill) in itertools.product(kinds, thoughts):
        marks = control_strings(form, reasoning)
        vocabulary = Vocabulary(control=marks) if is_control else Vocabulary(user_defined=marks)
        for (choice, answer), parallel in itertools.product(CHOICES, (True, False)):
            options: dict[str, Any] = {"reasoning": reasoning, "prefill": prefill, "marks": vocabulary.marks}
            source = grammar(form, choice=choice, parallel=parallel, answer=answer, **options).source
            for _ in range(WALKS):
                tokens, has_ended = walk(vocabulary, source, rng, MAX_TOKENS, likely(vocabulary))
                parser = AnswerParser(form, reasoning, prefill, TOOLS, marks=vocabulary.marks)
                parts = [part for token in tokens for part in parser.push(token, vocabulary.piece(token))]
                read = collected(parts + parser.flush("stop" if has_ended else "length"))
                text = b"".join(vocabulary.tokens[token] for token in tokens)
                state = f"seed {seed}: {text!r}, {choice}, parallel {parallel}, control {is_control}, {options}"
                num_calls += len(read.calls)
                for name, arguments, is_complete in read.calls:
                    assert name in SCHEMAS, state
                    if is_complete:
                        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
                if not has_ended:
                    continue
                assert all(is_complete for *_, is_complete in read.calls), state
                if choice.mode == "required":
                    assert read.calls, state
                    assert not read.content.strip(), state
                if choice.names:
                    assert {name for name, *_ in read.calls} == choice.names, state
                if not parallel:
                    assert len(read.calls) <= 1, state
                if answer:
                    assert read.calls or json.loads(read.content).keys() == {"x"}, state
                    assert not read.content.strip() or json.loads(read.content), state
    assert num_calls


@forms
def test_a_grammar_allows_what_the_template_writes(form: CallFormat) -> None:
    seed = secrets.randbelow(2**32)
    rng = random.Random(seed)
    tools = [
        tool("find", {"city": {"type": "string"}, "n": {"type": "integer"}}),
        tool("x2", {"a": {"type": "object"}}),
    ]
    marks = control_strings(form, None)
    vocabulary = Vocabulary(control=marks)
    for choice in (AUTO, REQUIRED):
        source = grammar(form, tools, choice=choice, marks=vocabulary.marks).source
        for _ in range(10 * WALKS):
            calls = random_calls(rng, tools, form)
            text = write_calls(form, calls).removeprefix("<|start|>assistant").removesuffix("<|call|>")
            matcher = vocabulary.matcher(source)
            while text:
                mark = next((mark for mark in marks if text.startswith(mark)), "")
                size = len(mark) or 1
                tokens = [vocabulary.marks[mark]] if mark else list(text[:1].encode())
                for token in tokens:
                    assert matcher.consume_token(token), f"seed {seed}: {form.name} {calls} refused before {text!r}"
                text = text[size:]
            assert matcher.is_accepting(), f"seed {seed}: {calls}"


def allows(source: str, text: str) -> bool:
    vocabulary = Vocabulary()
    matcher = vocabulary.matcher(source)
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


def test_nothing_is_constrained_without_tools_and_format() -> None:
    assert answer_grammar(GENERIC, []) is None
    assert answer_grammar(GENERIC, TOOLS, choice=ToolChoice("none")) is None
    assert answer_grammar(None, TOOLS) is None


def test_auto_allows_any_text_and_constrains_calls() -> None:
    source = grammar(GENERIC).source
    assert allows(source, "any <text> {}")
    assert allows(source, 'ok <tool_call>{"name": "now", "arguments": {}}</tool_call> and more')
    assert not allows(source, '<tool_call>{"name": "other", "arguments": {}}</tool_call>')
    assert not allows(source, '<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call>')
    assert not allows(
        grammar(GENERIC, parallel=False).source, ('<tool_call>{"name": "now", "arguments": {}}</tool_call>') * 2
    )


def test_bare_json_is_constrained_at_the_start_only() -> None:
    source = grammar(known("Llama 3")).source
    assert allows(source, '{"name": "now", "parameters": {}}')
    assert not allows(source, '{"name": "now", "parameters": {"x": 1}}')
    assert allows(source, '{"name": "Ann"}')
    assert allows(source, 'so {"name": "now", "parameters": {"x": 1}}')


def test_a_prompt_may_end_inside_the_head_of_a_call() -> None:
    source = grammar(known("Functionary 3.2"), prefill="<|assistant|>\n\n>>>").source
    assert allows(source, "now\n{}")
    assert allows(source, "all\nHello >>> there")
    assert allows(source, "all\nHello>>>now\n{}")
    assert not allows(source, "other\n{}")
    assert not allows(source, 'all\nHello>>>now\n{"x": 1}')


def test_an_allowed_list_hides_the_other_tools() -> None:
    source = grammar(GENERIC, choice=ToolChoice("auto", frozenset(["find"]))).source
    assert not allows(source, '<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    assert allows(source, "text")


def test_json_comes_after_reasoning() -> None:
    source = grammar(None, [], reasoning=THINK, prefill="<think>\n", answer=JSON).source
    assert allows(source, 'hm, {"y"}\n</think>\n\n{"x": 1}')
    assert not allows(source, '{"x": 1}')
    source = grammar(None, [], reasoning=THINK, answer=JSON).source
    assert allows(source, '{"x": 1}')
    assert allows(source, '<think>hm</think>{"x": 1}')
    assert not allows(source, '{"x":  1}')


def test_harmony_has_json_in_the_final_channel() -> None:
    marks = control_strings(known("Harmony"), None)
    vocabulary = Vocabulary(control=marks)
    source = grammar(known("Harmony"), [], answer=JSON, marks=vocabulary.marks).source
    matcher = vocabulary.matcher(source)
    tokens = [vocabulary.marks["<|channel|>"], *b"final", vocabulary.marks["<|message|>"], *b'{"x": 1}']
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


def test_a_schema_that_cannot_be_enforced_is_relaxed_or_refused() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "patternProperties": {"b": {}},
        "propertyNames": {"pattern": "a"},
    }
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    constraint = grammar(GENERIC, [odd])
    assert [name for name, _ in constraint.relaxed] == ["odd"]
    assert "propertyNames" in constraint.relaxed[0][1]
    assert not allows(constraint.source, '<tool_call>{"name": "odd", "arguments": {"a": 1}}</tool_call>')
    odd["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(RequestError, match="propertyNames"):
        answer_grammar(GENERIC, [odd])


def test_an_unknown_format_of_a_string_is_dropped() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "colour"}}, "required": ["a"]}
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema, "strict": True}}
    assert grammar(GENERIC, [odd]).relaxed == ()


def test_a_required_call_needs_a_tool() -> None:
    with pytest.raises(RequestError, match="requires a call"):
        answer_grammar(GENERIC, TOOLS, choice=ToolChoice("required", frozenset(["other"])))


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(80):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(RequestError, match="too large"):
        answer_grammar(GENERIC, [{"function": {"name": "deep", "parameters": schema}}])


@pytest.mark.parametrize("name", ["GLM 4.5", "Gemma 4", "Python calls", "Hermes"])
def test_real_tools_have_grammars(name: str) -> None:
    lines = data_file("jsonschema/tools_bfcl.jsonl").read_text().splitlines()
    for line in lines[: Count(test=15, soak=50)]:
        item = json.loads(line)
        constraint = grammar(known(name), item["tools"])
        assert check(constraint.source) is None


@pytest.mark.parametrize("name", with_vocabulary(["llama-bpe", "phi-3", "qwen2"]))
def test_the_tokens_of_real_vocabularies_fit(name: str) -> None:
    """The usual tokens of a text often span the border between a mark and what stands beside it."""
    seed = secrets.randbelow(2**32)
    rng = random.Random(seed)
    vocabulary = RealVocabulary(data_file(f"vocab/ggml-vocab-{name}.gguf"))
    tools = [
        tool("find", {"city": {"type": "string"}, "n": {"type": "integer"}}),
        tool("x2", {"a": {"type": "object"}}),
    ]
    for form in FORMS:
        if form.body == "harmony":  # its marks are always control tokens, and no vocabulary here has them
            continue
        for choice in (AUTO, REQUIRED):
            matcher = vocabulary.matcher(grammar(form, tools, choice=choice).source)
            text = write_calls(form, random_calls(rng, tools, form))
            tokens = vocabulary(text)
            if b"".join(vocabulary.tokens[token] for token in tokens) != text.encode():
                continue  # U+2581, which DeepSeek's marks contain, is a space in an SPM vocabulary
            assert matcher.try_consume_tokens(tokens) == len(tokens), f"seed {seed}: {form.name} {choice} {text!r}"
            assert matcher.is_accepting(), f"seed {seed}: {form.name} {choice} {text!r}"
