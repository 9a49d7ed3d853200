"""Values of arguments: from the text between two tags, or from a Python literal, to JSON; typed by the tool's schema.

Knows nothing of markers and streams.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from edgelm.text.calls.format import to_json

_MAX_REFS = 16
_JSON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
)  # fmt: skip
_NAMES = {"true": True, "false": False, "null": None, "none": None}
Schema = Mapping[str, Any]


class Tools:
    """The tools of a request: their names, and the types of their parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas: dict[str, Any] = {str(tool.get("name")): tool.get("parameters") or {} for tool in functions}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._schemas)

    def types(self, name: str, key: str) -> frozenset[str]:
        """Return the JSON types that an argument may have; nothing if the schema does not say."""
        schema = self._schemas.get(name)
        if not isinstance(schema, Mapping):
            return frozenset()
        properties = schema.get("properties")
        parameter = schema.get("additionalProperties")
        if isinstance(properties, Mapping):
            parameter = properties.get(key, parameter)
        return frozenset(types_of_schema(parameter, schema))

    def parameter(self, name: str, index: int) -> str:
        """Return the name of a positional parameter."""
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        keys = list(properties) if isinstance(properties, Mapping) else []
        return str(keys[index]) if index < len(keys) else f"arg{index}"


def json_of_text(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that stands in tags as raw text."""
    value = text.strip()
    if types == {"string"}:
        return to_json(text)
    try:
        parsed = json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if types and types <= {"boolean", "null"} and value.lower() in _NAMES:
            return to_json(_NAMES[value.lower()])
        if value in ("True", "False", "None") and "string" not in types:
            return to_json(_NAMES[value.lower()])
        if value[:1] in ("{", "[") and "string" not in types:
            return json_of_literal(value)
        return to_json(text)
    if types and "string" in types and not types & _types_of(parsed):
        return to_json(text)
    return value  # as the model wrote it


def json_of_literal(text: str) -> str:
    """Return the JSON of a value in Python's or JSON's spelling; other text becomes a string."""
    value = text.strip()
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        try:
            return to_json(_literal(ast.parse(value, mode="eval").body))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            # Templates write a string without escapes: a line break or a backslash in it is no literal of Python.
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            return to_json(value[1:-1] if is_quoted else value)
    return value


def json_escaped(text: str) -> str:
    """Return a text as it stands between the quotes of a JSON string."""
    return to_json(text)[1:-1]


def is_object(text: str) -> bool:
    """Return whether a text is the JSON of an object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _types_of(value: object) -> frozenset[str]:
    if value is None:
        return frozenset(("null",))
    name = next(name for kind, name in _JSON_TYPES if isinstance(value, kind))
    return frozenset((name, "number")) if name == "integer" else frozenset((name,))


def types_of_schema(schema: Any, root: Schema, depth: int = _MAX_REFS) -> Iterator[str]:
    """Yield the JSON types that a schema names; nothing if it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (name for name in kind if isinstance(name, str))
    elif "const" in schema or isinstance(schema.get("enum"), list):
        for value in [schema["const"]] if "const" in schema else schema["enum"]:
            yield from _types_of(value)
    else:
        for key in ("anyOf", "oneOf", "allOf"):
            for part in schema.get(key) or ():
                yield from types_of_schema(part, root, depth - 1)
        yield from types_of_schema(target_of(schema.get("$ref"), root), root, depth - 1)


def target_of(reference: object, root: Schema) -> Any:
    """Return the schema of a reference within the document; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for part in reference[1:].split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_literal(key)): _literal(value) for key, value in pairs if key is not None}
    raise ValueError("not a literal")
