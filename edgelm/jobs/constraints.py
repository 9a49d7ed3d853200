"""How a model thinks and calls tools, and the grammar of an answer to one request.

Owns the composition of text/constraint.py with the grammars of sampling/: calls, reasoning and content in one grammar,
kept by what it depends on.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgelm.base.errors import RequestError
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec, SchemaRule
from edgelm.engine.core import Matcher
from edgelm.engine.sampling.unique_lists import merged
from edgelm.jobs.request import AnswerRequest
from edgelm.jobs.tool_schemas import ToolSchemas
from edgelm.text.calls.known import known_formats
from edgelm.text.parse import control_marks
from edgelm.text.reasoning import ReasoningFormat, find_reasoning, is_thinking
from edgelm.text.template_runner import TemplateRunner
from edgelm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgelm.engine.sampling.grammar import Grammar, GrammarCompiler
    from edgelm.text.calls.derive import ToolSupport
    from edgelm.text.constraint import AnswerFormat

PROBE_BYTES = 2**16  # of a rendered probe
MAX_CONSTRAINTS = 64  # kept, least recently used out first
ANSWER_RULE = "answer_json"
HARMONY_THOUGHT = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>")


@dataclass(frozen=True, slots=True)
class Style:
    """How the model thinks and calls tools."""

    reasoning: ReasoningFormat | None = None
    tools: ToolSupport | None = None  # None: the request has nothing to do with tools
    marks: dict[str, int] = field(default_factory=dict)  # control tokens of both, by string

    @property
    def is_harmony(self) -> bool:
        return self.tools is not None and self.tools.form.body == "harmony"


class Styles:
    """The styles of one model. Its template is probed at the first request that needs its tool format."""

    def __init__(self, tokenizer: Tokenizer, templates: TemplateRunner) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._plain: Style | None = None
        self._harmony: bool | None = None  # None: not looked at yet
        self._probed: asyncio.Task[Style] | None = None

    async def of(self, request: AnswerRequest) -> Style:
        """Return the style for a chat. Raises the errors of the template worker."""
        calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in request.messages)
        if not (request.tools or calls or await self._is_harmony()):
            if self._plain is None:
                template = await self._templates.template()
                reasoning = find_reasoning(template.source, self._tokenizer.special_strings)
                marks = await asyncio.to_thread(control_marks, self._tokenizer, None, reasoning)
                self._plain = Style(reasoning, None, marks)
            return self._plain
        if self._probed is None or (self._probed.done() and self._probed.exception()):
            self._probed = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probed)

    async def _is_harmony(self) -> bool:
        if self._harmony is None:
            template = await self._templates.template()
            formats = known_formats(template.source, self._tokenizer.special_strings)
            self._harmony = any(form.body == "harmony" for form in formats)
        return self._harmony

    async def _probe(self) -> Style:
        from edgelm.text.calls.derive import find_support  # most requests have no tools

        template, tokenizer = await self._templates.template(), self._tokenizer
        loop = asyncio.get_running_loop()

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            rendering = self._templates.render(
                messages, max_bytes=PROBE_BYTES, tools=tools, add_generation_prompt=False
            )
            return asyncio.run_coroutine_threadsafe(rendering, loop).result().text

        strings = tokenizer.special_strings
        support = await asyncio.to_thread(find_support, template.source, strings, render)
        reasoning = find_reasoning(template.source, strings)
        marks = await asyncio.to_thread(control_marks, tokenizer, support.form, reasoning)
        return Style(reasoning, support, marks)


class Constraints:
    """The grammars of answers, for one model. Without `compiler`, no request may have a grammar or tools."""

    def __init__(self, tokenizer: Tokenizer, compiler: GrammarCompiler | None) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._schemas = ToolSchemas(self._check)
        self._kept: OrderedDict[str, tuple[GrammarSpec | None, tuple[str, ...]]] = OrderedDict()

    async def grammar(self, request: AnswerRequest, style: Style, tail: str) -> tuple[Grammar | None, tuple[str, ...]]:
        """Return the grammar of a whole answer, and notes on what it does not enforce.

        `tail` is the end of the rendered prompt. Raises RequestError.
        """
        spec, notes = await self._spec(request, style, tail)
        if spec is None:
            return None, notes
        try:
            grammar = await self._grammars.compile(spec)
        except RequestError as error:
            if spec is request.grammar or not request.tools:
                raise
            in_order, notes = await self._spec(request, style, tail, in_order=True)
            try:
                if in_order is None or in_order == spec:
                    raise
                # A part of a schema may be one that nothing conforms to, and the whole one without that part.
                grammar = await self._grammars.compile(in_order)
            except RequestError:
                raise RequestError(
                    f"the grammar of the tools cannot be used: {error.message}", "simplify the schemas of the tools"
                ) from None
        return grammar, (*notes, *(f"not enforced: {keyword}" for keyword in grammar.relaxed))

    def matcher(self, request: AnswerRequest, style: Style, tail: str, grammar: Grammar | None) -> Matcher | None:
        """Return the state of a new answer, with its budget of reasoning; None: nothing constrains it."""
        inner = grammar.matcher() if grammar else None
        reasoning = HARMONY_THOUGHT if style.is_harmony else style.reasoning
        spec, budget = request.grammar, request.thinking_budget
        follows = spec is not None and spec.kind in ("lark", "gbnf")  # the grammar begins behind the reasoning
        if reasoning is None or (budget is None and not follows):
            return inner
        from edgelm.engine.sampling.budget import BudgetMatcher

        return BudgetMatcher(
            inner,
            2**62 if budget is None else budget,
            is_open=is_thinking(reasoning, tail),
            end_ids=self._mark_ids(reasoning.closed),
            start_ids=self._mark_ids(reasoning.opened),
            piece=self._tokenizer.piece,
            spans_thought=not follows,
        )

    @property
    def _grammars(self) -> GrammarCompiler:
        assert self._compiler, "made without grammars"
        return self._compiler

    async def _check(self, spec: GrammarSpec) -> CheckedGrammar:
        return await self._grammars.check(spec)

    def _mark_ids(self, text: str) -> list[int]:
        # Some vocabularies put a space before a text: it goes to a character that none joins with another.
        before = self._tokenizer.encode("\x02", special=True, bos=False)
        return self._tokenizer.encode("\x02" + text, special=True, bos=False)[len(before) :]

    async def _spec(
        self, request: AnswerRequest, style: Style, tail: str, *, in_order: bool = False
    ) -> tuple[GrammarSpec | None, tuple[str, ...]]:
        spec, has_tools = request.grammar, bool(request.tools) and request.tool_choice.mode != "none"
        if not has_tools and request.tool_choice.mode == "required":
            raise RequestError("tool_choice requires a call, and there are no tools", "send tools, or omit tool_choice")
        if not has_tools and (spec is None or (style.reasoning is None and not style.is_harmony)):
            return spec, ()
        if spec is not None and spec.kind in ("lark", "gbnf"):
            if has_tools or style.is_harmony:
                raise RequestError("tools and a grammar cannot be used together", "use a JSON schema, or omit one")
            return spec, ()
        choice = request.tool_choice
        names = None if choice.names is None else sorted(choice.names)
        key = json.dumps(
            [
                list(request.tools) if has_tools else [],
                [choice.mode, names, request.has_several_calls],
                spec and [spec.kind, spec.source, spec.strict],
                tail[-64:],
                in_order,
            ],
            sort_keys=True,
        )
        if key not in self._kept:
            self._kept[key] = await self._new_spec(request, style, tail, has_tools, in_order)
            while len(self._kept) > MAX_CONSTRAINTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    async def _new_spec(
        self, request: AnswerRequest, style: Style, tail: str, has_tools: bool, in_order: bool
    ) -> tuple[GrammarSpec | None, tuple[str, ...]]:
        from edgelm.text.constraint import answer_grammar, callable_functions  # most answers are free

        spec = request.grammar
        rules: tuple[SchemaRule, ...] = ()
        answer: AnswerFormat | None = None
        if spec is not None:
            await self._check(spec)  # it alone: its errors speak of what the client sent
            answer, rules = _answer_format(spec)
        form = style.tools.form if style.tools and (has_tools or style.is_harmony) else None
        tools = request.tools if has_tools else ()
        schemas = await self._schemas.of(callable_functions(form, tools, request.tool_choice))
        constraint = await asyncio.to_thread(
            answer_grammar,
            form,
            tools,
            reasoning=style.reasoning,
            prefill=tail,
            marks=style.marks,
            choice=request.tool_choice,
            parallel=request.has_several_calls,
            answer=answer,
            stop_ids=self._tokenizer.stop_ids,
            schemas=schemas,
            in_order=in_order,
        )
        if constraint is None:
            return None, ()
        notes = tuple(f"the schema of {name} is enforced in part: {reason}" for name, reason in constraint.relaxed)
        tables = [json.loads(schema.unique) for schema in schemas.values() if schema.unique]
        unique = json.dumps(merged(tables)) if tables else ""
        return GrammarSpec("lark", constraint.source, rules=rules, unique=unique), notes


def _answer_format(spec: GrammarSpec) -> tuple[AnswerFormat, tuple[SchemaRule, ...]]:
    """Return the form of the content for the grammar of a whole answer, and the schema that it refers to."""
    from edgelm.text.constraint import AnswerFormat

    if spec.kind == "regex":
        return AnswerFormat("/" + spec.source.replace("/", r"\/") + "/"), ()
    if spec.kind == "choice":
        return AnswerFormat(" | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(spec.source))), ()
    schema = spec.source or '{"type": "object"}'
    return AnswerFormat(ANSWER_RULE), (SchemaRule(ANSWER_RULE, schema, spec.strict),)
