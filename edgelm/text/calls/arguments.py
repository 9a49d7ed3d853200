"""The grammar of a call's arguments, for each body of a format.

Owns the translation of a tool's schema to raw values, Python values and Gemma's values. Knows nothing of what stands
around the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgelm.text.calls.enforced import simplified
from edgelm.text.calls.format import GEMMA_QUOTE, CallFormat, parts_of, to_json
from edgelm.text.calls.free_order import listed, repeated
from edgelm.text.calls.json_objects import is_open, json_expression, properties_of, with_shared
from edgelm.text.calls.lark import Lark, escaped, json_rule
from edgelm.text.calls.values import Tools

_KEY = r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}"
_MAX_DEPTH = 8
_QUOTED = r"""'([^'\\]|\\['"\\nrt])*'"""  # a string as Python writes it
_STRING_LIMITS = frozenset(("const", "enum", "format", "maxLength", "minLength", "pattern"))


class Arguments:
    """Writes the expressions of the arguments of tools."""

    def __init__(
        self, lark: Lark, form: CallFormat, schemas: Mapping[str, dict[str, Any]], *, in_order: bool = False
    ) -> None:
        self._lark = lark
        self._in_order = in_order
        self._form = form
        self._schemas = schemas
        self._tools = Tools([{"name": name, "parameters": schema} for name, schema in schemas.items()])

    def of(self, name: str) -> str:
        """Return the expression of the arguments of a tool."""
        schema = self._schemas[name]
        match self._form.body:
            case "tagged":
                return self._tagged(name, schema)
            case "python":
                return f"{self._python(schema)} {self._lark.text_of(')') if not self._form.call[1] else ''}"
            case "gemma":
                return self._gemma(schema, schema, _MAX_DEPTH)
        return self.json(name)

    def json(self, name: str) -> str:
        """Return the expression of the arguments as JSON."""
        if self._in_order:
            return self._lark.anonymous(json_rule(self._schemas[name]))
        return json_expression(self._lark, self._schemas[name])

    # --------------------------------------------------------------------------------------------------------------

    def _tagged(self, name: str, schema: dict[str, Any]) -> str:
        lark = self._lark
        properties, required = properties_of(schema)
        items = {key: self._argument(name, lark.text_of(key), key, schema, value) for key, value in properties.items()}
        if is_open(schema):
            types: Any = schema.get("additionalProperties")
            key = self._other_key(properties)
            items[""] = self._argument(name, key, "", schema, types if isinstance(types, Mapping) else {})
        return listed(lark, items, required)

    def _argument(self, name: str, key: str, known: str, root: dict[str, Any], value: Any) -> str:
        lark, form = self._lark, self._form
        types = self._tools.types(name, known)
        texts: list[str] = []
        if "string" in types or not types:
            texts.append(f"{_opening(lark, form.arg[1])} {self._raw_text(simplified(value, root))}")
        if types != {"string"} and not (types and "string" in types and not form.value_mark):
            rule = lark.anonymous(json_rule(with_shared(value, root)))
            texts.append(f"{lark.mark(form.value_mark or form.arg[1])} ws {rule} {lark.mark(form.arg[2])}")
        return f"{lark.mark(form.arg[0])} {key} ({' | '.join(texts)})"

    def _raw_text(self, schema: Any) -> str:
        """Return the expression of a string between tags, with the tag that ends it."""
        lark = self._lark
        end = self._form.arg[2].rstrip()
        options = _choices(schema)
        if options is not None:
            texts = [to_json(value) if not isinstance(value, str) else value for value in options]
            if self._form.value_mark:
                texts = [value for value in options if isinstance(value, str)]
            return f"({' | '.join(f'{lark.text_of(text)} {lark.text_of(end)}' for text in texts)})"
        return lark.raw(end, _text_pattern(schema))

    def _python(self, schema: dict[str, Any]) -> str:
        lark = self._lark
        properties, required = properties_of(schema)
        items = {
            key: f"{lark.text_of(key + '=')} {self._python_value(with_shared(value, schema))}"
            for key, value in properties.items()
        }
        if is_open(schema):
            types = schema.get("additionalProperties")
            value = self._python_value(with_shared(types, schema)) if isinstance(types, Mapping) else ""
            items[""] = f'{self._other_key(properties)} "=" {value or lark.anonymous(json_rule({}))}'
        return listed(lark, items, required, ", ")

    def _python_value(self, schema: dict[str, Any]) -> str:
        if schema.get("type") == "boolean" and not schema.keys() & {"const", "enum"}:
            return '("True" | "False" | "true" | "false")'
        rule = self._lark.anonymous(json_rule(schema))
        if schema.get("type") == "string" and not schema.keys() & _STRING_LIMITS:
            return f"({rule} | {self._lark.pattern(_QUOTED)})"
        return rule

    def _gemma(self, schema: Any, root: dict[str, Any], depth: int) -> str:
        """Return the expression of a value in Gemma's syntax. Templates sort the keys."""
        lark = self._lark
        quote = lark.text_of(GEMMA_QUOTE)
        schema = simplified(schema, root)
        schema = schema if isinstance(schema, Mapping) else {}
        kind = schema.get("type")
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list):
            return f"({' | '.join(self._gemma_constant(value) for value in choices)})"
        if isinstance(kind, list) and kind:
            return f"({' | '.join(self._gemma({**schema, 'type': one}, root, depth) for one in kind)})"
        if kind == "string":
            return f"{quote} {lark.raw(GEMMA_QUOTE, _text_pattern(schema))}"
        if kind == "array" and depth:
            item = self._gemma(schema.get("items"), root, depth - 1)
            return f'"[" {repeated(item, schema, ",")} "]"'
        if kind == "object" and depth:
            properties, required = properties_of(schema)
            items = {
                key: f"{lark.text_of(key + ':')} {self._gemma(properties[key], root, depth - 1)}"
                for key in sorted(properties)
            }
            if is_open(schema):
                extra = self._gemma(schema.get("additionalProperties"), root, depth - 1)
                items[""] = f'{self._other_key(properties)} ":" {extra}'
            return f'"{{" {listed(lark, items, required, ",")} "}}"'
        if kind in ("integer", "number", "boolean", "null"):
            return lark.anonymous(json_rule(with_shared(schema, root)))
        return self._gemma_any()

    def _other_key(self, properties: Mapping[str, Any]) -> str:
        """Return the expression of a key that is none of the named ones."""
        if not properties:
            return self._lark.pattern(_KEY)
        return self._lark.terminal(f"/{_KEY}/ & ~/{'|'.join(map(escaped, sorted(properties)))}/")

    def _gemma_any(self) -> str:
        lark = self._lark
        if "gemma_value" not in lark:
            quote = lark.text_of(GEMMA_QUOTE)
            number = lark.anonymous(json_rule({"type": ["number", "boolean", "null"]}))
            key = lark.pattern(_KEY)
            lark.rule(
                "gemma_value",
                f'{quote} {lark.raw(GEMMA_QUOTE)} | {number} | "[" (gemma_value ("," gemma_value)*)? "]" | '
                f'"{{" ({key} ":" gemma_value ("," {key} ":" gemma_value)*)? "}}"',
            )
        return "gemma_value"

    def _gemma_constant(self, value: object) -> str:
        return self._lark.text_of(f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if isinstance(value, str) else json.dumps(value))


def _opening(lark: Lark, mark: str) -> str:
    """Return the expression of the mark before a text; a line break behind it belongs to the mark."""
    return lark.parts(parts_of(mark)) + (' "\\n"' if mark.endswith("\n") else "")


def _choices(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values else None


def _text_pattern(schema: Any) -> str:
    """Return the pattern of a raw string: its length is limited, a `pattern` of the schema is not read."""
    if not isinstance(schema, Mapping):
        return r"(.|\n)*"
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        return rf"(.|\n){{{int(least or 0)},{int(most) if isinstance(most, int) else ''}}}"
    return r"(.|\n)*"
