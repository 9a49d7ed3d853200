"""The grammar of JSON whose objects may have their keys in any order, and the parts of a schema.

llguidance's own rule of a schema fixes the order of keys. So plain objects with optional keys get rules of ours, and
all other values the rule of llguidance.

Owns those rules. Knows no format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgelm.text.calls.enforced import is_plain_array, is_plain_object
from edgelm.text.calls.free_order import listed, repeated
from edgelm.text.calls.lark import Lark, escaped, json_rule

_WHOLE = "whole"  # the name of the whole schema, for references into it
_NOTES = frozenset(("$comment", "default", "description", "examples", "title"))
_KEY = r'"([^"\\\x00-\x1F\x7F]|\\(["\\\/bfnrt]|u[a-fA-F0-9]{4}))*"'
_MAX_GROWTH = 2  # of the text of a schema
_MAX_STYLE = 4096  # characters that the options of its parts may add
_MAX_DEPTH = 16
_REFERENCE = re.compile(r'"\$(?:dynamicR|recursiveR|r)ef": "((?:[^"\\]|\\.)*)"')
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([\w.-]+)")


def json_expression(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Return the expression of the JSON of a schema. Plain objects in it may have their keys in any order.

    A schema whose parts share long definitions keeps its order: each part would have a copy of them.
    """
    parts = _Parts(lark, schema)
    if parts.has_choice(schema):
        shares = '"$ref"' in json.dumps(schema)
        if not shares or parts.are_within(_MAX_GROWTH * len(json_rule(schema)) + _MAX_STYLE, schema):
            return parts.expression(schema)
    return lark.anonymous(json_rule(schema))


class _Parts:
    """The parts of one schema."""

    def __init__(self, lark: Lark, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = root

    def has_choice(self, schema: Any, depth: int = _MAX_DEPTH) -> bool:
        """Return whether the order of keys matters in a value: an optional one is not the only one."""
        if not depth:
            return False
        if is_plain_array(schema):
            return self.has_choice(schema.get("items"), depth - 1)
        if not is_plain_object(schema):
            return False
        properties, required = properties_of(schema)
        is_optional = not required.issuperset(properties) and (len(properties) > 1 or is_open(schema))
        return is_optional or any(self.has_choice(value, depth - 1) for value in properties.values())

    def expression(self, schema: Any) -> str:
        """Return the expression of a value."""
        lark = self._lark
        if not self.has_choice(schema):
            return lark.anonymous(self._leaf(schema))
        if is_plain_array(schema):
            item = self.expression(schema["items"])
            return lark.anonymous(f'"[" {repeated(item, schema, ", ")} "]"')
        properties, required = properties_of(schema)
        items = {key: f"{lark.text_of(_key(key))} {self.expression(value)}" for key, value in properties.items()}
        if is_open(schema):
            other = schema.get("additionalProperties")
            known = "|".join(escaped(_key(key).removesuffix(": ")) for key in properties)
            key = lark.terminal(f"/{_KEY}/ & ~/{known}/")
            items[""] = f'{key} ": " {self.expression(other if isinstance(other, Mapping) else {})}'
        return lark.anonymous(f'"{{" {listed(lark, items, required, ", ")} "}}"')

    def are_within(self, limit: int, schema: Any) -> bool:
        """Return whether the rules of a value's parts have at most so many characters."""
        return self._left(limit, schema) >= 0

    def _left(self, limit: int, schema: Any) -> int:
        """Return what the rules of a value's parts leave of a limit; it stops below 0."""
        if not self.has_choice(schema):
            return limit - len(self._leaf(schema))
        if is_plain_array(schema):
            return self._left(limit, schema["items"])
        for value in properties_of(schema)[0].values():
            if limit < 0:
                break
            limit = self._left(limit, value)
        return limit

    def _leaf(self, schema: Any) -> str:
        return json_rule(with_shared(schema, self._root))


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ": "


def properties_of(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the properties of an object's schema, and the names of those that are required."""
    properties, required = schema.get("properties"), schema.get("required")
    names = frozenset(map(str, required)) if isinstance(required, list) else frozenset()
    return (properties if isinstance(properties, Mapping) else {}), names


def is_open(schema: Mapping[str, Any]) -> bool:
    """Return whether other keys may come. Where the schema does not say, only if it names no key."""
    others = schema.get("additionalProperties")
    return not schema.get("properties") if others is None else others is not False


def with_shared(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema with what it may refer to: definitions, or the whole schema, one level down.

    It is without its notes: so more parts have the same rule.
    """
    shared = {"x-guidance": root["x-guidance"]} if "x-guidance" in root else {}
    if not isinstance(schema, Mapping):
        return shared
    schema = {key: value for key, value in schema.items() if key not in _NOTES}
    if '"$ref": "#' not in json.dumps(schema):
        return {**shared, **schema}
    definitions = _definitions(schema, root)
    if definitions is not None:
        return {**shared, **schema, **definitions}
    whole = {key: value for key, value in root.items() if key not in ("x-guidance", "$id", "id")}
    return {**shared, **_moved(schema), "$defs": {_WHOLE: _moved(whole)}}


def _definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Return the definitions that a part of a schema refers to; None if it refers to anything else."""
    found: dict[str, dict[str, Any]] = {}
    parts = [schema]
    while parts:
        for reference in _REFERENCE.findall(json.dumps(parts.pop(), ensure_ascii=False)):
            match = _DEFINITION.fullmatch(reference)
            section = root.get(match[1]) if match else None
            if match is None or not isinstance(section, Mapping) or match[2] not in section:
                return None
            if match[2] not in found.setdefault(match[1], {}):
                found[match[1]][match[2]] = section[match[2]]
                parts.append(section[match[2]])
    return found


def _moved(schema: Any) -> Any:
    """Return a schema whose references to the root lead to the copy of the root."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/{_WHOLE}{value[1:]}" if key == "$ref" and str(value).startswith("#") else _moved(value)
        for key, value in schema.items()
    }
