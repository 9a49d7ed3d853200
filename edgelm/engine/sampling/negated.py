"""Negated schemas: one that no value of a given schema conforms to, in keywords that llguidance knows.

It need not have all other values: {"not": {"const": 3}} becomes the numbers above 3 and below 3.

Owns the negation of each keyword, and whether two schemas exclude each other. Knows nothing of where it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_NOTES = frozenset(
    "$comment $schema $id $defs definitions default deprecated description examples format id title".split()
)
_MAX_DEPTH = 16
_DISJOINT_DEPTH = 8
_MAX_STRINGS = 200  # of those that a pattern excludes


def negated(schema: Any, root: Mapping[str, Any], types: frozenset[str] = TYPES, depth: int = _MAX_DEPTH) -> Any:
    """Return a schema of values that do not conform to `schema`; None: there is no such form.

    Only values of `types` count. `root` is what references lead into.
    """
    schema = resolved(schema, root)
    if schema is True or schema == {}:
        return False
    if schema is False:
        return True
    if not isinstance(schema, dict) or not depth:
        return None
    keys = schema.keys() - _NOTES
    if not keys:
        return False
    of_types = types & types_of(schema)
    if not of_types:
        return True
    found = [_of_keyword(key, schema, root, types, depth - 1) for key in sorted(keys)]
    parts = [part for part in found if part is not None and part is not False]
    if True in parts:
        return True
    if parts:
        return {"anyOf": parts} if len(parts) > 1 else parts[0]
    return False if all(part is False for part in found) else None


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema that is only a reference refers to; {} is True."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() - _NOTES - {"$ref"}:
            break
        reference = schema["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        target: Any = root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        if target is None:
            break
        schema = target
    return schema


def types_of(schema: Any) -> frozenset[str]:
    """Return the types that the values of a schema may have, by its own keywords. Integers are numbers, too."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict):
        return TYPES
    if isinstance(kind := schema.get("type"), str):
        types = frozenset((kind,))
    elif isinstance(kind, list):
        types = frozenset(map(str, kind))
    else:
        types = TYPES
    if "number" in types:
        types |= {"integer"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        types &= {name for value in values for name in _types_of_value(value)}
    return types


def integral(value: Any) -> Any:
    """Return a number without a fraction as an integer: 2.0 is one in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def without_strings(strings: Sequence[str]) -> str | None:
    """Return the pattern of all strings but these; None: they are too many."""
    if len(strings) > _MAX_STRINGS or not strings:
        return None if strings else "^(.|\\n)*$"
    return f"^({_pattern_without(sorted(set(strings)))})$"


def _pattern_without(strings: Sequence[str]) -> str:
    firsts = sorted({text[0] for text in strings if text})
    parts = [] if "" in strings else [""]
    if firsts:
        others = "".join(map(_in_class, firsts))
        parts.append(f"[^{others}](.|\\n)*")
    else:
        parts.append("(.|\\n)+")
    for first in firsts:
        rest = [text[1:] for text in strings if text[:1] == first]
        parts.append(f"{re.escape(first)}({_pattern_without(rest)})")
    return "|".join(parts)


def _in_class(character: str) -> str:
    return "\\" + character if character in "\\]^-[&~" else character


_FIRST = re.compile(r"(?P<set>\[(?!\^)(?:[^\]\\]|\\.)+\])|(?P<one>\\[dws]|\\[^\w\s]|[^\\\[\](){}.*+?^$|])")


def _without_starts(pattern: str) -> str | None:
    """Return the pattern of strings without the characters that a match can begin with; None: it is not plain."""
    whole = pattern.removeprefix("^")
    inner = re.fullmatch(r"\((?:\?:)?([^()]*)\)", whole)
    if whole != pattern and "|" in whole and inner is None:
        return None  # only the first part is anchored
    firsts = []
    for part in (inner[1] if inner else whole).split("|"):
        first = _FIRST.match(part)
        if first is None or part[first.end() : first.end() + 1] in ("?", "*", "{") or "(" in part:
            return None
        firsts.append(first["set"][1:-1] if first["set"] else _in_class(first["one"]))
    others = f"[^{''.join(firsts)}]"
    return f"^({others}(.|\\n)*)?$" if whole != pattern else f"^{others}*$"


def _of_keyword(key: str, schema: dict[str, Any], root: Mapping[str, Any], types: frozenset[str], depth: int) -> Any:
    """Return a schema of values that do not conform to one keyword; False: all do; None: it has no such form."""
    value = schema[key]
    match key, value:
        case "type", _:
            refused = types_of({"type": value})
            left = TYPES - refused - ({"number"} if "integer" in refused else set())
            return {"type": sorted(left)} if left else False
        case "const", _:
            return _other_values([value], types)
        case "enum", list():
            return _other_values(value, types)
        case "not", _:
            return value
        case "required", list():
            return _any_of([{"type": "object", "properties": {str(name): False}} for name in value])
        case "pattern", str():
            wrong = _without_starts(value)
            return {"type": "string", "pattern": wrong} if wrong else None
    if key in _LIMITS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return _LIMITS[key](integral(value)) if is_number else None
    return _of_parts(key, schema, lambda part, of: negated(part, root, of, depth), types)


def _of_parts(
    key: str, schema: dict[str, Any], inverse: Callable[[Any, frozenset[str]], Any], types: frozenset[str]
) -> Any:
    """Return the same for a keyword that has schemas in it."""
    value = schema[key]
    match key, value:
        case (("anyOf" | "oneOf"), list()):
            parts = [inverse(part, types) for part in value]
            if None in parts:
                return None
            return False if any(part is False for part in parts) else {"allOf": [p for p in parts if p is not True]}
        case "allOf", list():
            return _any_of([inverse(part, types) for part in value])
        case "$ref", _ if schema.keys() - _NOTES != {"$ref"}:
            return inverse({"$ref": value}, types)
        case "properties", dict():
            found = [(name, inverse(part, TYPES)) for name, part in value.items()]
            return _any_of(
                [
                    part
                    if part is None or part is False
                    else {"type": "object", "required": [name], "properties": {name: part}}
                    for name, part in found
                ]
            )
        case "items", dict() | bool() if "prefixItems" not in schema:
            part = inverse(value, TYPES)
            return part if part is None or part is False else {"type": "array", "prefixItems": [part], "minItems": 1}
        case "contains", _ if "minContains" not in schema:
            part = inverse(value, TYPES)
            return None if part is None else {"type": "array", "items": part}
    return None


def _any_of(parts: Sequence[Any]) -> Any:
    left = [part for part in parts if part is not None and part is not False]
    if not left:
        return None if None in parts else False
    return True if True in left else {"anyOf": left} if len(left) > 1 else left[0]


def _one_less(key: str, kind: str) -> Callable[[Any], Any]:
    return lambda value: {"type": kind, key: value - 1} if value > 0 else False


def _one_more(key: str, kind: str) -> Callable[[Any], Any]:
    return lambda value: {"type": kind, key: value + 1}


_LIMITS: dict[str, Callable[[Any], Any]] = {
    "minimum": lambda value: {"type": "number", "exclusiveMaximum": value},
    "maximum": lambda value: {"type": "number", "exclusiveMinimum": value},
    "exclusiveMinimum": lambda value: {"type": "number", "maximum": value},
    "exclusiveMaximum": lambda value: {"type": "number", "minimum": value},
    "minLength": _one_less("maxLength", "string"),
    "maxLength": _one_more("minLength", "string"),
    "minItems": _one_less("maxItems", "array"),
    "maxItems": _one_more("minItems", "array"),
    "minProperties": _one_less("maxProperties", "object"),
    "maxProperties": _one_more("minProperties", "object"),
}


def _other_values(values: Sequence[Any], types: frozenset[str]) -> Any:
    """Return a schema of other values: of other types, other strings, numbers outside their range."""
    refused = {name for value in values for name in _types_of_value(value)}
    parts: list[Any] = []
    if others := types - refused - ({"number", "integer"} if refused & {"number", "integer"} else set()):
        parts.append({"type": sorted(others)})
    if "string" in types and "string" in refused:
        pattern = without_strings([value for value in values if isinstance(value, str)])
        if pattern:
            parts.append({"type": "string", "pattern": pattern})
    if types & {"number", "integer"} and "number" in refused:
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        kind = "number" if "number" in types else "integer"
        if all(map(math.isfinite, numbers)):
            parts.append({"type": kind, "exclusiveMinimum": max(numbers)})
            parts.append({"type": kind, "exclusiveMaximum": min(numbers)})
    if "boolean" in types and "boolean" in refused:
        left = [value for value in (True, False) if not any(value is one for one in values)]
        parts += [{"enum": left}] if left else []
    return {"anyOf": parts} if len(parts) > 1 else parts[0] if parts else False


def _types_of_value(value: Any) -> tuple[str, ...]:
    match value:
        case bool():
            return ("boolean",)
        case None:
            return ("null",)
        case str():
            return ("string",)
        case int():
            return ("integer", "number")
        case float():
            return ("integer", "number") if value.is_integer() else ("number",)
        case list():
            return ("array",)
    return ("object",)


def disjoint(one: Any, other: Any, root: Mapping[str, Any], depth: int = _DISJOINT_DEPTH) -> bool:
    """Tell whether certainly no value conforms to both schemas. `root` is what references lead into."""
    one, other = resolved(one, root), resolved(other, root)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or not depth:
        return False
    types = types_of(one) & types_of(other)
    if not types:
        return True
    values = [schema.get("enum", [schema["const"]] if "const" in schema else None) for schema in (one, other)]
    if isinstance(values[0], list) and isinstance(values[1], list):
        return not any(equal(first, second) for first in values[0] for second in values[1])
    pairs = ((one, other), (other, one))
    if any(_by_part(first, second, root, depth - 1) for first, second in pairs):
        return True
    return types == {"object"} and any(_by_property(first, second, root, depth - 1) for first, second in pairs)


def equal(one: Any, other: Any) -> bool:
    """Tell whether two values of JSON are equal: True is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _by_part(one: dict[str, Any], other: dict[str, Any], root: Mapping[str, Any], depth: int) -> bool:
    """Tell whether all alternatives of the first schema exclude the second, or a part that all values conform to."""
    for key in ("anyOf", "oneOf"):
        parts = one.get(key)
        if isinstance(parts, list) and parts and all(disjoint(part, other, root, depth) for part in parts):
            return True
    parts = one.get("allOf")
    return isinstance(parts, list) and any(disjoint(part, other, root, depth) for part in parts)


def _by_property(one: dict[str, Any], other: dict[str, Any], root: Mapping[str, Any], depth: int) -> bool:
    """Tell whether objects of the first schema have a property that those of the second do not have like this."""
    required, properties = one.get("required"), other.get("properties") or {}
    for name in required if isinstance(required, list) else ():
        if name not in properties:
            if other.get("additionalProperties") is False and not other.get("patternProperties"):
                return True
        elif disjoint((one.get("properties") or {}).get(name, True), properties[name], root, depth):
            return True
    return False
