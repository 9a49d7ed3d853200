"""The schema of a tool's arguments as the author of the tool means it: with no arguments but those that it names.

By the letter of JSON Schema, {"properties": {"a": …}} allows any other key, and {"type": "object"} all. A function has
the parameters that are listed, and fails for another one. A schema that says `additionalProperties` is kept.

Owns that reading. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgelm.text.calls.values import target_of

_NOTES = frozenset(
    ("$comment", "$id", "$schema", "description", "examples", "id", "required", "strict", "title", "type")
)
_SAID = frozenset(("additionalProperties", "unevaluatedProperties"))
_LISTS = ("allOf", "anyOf", "oneOf")  # keywords that apply to the same object, as the next ones do
_SAME = ("if", "then", "else", "$ref")
_VALUES = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
_ITEMS = ("items", "contains", "additionalProperties", "additionalItems", "unevaluatedItems")
_MAX_REFS = 8


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, in which an object that names properties has no others."""
    if not (schema.keys() - _NOTES - {"properties"} or schema.get("properties") or schema.get("required")):
        return {**schema, "properties": {}, "additionalProperties": False}
    result: dict[str, Any] = _Closing(schema).of(schema, "#", joined=False)
    return result


class _Closing:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._joined: set[str] = set()  # references to schemas that describe a part of an object
        self._find_joined(root, joined=False)

    def of(self, schema: Any, path: str, *, joined: bool) -> Any:
        """Return a schema with closed objects. `joined`: it describes a part of an object that is closed elsewhere."""
        if isinstance(schema, list):
            return [self.of(one, f"{path}/{index}", joined=joined) for index, one in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        joined = joined or path in self._joined
        inner = joined or self._is_whole(schema)
        result = {key: self._part(key, value, path, inner) for key, value in schema.items()}
        if self._is_whole(schema) and not joined:
            names = self._names(schema, _MAX_REFS)
            own = result.get("properties") or {}
            if names is not None and isinstance(own, Mapping):  # or else the grammar's check says what is wrong
                result |= {
                    "properties": {**own, **{name: {} for name in names if name not in own}},
                    "additionalProperties": False,
                }
        return result

    def _part(self, key: str, value: Any, path: str, joined: bool) -> Any:
        if key in _LISTS or key in _SAME:
            return self.of(value, f"{path}/{key}", joined=joined)
        if key in _VALUES and isinstance(value, Mapping):
            return {name: self.of(one, f"{path}/{key}/{_pointed(name)}", joined=False) for name, one in value.items()}
        if key in _ITEMS or key == "prefixItems":
            return self.of(value, f"{path}/{key}", joined=False)
        return value

    def _is_whole(self, schema: Mapping[str, Any]) -> bool:
        """Whether an object is described here, and not by one alternative or one reference alone."""
        parts = schema.get("allOf")
        return bool(schema.get("properties")) or (isinstance(parts, list) and len(parts) > 1) or "if" in schema

    def _names(self, schema: Any, depth: int) -> list[str] | None:
        """Return the names of all properties that an object may have; None: it says that there may be others."""
        if not isinstance(schema, Mapping):
            return []
        if schema.keys() & _SAID or schema.get("patternProperties") or not depth:
            return None
        properties = schema.get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        for part in self._same_object(schema):
            more = self._names(part, depth - 1)
            if more is None:
                return None
            names += more
        return names

    def _same_object(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        for key in _LISTS:
            parts = schema.get(key)
            yield from parts if isinstance(parts, list) else ()
        for key in ("if", "then", "else"):
            yield schema.get(key)
        if "$ref" in schema:
            yield target_of(schema["$ref"], self._root)
        dependent = schema.get("dependentSchemas")
        yield from dependent.values() if isinstance(dependent, Mapping) else ()

    def _find_joined(self, schema: Any, *, joined: bool) -> None:
        if isinstance(schema, list):
            for one in schema:
                self._find_joined(one, joined=joined)
        if not isinstance(schema, Mapping):
            return
        whole = joined or self._is_whole(schema)
        if whole and isinstance(reference := schema.get("$ref"), str):
            self._joined.add(reference)
        for key, value in schema.items():
            if key in _LISTS or key in _SAME:
                self._find_joined(value, joined=whole)
            elif key in _VALUES and isinstance(value, Mapping):
                for one in value.values():
                    self._find_joined(one, joined=False)
            elif key in _ITEMS or key == "prefixItems":
                self._find_joined(value, joined=False)


def _pointed(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
