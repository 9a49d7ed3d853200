"""The tools that a server offers, as a model and a person see them.

Owns which are refused, and what a consent is bound to. A server's own words about a tool, as that it only reads, are
shown and never trusted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgelm.chats.tools.results import cut, plain_text
from edgelm.chats.tools.settings import ToolServer

MAX_TOOLS = 128  # of a server; OpenAI takes as many in a request
MAX_SCHEMA = 32 * 2**10  # characters of JSON
MAX_DESCRIPTION = 2_000  # characters
MAX_NAME = 128
MAX_OFFERS = 200  # prompts and resources of a server
MAX_DEPTH = 40
PROBLEM = "x-edgelm-problem"  # in a schema: why it is not used


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `mark` is what a consent is bound to: `SERVER/TOOL:` and a hash of all that it says and runs."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]
    claims: str  # of the server about it
    mark: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools of a server, and a note for each that is left out."""

    tools: tuple[Tool, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """A prompt or a resource of a server, which the user may take. `name` has no white space.

    `own_name` is the server's: of a resource its URI. `arguments` of a prompt may be left out unless `required`.
    """

    kind: Literal["prompt", "resource"]
    name: str
    own_name: str
    description: str = ""
    arguments: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


def make_offers(prompts: Iterable[Any], resources: Iterable[Any]) -> tuple[Offer, ...]:
    """Return the prompts and resources of a server that can be named, each name once."""
    offers = []
    for prompt in prompts:
        arguments = prompt.arguments or ()
        names = tuple(argument.name for argument in arguments)
        required = tuple(argument.name for argument in arguments if argument.required)
        offers.append(Offer("prompt", _word(prompt.name), prompt.name, _line(prompt), names, required))
    offers += [Offer("resource", _word(entry.name), str(entry.uri), _line(entry)) for entry in resources]
    named = {offer.name: offer for offer in reversed(offers) if 0 < len(offer.name) <= MAX_NAME}
    return tuple(sorted(named.values(), key=lambda offer: (offer.kind, offer.name)))[:MAX_OFFERS]


def _word(name: str) -> str:
    return "_".join(plain_text(name).split())


def _line(offered: Any) -> str:
    return cut(" ".join(plain_text(offered.description or offered.title or "").split()), MAX_DESCRIPTION)


def make_listing(server: ToolServer, tools: Iterable[Any]) -> Listing:
    """Return the listing of a server's own tools, of which several may be left out."""
    kept: dict[str, Tool] = {}
    notes: list[str] = []
    for tool in tools:
        name = plain_text(tool.name)
        if len(kept) >= MAX_TOOLS:
            notes.append(f"only the first {MAX_TOOLS} tools are used")
            break
        if not name.strip() or len(name) > MAX_NAME or name != tool.name or "\n" in name or name in kept:
            notes.append(
                f"{name[:60]!r} is left out: its name is empty, too long, there twice, or has control characters"
            )
        elif reason := _schema_problem(tool.input_schema):
            notes.append(f"{name} is left out: {reason}")
        else:
            kept[name] = _make(server, tool)
    return Listing(tuple(kept.values()), tuple(notes))


def mend_result(result: object) -> None:
    """Make a server's result one that mcp takes, which refuses all tools for one that is odd.

    A schema that cannot be used stands as PROBLEM in its tool. What is not used here goes.
    """
    if not isinstance(result, dict):
        return
    if "structuredContent" in result and not isinstance(result.get("content"), list):
        result["content"] = []
    if isinstance(tools := result.get("tools"), list):
        result["tools"] = [_mended(tool) for tool in tools if isinstance(tool, dict)]


def _mended(tool: dict[str, Any]) -> dict[str, Any]:
    hints = tool.get("annotations")
    hints = {name: value for name, value in hints.items() if value is True} if isinstance(hints, dict) else {}
    texts = {name: tool[name] for name in ("description", "title") if isinstance(tool.get(name), str)}
    name = tool.get("name")
    mended = {"name": name if isinstance(name, str) else "", **texts, "inputSchema": _object(tool.get("inputSchema"))}
    return {**mended, "annotations": hints} if hints else mended


def _object(schema: object) -> dict[str, Any]:
    """Return the schema of a tool's arguments as that of an object, which it is where it does not say so."""
    if schema is None:
        return {"type": "object"}
    kind = schema.get("type", "object") if isinstance(schema, dict) else type(schema).__name__
    if not isinstance(schema, dict) or (kind != "object" and not (isinstance(kind, list) and "object" in kind)):
        return {"type": "object", PROBLEM: f"the schema of its arguments is of type {kind!r}"[:200]}
    mended = {**schema, "type": "object"}
    if "properties" in mended:
        properties = mended["properties"] if isinstance(mended["properties"], dict) else {}
        mended["properties"] = {name: one for name, one in properties.items() if isinstance(one, dict | bool)}
    if not isinstance(mended.get("required", []), list):
        del mended["required"]
    return mended


def _make(server: ToolServer, tool: Any) -> Tool:
    description = tool.description or ""
    bound = json.dumps([server.transport, tool.name, description, tool.input_schema], sort_keys=True)
    return Tool(
        server.name,
        tool.name,
        cut(plain_text(description), MAX_DESCRIPTION),
        tool.input_schema,
        _claims(tool.annotations),
        f"{server.name}/{tool.name}:{hashlib.sha256(bound.encode()).hexdigest()}",
    )


def _schema_problem(schema: Mapping[str, Any]) -> str:
    """Return why the schema of a tool's arguments cannot be used; empty: it can."""
    if PROBLEM in schema:
        return str(schema[PROBLEM])
    if _depth(schema) > MAX_DEPTH:
        return "the schema of its arguments is nested too deeply"
    length = len(json.dumps(schema))
    return f"the schema of its arguments has {length:,} characters, too many" if length > MAX_SCHEMA else ""


def _depth(value: object, depth: int = 0) -> int:
    if depth > MAX_DEPTH:
        return depth
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return max((_depth(item, depth + 1) for item in items), default=depth)


def _claims(annotations: Any) -> str:
    """Return the tool's annotations as words, such as "it only reads". They are claims of the server."""
    if annotations is None:
        return ""
    words = {
        "read_only_hint": "it only reads",
        "destructive_hint": "it may destroy",
        "open_world_hint": "it reaches out to the world",
    }
    return ", ".join(text for name, text in words.items() if getattr(annotations, name, None) is True)
