"""Which keywords of a tool's schema the grammar of a format leaves out, because its values are not JSON.

Owns the lists of keywords that arguments.py translates for each body. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgelm.text.calls.format import CallFormat
from edgelm.text.calls.values import target_of, types_of_schema

_ASSERTIONS = frozenset(  # all other keywords are notes
    "$dynamicRef $recursiveRef $ref additionalItems additionalProperties allOf anyOf const contains dependencies "
    "dependentRequired dependentSchemas else enum exclusiveMaximum exclusiveMinimum if items maxContains maxItems "
    "maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern "
    "patternProperties prefixItems properties propertyNames required then type unevaluatedItems unevaluatedProperties "
    "uniqueItems".split()
)
_OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
_TEXT = frozenset(("type", "minLength", "maxLength"))
_CHOICE = frozenset(("type", "enum", "const"))
_ARRAY = frozenset(("type", "items", "minItems", "maxItems"))
_SCALARS = frozenset(("integer", "number", "boolean", "null"))
_MAX_DEPTH = 8


def unenforced(form: CallFormat, schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords of a schema that the grammar of a format does not enforce."""
    match form.body:
        case "tagged":
            found = {*_of_object(schema), *(key for value in _parts(schema) for key in _of_text(value, schema))}
        case "python":
            found = set(_of_object(schema))
        case "gemma":
            found = set(_of_gemma(schema, schema, _MAX_DEPTH))
        case _:
            found = set()
    return sorted(found)


def is_plain_object(schema: Any) -> bool:
    """Return whether a schema is that of an object, and says nothing but which keys it has."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object" or any(_of_object(schema)):
        return False
    properties = schema.get("properties", {})
    return isinstance(properties, Mapping) and False not in properties.values()


def is_plain_array(schema: Any) -> bool:
    """Return whether a schema is that of a list, and says nothing but which items it has and how many."""
    return isinstance(schema, Mapping) and schema.get("type") == "array" and schema.keys() & _ASSERTIONS <= _ARRAY


def simplified(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema without a reference at its top, and with alternatives of plain types as a list of types."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping) or schema.keys() & _ASSERTIONS != {"$ref"}:
            break
        schema = target_of(schema["$ref"], root)
    if not isinstance(schema, Mapping):
        return schema
    keys = schema.keys() & _ASSERTIONS
    for key in ("anyOf", "oneOf"):
        parts = schema.get(key)
        if keys == {key} and isinstance(parts, list) and all(_is_plain(part) for part in parts):
            kinds = [part["type"] for part in parts]
            if len(set(kinds)) == len(kinds) and not {"integer", "number"} <= set(kinds):
                return {name: value for part in parts for name, value in part.items()} | {"type": kinds}
    return schema


def _is_plain(part: Any) -> bool:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        return False
    return part.keys() & _ASSERTIONS <= (_TEXT if part["type"] == "string" else {"type"})


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    properties, extra = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, Mapping):
        yield from properties.values()
    if isinstance(extra, Mapping):
        yield extra


def _of_object(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (schema.keys() & _ASSERTIONS) - _OBJECT
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list) and not set(map(str, required)) <= set(properties or ()):
        yield "required"


def _of_text(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keywords of a value that may be a raw text; any other value is JSON, and obeys all."""
    schema = simplified(schema, root)
    if not isinstance(schema, Mapping):
        return
    types = frozenset(types_of_schema(schema, root))
    if types and "string" not in types:
        return
    yield from (schema.keys() & _ASSERTIONS) - (_CHOICE if schema.keys() & {"enum", "const"} else _TEXT)


def _of_gemma(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    schema = simplified(schema, root)
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    if schema.keys() & {"enum", "const"}:
        yield from (schema.keys() & _ASSERTIONS) - _CHOICE
    elif isinstance(kind, list):
        for one in kind:
            yield from _of_gemma({**schema, "type": one}, root, depth)
    elif kind == "string":
        yield from (schema.keys() & _ASSERTIONS) - _TEXT
    elif kind == "array" and depth:
        yield from (schema.keys() & _ASSERTIONS) - _ARRAY
        yield from _of_gemma(schema.get("items"), root, depth - 1)
    elif kind == "object" and depth:
        yield from _of_object(schema)
        for part in _parts(schema):
            yield from _of_gemma(part, root, depth - 1)
    elif kind not in _SCALARS:
        yield from schema.keys() & _ASSERTIONS
