"""The lists of a schema whose items must differ (`uniqueItems`), by the key before them.

Owns that table and how it is read from a schema. unique.py keeps the items apart; imports no arrays, as the checker
of grammars starts with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgelm.engine.sampling.negated import resolved, types_of

Lists = Mapping[str, Sequence[str] | None]  # the JSON of all possible items by key, None: there are many

NO_KEY = ""  # of a list that is the whole answer, or an item of a list
ANY_KEY = "*"
_MAX_VALUES = 256  # of items that are listed
_IN_PLACE = ("allOf", "anyOf", "oneOf")


def unique_lists(schema: Any) -> dict[str, list[str] | None]:
    """Return the lists of a schema whose items must differ."""
    found: dict[str, list[str] | None] = {}
    for key, part in _keyed(schema, NO_KEY):
        for one in _in_place(part, schema, 8):
            if one.get("uniqueItems") is True and "array" in types_of(one):
                values = item_values(one, schema)
                if key in found:
                    before = found[key]
                    values = None if values is None or before is None else sorted({*before, *values})
                found[key] = values
    return found


def merged(tables: Sequence[Lists]) -> dict[str, list[str] | None]:
    """Return one table of lists for several schemas."""
    result: dict[str, list[str] | None] = {}
    for table in tables:
        for key, values in table.items():
            before = result.get(key, [])
            result[key] = None if values is None or before is None else sorted({*before, *values})
    return result


def _keyed(schema: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield all parts of a schema, with the key that their values have."""
    if isinstance(schema, list):
        for part in schema:
            yield from _keyed(part, key)
    if not isinstance(schema, dict):
        return
    yield key, schema
    for name, part in schema.items():
        if name in ("properties", "dependentSchemas", "$defs", "definitions") and isinstance(part, dict):
            for own, one in part.items():
                yield from _keyed(one, own if name == "properties" else ANY_KEY if name == "dependentSchemas" else "?")
        elif name == "patternProperties" and isinstance(part, dict):
            for one in part.values():
                yield from _keyed(one, ANY_KEY)
        elif name in ("additionalProperties", "unevaluatedProperties"):
            yield from _keyed(part, ANY_KEY)
        elif name in ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"):
            yield from _keyed(part, NO_KEY)
        elif name in (*_IN_PLACE, "if", "then", "else"):
            yield from _keyed(part, key)


def _in_place(schema: Any, root: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a value may have to conform to."""
    if not isinstance(schema, dict) or not depth:
        return
    yield schema
    if "$ref" in schema:
        yield from _in_place(resolved({"$ref": schema["$ref"]}, root), root, depth - 1)
    for key in _IN_PLACE:
        for part in schema.get(key) or () if isinstance(schema.get(key), list) else ():
            yield from _in_place(part, root, depth - 1)


def item_values(schema: dict[str, Any], root: Any) -> list[str] | None:
    """Return the JSON of all values that items may have; None: they are too many."""
    if schema.get("prefixItems") or isinstance(schema.get("items"), list):
        return None
    items = resolved(schema.get("items"), root)
    if not isinstance(items, dict):
        return None
    values = items.get("enum", [items["const"]] if "const" in items else None)
    if values is None and types_of(items) == {"integer"}:
        least, most = items.get("minimum"), items.get("maximum")
        if isinstance(least, int) and isinstance(most, int) and most - least < _MAX_VALUES:
            values = list(range(least, most + 1))
    if not isinstance(values, list) or len(values) > _MAX_VALUES:
        return None
    return [json.dumps(value, ensure_ascii=False) for value in values]
