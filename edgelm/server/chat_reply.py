"""The answers of POST /v1/chat/completions in OpenAI's shape, whole and in chunks, with our numbers beside it.

Owns the shapes. Knows nothing of HTTP and of where the tokens come from.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from edgelm import __version__
from edgelm.completion import Delta, Span
from edgelm.core import ExecutorInfo, FinishReason, Sampled, Stats
from edgelm.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for what JSON cannot hold


@dataclass(slots=True)
class ChatReply:
    """The answer to one request."""

    model: str
    tokenizer: Tokenizer
    executor: ExecutorInfo
    logprobs: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        last = deltas[-1]
        assert last.finish_reason
        assert last.stats
        text = "".join(delta.text for delta in deltas)
        content = [each for delta in deltas for each in self._logprobs(delta)]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": {"content": content, "refusal": None} if self.logprobs else None,
            "finish_reason": _openai_reason(last.finish_reason),
        }
        return self._envelope("chat.completion", [choice]) | {
            "usage": usage(last.stats),
            "edgelm": self._beside(last.finish_reason, last.stats) | _drafted(_all_drafted(deltas)),
        }

    def opening(self) -> dict[str, Any]:
        """Return the chunk that begins a stream."""
        return self._chunk({"role": "assistant", "content": ""}, None, None)

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """Return the chunk for a delta; None: it shows nothing yet."""
        content = self._logprobs(delta) if self.logprobs else []
        if not (delta.text or content or delta.finish_reason):
            return None
        logprobs = {"content": content, "refusal": None} if self.logprobs else None
        chunk = self._chunk({"content": delta.text} if delta.text else {}, logprobs, delta.finish_reason)
        if delta.finish_reason:
            assert delta.stats
            chunk["edgelm"] = self._beside(delta.finish_reason, delta.stats) | _drafted(delta.drafted)
        elif delta.drafted:
            chunk["edgelm"] = _drafted(delta.drafted)
        return chunk

    def usage_chunk(self, last: Delta) -> dict[str, Any]:
        """Return the chunk that `stream_options.include_usage` asks for, behind the last."""
        assert last.finish_reason
        assert last.stats
        beside = self._beside(last.finish_reason, last.stats)
        return self._envelope("chat.completion.chunk", []) | {"usage": usage(last.stats), "edgelm": beside}

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: FinishReason | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": _openai_reason(reason) if reason else None,
        }
        return self._envelope("chat.completion.chunk", [choice])

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"edgelm-{__version__}",
            "choices": choices,
        }

    def _beside(self, reason: FinishReason, stats: Stats) -> dict[str, Any]:
        """Return what OpenAI's shape has no place for."""
        return {
            "finish_reason": reason,
            "timings": timings(stats),
            "speculation": {"drafted": stats.drafted, "accepted": stats.accepted},
            "cached_tokens": stats.cached_tokens,
            "context": {"used": stats.prompt_tokens + stats.completion_tokens, "size": self.executor.context},
            "engine": self.executor.engine,
            "device": self.executor.device,
        }

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the log-probabilities of the answer's tokens; the one that ends it is not part of the answer."""
        stop_ids = self.tokenizer.stop_ids
        return [self._token(sample) for sample in delta.sampled if sample.id not in stop_ids] if self.logprobs else []

    def _token(self, sample: Sampled) -> dict[str, Any]:
        top = [self._logprob(token, value) for token, value in sample.top]
        return self._logprob(sample.id, sample.logprob) | {"top_logprobs": top}

    def _logprob(self, token: int, value: float | None) -> dict[str, Any]:
        piece = self.tokenizer.piece(token)
        text = piece.decode("utf-8", "replace") if piece else self.tokenizer.text_of(token)
        safe = value if value is not None and value > LEAST_LOGPROB else LEAST_LOGPROB
        return {"token": text, "logprob": safe, "bytes": list(piece)}


def usage(stats: Stats) -> dict[str, Any]:
    """Return OpenAI's token counts."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


def timings(stats: Stats) -> dict[str, float]:
    """Return what a request took."""
    return {
        "queue_ms": round(stats.queue_ms, 3),
        "prompt_ms": round(stats.prompt_ms, 3),
        "first_token_ms": round(stats.first_token_ms, 3),
        "decode_ms": round(stats.decode_ms, 3),
        "decode_tokens_per_second": round(stats.decode_tokens_per_second, 2),
    }


def event(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def _drafted(spans: Sequence[Span]) -> dict[str, Any]:
    """Return which characters (Unicode code points) of the content beside it were drafted, where any were."""
    return {"drafted": [list(span) for span in spans]} if spans else {}


def _all_drafted(deltas: Sequence[Delta]) -> list[Span]:
    """Return the drafted parts of all texts together; those that touch are one."""
    joined: list[Span] = []
    begins = accumulate((len(delta.text) for delta in deltas), initial=0)
    for at, delta in zip(begins, deltas, strict=False):
        for first, end in delta.drafted:
            begin = joined.pop()[0] if joined and joined[-1][1] == at + first else at + first
            joined.append((begin, at + end))
    return joined


def _openai_reason(reason: FinishReason) -> str:
    return "length" if reason == "context" else reason
