"""JSON schemas from real use and the standard's test suite: what is written is valid, what is invalid is refused."""

from __future__ import annotations

import json
import random
import secrets
from typing import Any

import jsonschema
import pytest

from edgelm.base.errors import RequestError
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.engine.sampling.grammar import GrammarCompiler, GrammarMatcher
from tests.engine.sampling.test_grammar import NUM_VOCAB, Words, masks_of
from tests.real_data import data_file

WALKS = 6
MOST = 1500  # tokens
LEAP = ("-02-29", ":60")  # llguidance knows dates by their form alone


def walk(matcher: GrammarMatcher, rng: random.Random) -> str | None:
    """Return a random text that the grammar ends, mostly short; None: it became too long."""
    text = b""
    for length in range(MOST):
        if matcher.done:
            return text.decode()
        (mask,) = masks_of(matcher, [])
        assert matcher.error is None
        if mask & Words.stop_ids:
            return text.decode()
        closing = [token for token in mask if token < 256 and chr(token) in '"]}0123456789tfn']
        token = rng.choice(closing if closing and rng.random() < min(0.2 + length / 100, 0.95) else sorted(mask))
        matcher.accept(token)
        text += Words().pieces[token]
    return None


@pytest.mark.parametrize("name", ["iglu", "schemastore", "test_suite"])
async def test_answers_are_valid_and_invalid_ones_are_refused(name: str) -> None:
    rng = random.Random(seed := secrets.randbits(32))
    compiler = GrammarCompiler(Words(), NUM_VOCAB)
    num_enforced, num_written = 0, 0
    items = [json.loads(line) for line in data_file(f"jsonschema/{name}.jsonl").read_text().splitlines()]
    for item in items:
        schema: Any = item["schema"]
        if "\\p{" in str(schema):
            continue  # Python's regexes, with which jsonschema checks, do not have it
        try:
            grammar = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        except RequestError:
            continue
        num_enforced += 1
        validator = jsonschema.validators.validator_for(schema)(schema)
        for _ in range(WALKS):
            text = walk(grammar.matcher(), rng)
            if text is not None:
                num_written += 1
                assert validator.is_valid(json.loads(text)), f"{item['id']}, seed {seed}: {text}"
        for invalid in item["invalid"]:
            text = json.dumps(invalid, ensure_ascii=False)
            tokens = list(text.encode())
            matcher = grammar.matcher()
            if validator.is_valid(invalid) or any(leap in text for leap in LEAP):
                continue  # invalid by its format alone, which is an annotation
            follows = matcher.allowed(tokens) == len(tokens)
            for token in tokens if follows else ():
                matcher.accept(token)
            ends = follows and (matcher.done or masks_of(matcher, [])[0] & Words.stop_ids)
            assert not ends, f"{item['id']}: {text}"
    await compiler.close()
    assert num_enforced >= len(items) // 3
    assert num_written >= num_enforced
