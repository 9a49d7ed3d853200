"""Values that nearly fit a field of a request, and values that fit nowhere.

Owns the values. A field that is not listed gets junk.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD_SCHEMAS: list[Any] = [
    {},
    True,
    {"type": "any"},
    {"type": []},
    {"type": ["string", "null"]},
    {"$ref": "#"},
    {"$ref": "#/$defs/missing"},
    {"$ref": "http://127.0.0.1:9/schema.json"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"": {}, "\x00": {"type": "string"}, "\ud800": {}}},
    {"type": "object", "required": ["nowhere"], "additionalProperties": False},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "^(a+)+$", "minLength": 10**9},
    {"type": "string", "minLength": 5, "maxLength": 1},
    {"type": "string", "format": "no-such-format"},
    {"type": "integer", "minimum": 10, "maximum": 1},
    {"type": "number", "multipleOf": 0},
    {"type": "number", "minimum": 1e308, "maximum": -1e308},
    {"type": "array", "minItems": 10**6},
    {"type": "array", "prefixItems": [{}], "items": False},
    {"enum": []},
    {"const": {"a": [None, 1.5, "\ud800"]}},
    {"anyOf": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "string"}, {"minLength": 2}]},
    {"not": {}},
    {"if": {"type": "object"}, "then": False},
    {"patternProperties": {"[": {}}},
    {"type": "object", "propertyNames": {"pattern": "^$"}},
]
ODD_REGEXES = [
    "",
    "(",
    "[",
    "a{99999999}",
    "(a|a)*b",
    "(?=x)",
    "\\1",
    "(?P<n>a)(?P=n)",
    "\\p{Nope}",
    ".*" * 50,
    "\x00",
    "\ud800",
]
ODD_GRAMMARS = [
    "",
    "root ::= ",
    "root ::= root",
    'root ::= "a" | root "b"',
    "start: ",
    "start: start",
    'start: "a" b',
    "start: /(/",
    "%import common.NOPE",
    '%llguidance {"no": 1}\nstart: "x"',
    "::=",
    "root ::= [",
    'root ::= "' + "a" * 3000 + '"',
    "\x00::=\ud800",
]
TEXTS = [
    "",
    " ",
    "a",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "\N{GRINNING FACE}",
    "e\u0301",
    "\u202e",
    "<|im_end|>",
    "</think>",
    "<tool_call>",
    "{",
    "data: [DONE]\n\n",
    "x" * 3000,
    "null",
    "-1",
    "starter",
    "../../etc/passwd",
    "%s%n",
    "{{ 7 * 7 }}",
]
NUMBERS = [
    0,
    -0.0,
    1,
    -1,
    2,
    0.5,
    4096,
    2**31,
    2**32,
    2**63,
    2**64,
    -(2**63) - 1,
    10**40,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    float("-inf"),
]
ROLES = ["system", "developer", "user", "assistant", "tool", "function", "robot", "", "User", "ipython", None, 3]


def odd_value(rng: random.Random, name: str) -> Any:
    """Return a value that nearly fits a field, or junk."""
    schema = rng.choice(ODD_SCHEMAS)
    tool = rng.choice(["look", "nope", "", "\ud800", "x" * 300])
    function = {"name": tool, "parameters": schema, "strict": rng.choice([True, False, None, 1])}
    odd: dict[str, list[Any]] = {
        "tools": [
            [],
            [{}],
            [None],
            [{"type": "function"}],
            [{"type": "function", "function": function}] * rng.choice([1, 2, 40]),
            [{"type": "custom", "custom": {"name": tool, "format": schema}}],
            [{"type": "function", **function}],
            [{"name": tool, "input_schema": schema}],
            [{"type": "namespace", "name": tool, "tools": [{"type": "namespace", "name": tool, "tools": 3}]}],
        ],
        "tool_choice": [
            "required",
            "none",
            "any",
            "",
            tool,
            {},
            {"type": "function"},
            {"type": "function", "function": {"name": tool}},
            {"type": "function", "name": tool},
            {"type": "tool", "name": tool},
            {"type": "any"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": tool}, 3]}},
            {"type": "allowed_tools", "mode": [], "tools": [{"name": tool}]},
            {"type": []},
        ],
        "response_format": [
            {"type": "json_object"},
            {"type": "json_object", "schema": schema},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": rng.random() < 0.5}},
            {"type": "json_schema"},
            {"type": "regex"},
            {},
            {"type": None},
        ],
        "structured_outputs": [
            {"json": schema},
            {"json": "{"},
            {"regex": rng.choice(ODD_REGEXES)},
            {"choice": rng.choice([[], [""], ["\ud800"], ["a"] * 500])},
            {"grammar": rng.choice(ODD_GRAMMARS)},
            {"json_object": True},
        ],
        "guided_json": [schema, json.dumps(schema), "[" * 5000, "NaN"],
        "guided_regex": ODD_REGEXES,
        "guided_grammar": ODD_GRAMMARS,
        "grammar": ODD_GRAMMARS,
        "guided_choice": [[], [""], ["\ud800"], ["a", "a"], ["x" * 3000]],
        "text": [
            {"format": {"type": "json_schema", "schema": schema}},
            {"format": {"type": "json_object"}},
            {"format": {"type": "grammar"}},
            {"verbosity": "\ud800"},
        ],
        "output_config": [
            {"format": {"type": "json_schema", "schema": schema}},
            {"effort": "\ud800"},
            {"format": {"type": "x"}},
        ],
        "functions": [[], [function], [{}], [{"name": tool}]],
        "thinking": [
            {"type": "enabled"},
            {"type": "enabled", "budget_tokens": 1},
            {"type": "adaptive"},
            {"type": "disabled"},
        ],
        "stop": [[], "", [""], ["a"] * 70, "\ud800", "x" * 5000],
        "stop_token_ids": [[], [-1], [2**31], ["a"], [1] * 70, [1.5], "\ud800"],
        "logit_bias": [{}, {"-1": 1}, {"999999999": 1}, {"1": 101}, {"a": 1}, {"\u0661": 1}, {"1": float("nan")}],
        "n": [0, 1, 2, 16, 17, -1, 1.5],
        "best_of": [0, 1, 2, 16, 17],
        "logprobs": [True, False, 0, 5, 6, -1],
        "prompt": [
            "",
            [],
            [[]],
            [[], [1]],
            [1, "a"],
            ["a", 1],
            [-1],
            [10**9],
            [True],
            ["\ud800"],
            [[1], "a"],
            ["a"] * 65,
        ],
        "input": [
            "",
            [],
            [{}],
            [{"type": "reasoning"}],
            [{"type": "item_reference", "id": "x"}],
            [{"role": "user"}],
            [{"type": "function_call"}],
            [{"type": []}],
        ],
        "messages": [
            [],
            [{}],
            [{"role": "user"}],
            [{"role": "assistant", "content": ""}],
            [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": []}],
            [{"role": "system", "content": "only"}],
            [{"role": "user", "content": "\ud800"}],
        ],
        "parameters": ODD_SCHEMAS,
        "input_schema": ODD_SCHEMAS,
        "schema": ODD_SCHEMAS,
        "arguments": ["", "{", "[]", "null", '{"a": NaN}', '{"a": "\\ud800"}', {}, [], "[" * 3000],
        "model": ["starter", "", "nope", "../x", "\ud800", "x" * 5000, "starter\x00", "/etc/passwd"],
        "role": ROLES,
        "previous_response_id": ["", "nope", "\ud800", "x" * 5000],
    }
    return copy.deepcopy(rng.choice(odd[name])) if name in odd and rng.random() < 0.8 else junk(rng)


def junk(rng: random.Random) -> Any:
    match rng.randrange(8):
        case 0:
            return rng.choice(TEXTS)
        case 1 | 7:
            return rng.choice(NUMBERS)
        case 2:
            return rng.choice([None, True, False])
        case 3:
            return [junk(rng) for _ in range(rng.randrange(3))]
        case 4:
            return {rng.choice([*TEXTS[:8], "type", "name", "text"]): junk(rng) for _ in range(rng.randrange(3))}
        case 5:
            return nested(rng, rng.choice([5, 60, 180]))
        case _:
            return {
                "type": rng.choice(["text", "image_url", "input_text", "tool_use", "document", 3]),
                "text": rng.choice(TEXTS),
            }


def nested(rng: random.Random, depth: int) -> Any:
    value: Any = "core"
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"properties": {"a": value}, "type": "object"}
    return value
