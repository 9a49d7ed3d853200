"""The grammar of items: those of a list, and arguments, which may come in any order, each at most once.

A fixed order would lose arguments: a model that has written the last optional one could not write an earlier one any
more, and would call something else than it wants.

Owns these expressions. Knows no format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edgelm.text.calls.lark import Lark

_MAX_FREE = 64  # bits of a rule's parameter


def listed(lark: Lark, items: Mapping[str, str], required: Collection[str], comma: str = "") -> str:
    """Return the expression of items with commas between them; the item "" may come any number of times.

    Items that are all required keep their order, which leaves the model no choice and saves steps. Beyond 64 items,
    those of each 64 are free among each other.
    """
    between = json.dumps(comma) if comma else ""
    named = {key: lark.anonymous(item) for key, item in items.items() if key}
    extra = lark.anonymous(items[""]) if "" in items else ""
    if named and all(key in required for key in named):
        in_order = f" {between} ".join(named.values())
        return lark.anonymous(f"{in_order} ({between} {extra})*" if extra else in_order)
    more = lark.anonymous(f"({between} {extra})*") if extra else ""
    first = lark.anonymous(f"({extra} {more})?") if extra and not named else '""'
    later = ""
    for start in reversed(range(0, len(named), _MAX_FREE)):
        keys = sorted([*named][start : start + _MAX_FREE], key=lambda key: key not in required)
        num_required = sum(key in required for key in keys)
        group = _group(lark, [named[key] for key in keys], num_required, between, more)
        if between:  # the first item of all has no comma before it
            ways = [f"{named[key]} {more} {group}::{1 << bit:#x} {later}" for bit, key in enumerate(keys)]
            ways += [f"{extra} {more} {group}::0 {later}"] if extra else []
            first = lark.anonymous(" | ".join(ways if num_required else [*ways, first]))
        later = f"{group}::0 {later}"
    return first if between else f"{more} {later}"


def _group(lark: Lark, items: Sequence[str], num_required: int, between: str, more: str) -> str:
    """Return a rule of items in any order, the first ones of them required; its parameter has those that have come.

    Behind each come `more` that the schema does not name. They are no way of the rule itself: then it would have a row
    for each of them, and a mask would cost more with each. What follows is no part of the rule: llguidance would judge
    with this parameter whether the next group may be empty.
    """
    ways = [f"{between} {item} {more} SELF::set_bit({bit}) %if bit_clear({bit})" for bit, item in enumerate(items)]
    done = f" %if is_ones([0:{num_required}])" if num_required else ""
    return lark.parametric(" | ".join([*ways, f'""{done}']))


def repeated(item: str, schema: Mapping[str, Any], comma: str) -> str:
    """Return the expression of the items of a list of this schema."""
    least, most = int(schema.get("minItems") or 0), schema.get("maxItems")
    if most is not None and not int(most):
        return '""'
    if most is not None and int(most) == 1:
        return item if least else f"({item})?"
    more = f"{{{max(0, least - 1)},{int(most) - 1 if most is not None else ''}}}"
    rest = f"{item} ({json.dumps(comma)} {item}){more if most is not None or least > 1 else '*'}"
    return f"({rest})" if least else f"({rest})?"
