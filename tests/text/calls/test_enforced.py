"""Schemas of tools in formats whose values are not JSON: the grammar holds them, or the keyword is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgelm.base.errors import RequestError
from edgelm.text.calls.enforced import unenforced
from edgelm.text.calls.format import CallFormat, ToolChoice
from edgelm.text.calls.generic import GENERIC
from edgelm.text.calls.known import KNOWN
from edgelm.text.parse import AnswerParser
from tests.text.calls.random_calls import parsed
from tests.text.calls.vocabulary import Vocabulary, answer_grammar


def known(name: str) -> CallFormat:
    return next(form for _, form in KNOWN if form.name == name)


GLM, PYTHON, GEMMA, HARMONY = map(known, ("GLM 4.5", "Python calls", "Gemma 4", "Harmony"))


def schema_of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def allows(form: CallFormat, parameters: dict[str, Any], text: str) -> bool:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    constraint = answer_grammar(form, tools, choice=ToolChoice("required"), parallel=False)
    assert constraint
    matcher = Vocabulary().matcher(constraint.source)
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def glm(**values: str) -> str:
    arguments = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>f\n{arguments}</tool_call>"


def test_keywords_that_raw_values_do_not_obey_are_reported() -> None:
    text = {"type": "string"}
    schema = schema_of({"a": {**text, "pattern": "^x$"}, "b": {"type": "integer", "multipleOf": 3}}, minProperties=1)
    assert unenforced(GLM, schema) == ["minProperties", "pattern"]
    assert unenforced(PYTHON, schema) == ["minProperties"]
    assert unenforced(GEMMA, schema) == ["minProperties", "pattern"]
    assert unenforced(known("Hermes"), schema) == []
    optional = {"anyOf": [{**text, "maxLength": 3}, {"type": "null"}], "title": "as pydantic writes it"}
    for form in (GLM, PYTHON, GEMMA):
        plain = schema_of({"a": {"$ref": "#/$defs/t"}, "b": optional}, required=["a"])
        assert unenforced(form, {**plain, "$defs": {"t": text}, "own-keyword": 1}) == []
        assert unenforced(form, {**plain, "required": ["other"], "$defs": {"t": text}}) == ["required"]


def test_the_answer_says_which_keywords_are_not_held_and_strict_tools_are_refused() -> None:
    function = {"name": "f", "parameters": schema_of({"a": {"type": "string", "pattern": "^x$"}})}
    constraint = answer_grammar(GLM, [function])
    assert constraint
    assert constraint.relaxed == (("f", 'calls are not held to "pattern"'),)
    with pytest.raises(RequestError, match='not held to "pattern"'):
        answer_grammar(GLM, [{**function, "strict": True}])
    strict = answer_grammar(GENERIC, [{**function, "strict": True}])
    assert strict, "its own calls are JSON"


def test_limits_behind_references_and_alternatives_are_held() -> None:
    short = {"type": "string", "maxLength": 2}
    schema = schema_of(
        {"a": {"$ref": "#/$defs/s"}, "b": {"anyOf": [short, {"type": "null"}]}, "c": {"$ref": "#/properties/a"}},
        **{"$defs": {"s": short}},
    )
    assert allows(GLM, schema, glm(a="xy", b="xy", c="xy"))
    for key in "abc":
        assert not allows(GLM, schema, glm(**{key: "xyz"}))
    assert allows(PYTHON, schema, '<|tool_call_start|>[f(a="xy", b=null, c="xy")]<|tool_call_end|>')
    assert not allows(PYTHON, schema, '<|tool_call_start|>[f(c="xyz")]<|tool_call_end|>')
    assert allows(GEMMA, schema, '<|tool_call>call:f{a:<|"|>xy<|"|>,b:null}<tool_call|>')
    assert not allows(GEMMA, schema, '<|tool_call>call:f{b:<|"|>xyz<|"|>}<tool_call|>')


def test_a_recursive_schema_is_held() -> None:
    schema = schema_of({"next": {"$ref": "#"}, "n": {"type": "integer"}})
    assert allows(PYTHON, schema, '<|tool_call_start|>[f(next={"next": {"n": 1}})]<|tool_call_end|>')
    assert not allows(PYTHON, schema, '<|tool_call_start|>[f(next={"next": {"n": "1"}})]<|tool_call_end|>')


def test_other_keys_have_the_type_of_additional_properties() -> None:
    schema = schema_of({"n": {"type": "integer"}}) | {"additionalProperties": {"type": "boolean"}}
    assert allows(GLM, schema, glm(n="1", x="true"))
    assert allows(PYTHON, schema, "<|tool_call_start|>[f(n=1, x=True)]<|tool_call_end|>")
    assert allows(GEMMA, schema, "<|tool_call>call:f{n:1,x:true}<tool_call|>")
    for wrong in ({"x": "1"}, {"n": "true"}, {"x": "true", "n": "true"}):
        assert not allows(GLM, schema, glm(**wrong)), wrong
        arguments = ", ".join(f"{key}={value}" for key, value in wrong.items())
        assert not allows(PYTHON, schema, f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"), wrong
        arguments = ",".join(f"{key}:{value}" for key, value in wrong.items())
        assert not allows(GEMMA, schema, f"<|tool_call>call:f{{{arguments}}}<tool_call|>"), wrong


def test_a_list_of_gemma_may_be_limited_to_one_item() -> None:
    for least in (0, 1):
        schema = schema_of({"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 1, "minItems": least}})
        assert allows(GEMMA, schema, "<|tool_call>call:f{a:[1]}<tool_call|>")
        assert not allows(GEMMA, schema, "<|tool_call>call:f{a:[1,2]}<tool_call|>")
        assert allows(GEMMA, schema, "<|tool_call>call:f{a:[]}<tool_call|>") == (not least)


def test_a_python_call_may_have_keys_that_are_no_identifiers() -> None:
    text = "<|tool_call_start|>[f(with-dash=\"a=b\", list of=[1], -5, n='=')]<|tool_call_end|>"
    tools = [{"name": "f", "parameters": schema_of({key: {} for key in ("with-dash", "list of", "x", "n")})}]
    answer = parsed(AnswerParser(PYTHON, None, "", tools), [(None, text.encode())])
    assert answer.values == [("f", {"with-dash": "a=b", "list of": [1], "x": -5, "n": "="})]


def test_strings_of_harmony_may_contain_what_looks_like_a_mark() -> None:
    arguments = {"a": "<|start|> <|call|> <|channel|>final"}
    text = "<|channel|>analysis<|message|>a <|start|> b<|end|><|start|>assistant to=functions.f<|channel|>commentary "
    text += f"json<|message|>{json.dumps(arguments)}<|call|>"
    answer = parsed(AnswerParser(HARMONY, None), [(None, text.encode())])
    assert answer.reasoning == "a <|start|> b"
    assert answer.values == [("f", arguments)]
