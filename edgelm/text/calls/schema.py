"""The schemas of tools, as they come and as a grammar can obey them.

Owns the limits of a tool's schema. Knows nothing of formats, and checks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgelm.base.errors import RequestError
from edgelm.text.calls.closing import closed

MAX_BYTES = 2**18
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """The schema that the grammar of a tool's arguments obeys, and why it is relaxed ("" if it is not).

    `unique` are the lists of JSON whose items are held apart beside the grammar, as in `GrammarSpec`.
    """

    schema: dict[str, Any]
    relaxed: str = ""
    unique: str = ""


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, closed. Raises RequestError for one that is too large."""
    name, schema = function.get("name"), function.get("parameters")
    if not schema:
        return closed({"type": "object"})
    if not isinstance(schema, Mapping):
        raise RequestError(f"the parameters of the tool {name} are no JSON schema", "give an object")
    if _depth(schema) > MAX_DEPTH or len(json.dumps(schema)) > MAX_BYTES:
        raise RequestError(
            f"the schema of the tool {name} is too large",
            f"give at most {MAX_BYTES // 1024} KiB and {MAX_DEPTH} levels",
        )
    return closed({"type": "object", **schema})


def _depth(value: object) -> int:
    """Return the number of levels, counted no further than the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ())
        ]
    return depth
