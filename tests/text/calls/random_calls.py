"""Random tools, calls and texts; and the parts of an answer, put together."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgelm.text.calls.format import Call, CallFormat
from edgelm.text.parse import AnswerParser, Args, CallBegin, CallEnd, Content, Part, Reasoning
from edgelm.text.reasoning import ReasoningFormat

THINK = ReasoningFormat("<think>", "</think>")
NAMES = ("get_weather", "find", "a", "user.list-all", "x2")
LETTERS = "ab cd\"'\\/<>{}[]:,=\n\té日🦙_"
_TYPES = ("string", "integer", "number", "boolean", "array", "object")


def tool(name: str, properties: dict[str, Any], required: Sequence[str] | None = None, **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters, **more}}


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    tools = []
    for name in rng.sample(NAMES, rng.randint(1, 4)):
        keys = rng.sample(["city", "n", "q_2", "flag", "items"], rng.randint(0, 4))
        tools.append(tool(name, {key: {"type": rng.choice(_TYPES)} for key in keys}, rng.sample(keys, len(keys) // 2)))
    return tools


def random_text(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(0, most)))


def random_value(rng: random.Random, kind: str, depth: int = 2) -> Any:
    inner = rng.choice(_TYPES[: 6 if depth else 4])
    match kind:
        case "string":
            return random_text(rng)
        case "integer":
            return rng.randint(-99, 9999)
        case "number":
            return rng.choice([1.5, -0.25, 1e-7, 3])
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [random_value(rng, inner, depth - 1) for _ in range(rng.randint(0, 3))]
    keys = rng.sample(["a", "b", "cc"], rng.randint(0, 3))
    return {key: random_value(rng, inner, depth - 1) for key in sorted(keys)}


def random_calls(rng: random.Random, tools: Sequence[dict[str, Any]], form: CallFormat) -> list[Call]:
    """Return calls that a format can write: raw values cannot contain the mark that ends them."""
    calls = []
    for _ in range(rng.randint(1, 3) if form.parallel else 1):
        function = rng.choice(tools)["function"]
        arguments = {}
        properties = function["parameters"]["properties"]
        for key in sorted(properties):
            if key in function["parameters"]["required"] or rng.random() < 0.5:
                arguments[key] = random_value(rng, properties[key]["type"])
        calls.append(Call(function["name"], arguments, "".join(rng.choices("abc123", k=9))))
    return calls


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    calls: list[list[Any]] = field(default_factory=list)  # name, arguments as text, whether complete
    ids: list[str] = field(default_factory=list)

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments, _ in self.calls]


def collected(parts: Iterable[Part]) -> Answer:
    """Put the parts of an answer together; check their order."""
    answer = Answer()
    is_open = False
    for part in parts:
        match part:
            case Reasoning(text):
                assert text
                answer.reasoning += text
            case Content(text):
                assert text
                answer.content += text
            case CallBegin(index, call_id, name):
                assert index == len(answer.calls)
                assert call_id
                answer.calls.append([name, "", False])
                answer.ids.append(call_id)
                is_open = True
            case Args(index, text):
                assert text
                assert is_open
                assert index == len(answer.calls) - 1
                answer.calls[index][1] += text
            case CallEnd(index):
                assert is_open
                assert index == len(answer.calls) - 1
                answer.calls[index][2] = True
                is_open = False
    return answer


def control_strings(form: CallFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """Return the tags in the strings of formats, as vocabularies have them as control tokens."""
    strings = (*(form.strings if form else ()), *(reasoning.strings if reasoning else ()))
    tags = r"<\|[^<> ]*\|?>|<\uff5c[^<> ]*>|<[/a-z_:]+>|\[[A-Z_/]+\]"
    found = {mark for text in strings for mark in re.findall(tags, text)}
    return sorted(found)


def as_tokens(text: str, marks: dict[str, int], rng: random.Random | None) -> list[tuple[int | None, bytes]]:
    """Cut a text in tokens: control tokens where they stand, and pieces of random length of the bytes between them."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)"
    tokens: list[tuple[int | None, bytes]] = []
    for part in re.split(f"({pattern})", text):
        if part in marks:
            tokens.append((marks[part], b""))
            continue
        data = part.encode()
        while data:
            size = rng.randint(1, 6) if rng else len(data)
            tokens.append((None, data[:size]))
            data = data[size:]
    return tokens


def parsed(parser: AnswerParser, tokens: Iterable[tuple[int | None, bytes]], reason: str = "stop") -> Answer:
    parts: list[Part] = []
    for token, piece in tokens:
        parts += parser.push(token, piece)
    return collected(parts + parser.flush(reason))
