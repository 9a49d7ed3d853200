"""JSON schemas as llguidance takes them: within limits, with our separators, without formats that it does not know.

Owns the limits of a schema. Knows nothing of tokens, and compiles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from edgelm.base.errors import RequestError
from edgelm.base.workers.grammars import GrammarSpec

MAX_SOURCE = 256 * 1024  # characters of a grammar in any language
MAX_DEPTH = 64  # nested objects and lists of a schema
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose values are data, not schemas
_SHORT_ESCAPES = 'nrbtf"\\'  # all of JSON's but \uXXXX


def refuse_oversized(spec: GrammarSpec) -> None:
    """Raise RequestError for a grammar that is too long."""
    size = len(spec.source) + sum(len(rule.schema) for rule in spec.rules)
    if size > MAX_SOURCE:
        raise RequestError(f"the grammar has {size:,} characters", f"send at most {MAX_SOURCE:,}")


def parse_schema(source: str) -> dict[str, Any]:
    """Return a schema within the limits. Raises RequestError."""
    try:
        schema = json.loads(source)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"the JSON schema is no JSON: {error}", "send a JSON object") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError("the JSON schema is no JSON object", 'send an object such as {"type": "object"}')
    if _depth(schema, MAX_DEPTH) > MAX_DEPTH:
        raise _too_deep()
    return schema


def for_llguidance(schema: dict[str, Any], *, lenient: bool) -> dict[str, Any]:
    """Return a schema with llguidance's options in it.

    Unknown formats are dropped: for the standard they are annotations. With `lenient`, llguidance ignores keywords
    that it cannot enforce, and warns.
    """
    options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    known: dict[str, Any] = _without_keywords(schema, lambda key, item: key == "format" and item not in FORMATS)
    if _may_escape_names(known):
        options["json_allowed_escapes"] = _SHORT_ESCAPES
    return known | {"x-guidance": {**options, "lenient": lenient}}


def _may_escape_names(value: Any) -> bool:
    r"""Return whether a name that has rules might come as \uXXXX, as one of those that the object allows besides.

    llguidance writes the names that it knows as they are, and compares the text of others with that (1.8 and later).
    ASCII names aside: nobody writes those so, and a string without such escapes has no control characters.
    """
    if isinstance(value, list):
        return any(map(_may_escape_names, value))
    if not isinstance(value, dict):
        return False
    names, patterns = value.get("properties"), value.get("patternProperties")
    if value.get("additionalProperties") is not False and (
        (isinstance(patterns, dict) and patterns) or not all(map(str.isascii, names if isinstance(names, dict) else ()))
    ):
        return True
    return any(map(_may_escape_names, value.values()))


def without_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the regexes for strings."""
    weaker: dict[str, Any] = _without_keywords(schema, lambda key, _: key == "pattern")
    return weaker


def _without_keywords(value: Any, unwanted: Callable[[str, str], bool]) -> Any:
    """Return a schema without those keywords. Only text is asked about: a property may have a keyword's name."""
    if isinstance(value, list):
        return [_without_keywords(item, unwanted) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item if key in _VALUES else _without_keywords(item, unwanted)
        for key, item in value.items()
        if not (isinstance(item, str) and unwanted(key, item))
    }


def _depth(value: Any, limit: int) -> int:
    """Return how deep a value is nested, or `limit` + 1 if it is deeper."""
    if not isinstance(value, (dict, list)):
        return 0
    if limit == 0:
        return 1
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, limit - 1) for item in items), default=0)


def _too_deep() -> RequestError:
    return RequestError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels", "flatten it, or use $ref")
