"""Lists whose items must differ: random walks over grammars, with tokens of any length, with drafts and without."""

from __future__ import annotations

import json
import random
import secrets
from typing import Any

import jsonschema
import numpy as np
import pytest

from edgelm.base.workers.grammars import GrammarSpec
from edgelm.engine.core import Matcher
from edgelm.engine.sampling.grammar import GrammarCompiler
from edgelm.engine.sampling.unique_lists import unique_lists

STOP = 256
PIECES = [bytes([byte]) for byte in range(256)] + [b""]
PIECES += [
    text.encode()
    for text in (
        '", "', '"]', '["', ", ", "], [", "], ", "1, ", "1, 1", "1]", ", 1]", "true", "tr", ", true", "ue", "12",
        '"a"', '"a", "a"', '"a", "b"', 'a"', 'a"]', '"red"', "red", '"red", "gr', "een", '"tags": [', '": [', "}, {",
        '{"a": ', "false", "1}", "1}, {", "null", "1.0", "0]", "[[1]", "[1], ", "e1", "], [1]",
    )
]  # fmt: skip
WALKS = 30
MOST = 300  # tokens


class Tokens:
    """A vocabulary with tokens that complete several items."""

    num_tokens = len(PIECES)
    stop_ids = frozenset({STOP})

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return PIECES[token]

    def text_of(self, token: int) -> str:
        return "<eos>" if token == STOP else ""


def a_list(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, "maxItems": 6, **more}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "strings": a_list({"type": "string", "maxLength": 2}, minItems=2),
    "numbers": a_list({"type": "number", "minimum": 0, "maximum": 12}, minItems=2),
    "few": a_list({"type": "integer", "minimum": 1, "maximum": 3}, minItems=3),
    "enum": an_object(tags=a_list({"enum": ["red", "green", "re", 1, 12, None, True]}, minItems=4)),
    "literals": a_list({"type": ["boolean", "null", "integer"]}, minItems=2),
    "prefix": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "boolean"}], "uniqueItems": True},
    "lists": a_list({"type": "array", "items": {"type": "integer"}, "maxItems": 2}),
    "unique lists": an_object(
        a=a_list(a_list({"type": "integer", "minimum": 0, "maximum": 2}, minItems=1), minItems=2)
    ),
    "objects": a_list(an_object(a={"type": "integer", "minimum": 0, "maximum": 20}), minItems=2),
    "both": an_object(tags=a_list({"type": "string"}), free={"type": "array", "items": {"const": 1}, "minItems": 2}),
    "inner": a_list(an_object(tags=a_list({"enum": ["a", "b", "c", "d"]}, minItems=1)), minItems=2, maxItems=3),
    "reference": {**an_object(a={"$ref": "#/$defs/L"}), "$defs": {"L": a_list({"type": "string"}, minItems=2)}},
    "any key": {"type": "object", "additionalProperties": a_list({"enum": [1, 2, 3]}, minItems=2), "required": ["x"]},
    "alternatives": an_object(a={"anyOf": [a_list({"type": "string"}), {"type": "null"}]}),
}


def masks(matcher: Matcher, draft: list[int]) -> Any:
    rows = np.zeros((len(draft) + 1, (len(PIECES) + 31) // 32), np.int32)
    matcher.fill(draft, rows)
    return np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")[:, : len(PIECES)]


def walk(matcher: Matcher, rng: random.Random, stuck: list[bytes] | None) -> str | None:
    """Return a random text that the grammar ends; None: it became too long, or `stuck` has it.

    Drafts have the masks of single rows.
    """
    text = b""
    tokens: list[int] = []
    while len(tokens) < MOST:
        if matcher.done:
            return text.decode()
        forced = matcher.forced(4)
        if stuck is None:
            assert all(row[token] for row, token in zip(masks(matcher, forced), forced, strict=False))
        draft = [*forced, rng.randrange(len(PIECES))][: rng.randrange(4)]
        draft = draft[: matcher.allowed(draft)]
        rows = masks(matcher, draft)
        for row, drafted in zip(rows, [*draft, None], strict=True):
            allowed = np.flatnonzero(row).tolist()
            assert (masks(matcher, [])[0] == row).all()
            if not allowed and stuck is not None:
                assert matcher.error
                stuck.append(text)
                return None
            assert allowed, f"no way on from {text!r}: {matcher.error}"
            token = drafted
            if token is None:
                if STOP in allowed and rng.random() < 0.5:
                    return text.decode()
                ends = [one for one in allowed if one > STOP or chr(one) in '"],}']
                token = rng.choice(ends if ends and rng.random() < 0.7 else allowed)
            if token == STOP:
                return text.decode()
            if not row[token]:
                break  # `allowed` does not look as far ahead as a mask
            matcher.accept(token)
            tokens.append(token)
            text += PIECES[token]
    return None


@pytest.mark.parametrize("name", SCHEMAS)
async def test_items_differ(name: str) -> None:
    rng = random.Random(seed := secrets.randbits(32))
    schema = SCHEMAS[name]
    compiler = GrammarCompiler(Tokens(), len(PIECES))
    grammar = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    validator = jsonschema.Draft202012Validator(schema)
    # Of lists with few possible lists in them, all may be used up: that fails, and nothing wrong is finished.
    stuck: list[bytes] | None = [] if name in ("inner", "unique lists") else None
    finished = 0
    for _ in range(WALKS):
        text = walk(grammar.matcher(), rng, stuck)
        if text is not None:
            finished += 1
            error = next(validator.iter_errors(json.loads(text)), None)
            assert error is None, f"seed {seed}: {text}: {error and error.message}"
    await compiler.close()
    assert finished > WALKS // 4


def test_lists_are_found_by_their_keys() -> None:
    assert unique_lists(SCHEMAS["enum"]) == {"tags": ['"red"', '"green"', '"re"', "1", "12", "null", "true"]}
    assert unique_lists(SCHEMAS["both"]) == {"tags": None}
    assert unique_lists(SCHEMAS["unique lists"]) == {"a": None, "": ["0", "1", "2"]}
    assert unique_lists(SCHEMAS["any key"]) == {"*": ["1", "2", "3"]}
    assert unique_lists({"type": "string", "uniqueItems": True}) == {}
