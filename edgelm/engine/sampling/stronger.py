"""Stronger schemas: a JSON schema whose keywords llguidance knows, and whose every value conforms to the given one.

`oneOf`, `not`, `contains`, `propertyNames`, `if`, dependencies and `unevaluated…` are no matter of a context-free
grammar, but each of them follows from something that is: a value that contains a 5 is a list that begins with one. What
has no such form is left as it is, so that the caller can name it. `uniqueItems` is left out: unique.py has it.

Knows neither tokens nor llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgelm.engine.sampling.negated import (
    TYPES,
    disjoint,
    equal,
    integral,
    negated,
    resolved,
    types_of,
    without_strings,
)
from edgelm.engine.sampling.unique_lists import item_values

_MAX_DEPTH = 64
_MAX_PARTS = 20_000  # of one result: alternatives multiply
_COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains".split())
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
# A value conforms to these parts themselves. The parts of other keywords stay as they are until it is known whether a
# value has to conform to them or not: what is stronger than a part is weaker when negated.
_SINGLE = frozenset(
    "additionalProperties additionalItems items then else unevaluatedItems unevaluatedProperties".split()
)
_LISTS = frozenset(("allOf", "anyOf", "prefixItems"))


def stronger(schema: dict[str, Any], *, merge_patterns: bool = False) -> dict[str, Any]:
    """Return a stronger schema. With `merge_patterns`, names that match several patterns have one schema.

    One with a value of a wrong type, such as a list of `properties`, is returned as it is: llguidance says so.
    """
    if not _is_well_formed(schema):
        return schema
    result = _Stronger(schema, merge_patterns).of(schema)
    return result if isinstance(result, dict) else {"not": {}}


_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_PARTS = _SINGLE | {"propertyNames", "contains", "not", "if"}


def _is_well_formed(schema: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether the keywords of a schema and of its parts have values of the types that they need."""
    if isinstance(schema, bool) or not depth:
        return True
    return isinstance(schema, dict) and all(_has_its_type(key, value, depth - 1) for key, value in schema.items())


def _has_its_type(key: str, value: Any, depth: int) -> bool:
    match key:
        case "enum" | "required":
            return isinstance(value, list)
        case "pattern" | "$ref":
            return isinstance(value, str)
        case "type":
            return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))
        case "dependencies" | "dependentRequired":
            parts = value.values() if isinstance(value, dict) else [None]
            return all(isinstance(part, list) or _is_well_formed(part, depth) for part in parts)
    if key in _COUNTS:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool)
    if key in _MAPS:
        return isinstance(value, dict) and all(_is_well_formed(part, depth) for part in value.values())
    if key in _LISTS or key == "oneOf" or (key in ("items", "additionalItems") and isinstance(value, list)):
        return isinstance(value, list) and all(_is_well_formed(part, depth) for part in value)
    return key not in _PARTS or _is_well_formed(value, depth)


class _Stronger:
    def __init__(self, root: dict[str, Any], merge_patterns: bool) -> None:
        self._root = root
        self._merge_patterns = merge_patterns
        self._num_parts = 0

    def of(self, schema: Any, depth: int = _MAX_DEPTH) -> Any:
        self._num_parts += 1
        if not isinstance(schema, dict) or not depth or self._num_parts > _MAX_PARTS:
            return schema
        schema = dict(schema)
        more = self._switch(schema)  # further schemas that a value has to conform to
        result = {key: self._part(key, value, depth - 1) for key, value in schema.items()}
        if result.pop("uniqueItems", False) is True and (values := item_values(schema, self._root)) is not None:
            result["maxItems"] = min(len(values), result.get("maxItems", len(values)))
        self._unevaluated_items(result)
        self._unevaluated_properties(result, schema)
        self._contains(result, more)
        self._property_names(result)
        self._conditions(result, more)
        self._dependencies(result, more)
        self._patterns(result)
        self._not(result, more)
        self._one_of(result, more)
        self._num_properties(result, more)
        if more:
            result["allOf"] = [*_list(result.get("allOf")), *(self.of(part, depth - 1) for part in more)]
        return result

    def _part(self, key: str, value: Any, depth: int) -> Any:
        if key in _COUNTS:
            return integral(value)
        if key in _NAMED and isinstance(value, dict):
            return {name: self.of(one, depth) for name, one in value.items()}
        if (key in _LISTS or key in ("items", "additionalItems")) and isinstance(value, list):
            return [self.of(one, depth) for one in value]
        return self.of(value, depth) if key in _SINGLE else value

    # -- lists -----------------------------------------------------------------------------------------------------

    def _unevaluated_items(self, schema: dict[str, Any]) -> None:
        rest = schema.pop("unevaluatedItems", True)
        key = "additionalItems" if isinstance(schema.get("items"), list) else "items"
        if rest is not True and key not in schema:
            schema[key] = rest

    def _contains(self, schema: dict[str, Any], more: list[Any]) -> None:
        """Let a list begin with what it must contain; the rest has none of it where it may have no more."""
        has = "contains" in schema
        raw, least, most = schema.pop("contains", True), schema.pop("minContains", 1), schema.pop("maxContains", None)
        if not has or (not least and most is None):
            return
        if most is not None and most < least:
            more.append({"type": sorted(TYPES - {"array"})})
            return
        part = self.of(raw)
        key = "items" if isinstance(schema.get("items"), list) or _is_older(self._root) else "prefixItems"
        rest_key = "additionalItems" if key == "items" and isinstance(schema.get("items"), list) else "items"
        rest = schema.get(rest_key, True)
        first = _list(schema.get(key))
        head = [_both_of(one, part) for one in [*first, *[rest] * least][:least]]
        if head:
            first = [*head, *first[least:]]
            schema["minItems"] = max(least, schema.get("minItems", 0))
        if most is not None:
            other = negated(raw, self._root)
            if other is None:
                schema["maxItems"] = min(most, schema.get("maxItems", most))
            else:
                other = self.of(other)
                first = [*first[:least], *(_both_of(one, other) for one in first[least:])]
                rest = _both_of(rest, other)
        if not first:
            schema["items"] = rest
        elif key == "items":
            schema |= {"items": first, "additionalItems": rest}
        else:
            schema |= {"prefixItems": first, "items": rest}

    # -- objects ---------------------------------------------------------------------------------------------------

    def _property_names(self, schema: dict[str, Any]) -> None:
        """Put the condition of all names into the patterns of names, or list the names."""
        if "propertyNames" not in schema:
            return
        rule = resolved(schema["propertyNames"], self._root)
        own = schema.get("properties") or {}
        extra = schema.get("additionalProperties", True)
        if rule is True or (isinstance(rule, dict) and not _limits_names(rule)):
            del schema["propertyNames"]
            return
        names: list[str] | str | None = []
        if rule is not False:
            assert isinstance(rule, dict)
            names = _names(rule)
        if names is None or (schema.get("patternProperties") and not isinstance(names, list)):
            return
        del schema["propertyNames"]
        patterns = schema.pop("patternProperties", None) or {}
        if isinstance(names, list):
            schema["properties"] = {
                name: _all_of(
                    [
                        *([own[name]] if name in own else []),
                        *(one for pattern, one in patterns.items() if _matches(pattern, name)),
                    ]
                    or [extra]
                )
                for name in names
            }
        else:
            schema["properties"] = {name: one for name, one in own.items() if _matches(names, name)}
            if extra is not False:
                schema["patternProperties"] = {names: extra}
        schema["additionalProperties"] = False

    def _patterns(self, schema: dict[str, Any]) -> None:
        """Give names that match several patterns all their schemas: then only the first pattern's names may come."""
        patterns = schema.get("patternProperties")
        if not self._merge_patterns or not isinstance(patterns, dict) or len(patterns) < 2:
            return
        own = schema.get("properties") or {}
        schema["properties"] = {
            name: _all_of([one, *(part for pattern, part in patterns.items() if _matches(pattern, name))])
            for name, one in own.items()
        }
        schema["patternProperties"] = {next(iter(patterns)): _all_of(list(patterns.values()))}
        schema["additionalProperties"] = False

    def _dependencies(self, schema: dict[str, Any], more: list[Any]) -> None:
        required = _list(schema.get("required"))
        parts: list[tuple[str, Any]] = []
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            value = schema.pop(key, None)
            parts += value.items() if isinstance(value, dict) else ()
        for name, value in parts:
            then = {"required": value} if isinstance(value, list) else value
            if then in (True, {}, {"required": []}):
                continue
            more.append(then if name in required else {"anyOf": [{"properties": {name: False}}, then]})

    def _conditions(self, schema: dict[str, Any], more: list[Any]) -> None:
        """Let a value fulfil `if` and `then`, or not `if` and `else`, or both `then` and `else`."""
        given = "if" in schema
        condition, then, other = schema.pop("if", True), schema.pop("then", True), schema.pop("else", True)
        if not given or (then in (True, {}) and other in (True, {})):
            return
        reverse = negated(condition, self._root)
        last = _all_of([then, other]) if reverse is None else _all_of([reverse, other])
        if last is not False:
            more.append({"anyOf": [_all_of([condition, then]), last]})
        else:
            more.append(_all_of([condition, then]))

    def _switch(self, schema: dict[str, Any]) -> list[Any]:
        """Take several conditions out of `allOf`, of which at most one can be true; return them as alternatives."""
        parts = _list(schema.get("allOf"))
        cases = [part for part in parts if isinstance(part, dict) and part.keys() - {"$comment"} == {"if", "then"}]
        named = [set(_dict(_dict(case["if"]).get("properties"))) for case in cases]
        if len(cases) < 2 or not set.intersection(*named):
            return []
        required = [*_list(schema.get("required")), *sorted(set.intersection(*named))]
        shapes = [{"type": "object", "required": required, **_dict(case["if"])} for case in cases]
        if not all(disjoint(one, other, self._root) for index, one in enumerate(shapes) for other in shapes[:index]):
            return []
        others = [negated(case["if"], self._root) for case in cases]
        schema["allOf"] = [part for part in parts if part not in cases]
        alternatives = [_all_of([{"type": "object", "required": required}, case["if"], case["then"]]) for case in cases]
        return [{"anyOf": alternatives if None in others else [*alternatives, _all_of(others)]}]

    def _num_properties(self, schema: dict[str, Any], more: list[Any]) -> None:
        """Require properties, or leave some out, where their number is limited: llguidance counts required ones."""
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        own = schema.get("properties") or {}
        required = _list(schema.get("required"))
        rest = [name for name, part in own.items() if name not in required and part is not False]
        if not rest or not isinstance(least, int) or not isinstance(most, int | None):
            return
        if most is not None:
            del schema["maxProperties"]
            is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
            if not is_closed or len(rest) + len(required) > most:
                rest = rest[: max(0, most - len(required))]
                patterns = schema.pop("patternProperties", None) or {}
                schema["properties"] = {
                    name: _all_of([part, *(one for pattern, one in patterns.items() if _matches(pattern, name))])
                    for name, part in own.items()
                    if name in rest or name in required
                }
                schema["additionalProperties"] = False
        missing = least - len(required)
        if least and len(rest) >= missing:
            del schema["minProperties"]
            if missing == 1:
                more.append({"anyOf": [{"required": [name]} for name in rest]})
            elif missing > 1:
                schema["required"] = [*required, *rest[:missing]]

    # -- all types -------------------------------------------------------------------------------------------------

    def _not(self, schema: dict[str, Any], more: list[Any]) -> None:
        if "not" not in schema:
            return
        if "enum" in schema or "const" in schema:
            left = _left_of(schema, resolved(schema["not"], self._root))
            if left is not None:
                schema.pop("const", None)
                del schema["not"]
                schema["enum"] = left
                return
        other = negated(schema["not"], self._root, types_of(schema))
        if other is not None and other is not False:
            del schema["not"]
            more.append(other)

    def _one_of(self, schema: dict[str, Any], more: list[Any]) -> None:
        """Take an alternative together with the negations of those that it does not exclude by itself."""
        parts = [part for part in _list(schema.get("oneOf")) if part is not False]
        if not parts:
            return
        shapes = [resolved(part, self._root) for part in parts]
        alternatives = []
        for index, part in enumerate(parts):
            whole = [part]
            for other, shape in enumerate(shapes):
                if other != index and not disjoint(shapes[index], shape, self._root):
                    whole.append(negated(shape, self._root, types_of(shapes[index])))
            if None not in whole and False not in whole:
                alternatives.append(_all_of(whole))
        if not alternatives:
            return
        del schema["oneOf"]
        more.append({"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0])

    def _unevaluated_properties(self, schema: dict[str, Any], given: dict[str, Any]) -> None:
        rest = schema.get("unevaluatedProperties")
        if rest is None:
            return
        if "additionalProperties" in schema or rest is True:
            del schema["unevaluatedProperties"]
            return
        names: dict[str, Any] = {name: {} for part in self._always(given, 8) for name in part.get("properties") or {}}
        del schema["unevaluatedProperties"]
        schema["properties"] = {**names, **(schema.get("properties") or {})}
        schema["additionalProperties"] = rest

    def _always(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """Yield the schemas that every value of a schema conforms to."""
        if isinstance(schema, dict) and depth:
            yield schema
            for part in _list(schema.get("allOf")):
                yield from self._always(part, depth - 1)
            if "$ref" in schema:
                yield from self._always(resolved({"$ref": schema["$ref"]}, self._root), depth - 1)


_NAME_RULES = frozenset("type enum const pattern minLength maxLength not anyOf oneOf allOf $ref if".split())


def _limits_names(rule: dict[str, Any]) -> bool:
    """Return whether a schema of names excludes one; `{"type": "string"}`, which Zod writes, does not."""
    rules = rule.keys() & _NAME_RULES
    return bool(rules) and not (rules == {"type"} and "string" in types_of(rule))


def _names(rule: dict[str, Any]) -> list[str] | str | None:
    """Return the names that a schema of names allows, or their pattern; None: it has no such form."""
    keys = rule.keys() & _NAME_RULES
    if "string" not in types_of(rule):
        return []
    keys -= {"type"}
    if "enum" in rule or "const" in rule:
        values = rule.get("enum", [rule.get("const")])
        return [value for value in values if isinstance(value, str)] if len(keys) == 1 else None
    if keys == {"pattern"}:
        return str(rule["pattern"])
    if keys and keys <= {"minLength", "maxLength"}:
        least, most = integral(rule.get("minLength", 0)), integral(rule.get("maxLength", ""))
        return rf"^(.|\n){{{least},{most}}}$"
    if keys == {"not"} and isinstance(rule["not"], dict):
        wrong = rule["not"]
        values = wrong.get("enum", [wrong["const"]] if "const" in wrong else None)
        if isinstance(values, list) and not wrong.keys() & (_NAME_RULES - {"enum", "const", "type"}):
            return without_strings([value for value in values if isinstance(value, str)])
    if len(keys) == 1 and keys <= {"anyOf", "allOf", "oneOf"}:
        (key,) = keys
        parts = [_names(part) if isinstance(part, dict) else None for part in _list(rule[key])]
        if len(parts) == 1:
            return parts[0]
        if key == "anyOf" and all(isinstance(part, str) for part in parts):
            return "|".join(f"({part})" for part in parts)
        if key == "anyOf" and all(isinstance(part, list) for part in parts):
            return [name for part in parts for name in part or ()]
    return None


def _left_of(schema: dict[str, Any], wrong: Any) -> list[Any] | None:
    """Return the values of an enum that a plain `not` leaves."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(wrong, dict) or not isinstance(values, list):
        return None
    if wrong.keys() in ({"enum"}, {"const"}):
        refused = wrong.get("enum", [wrong.get("const")])
        return [value for value in values if not any(equal(value, one) for one in refused)]
    return None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def _is_older(root: Mapping[str, Any]) -> bool:
    return bool(re.search(r"draft-0[3-7]|draft/2019", str(root.get("$schema", ""))))


def _both_of(one: Any, other: Any) -> Any:
    return _all_of([one, other])


def _all_of(parts: Sequence[Any]) -> Any:
    """Return the schema of what conforms to all parts."""
    left = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in left):
        return False
    return {"allOf": left} if len(left) > 1 else left[0] if left else {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
