"""A request in our words as one of OpenAI's API to another server, and the chunks of its stream as deltas.

Owns what such a server can be asked, what is refused instead, and what may be wrong in its chunks. Knows no connection.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgelm.base.errors import EngineError
from edgelm.base.sampling import SAMPLING
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.client.answer_stream import ThinkTags, reasoning_of
from edgelm.client.call_parts import CallParts
from edgelm.client.json_values import clean_text, mapping, number, whole
from edgelm.engine.core import Sampled, Stats
from edgelm.jobs.request import AnswerDelta, AnswerReason, AnswerRequest
from edgelm.server.api.errors import ApiError
from edgelm.text.calls.format import ToolChoice
from edgelm.text.parse import Args, CallBegin, CallEnd, Content, Part, Reasoning

# Fields that are omitted after a server has refused them: the answer means the same without.
OPTIONAL = (
    *("stream_options", "reasoning_content", "chat_template_kwargs", "reasoning_effort", "parallel_tool_calls"),
    *("encoding_format", "truncate_prompt_tokens"),  # of embeddings
    "ignore_eos",  # of `edgelm bench`
)
NO_OBJECT = "json_object"  # among the omitted: the server follows schemas, and not this format (llama-server)
THINKING = ("enable_thinking", "thinking")  # template variables of our own making
REASONS: dict[str, AnswerReason] = {"length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}
MAX_TOKENS = 2**20  # whose texts are kept for log-probabilities


def path_of(requests: Sequence[AnswerRequest]) -> str:
    """Return the route of the other server, behind its base URL."""
    return "/chat/completions" if requests[0].prompt is None else "/completions"


def body_of(requests: Sequence[AnswerRequest], model: str, omitted: frozenset[str]) -> dict[str, Any]:
    """Return the body for another server, without fields that it refused before.

    Several requests differ in their prompts only. Raises ApiError for what another server cannot be asked.
    """
    request = requests[0]
    _check(request)
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _sampling(request)
    if request.stop:
        body["stop"] = list(request.stop)
    if request.num_choices > 1:
        body["n"] = request.num_choices
    if request.prompt is None:
        body |= _conversation(request, "reasoning_content" not in omitted)
    else:
        prompts = [one.prompt for one in requests]
        body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    if request.grammar is not None:
        body["response_format"] = _response_format(request.grammar, NO_OBJECT in omitted)
    return {name: value for name, value in body.items() if name not in omitted}


def echoes_of(requests: Sequence[AnswerRequest]) -> Iterator[AnswerDelta]:
    """Yield the prompts with which the answers begin, where that was requested."""
    for at, request in enumerate(requests):
        if request.echo and isinstance(request.prompt, str):
            for choice in range(request.num_choices):
                yield AnswerDelta((Content(request.prompt),), (), at * request.num_choices + choice)


def notes_of(request: AnswerRequest, omitted: frozenset[str]) -> tuple[str, ...]:
    """Return what is not passed on, for the answer to say."""
    notes = []
    if request.thinking_budget is not None:
        notes.append("ignored the limit of reasoning: the model runs on another server")
    if request.prediction:
        notes.append("ignored prediction: the model runs on another server")
    dropped = sorted({"chat_template_kwargs", "reasoning_effort", "parallel_tool_calls"} & omitted)
    if dropped and (request.template_kwargs or request.parallel_tool_calls is not None):
        notes.append(f"the server of the model refuses {', '.join(dropped)}")
    return tuple(notes)


def _check(request: AnswerRequest) -> None:
    """Raise ApiError for what only an engine of this machine can do."""
    draft = request.sampling.get("draft", "off")
    for is_asked, what, param in (
        (request.suffix is not None, "the middle of a text", "suffix"),
        (
            request.echo and ("num_logprobs" in request.sampling or not isinstance(request.prompt, str)),
            "an echo with log-probabilities or of tokens",
            "echo",
        ),
        (request.least_indent > 0, "a limit of indentation", "n_indent"),
        (request.time_limit_ms is not None, "a limit of time", "t_max_predict_ms"),
        (draft not in ("off", "auto"), "a choice of drafts", "draft"),
        (bool(request.sampling.get("repeatable")), "answers that are equal to the letter", "repeatable"),
        (
            request.grammar is not None and request.grammar.kind not in ("json_object", "json_schema"),
            "a grammar other than a JSON schema",
            "grammar",
        ),
    ):
        if is_asked:
            message = f"the model runs on another server, which is not asked for {what}: omit {param}"
            raise ApiError(400, "unsupported_by_remote", message, param=param)


def _sampling(request: AnswerRequest) -> dict[str, Any]:
    given = request.sampling
    body = {name: value for name, value in given.items() if name in SAMPLING or name in ("max_tokens", "seed")}
    if "repetition_penalty" in body:  # vLLM's name, and llama-server's
        body["repeat_penalty"] = body["repetition_penalty"]
    if bias := given.get("logit_bias"):
        body["logit_bias"] = {str(token): value for token, value in bias}
    if stop_ids := given.get("stop_ids"):
        body["stop_token_ids"] = sorted(stop_ids)
    if (count := given.get("num_logprobs")) is not None:
        body |= {"logprobs": True, "top_logprobs": count} if request.prompt is None else {"logprobs": count}
    return body


def _conversation(request: AnswerRequest, with_reasoning: bool) -> dict[str, Any]:
    messages = [
        message if with_reasoning else {name: value for name, value in message.items() if name != "reasoning_content"}
        for message in request.messages
    ]
    body: dict[str, Any] = {"messages": messages}
    if request.tools:
        body |= _tools(request.tools, request.tool_choice)
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    for at, message in enumerate(messages):
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            # The other server would fetch it, perhaps from its own network.
            if part["type"] == "image_url" and not part["image_url"]["url"].startswith("data:"):
                problem = "the model runs on another server, which is given no addresses of pictures: send the picture"
                raise ApiError(400, "unsupported_by_remote", problem, param=f"messages.{at}.content")
    kwargs = dict(request.template_kwargs)
    if effort := kwargs.pop("reasoning_effort", None):
        body["reasoning_effort"] = effort
        for name in THINKING:  # the effort says it, and not every server takes variables
            kwargs.pop(name, None)
    if kwargs:
        body["chat_template_kwargs"] = kwargs
    if request.continues_last:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _tools(tools: Sequence[dict[str, Any]], choice: ToolChoice) -> dict[str, Any]:
    names = choice.names
    if names is not None and len(names) > 1:  # OpenAI's form for several is known to few servers
        tools = [tool for tool in tools if tool["function"]["name"] in names]
    mode: Any = choice.mode
    if mode == "required" and names is not None and len(names) == 1:
        mode = {"type": "function", "function": {"name": next(iter(names))}}
    return {"tools": list(tools), "tool_choice": mode}


def _response_format(grammar: GrammarSpec, needs_schema: bool) -> dict[str, Any]:
    if grammar.kind == "json_object":
        an_object = {"name": "answer", "schema": {"type": "object"}}
        return {"type": "json_schema", "json_schema": an_object} if needs_schema else {"type": "json_object"}
    schema = {"name": "answer", "schema": json.loads(grammar.source), "strict": grammar.strict}
    return {"type": "json_schema", "json_schema": schema}


class TokenTexts:
    """The texts of another server's tokens, numbered as they come: what log-probabilities need of a tokenizer."""

    stop_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._texts: list[bytes] = []

    def id_of(self, text: object, spelled: object = None) -> int:
        """Return the number of a token; `spelled` are its bytes, where the server tells them."""
        data = clean_text(text).encode() if isinstance(text, str) else b""
        if isinstance(spelled, list) and all(type(byte) is int and 0 <= byte < 256 for byte in spelled):
            data = bytes(spelled)
        if data not in self._ids:
            if len(self._texts) >= MAX_TOKENS:
                raise EngineError("the answer has too many different tokens", "ask for fewer log-probabilities")
            self._ids[data] = len(self._texts)
            self._texts.append(data)
        return self._ids[data]

    def piece(self, token: int) -> bytes:
        return self._texts[token]

    def text_of(self, token: int) -> str:
        return self._texts[token].decode("utf-8", "replace")


class _Choice:
    """One answer while it arrives."""

    def __init__(self, *, tags: bool) -> None:
        self.reason: str | None = None
        self.stop: str | None = None
        self._tags = ThinkTags() if tags else None
        self._calls = CallParts()
        self._open: int | None = None  # the number of the call that is being written
        self._held = ""  # its arguments before its name
        self._num_calls = 0
        self._has_arguments = False
        self._ids: set[str] = set()

    def parts(self, delta: Mapping[str, Any]) -> Iterator[Part]:
        """Yield the parts that a delta adds. Raises EngineError for calls that are mixed."""
        content = delta.get("content")
        text = clean_text(content) if isinstance(content, str) else ""
        reasoning = clean_text(reasoning_of(delta))
        if self._tags is not None and text:
            tagged, text = self._tags.take(text, is_open=not reasoning)
            reasoning += tagged
        if self._open is not None:  # white space beside calls belongs to nobody
            text = text if text.strip() else ""
            if reasoning or text:
                yield from self._end_call()
        if reasoning:
            yield Reasoning(reasoning)
        if text:
            yield Content(text)
        items = delta.get("tool_calls")
        if isinstance(older := delta.get("function_call"), dict):  # OpenAI's older form of one call
            items = [{"index": 0, "function": older}]
        for number_of, call_id, name, arguments in self._calls.take(items):
            if number_of != self._open:
                if number_of < self._num_calls:
                    raise EngineError("the server of the model mixes two calls of tools", "try again")
                yield from self._end_call()
                self._open, self._held, self._has_arguments = number_of, "", False
            yield from self._call(call_id, name, arguments)

    def end(self) -> Iterator[Part]:
        """Yield the parts that were held."""
        reasoning, text = self._tags.close() if self._tags is not None else ("", "")
        if reasoning:
            yield Reasoning(reasoning)
        if text:
            yield Content(text)
        if self.reason != "length":  # a call that is cut off has no end
            yield from self._end_call()

    @property
    def num_calls(self) -> int:
        return self._num_calls

    @property
    def answer_reason(self) -> AnswerReason:
        if self._num_calls and self.reason == "stop":
            return "tool_calls"
        return REASONS.get(self.reason or "", "stop")

    def _call(self, call_id: str, name: str, arguments: str) -> Iterator[Part]:
        assert self._open is not None
        if not name:
            self._held += arguments
            return
        if self._num_calls <= self._open:
            while not call_id or call_id in self._ids:
                call_id = f"call_{secrets.token_hex(12)}"
            self._ids.add(call_id)
            self._num_calls = self._open + 1
            yield CallBegin(self._open, call_id, name)
            arguments, self._held = self._held + arguments, ""
        if arguments:
            self._has_arguments = True
            yield Args(self._open, arguments)

    def _end_call(self) -> Iterator[Part]:
        if self._open is not None and self._num_calls > self._open:
            if not self._has_arguments:
                yield Args(self._open, "{}")
            yield CallEnd(self._open)
        self._open = None


class Chunks:
    """The deltas of an answer from the chunks of a server's stream."""

    def __init__(self, requests: Sequence[AnswerRequest], notes: tuple[str, ...], texts: TokenTexts) -> None:
        request = requests[0]
        self._is_chat = request.prompt is None
        self._needs_call = request.tool_choice.mode == "required" and bool(request.tools)
        self._choices = [_Choice(tags=self._is_chat) for _ in range(len(requests) * request.num_choices)]
        self._notes = notes
        self._texts = texts
        self._usages: dict[int | None, dict[str, Any]] = {}  # by choice; None: of all together
        self._num_pieces = 0  # of text: the number of tokens, where the server does not tell it

    def take(self, chunk: Mapping[str, Any]) -> Iterator[AnswerDelta]:
        """Yield what a chunk adds."""
        usage, choices = mapping(chunk.get("usage")), chunk.get("choices")
        entries = [mapping(entry) for entry in choices] if isinstance(choices, list) else []
        if usage:  # llama-server tells it with the end of each choice, others behind all
            self._usages[whole(entries[0].get("index")) or 0 if entries else None] = usage
        for entry in entries:
            index = whole(entry.get("index")) or 0
            if not 0 <= index < len(self._choices):
                continue
            choice = self._choices[index]
            reason = entry.get("finish_reason")
            if isinstance(reason, str) and reason:
                choice.reason = reason
                stop = entry.get("stop_reason") or entry.get("matched_stop")  # vLLM's and SGLang's: the stop string
                choice.stop = stop if isinstance(stop, str) else None
            # A server that does not stream sends a message.
            delta = mapping(entry.get("delta")) or mapping(entry.get("message"))
            parts = tuple(choice.parts(delta if self._is_chat else {"content": entry.get("text")}))
            sampled = tuple(self._sampled(mapping(entry.get("logprobs"))))
            if parts or sampled:
                self._num_pieces += 1
                yield AnswerDelta(parts, sampled, index)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.reason is not None for choice in self._choices)

    def finish(self, queue_ms: float, first_token_ms: float, decode_ms: float) -> list[AnswerDelta]:
        """Return the last delta of each choice; the first one has the counts of all."""
        usages = [self._usages[None]] if None in self._usages else [*self._usages.values()]

        def total(name: str, details: str = "") -> int:
            return sum(_count((mapping(one.get(details)) if details else one).get(name)) for one in usages)

        prompt = total("prompt_tokens")
        counts = {
            "prompt_tokens": prompt,
            "cached_tokens": min(total("cached_tokens", "prompt_tokens_details"), prompt),
            "completion_tokens": total("completion_tokens") if usages else self._num_pieces,
        }
        times: dict[str, Any] = {
            "queue_ms": queue_ms,
            "prompt_ms": max(first_token_ms - queue_ms, 0.0),
            "first_token_ms": first_token_ms,
            "decode_ms": decode_ms,
        }
        notes = self._notes if usages else (*self._notes, "the server of the model told no token counts")
        last = []
        for index, choice in enumerate(self._choices):
            own = counts if not index else dict.fromkeys(counts, 0)
            reason, parts = choice.reason, tuple(choice.end())
            odd: tuple[str, ...] = (
                (f"the server ended the answer: {reason[:40]}",) if reason == "content_filter" else ()
            )
            if self._needs_call and not choice.num_calls:
                odd += ("the server of the model called no tool, which was required",)
            last.append(
                AnswerDelta(
                    parts,
                    choice=index,
                    reason=choice.answer_reason,
                    stop=choice.stop,
                    stats=Stats(**own, drafted=0, accepted=0, **times),
                    reasoning_tokens=0 if index else total("reasoning_tokens", "completion_tokens_details"),
                    notes=(*notes, *odd),
                )
            )
        return last

    def _sampled(self, logprobs: Mapping[str, Any]) -> Iterator[Sampled]:
        """Yield the tokens of either form of log-probabilities."""
        id_of, content = self._texts.id_of, logprobs.get("content")
        for entry in map(mapping, content if isinstance(content, list) else ()):
            tops = entry.get("top_logprobs")
            top = [
                (id_of(one.get("token"), one.get("bytes")), number(one.get("logprob")) or 0.0)
                for one in map(mapping, tops if isinstance(tops, list) else ())
            ]
            yield Sampled(id_of(entry.get("token"), entry.get("bytes")), number(entry.get("logprob")), tuple(top))
        tokens, values, tops = (logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
        if not isinstance(tokens, list) or not isinstance(values, list) or len(tokens) != len(values):
            return
        for at, (token, value) in enumerate(zip(tokens, values, strict=True)):
            likely = mapping(tops[at]) if isinstance(tops, list) and at < len(tops) else {}
            top = [(id_of(text), number(other) or 0.0) for text, other in likely.items()]
            yield Sampled(id_of(token), number(value), tuple(top))


def _count(value: object) -> int:
    """Return a number of tokens; 0 for anything that is none."""
    return max(whole(value) or 0, 0)
