"""A model writes the arguments of a call in the order that it likes: none is lost, none missing, none there twice."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import jsonschema
import llguidance
import pytest

from edgelm.engine.sampling.grammar_limits import parser_limits
from edgelm.text.calls.format import Call, CallFormat, write_calls
from edgelm.text.calls.generic import GENERIC
from edgelm.text.calls.known import KNOWN
from edgelm.text.parse import AnswerParser
from tests.text.calls.random_calls import collected, tool
from tests.text.calls.vocabulary import Vocabulary, answer_grammar

FORMS = [form for _, form in KNOWN]
forms = pytest.mark.parametrize("form", FORMS, ids=[f"{index}-{form.name}" for index, form in enumerate(FORMS)])
VALUES: dict[str, Any] = {"key_a": "x y", "key_b": 7, "key_c": [1, 2], "key_d": 1.5}
TYPES: dict[str, Any] = {
    "key_a": {"type": "string"},
    "key_b": {"type": "integer"},
    "key_c": {"type": "array", "items": {"type": "integer"}},
    "key_d": {"type": "number"},
}


def text_of(form: CallFormat, arguments: dict[str, Any]) -> str:
    text = write_calls(form, [Call("find", arguments, "abcdefgh1")])
    return text.removeprefix("<|start|>assistant").removesuffix("<|call|>") if form.body == "harmony" else text


class Allowed:
    """Which calls of a tool the grammar of a format allows."""

    def __init__(self, form: CallFormat, properties: dict[str, Any], required: list[str], **more: Any) -> None:
        parameters = tool("find", properties, required)["function"]["parameters"] | more
        self.tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
        self.form = form
        self._vocabulary = Vocabulary(["<|message|>", "<|channel|>"] if form.body == "harmony" else [])
        constraint = answer_grammar(form, [self.tool], marks=self._vocabulary.marks)
        assert constraint is not None
        self._source = constraint.source

    def text(self, text: str) -> bool:
        """Whether a call may be written, and the answer end behind it."""
        matcher = self._vocabulary.matcher(self._source)
        tokens = list(text.encode())
        for mark, token in self._vocabulary.marks.items():
            data = mark.encode()
            while (at := bytes(t if t < 256 else 0 for t in tokens).find(data)) >= 0:
                tokens[at : at + len(data)] = [token]
        return matcher.try_consume_tokens(tokens) == len(tokens) and self._ends_whole(text)

    def _ends_whole(self, text: str) -> bool:
        parser = AnswerParser(self.form, None, "", [self.tool])
        read = collected(parser.push(None, text) + parser.flush())
        return [complete for *_, complete in read.calls] == [True]

    def __call__(self, arguments: dict[str, Any]) -> bool:
        return self.text(text_of(self.form, arguments))


@forms
def test_any_order_is_allowed(form: CallFormat) -> None:
    for order in itertools.permutations(VALUES):  # of the schema, as some formats sort the keys that they write
        allowed = Allowed(form, {key: TYPES[key] for key in order}, ["key_b"])
        assert allowed(VALUES), order
        assert allowed({"key_b": 7}), order
        assert allowed({"key_a": "", "key_b": 7}), order
        assert allowed({"key_b": 7, "key_d": 0.5}), order
    assert not allowed({"key_a": "x y", "key_d": 1.5}), "it is required"
    twice = text_of(form, {"key_b": 7, "key_c": [1]}).replace("key_c", "key_b").replace("[1]", "1")
    assert not allowed.text(twice)


@forms
def test_all_that_are_required_come_in_the_order_of_the_schema(form: CallFormat) -> None:
    assert Allowed(form, TYPES, [*TYPES])(VALUES)
    assert not Allowed(form, TYPES, [*TYPES])({"key_a": "x", "key_b": 1, "key_c": []})


@pytest.mark.parametrize("form", [GENERIC, next(form for form in FORMS if form.body == "tagged")])
def test_other_keys_stand_anywhere(form: CallFormat) -> None:
    allowed = Allowed(form, TYPES, ["key_b"], additionalProperties={"type": "integer"})
    assert allowed({"more": 1, "key_b": 7, "other": 3, "key_a": "x"})
    assert allowed({"key_b": 7, "other": 3})
    assert not allowed({"other": 3})
    assert not allowed.text(text_of(form, {"key_b": 7, "other": 3}).replace("other", "key_b"))
    assert Allowed(form, {}, [], additionalProperties={"type": "integer"})({"more": 1, "other": 2})


@pytest.mark.parametrize("form", [GENERIC, next(form for form in FORMS if form.body == "tagged")])
def test_other_keys_cost_no_more_the_more_there_are(form: CallFormat) -> None:
    """A grammar with a row for each of them reaches the limit of rows, and slows down all answers before."""
    allowed = Allowed(form, {"key_a": {"type": "integer"}}, [], additionalProperties={"type": "integer"})
    arguments = {"key_a": 1} | {f"more_{number}": number for number in range(900)}
    constraint = answer_grammar(form, [allowed.tool])
    assert constraint is not None
    vocabulary = Vocabulary()
    matcher = llguidance.LLMatcher(
        vocabulary.tokenizer,
        llguidance.LLMatcher.grammar_from_lark(constraint.source),
        log_level=0,
        limits=parser_limits(),
    )
    text = list(text_of(form, arguments).encode())
    assert matcher.try_consume_tokens(text) == len(text), matcher.get_error()


def test_an_object_that_says_anything_of_other_keys_is_open() -> None:
    allowed = Allowed(GENERIC, {"key_a": {"type": "integer"}}, [], additionalProperties={})
    assert allowed({"more": [1], "key_a": 1})


@pytest.mark.parametrize("form", FORMS[:1] + [form for form in FORMS if form.body in ("tagged", "python")][:2])
def test_a_tool_may_have_more_arguments_than_a_number_has_bits(form: CallFormat) -> None:
    properties = {f"key_{number:02}": {"type": "integer"} for number in range(70)}
    required = ["key_03", "key_69"]
    allowed = Allowed(form, properties, required)
    assert allowed(dict.fromkeys(properties, 1))
    assert allowed(dict.fromkeys([*reversed([*properties][:64]), *reversed([*properties][64:])], 1))
    assert allowed({"key_63": 1, "key_03": 2, "key_69": 3})
    assert not allowed({"key_63": 1, "key_69": 3})
    assert not allowed({"key_63": 1, "key_03": 2})


def test_objects_in_json_arguments_are_free_too() -> None:
    part = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "A."}, "b": {"$ref": "#/$defs/word"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    properties = {"list": {"type": "array", "items": part, "maxItems": 2}, "one": part, "deep": {"$ref": "#/$defs/one"}}
    word = {"enum": ["x", "y"]}
    allowed = Allowed(GENERIC, properties, ["list"], **{"$defs": {"word": word, "one": part}})
    whole = {"list": [{"b": "x", "a": "é"}, {"a": ""}], "deep": {"a": "1", "b": "y"}, "one": {"b": "y", "a": "1"}}
    assert allowed(whole)
    assert allowed(whole | {"list": []})
    assert not allowed(whole | {"list": [{}, {}, {}]})
    for empty in ({}, {"b": "x"}):
        assert not allowed(whole | {"one": empty})
        assert not allowed(whole | {"list": [empty]})
        assert not allowed({"list": [], "one": empty})
    assert not allowed(whole | {"one": {"a": "1", "b": "z"}})
    assert not allowed(whole | {"one": {"a": "1", "c": "z"}})
    assert not allowed.text(text_of(GENERIC, whole).replace('{"b": "y", "a": "1"}', '{"b": "y", "b": "y"}'))


def test_schemas_that_say_more_of_an_object_are_kept_whole() -> None:
    for more in ({"minProperties": 2}, {"anyOf": [{"required": ["key_a"]}, {"required": ["key_d"]}]}):
        allowed = Allowed(GENERIC, TYPES, ["key_b"], **more)
        for size in range(len(VALUES) + 1):
            for keys in itertools.combinations(VALUES, size):
                arguments = {key: VALUES[key] for key in keys}
                schema = allowed.tool["function"]["parameters"]
                assert allowed(arguments) == jsonschema.Draft202012Validator(schema).is_valid(arguments), arguments


def test_a_long_definition_is_not_copied_to_each_argument() -> None:
    long = {"enum": [f"word {number}" for number in range(500)]}
    for properties in ({f"key_{number}": {"$ref": "#/$defs/long"} for number in range(20)}, TYPES):
        parameters = {"type": "object", "properties": properties, "$defs": {"long": long}}
        constraint = answer_grammar(
            replace(GENERIC, also=()), [{"function": {"name": "find", "parameters": parameters}}]
        )
        assert constraint is not None
        assert len(constraint.source) < 3 * len(json.dumps(parameters))


def test_arguments_of_one_type_share_a_rule_whatever_their_descriptions() -> None:
    for form in (GENERIC, next(form for form in FORMS if form.body == "tagged")):
        sizes = []
        for note in ("", "In words. " * 40):
            properties = {f"key_{number}": {"type": "integer", "description": f"{number}{note}"} for number in range(9)}
            constraint = answer_grammar(form, [tool("find", properties, [])])
            assert constraint is not None
            sizes.append(len(constraint.source))
        assert sizes[0] == sizes[1]
