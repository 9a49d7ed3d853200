"""An answer as it streams from an endpoint: its parts, its end, and its statistics.

Owns the differences between endpoints in these. Knows nothing of requests and connections.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgelm.client.call_parts import CallParts
from edgelm.client.json_values import clean_text, mapping, number, whole
from edgelm.client.turns import Call

THINK, THOUGHT = "<think>", "</think>"
_MAX_FIGURE = 1e12  # tokens, or milliseconds


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of the answer, or of the reasoning before it."""

    text: str = ""
    reasoning: str = ""
    drafted: tuple[tuple[int, int], ...] = ()  # spans of `text` from accepted draft tokens: begin, end
    tokens: int = 1
    calling: str = ""  # the tool whose call is being written


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Statistics of an answer. None: the endpoint does not report it. `reasoning_ms` is measured by the caller."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_ms: float | None = None
    tokens_per_second: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    context_used: int | None = None
    context_size: int | None = None
    engine: str = ""
    device: str = ""
    reasoning_ms: float | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer. `reason`: stop, length, context, content_filter, or the endpoint's own.

    With `calls` the answer goes on after their results.
    """

    reason: str
    stats: AnswerStats
    calls: tuple[Call, ...] = ()


class AnswerStream:
    """An answer while it arrives: the times of its tokens, and the endpoint's own statistics."""

    def __init__(self, started: float, *, tags: bool = False) -> None:
        """`tags`: the content may begin with <think>."""
        self.reason: str | None = None
        self.begun = False
        self.chunks = 0
        self._started = started
        self._first = self._last = 0.0
        self._num_tokens = 0  # as far as they can be counted
        self._usage: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._calls = CallParts()
        self._tags = ThinkTags() if tags else None

    def take(self, chunk: Mapping[str, Any]) -> Delta | None:
        """Return what a chunk adds to the answer; None: nothing to show. A field of a wrong type is ignored."""
        self.chunks += 1
        own = mapping(chunk.get("edgelm"))
        self._own |= own
        self._usage = mapping(chunk.get("usage")) or self._usage
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices:
            return None
        choice = mapping(choices[0])
        delta, reason = mapping(choice.get("delta")), choice.get("finish_reason")
        self.reason = reason if isinstance(reason, str) and reason else self.reason
        content = delta.get("content")
        text = clean_text(content) if isinstance(content, str) else ""
        reasoning = clean_text(reasoning_of(delta))
        if self._tags is not None:
            tagged, text = self._tags.take(text, is_open=not reasoning)
            reasoning += tagged
        self._calls.take(delta.get("tool_calls"))
        if not text and not reasoning:
            self.begun |= bool(self._calls.name)
            return Delta(calling=self._calls.name) if self._calls.name and not reason else None
        self._last = time.perf_counter()
        self._first = self._first or self._last
        num_tokens = max(whole(own.get("tokens")) or 1, 1)
        self._num_tokens += num_tokens
        self.begun = True
        return Delta(text, reasoning, _spans(own, len(text)), num_tokens)

    def rest(self) -> Delta | None:
        """Return the text that was held because it might have become a tag."""
        reasoning, text = self._tags.close() if self._tags is not None else ("", "")
        return Delta(text, reasoning) if text or reasoning else None

    def finish(self) -> Finished:
        own, usage = self._own, self._usage
        timings, speculation, context = (mapping(own.get(name)) for name in ("timings", "speculation", "context"))
        completion = whole(usage.get("completion_tokens"))
        prompt = whole(usage.get("prompt_tokens"))
        measured = 1000 * (self._first - self._started) if self._first else None
        used = whole(context.get("used"))
        if used is None and prompt is not None and completion is not None:
            used = prompt + completion
        first_token_ms = number(timings.get("first_token_ms"))
        details = mapping(usage.get("completion_tokens_details"))
        return Finished(
            str(own.get("finish_reason") or self.reason),
            AnswerStats(
                prompt_tokens=prompt,
                cached_tokens=whole(own.get("cached_tokens")),
                completion_tokens=completion,
                first_token_ms=measured if first_token_ms is None else first_token_ms,
                tokens_per_second=number(timings.get("decode_tokens_per_second")) or self._speed(completion),
                drafted=whole(speculation.get("drafted")),
                accepted=whole(speculation.get("accepted")),
                context_used=used,
                context_size=whole(context.get("size")),
                engine=str(own.get("engine") or ""),
                device=str(own.get("device") or ""),
                reasoning_tokens=whole(details.get("reasoning_tokens")) or None,
            ),
            self._calls.finish(),
        )

    def _speed(self, completion_tokens: int | None) -> float | None:
        count, seconds = (completion_tokens or self._num_tokens) - 1, self._last - self._first
        return count / seconds if count > 0 and seconds > 0 else None


class ThinkTags:
    """Splits a content that begins with <think> into reasoning and text: servers without a parser send it raw."""

    def __init__(self) -> None:
        self._unsent = ""  # may become a tag
        self._state: Literal["before", "inside", "behind", "text"] = "before"

    def take(self, text: str, *, is_open: bool) -> tuple[str, str]:
        """Return the reasoning and the text that are complete with this piece; not `is_open`: no tag begins here."""
        if self._state == "before" and not is_open:
            self._state = "text"
        held, self._unsent = self._unsent + text, ""
        reasoning = ""
        if self._state == "before":
            begun = held.lstrip()
            if THINK.startswith(begun[: len(THINK)]) and len(begun) < len(THINK):
                self._unsent = held
                return "", ""
            self._state = "inside" if begun.startswith(THINK) else "text"
            held = begun.removeprefix(THINK) if self._state == "inside" else held
        if self._state == "inside":
            reasoning, tag, held = held.partition(THOUGHT)
            if not tag:
                cut = next((n for n in range(len(THOUGHT) - 1, 0, -1) if reasoning.endswith(THOUGHT[:n])), 0)
                self._unsent = reasoning[len(reasoning) - cut :]
                return reasoning[: len(reasoning) - cut], ""
            self._state = "behind"
        if self._state == "behind":
            held = held.lstrip("\n")
            self._state = "text" if held else "behind"
        return reasoning, held

    def close(self) -> tuple[str, str]:
        """Return what is held; the rest is text, unless reasoning has begun."""
        held, self._unsent = self._unsent, ""
        if self._state == "inside":
            return held, ""
        self._state = "text"
        return "", held


def reasoning_of(delta: Mapping[str, Any]) -> str:
    """Return the reasoning of a delta: endpoints use one of two names, or both with equal text."""
    texts = (delta.get(name) for name in ("reasoning_content", "reasoning"))
    return next((text for text in texts if isinstance(text, str) and text), "")


def _spans(own: Mapping[str, Any], length: int) -> tuple[tuple[int, int], ...]:
    """Return the drafted spans of a text of this length; none if they are not valid."""
    items = own.get("drafted")
    spans: list[tuple[int, int]] = []
    for item in items if isinstance(items, list) else ():
        begin, end = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not (type(begin) is int and type(end) is int and (spans[-1][1] if spans else 0) <= begin < end <= length):
            return ()
        spans.append((begin, end))
    return tuple(spans)


def stats_to_json(stats: AnswerStats) -> str:
    """Return the stats as JSON, without unknown values."""
    values = {name: getattr(stats, name) for name in AnswerStats.__slots__}
    return json.dumps({name: value for name, value in values.items() if value not in (None, "")})


def stats_from_json(text: str) -> AnswerStats | None:
    """Parse stats that `stats_to_json` wrote, possibly in another version; None for an empty text.

    A value that is no figure is unknown: chats from other machines have been saved with such.
    """
    try:
        values = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    known: dict[str, Any] = {name: _words(values.get(name)) for name in ("engine", "device")}
    known |= {name: _figure(values.get(name)) for name in ("first_token_ms", "tokens_per_second", "reasoning_ms")}
    known |= {name: whole(_figure(values.get(name))) for name in AnswerStats.__slots__ if name not in known}
    return AnswerStats(**known)


def _figure(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_FIGURE:
        return None
    return value


def _words(value: object) -> str:
    return value if isinstance(value, str) else ""
