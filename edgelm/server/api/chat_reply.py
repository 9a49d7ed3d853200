"""The answer of POST /v1/chat/completions in OpenAI's format, whole and as chunks, with our figures in `edgelm`.

Owns the formats. Knows nothing of HTTP and of the engine.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgelm import __version__
from edgelm.engine.core import ExecutorInfo, Sampled, Stats
from edgelm.jobs.request import AnswerDelta, AnswerReason, Span
from edgelm.server.api.arguments import custom_input
from edgelm.server.api.dialect import DONE, AnswerContext, Reply
from edgelm.server.api.logprobs import FEW_TOKENS, chat_logprobs, each_logprobs
from edgelm.text.parse import Args, CallBegin, CallEnd, Content, Part, Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """The fields of a request that its answer depends on."""

    num_choices: int = 1
    has_logprobs: bool = False
    includes_usage: bool = False  # in a chunk of its own
    custom_tools: frozenset[str] = frozenset()  # their input is a text
    has_functions: bool = False  # calls have OpenAI's older form
    has_prediction: bool = False


class ChatReply(Reply):
    """The choices of one request."""

    def __init__(self, options: ReplyOptions, context: AnswerContext) -> None:
        self._options = options
        self._context = context
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._last: dict[int, AnswerDelta] = {}  # by choice
        self._custom: dict[tuple[int, int], str] = {}  # by choice and call: arguments of open calls of custom tools

    def opening(self) -> bytes:
        choices = range(self._options.num_choices)
        return b"".join(event(self._chunk(index, {"role": "assistant", "content": ""})) for index in choices)

    def delta(self, delta: AnswerDelta) -> bytes:
        logprobs = self._logprobs(delta.sampled)
        shown = self._shown(delta)
        if not (shown or delta.reason or (logprobs and logprobs["content"])):
            return b""
        chunks = []
        for fields, drafted in shown or [({}, [])]:
            chunk = self._chunk(delta.choice, fields)
            if drafted:
                chunk["edgelm"] = {"drafted": drafted}
            chunks.append(chunk)
        if len(delta.sampled) > 1:  # a client that shows the speed counts tokens
            chunks[0]["edgelm"] = {"tokens": len(delta.sampled)} | chunks[0].get("edgelm", {})
        chunks[0]["choices"][0]["logprobs"] = logprobs
        if delta.reason:
            self._last[delta.choice] = delta
            chunks[-1]["choices"][0]["finish_reason"] = self._reason(delta.reason)
            chunks[-1]["edgelm"] = figures(delta, self._context.executor) | chunks[-1].get("edgelm", {})
        return b"".join(map(event, chunks))

    def closing(self) -> bytes:
        if not self._options.includes_usage:
            return DONE
        chunk = self._envelope("chat.completion.chunk", [])
        return event(chunk | {"usage": self._usage(), "edgelm": figures(self._last[0], self._context.executor)}) + DONE

    def whole(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        answers: dict[int, list[AnswerDelta]] = {}
        for delta in deltas:
            answers.setdefault(delta.choice, []).append(delta)
        self._last = {choice: answer[-1] for choice, answer in answers.items()}
        is_large = sum(len(delta.sampled) for delta in deltas) > FEW_TOKENS
        spans = joined_spans([part for delta in answers[0] for part in delta.parts])
        return self._envelope(
            "chat.completion", [self._whole_choice(index, answers[index], is_large) for index in sorted(answers)]
        ) | {
            "usage": self._usage(),
            "edgelm": figures(self._last[0], self._context.executor) | ({"drafted": spans} if spans else {}),
        }

    def _whole_choice(self, index: int, deltas: list[AnswerDelta], is_large: bool) -> dict[str, Any]:
        parts = [part for delta in deltas for part in delta.parts]
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, CallBegin):
                calls.append(self._new_call(part))
            elif isinstance(part, Args):
                call = calls[-1]
                if call["type"] == "custom":
                    call["custom"]["input"] += part.json_text
                else:
                    call["function"]["arguments"] += part.json_text
        for call in calls:
            if call["type"] == "custom":
                call["custom"]["input"] = custom_input(call["custom"]["input"])
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls and self._options.has_functions:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        last = deltas[-1]
        assert last.reason
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs([sample for delta in deltas for sample in delta.sampled], is_large=is_large),
            "finish_reason": self._reason(last.reason),
        }

    def _shown(self, delta: AnswerDelta) -> list[tuple[dict[str, Any], list[Span]]]:
        """Return the fields of a delta's chunks, with the drafted spans of their content; adjacent texts are joined."""
        shown: list[tuple[dict[str, Any], list[Part]]] = []
        for part in delta.parts:
            fields = self._fields(part, delta.choice)
            last = shown[-1] if shown else None
            if last and isinstance(part, Content | Reasoning) and last[0].keys() == fields.keys():
                last[0].update({name: last[0][name] + text for name, text in fields.items()})
                last[1].append(part)
            elif fields:
                shown.append((fields, [part]))
        if delta.reason:
            shown += [(self._custom_call(*key), []) for key in sorted(self._custom) if key[0] == delta.choice]
        return [(fields, joined_spans(parts)) for fields, parts in shown]

    def _fields(self, part: Part, choice: int) -> dict[str, Any]:
        """Return the fields of the delta that shows a part; empty: it shows nothing."""
        match part:
            case Content(text, _):
                return {"content": text}
            case Reasoning(text, _):
                return {"reasoning_content": text, "reasoning": text}
            case CallBegin():
                call = self._new_call(part)
                if call["type"] == "custom":
                    self._custom[choice, part.index] = ""
                return self._call_fields(part.index, call)
            case Args() if (choice, part.index) in self._custom:  # shown when the JSON around the text is complete
                self._custom[choice, part.index] += part.json_text
            case Args():
                return self._call_fields(part.index, {"function": {"arguments": part.json_text}})
            case CallEnd() if (choice, part.index) in self._custom:
                return self._custom_call(choice, part.index)
        return {}

    def _call_fields(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        if self._options.has_functions:
            return {"function_call": call["function"]}
        return {"tool_calls": [{"index": index, **call}]}

    def _custom_call(self, choice: int, index: int) -> dict[str, Any]:
        return self._call_fields(index, {"custom": {"input": custom_input(self._custom.pop((choice, index)))}})

    def _new_call(self, part: CallBegin) -> dict[str, Any]:
        if part.name in self._options.custom_tools:
            return {"id": part.id, "type": "custom", "custom": {"name": part.name, "input": ""}}
        return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}

    def _reason(self, reason: AnswerReason) -> str:
        if reason == "tool_calls" and self._options.has_functions:
            return "function_call"
        return openai_reason(reason)

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._envelope("chat.completion.chunk", [choice])

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._context.model,
            "system_fingerprint": f"edgelm-{__version__}",
            "choices": choices,
        }

    def _logprobs(self, sampled: Sequence[Sampled], *, is_large: bool = False) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens; those of a large answer are an iterator, for `json_pieces`."""
        if not self._options.has_logprobs:
            return None
        entries = each_logprobs if is_large else chat_logprobs
        return {"content": entries(self._context.tokenizer, sampled), "refusal": None}

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._last, self._options.num_choices)
        if self._options.has_prediction:
            stats = [last.stats for last in self._last.values() if last.stats]
            accepted = sum(s.accepted for s in stats)
            rejected = sum(s.drafted for s in stats) - accepted
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
            counts["completion_tokens_details"] |= details
        return counts


def joined_spans(parts: Sequence[Part]) -> list[Span]:
    """Return the drafted spans of the content of some parts, in Unicode code points; adjacent spans are joined."""
    return AnswerDelta(tuple(parts)).drafted


def usage(last: dict[int, AnswerDelta], num_candidates: int = 1) -> dict[str, Any]:
    """Return OpenAI's token counts of the last deltas of all choices; a prompt counts once for its candidates."""
    stats = [delta.stats for _, delta in sorted(last.items()) if delta.stats]
    prompt = sum(s.prompt_tokens for s in stats[::num_candidates])
    completion = sum(s.completion_tokens for s in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in stats[::num_candidates])},
        "completion_tokens_details": {"reasoning_tokens": sum(delta.reasoning_tokens for delta in last.values())},
    }


def figures(last: AnswerDelta, executor: ExecutorInfo) -> dict[str, Any]:
    """Return the figures of an answer that OpenAI's format does not have."""
    assert last.stats
    stats = last.stats
    notes = {"notes": list(last.notes)} if last.notes else {}
    return {
        "finish_reason": last.reason,
        "timings": timings(stats),
        "speculation": {"drafted": stats.drafted, "accepted": stats.accepted},
        "cached_tokens": stats.cached_tokens,
        "context": {"used": stats.prompt_tokens + stats.completion_tokens, "size": executor.context},
        "engine": executor.engine,
        "device": executor.device,
        **notes,
    }


def timings(stats: Stats) -> dict[str, float]:
    """Return the times of a request."""
    return {
        "queue_ms": round(stats.queue_ms, 3),
        "prompt_ms": round(stats.prompt_ms, 3),
        "first_token_ms": round(stats.first_token_ms, 3),
        "decode_ms": round(stats.decode_ms, 3),
        "decode_tokens_per_second": round(stats.decode_tokens_per_second, 2),
    }


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _encode(data).encode() + b"\n\n"


def openai_reason(reason: AnswerReason) -> str:
    """Return a finish reason that OpenAI's clients know."""
    return "length" if reason == "context" else reason
