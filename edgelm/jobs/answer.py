"""An answer: messages in; reasoning, content and tool calls out, with a loaded model.

Owns the composition of prompt, grammar, engine and parser, for `edgelm run` and every API. Knows nothing of HTTP and of
any API's format; messages and tools have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import RequestError
from edgelm.base.sampling import DEFAULT_SAMPLING, SamplingParams
from edgelm.engine.core import Event, Masks, PictureSpan, Sampled, Stats
from edgelm.engine.usage import Usage
from edgelm.jobs.constraints import Constraints, Style, Styles
from edgelm.jobs.prompts import PastTokens, Prompts
from edgelm.jobs.request import AnswerDelta, AnswerReason, AnswerRequest, too_long
from edgelm.jobs.stop_tokens import stop_tokens
from edgelm.text.calls.output import RepeatedCalls
from edgelm.text.chat import Rendered
from edgelm.text.parse import AnswerParser, Args, CallBegin, CallEnd, Content, Part, Reasoning
from edgelm.text.prompt_token_cache import Prompt
from edgelm.text.stream import IndentLimit
from edgelm.text.template_runner import TemplateRunner
from edgelm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgelm.engine.sampling.grammar import Grammar, GrammarCompiler

CUT = "the answer reached its last token before its grammar ended: bound it, by maxLength, maxItems or {0,200}"
REPEATED = "the answer ends before a call that repeats an earlier one with the same arguments"
TAIL = 512  # characters of the prompt that tell where an answer begins


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to run."""

    request: AnswerRequest
    ids: list[int]
    params: SamplingParams
    chat: Prompt | None  # None: the prompt is a text
    tail: str  # the end of the rendered prompt
    style: Style
    grammar: Grammar | None
    stops: tuple[str, ...]
    past: list[int]
    cache_namespace: str
    client: str  # who takes turns with others in the queue
    notes: tuple[str, ...]
    usage: Usage | None = None  # counts every sequence
    pictures: tuple[PictureSpan, ...] = ()
    stop_tokens: Mapping[int, str] = field(default_factory=dict)  # of the request, with what is reported at the end


class Answerer:
    """Answers requests with one model. For one event loop; the caller closes the parts.

    Without `grammars`, no request may have a grammar or tools.
    """

    def __init__(
        self, loaded: LoadedModel, templates: TemplateRunner, grammars: GrammarCompiler | None, settings: Settings
    ) -> None:
        self._loaded = loaded
        self._templates = templates
        self._settings = settings
        self._prompts = Prompts(loaded, templates, settings)
        self._past = PastTokens(loaded.tokenizer)
        self._styles = Styles(loaded.tokenizer, templates)
        self._constraints = Constraints(loaded.tokenizer, grammars)

    async def prepare(self, request: AnswerRequest, cache_namespace: str = "", client: str = "") -> Prepared:
        """Render, encode and constrain a request.

        Raises RequestError for one that cannot be answered, ContextError if it is too long, and the errors of the
        template worker.
        """
        self._loaded.require("text")
        params = self._params(request)
        style, chat, tail = Style(), None, ""
        spans: tuple[PictureSpan, ...] = ()
        if request.prompt is not None:
            ids = await asyncio.to_thread(self._prompts.text_tokens, request)
        else:
            style = await self._styles.of(request)
            chat, pictures = await self._prompts.chat(request, style, cache_namespace)
            (ids, spans), tail = pictures.expanded(chat), chat.rendered.text[-TAIL:]
        if not ids:
            raise RequestError("the prompt is empty", "give at least one token")
        if len(ids) >= (context := self._loaded.engine.info.context):
            raise too_long(f"the prompt has {len(ids):,} tokens", context)
        grammar, notes = await self._constraints.grammar(request, style, tail)
        notes = (*request.notes, *notes)
        if request.thinking_budget is not None and style.reasoning is None and not style.is_harmony:
            notes = (*notes, "the thinking budget has no effect: the model does not think")
        if chat is not None:
            notes = (*notes, *_notes_on_effort(chat.rendered, request.template_kwargs.get("reasoning_effort")))
        stops = request.stop if chat is None else (*request.stop, *(await self._templates.template()).stop_strings)
        ends = stop_tokens(self._loaded.tokenizer, request.stop, params.stop_ids, style.marks)
        params = replace(params, stop_ids=self._loaded.tokenizer.stop_ids | ends.keys())
        predicted = [{"role": "assistant", "content": request.prediction}] if request.prediction else []
        past = await self._past.tokens([*request.past, *predicted])
        return Prepared(
            request,
            ids,
            params,
            chat,
            tail,
            style,
            grammar,
            tuple(stops),
            past,
            cache_namespace,
            client,
            tuple(notes),
            pictures=spans,
            stop_tokens=ends,
        )

    async def answer(self, prepared: Prepared) -> AsyncGenerator[AnswerDelta, None]:
        """Yield the answer as it is decoded. Leaving the iterator cancels it. Raises the error of a failed request."""
        if prepared.request.echo:
            async with aclosing(self._echo(prepared)) as deltas:
                async for delta in deltas:
                    yield delta
        elif prepared.request.sampling.get("max_tokens") == 0:
            async with aclosing(self._choice(prepared, 0)) as deltas:
                async for delta in deltas:
                    if delta.reason:
                        stats = replace(delta.stats, completion_tokens=0) if delta.stats else None
                        end = AnswerDelta((), reason="length", stats=stats, notes=delta.notes)
                        for choice in range(prepared.request.num_choices):
                            yield replace(end, choice=choice)
        elif prepared.request.num_choices == 1:
            async with aclosing(self._choice(prepared, 0)) as deltas:
                async for delta in deltas:
                    yield delta
        else:
            async with aclosing(self._choices(prepared)) as deltas:
                async for delta in deltas:
                    yield delta

    def _params(self, request: AnswerRequest) -> SamplingParams:
        settings = self._settings
        values: dict[str, Any] = {
            "max_tokens": None,
            "seed": secrets.randbits(32),
            **DEFAULT_SAMPLING,
            **self._loaded.sampling,
            **settings.as_params(),
            **request.sampling,
        }
        if values.pop("repeatable", False):
            if not self._loaded.engine.info.repeatable:
                raise RequestError(
                    "repeatable: the model was not loaded for it",
                    "start `edgelm serve --repeatable`, or set `repeatable = true` for the model in config.toml",
                )
            values["seed"] = request.sampling.get("seed", settings.seed or 0)
        if values["max_tokens"] == 0:
            values["max_tokens"] = 1  # its token is dropped
        return SamplingParams(**values)

    # -- answers ---------------------------------------------------------------------------------------------------

    async def _choice(self, prepared: Prepared, choice: int) -> AsyncGenerator[AnswerDelta, None]:
        """Yield one answer, and keep its tokens for the next turn of the conversation."""
        engine = self._loaded.engine
        decoding = Decoding(prepared, choice, self._loaded.tokenizer)
        stream = engine.submit(
            prepared.ids,
            decoding.params,
            self._constraints.matcher(prepared.request, prepared.style, prepared.tail, prepared.grammar),
            past=prepared.past,
            cache_namespace=prepared.cache_namespace,
            client=prepared.client,
            interactive=_is_urgent(prepared.request),
            limit_s=None if prepared.request.time_limit_ms is None else prepared.request.time_limit_ms / 1000,
            usage=prepared.usage,
            pictures=prepared.pictures,
        )
        try:
            async with aclosing(stream):
                async for event in stream:
                    delta = decoding.push(event)
                    if decoding.is_cut:
                        stats = event.stats or await stream.stop()
                        delta = replace(delta, stats=replace(stats, completion_tokens=len(decoding.ids)))
                    yield delta
                    if delta.reason:
                        return
        finally:
            # The message of a repeated call does not have all the tokens. Repeatable answers depend on texts alone:
            # another process may encode them to other tokens than the model generated.
            is_kept = choice == 0 and not (decoding.repeats.found or engine.info.repeatable)
            if decoding.ids and is_kept and prepared.chat is not None and (ids := decoding.ended_ids()):
                await self._templates.cache_answer(prepared.chat, ids, decoding.message.message())

    async def _choices(self, prepared: Prepared) -> AsyncGenerator[AnswerDelta, None]:
        """Yield several answers as they come. All but the first begin when the prompt, which they share, is cached."""
        answers = [self._choice(prepared, choice) for choice in range(prepared.request.num_choices)]
        async with aclosing(answers[0]) as first:
            yield await anext(first)
            async with aclosing(merged(answers)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _echo(self, prepared: Prepared) -> AsyncGenerator[AnswerDelta, None]:
        """Yield the prompt as the beginning of each answer, then the answers."""
        ids, request = prepared.ids, prepared.request
        scores: tuple[Sampled, ...] = ()
        if prepared.params.num_logprobs is not None:
            scores = (Sampled(ids[0]), *await self._scores(prepared))
        text = request.prompt
        if not isinstance(text, str):
            text = self._loaded.tokenizer.decode(ids, strip_prefix_space=True)
        echoes = [AnswerDelta((Content(text),), scores, choice) for choice in range(request.num_choices)]
        if request.sampling.get("max_tokens") == 0:
            stats = _no_stats(len(ids))
            if prepared.usage and len(scores) < 2:  # the engine had nothing to do
                prepared.usage.begin(counts_prompt=True)(Event(0, finish_reason="length", stats=stats))
            for echo in echoes:
                yield replace(echo, reason="length", stats=stats)
            return
        async with aclosing(self.answer(replace(prepared, request=replace(request, echo=False)))) as deltas:
            first = await anext(deltas)  # a request that fails at once shows nothing
            for delta in (*echoes, first):
                yield delta
            async for delta in deltas:
                yield delta

    async def _scores(self, prepared: Prepared) -> list[Sampled]:
        """Return the model's log-probabilities of the prompt's tokens behind the first."""
        script = prepared.ids[1:]
        if not script:
            return []
        params = SamplingParams(temperature=0, max_tokens=len(script), num_logprobs=prepared.params.num_logprobs)
        sampled: list[Sampled] = []
        stream = self._loaded.engine.submit(
            prepared.ids[:1],
            params,
            _ScriptMatcher(script),
            cache_namespace=prepared.cache_namespace,
            client=prepared.client,
            usage=prepared.usage if prepared.request.sampling.get("max_tokens") == 0 else None,
            scoring=True,
        )
        async with aclosing(stream):
            async for event in stream:
                sampled += event.sampled
        return sampled


async def merged(answers: Sequence[AsyncGenerator[AnswerDelta, None]]) -> AsyncGenerator[AnswerDelta, None]:
    """Yield the deltas of several answers, which run at the same time. The first error ends all."""
    queue: asyncio.Queue[AnswerDelta | None] = asyncio.Queue()

    async def run(answer: AsyncGenerator[AnswerDelta, None]) -> None:
        try:
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(run(answer)) for answer in answers]
    left = len(tasks)
    try:
        while left:
            delta = await queue.get()
            if delta is not None:
                yield delta
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Decoding:
    """One answer as it is decoded: events of the engine in, deltas out."""

    def __init__(self, prepared: Prepared, choice: int, tokenizer: Tokenizer) -> None:
        request, style = prepared.request, prepared.style
        uses_tools = bool(request.tools) and request.tool_choice.mode != "none"
        self.params = replace(prepared.params, choice=choice)
        self.ids: list[int] = []  # of the answer so far
        self.message, self.repeats = _MessageBuilder(), RepeatedCalls()
        self.is_cut = False  # it ends here, although the engine would go on
        self._notes = prepared.notes
        self._must_end = request.grammar is not None or request.tool_choice.mode == "required"
        self._tokenizer = tokenizer
        self._stop_tokens = prepared.stop_tokens
        self._limit = IndentLimit(request.least_indent)
        self._is_complete = False  # the model or the grammar ended it
        self._parser = AnswerParser(
            style.tools.form if style.tools and (uses_tools or style.is_harmony) else None,
            style.reasoning,
            prepared.tail,
            request.tools,
            marks=style.marks,
            stop=prepared.stops,
            must_call=request.tool_choice.mode == "required",
            may_call=uses_tools,
        )

    def push(self, event: Event) -> AnswerDelta:
        """Take the tokens of an event, up to where the answer is cut; the last delta has the reason of the end."""
        parser, parts, taken = self._parser, list[Part](), 0
        for index, sample in enumerate(event.sampled):
            taken += 1
            if sample.id in self._stop_tokens:  # it is the last one, and no mark
                break
            piece = b"" if sample.id in self.params.stop_ids else self._tokenizer.piece(sample.id)
            parts += self._take(parser.push(sample.id, piece, drafted=index < event.accepted))
            self.is_cut = parser.stopped or self._limit.reached or self.repeats.found
            if self.is_cut:
                break
        sampled = event.sampled[:taken]
        self.ids += [sample.id for sample in sampled]
        reason: AnswerReason | None = "stop" if self.is_cut else None
        if event.finish_reason and not self.is_cut:
            parts += self._take(parser.flush(event.finish_reason))
            self._is_complete = event.finish_reason == "stop"
            reason = cast(AnswerReason, parser.finish_reason(event.finish_reason))
        notes = self._notes
        if self.repeats.found:
            notes, reason = (*notes, REPEATED), "tool_calls"
        if reason in ("length", "context") and self._must_end:
            notes = (*notes, CUT)
        self.message.add(parts)
        return AnswerDelta(
            tuple(parts),
            sampled,
            self.params.choice,
            reason,
            (parser.stop or self._stop_tokens.get(self.ids[-1])) if reason == "stop" and self.ids else None,
            event.stats,
            parser.reasoning_tokens,
            notes if reason else (),
        )

    def ended_ids(self) -> list[int]:
        """Return the tokens with a stop token at the end, also if the grammar ended the answer, before any.

        A stop token of the request alone is not part of the conversation.
        """
        if self.ids[-1] in self._stop_tokens:
            return self.ids[:-1]
        if self._is_complete and self.ids[-1] not in self.params.stop_ids:
            return self.ids + sorted(self._tokenizer.stop_ids)[:1]
        return self.ids

    def _take(self, parts: list[Part]) -> list[Part]:
        """Return the parts before a repeated call, up to the limit of the content's indentation."""
        if self._limit.least:
            limit = self._limit
            parts = [replace(part, text=limit.take(part.text)) if isinstance(part, Content) else part for part in parts]
        return self.repeats.take(parts)


class _MessageBuilder:
    """The message that a client gets, as it comes back in the history."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._complete = 0  # calls

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content():
                    self._texts.append(part.text)
                case Reasoning():
                    self._thoughts.append(part.text)
                case CallBegin():
                    function = {"name": part.name, "arguments": ""}
                    self._calls.append({"id": part.id, "type": "function", "function": function})
                case Args():
                    self._calls[-1]["function"]["arguments"] += part.json_text
                case CallEnd():
                    self._complete += 1

    def message(self) -> dict[str, Any] | None:
        """Return the message; None: a call was cut off, and no client sends it back."""
        if self._complete < len(self._calls):
            return None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _notes_on_effort(rendered: Rendered, asked: object) -> list[str]:
    """Return what a template makes of the reasoning that a request asks for, where that is something else."""
    if rendered.stays_on:
        return ["the reasoning cannot be turned off: the model's chat template has no way"]
    if not rendered.effort:
        return []
    if asked is None:
        return [f"the reasoning cannot be turned off: the effort {rendered.effort!r} is used"]
    return [f"the model's chat template refuses the reasoning effort {asked!r}: {rendered.effort!r} is used"]


def _is_urgent(request: AnswerRequest) -> bool:
    """Tell whether somebody waits in an editor, and not for a warm cache."""
    return (request.interactive or request.suffix is not None) and request.sampling.get("max_tokens") != 0


def _no_stats(prompt_tokens: int) -> Stats:
    """Return the stats of an answer that is the prompt alone."""
    return Stats(
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        completion_tokens=0,
        drafted=0,
        accepted=0,
        queue_ms=0,
        prompt_ms=0,
        first_token_ms=0,
        decode_ms=0,
    )


class _ScriptMatcher:
    """A `Matcher` (core.py) that allows one sequence of tokens, so that the model only scores it.

    They are forced like those of a grammar: verification runs many of them in one step, and each sampled token has the
    log-probability that the model itself gives it.
    """

    error: str | None = None
    unrestricted = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._num_accepted = 0

    @property
    def done(self) -> bool:
        return self._num_accepted == len(self._tokens)

    def allowed(self, draft: list[int]) -> int:
        expected = self._tokens[self._num_accepted :]
        pairs = zip(draft, expected, strict=False)
        return next((row for row, (token, right) in enumerate(pairs) if token != right), min(len(draft), len(expected)))

    def forced(self, most: int) -> list[int]:
        return list(self._tokens[self._num_accepted : self._num_accepted + most])

    def fill(self, draft: list[int], rows: Masks) -> None:
        rows[:] = 0
        for row, token in zip(rows, self._tokens[self._num_accepted :], strict=False):
            row.view(np.uint32)[token // 32] = 1 << token % 32

    def accept(self, token: int) -> None:
        assert token == self._tokens[self._num_accepted]
        self._num_accepted += 1
