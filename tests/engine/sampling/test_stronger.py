"""Stronger schemas: what conforms to one conforms to the schema that it was made of."""

from __future__ import annotations

import random
import secrets
from typing import Any

import jsonschema
import pytest

from edgelm.engine.sampling.stronger import stronger

NUM_SCHEMAS = 1500
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 1.5, 2, 5, "", "a", "b", "ab", "aaa", "xyz"),
    *([], [1], [1, 1], [0, 5], ["a"], ["a", 1], [[1]], {}, {"a": 1}, {"a": "a"}, {"b": 1}, {"a": 1, "b": 2}),
    *({"a": "x", "b": "a", "c": 5}, {"ab": 1}, {"c": 1}, {"a": None}, {"a": {"a": 1}}, {"k": "a"}, {"k": "b", "a": 1}),
]
REFERRED: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"enum": ["a", 1]},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    {"not": {"required": ["a"]}},
]
Draft = jsonschema.Draft202012Validator


def random_schema(rng: random.Random, depth: int) -> Any:
    """Return a schema of two or three keywords, most of which no grammar has."""
    if not depth or rng.random() < 0.08:
        return rng.choice([True, False, {}, {"type": "string"}, {"type": "integer"}, {"const": 1}, {"minimum": 1}])

    def part() -> Any:
        return random_schema(rng, depth - 1)

    names = ["a", "b", "c", "k"]
    words = {
        "type": lambda: rng.choice(["object", "array", "string", "integer", "number", ["object", "null"]]),
        "const": lambda: rng.choice(VALUES),
        "enum": lambda: rng.sample(VALUES, 3),
        "minimum": lambda: rng.randint(-1, 3),
        "exclusiveMaximum": lambda: rng.randint(0, 3),
        "minLength": lambda: float(rng.randint(0, 2)),
        "maxLength": lambda: rng.randint(0, 2),
        "pattern": lambda: rng.choice(["^a", "b", "^(a|x)", "a|^b", "^a|b", "^a?"]),
        "properties": lambda: {name: part() for name in rng.sample(names, 2)},
        "patternProperties": lambda: {name: part() for name in rng.sample(["^a", "b", "a"], 2)},
        "additionalProperties": part,
        "required": lambda: rng.sample(names, rng.randint(1, 2)),
        "minProperties": lambda: rng.randint(0, 2),
        "maxProperties": lambda: rng.randint(0, 2),
        "propertyNames": lambda: rng.choice(
            [{"enum": ["a", "b"]}, {"pattern": "^a"}, {"maxLength": 1.0}, {"not": {"enum": ["a"]}}, {"type": "string"}]
        ),
        "items": part,
        "prefixItems": lambda: [part(), part()],
        "minItems": lambda: rng.randint(0, 2),
        "contains": part,
        "minContains": lambda: rng.randint(0, 2),
        "maxContains": lambda: rng.randint(0, 2),
        "allOf": lambda: [part(), part()],
        "anyOf": lambda: [part(), part()],
        "oneOf": lambda: [part(), part(), part()],
        "not": part,
        "if": part,
        "then": part,
        "else": part,
        "dependentRequired": lambda: {rng.choice(names): rng.sample(names, 1)},
        "dependentSchemas": lambda: {rng.choice(names): part()},
        "dependencies": dict,
        "unevaluatedProperties": lambda: rng.choice([False, {"type": "integer"}]),
        "unevaluatedItems": lambda: rng.choice([False, {"type": "integer"}]),
        "$ref": lambda: "#/$defs/A",
    }
    return {word: words[word]() for word in rng.sample(sorted(words), rng.choice([1, 2, 2, 3]))}


def test_what_conforms_to_the_stronger_schema_conforms_to_the_given_one() -> None:
    rng = random.Random(seed := secrets.randbits(32))
    changed = conforming = 0
    for number in range(NUM_SCHEMAS):
        schema = random_schema(rng, 3)
        if not isinstance(schema, dict):
            continue
        schema["$defs"] = {"A": rng.choice(REFERRED)}
        for merge_patterns in (False, True):
            strong = stronger(schema, merge_patterns=merge_patterns)
            changed += strong != schema
            given, made = Draft(schema), Draft(strong)
            for value in VALUES:
                if made.is_valid(value):
                    conforming += 1
                    assert given.is_valid(value), f"seed {seed}, {number}: {value} of {strong}\nfor {schema}"
    assert changed > NUM_SCHEMAS // 4
    assert conforming > NUM_SCHEMAS


def test_a_limited_number_of_properties_obeys_the_patterns_of_their_names() -> None:
    given = {"properties": {"a": {"minLength": 1}}, "patternProperties": {"a": {"type": "integer"}}, "maxProperties": 2}
    strong = stronger(given)
    assert Draft(strong).is_valid({"a": 1})
    assert not Draft(strong).is_valid({"a": "x"})


def test_a_not_that_refuses_everything_leaves_no_value_of_an_enum() -> None:
    strong = stronger({"not": {}, "enum": [1, None]}, merge_patterns=False)
    assert not any(Draft(strong).is_valid(value) for value in (1, None))


@pytest.mark.parametrize("value", [None, 1, "x", [], [1], {"a": 1}, True, [{"a": {"type": "integer"}}]])
@pytest.mark.parametrize(
    "keyword", ["properties", "propertyNames", "contains", "minContains", "minItems", "enum", "oneOf", "dependencies"]
)
def test_a_value_of_a_wrong_type_is_no_bug(keyword: str, value: Any) -> None:
    """What is malformed stays as it is, and the grammar's compiler refuses it."""
    for base in ({}, {"type": "object", "minProperties": 1}, {"contains": {"type": "integer"}}):
        for schema in ({**base, keyword: value}, {"not": {**base, keyword: value}}):
            stronger(schema)
            stronger({"propertyNames": schema}, merge_patterns=True)
