"""Schemas of tools whose objects are closed."""

from __future__ import annotations

from typing import Any

import pytest

from edgelm.text.calls.closing import closed
from edgelm.text.calls.schema import parameters_of


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 2**63, "required": ["a"]},
        {"properties": 7, "allOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
        {"allOf": 5, "required": ["a"]},
        {"properties": {"a": {"properties": "x", "required": ["b"]}}},
    ],
)
def test_a_value_that_no_schema_has_there_is_left_to_the_check_behind(schema: dict[str, Any]) -> None:
    whole = {"type": "object", **schema}
    parameters = parameters_of({"name": "f", "parameters": schema})
    assert parameters == closed(whole)
    wrong = [key for key, value in schema.items() if not isinstance(value, dict | list)]
    assert {key: parameters[key] for key in wrong} == {key: schema[key] for key in wrong}
