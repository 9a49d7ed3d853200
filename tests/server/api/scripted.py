"""Answers of a script, for tests of the forms in which APIs return them."""

from __future__ import annotations

import json
from typing import Any, cast

from edgelm.engine.core import ExecutorInfo, Sampled, Stats
from edgelm.jobs.request import AnswerDelta, AnswerReason
from edgelm.server.api.dialect import AnswerContext
from edgelm.text.parse import Args, CallBegin, CallEnd, Part
from edgelm.text.tokenizer import Tokenizer

STATS = Stats(
    prompt_tokens=30,
    cached_tokens=20,
    completion_tokens=9,
    drafted=0,
    accepted=0,
    queue_ms=0,
    prompt_ms=0,
    first_token_ms=0,
    decode_ms=0,
)
INFO = ExecutorInfo(
    engine="llama",
    device="cpu",
    num_vocab=100,
    context=512,
    capacity=512,
    max_tokens=64,
    max_rows=8,
    max_sequences=4,
    kv_bytes_per_token=16,
)


class Letters:
    """A tokenizer with a token for every character."""

    stop_ids = frozenset({0})

    def piece(self, token: int) -> bytes:
        return chr(token).encode()

    def text_of(self, token: int) -> str:
        return f"<{token}>"


CONTEXT = AnswerContext("m", cast(Tokenizer, Letters()), INFO, range(30))


def delta(*parts: Part, text: str = "", reason: AnswerReason | None = None, **fields: Any) -> AnswerDelta:
    """Return a delta; `text` is that of its tokens."""
    sampled = tuple(Sampled(ord(letter), -0.5, ((ord(letter), -0.5), (65, -1.0))) for letter in text)
    return AnswerDelta(parts, sampled, reason=reason, stats=STATS if reason else None, **fields)


def end(reason: AnswerReason = "stop", *parts: Part, **fields: Any) -> AnswerDelta:
    return delta(*parts, reason=reason, **fields)


def call(index: int, name: str, *arguments: str, complete: bool = True) -> list[Part]:
    """Return the parts of a call."""
    begin = CallBegin(index, f"call_{index}", name)
    return [begin, *(Args(index, text) for text in arguments), *([CallEnd(index)] if complete else [])]


def events(written: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; their `event:` line names their type."""
    assert written.endswith(b"\n\n") or not written
    found = []
    for block in written.decode().split("\n\n")[:-1]:
        kind, data = block.split("\n")
        assert data.startswith("data: ")
        found.append(json.loads(data[6:]))
        assert kind == f"event: {found[-1]['type']}"
    return found
