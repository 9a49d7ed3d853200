"""Arguments that JSON permits and a response cannot hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgelm.server.api.arguments import MAX_DEPTH, custom_input, read_arguments


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": [1, 2.5, true, null, "\\u00e9"]}', {"a": [1, 2.5, True, None, "é"]}),
        ('{"a": 1e999, "b": [-1e999]}', {"a": 1.7976931348623157e308, "b": [-1.7976931348623157e308]}),
        ('{"a": NaN, "b": -Infinity}', {"a": None, "b": None}),
        ('{"a\\ud83d": {"b": "x\\ud83d"}}', {"a?": {"b": "x?"}}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", None),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", None),
        ('{"a": ' + "9" * 5000 + "}", None),
        ('{"a": ', None),
        ("[1]", None),
    ],
)
def test_arguments_that_a_response_can_hold(arguments: str, value: Any) -> None:
    read = read_arguments(arguments)
    assert read == value
    json.dumps(read, ensure_ascii=False, allow_nan=False).encode()


def test_the_deepest_arguments() -> None:
    depth = MAX_DEPTH - 1
    read = read_arguments('{"a": ' + "[" * depth + "]" * depth + "}")
    assert read is not None
    assert json.dumps(read).count("[") == depth


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "x\\ud83d"}', "x?"),
        ('{"input": "x", "more": 1e999}', "x"),
        ('{"input": "x', '{"input": "x'),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_the_input_of_a_custom_tool(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
