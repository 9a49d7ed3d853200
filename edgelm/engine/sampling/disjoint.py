"""Whether two JSON schemas have a value in common, as far as that is plain. Knows nothing of where it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgelm.engine.sampling.negated import resolved, types_of

_MAX_DEPTH = 8


def disjoint(one: Any, other: Any, root: Mapping[str, Any], depth: int = _MAX_DEPTH) -> bool:
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
