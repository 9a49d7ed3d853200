"""One grammar for a whole answer: reasoning, free text, tool calls and a format of the answer.

The grammar is a text in llguidance's Lark dialect. It spans the answer from its first token, so that nothing has to be
switched on in the middle: free text is a rule, and a mark in it lets a call begin (a lazy rule). From there the name is
that of a tool, and the arguments obey its schema.

    call = answer_grammar(form, tools, schemas=CHECKED, …)         # None: nothing to constrain
    spec = GrammarSpec(kind="lark", source=call.source)            # engine/sampling/grammar.py

Control tokens stand as `<[id]>`; other marks as text, which matches both a token and its spelling. White space next to
marks is free but bounded, in JSON it is that of the templates.

Owns the grammar of formats. Knows nothing of llguidance: the schemas are checked before, the grammar afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgelm.base.errors import RequestError
from edgelm.text.calls.arguments import Arguments
from edgelm.text.calls.enforced import unenforced
from edgelm.text.calls.format import CallFormat, ToolChoice, heads_of, parts_of
from edgelm.text.calls.harmony import message_starts
from edgelm.text.calls.lark import Lark, escaped
from edgelm.text.calls.schema import ToolSchema
from edgelm.text.reasoning import ReasoningFormat, is_thinking

_JSON_BODIES = ("json", "name_json", "harmony")
_START_KEYS = '"(name|function|tool_name)"'


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A form of the answer's text: a Lark expression, and the rules that it uses."""

    rule: str
    rules: str = ""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the tools whose schemas it obeys only in part, with the reason."""

    source: str
    relaxed: tuple[tuple[str, str], ...] = ()


def answer_grammar(
    form: CallFormat | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    reasoning: ReasoningFormat | None = None,
    prefill: str = "",
    marks: Mapping[str, int] | None = None,
    choice: ToolChoice | None = None,
    parallel: bool = True,
    answer: AnswerFormat | None = None,
    stop_ids: Collection[int] = (),
    schemas: Mapping[str, ToolSchema],
    in_order: bool = False,
) -> Constraint | None:
    """Return the grammar of an answer; None if nothing constrains it.

    With `in_order`, arguments as JSON come in the order of their schemas, which llguidance reads as wholes.

    `prefill` and `marks` are those of the AnswerParser; `stop_ids` end an answer; `schemas` has those of the callable
    functions, by name. Raises RequestError if no tool may be called that must be, and for a strict tool whose schema
    the calls of this format do not obey.
    """
    choice = choice or ToolChoice()
    allowed = callable_functions(form, tools, choice)
    if choice.mode == "required" and not allowed:
        raise RequestError(
            "tool_choice requires a call, and there is no such tool", "give tools, or another tool_choice"
        )
    if not allowed and answer is None:
        return None
    obeyed, relaxed = _obeyed_schemas(form, allowed, schemas)
    # A stop token ends the answer, and stands nowhere in its text.
    drops = [
        text
        for text in (*(form.drop if form else ()), *(reasoning.drop if reasoning else ()))
        if (marks or {}).get(text) not in stop_ids
    ]
    grammar = _Grammar(Lark(marks or {}, drops), obeyed, choice.mode, parallel, answer, in_order)
    if form is not None and form.body == "harmony":
        grammar.harmony()
    else:
        grammar.sections(form, reasoning, prefill)
    return Constraint(grammar.lark.source(), tuple(relaxed))


def _obeyed_schemas(
    form: CallFormat | None, functions: Sequence[Mapping[str, Any]], schemas: Mapping[str, ToolSchema]
) -> tuple[dict[str, dict[str, Any]], list[tuple[str, str]]]:
    """Return the schemas that calls obey, and the names of those that are not enforced in full, with the reason.

    Raises RequestError for a strict function whose schema the calls of this format do not obey.
    """
    obeyed: dict[str, dict[str, Any]] = {}
    relaxed: list[tuple[str, str]] = []
    for function in functions:
        name = str(function["name"])
        obeyed[name], reason = schemas[name].schema, schemas[name].relaxed
        assert form is not None
        for one in (form, *form.also):
            keywords = unenforced(one, obeyed[name])
            if schemas[name].unique and one.body not in _JSON_BODIES:
                keywords.append("uniqueItems")
            left_out = ", ".join(map(json.dumps, keywords))
            if left_out and function.get("strict") and one is form:
                raise RequestError(
                    f"the schema of the strict tool {name} cannot be enforced: this model's calls are not JSON, and "
                    f"not held to {left_out}",
                    "change the schema, or drop strict",
                )
            if left_out and not reason:
                reason = f"calls are not held to {left_out}"
        if reason:
            relaxed.append((name, reason))
    return obeyed, relaxed


def callable_functions(
    form: CallFormat | None, tools: Sequence[Mapping[str, Any]], choice: ToolChoice
) -> list[Mapping[str, Any]]:
    """Return the functions of the tools that an answer may call."""
    if form is None or choice.mode == "none":
        return []
    return [_function(tool) for tool in tools if choice.names is None or _name(tool) in choice.names]


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    assert isinstance(function, Mapping), "tools are checked before"
    return function


def _name(tool: Mapping[str, Any]) -> str:
    return str(_function(tool).get("name"))


class _Grammar:
    """The rules of one answer."""

    def __init__(
        self,
        lark: Lark,
        schemas: dict[str, dict[str, Any]],
        mode: str,
        parallel: bool,
        answer: AnswerFormat | None,
        in_order: bool,
    ) -> None:
        self.lark = lark
        self._schemas = schemas
        self._in_order = in_order
        self._required = mode == "required"
        self._parallel = parallel
        self._answer = answer
        self._refused = ""  # the pattern of text that must be a call, as it begins like one
        if answer:
            lark.more(answer.rules)
            lark.rule("answer", answer.rule)

    def sections(self, form: CallFormat | None, reasoning: ReasoningFormat | None, prefill: str) -> None:
        """Write the rules of a format whose calls stand in the text."""
        lark = self.lark
        forms = (form, *form.also) if form and self._schemas else ()
        free = not self._required and self._answer is None
        self._refused = "|".join(self._start_pattern(one) for one in forms if one.at_start)
        calls = " | ".join(self._calls(one, index) for index, one in enumerate(forms[:1]))
        inside = self._inside(form, prefill) if form and self._schemas else ""
        if free:
            lark.rule("flow", self._flow(forms))
            body = "flow"
        elif self._required:
            body = calls
        else:
            body = f"({calls} ws)? answer | {calls}" if calls else "answer"
            if calls and not self._parallel:
                body = f"answer | {calls}"
        lark.rule("body", body)
        lark.rule("start", self._with_reasoning(inside or "body", forms, reasoning, prefill, free))

    def _with_reasoning(
        self, begin: str, forms: Sequence[CallFormat], reasoning: ReasoningFormat | None, prefill: str, free: bool
    ) -> str:
        """Return the rule of an answer that may begin with reasoning, or begins inside it."""
        if reasoning is None:
            return begin
        lark = self.lark
        closed, *rest = parts_of(reasoning.closed)
        end = f"{lark.up_to(closed)} {lark.parts(rest)}"
        lark.rule("thought", f"{end} ws body")
        calls = [self._from_text(form, index) for index, form in enumerate(forms[:1]) if not form.at_start]
        if calls:  # a call ends reasoning
            more = (
                " flow" if free and self._parallel else (f" (ws {self._calls(forms[0], 0)})?" if self._parallel else "")
            )
            lark.rule("thought_call", f"({' | '.join(calls)}){more}")
            lark.rule("thinking", "thought | thought_call")
        else:
            lark.rule("thinking", "thought")
        if is_thinking(reasoning, prefill):
            return "thinking"
        if prefill.rstrip().endswith(reasoning.closed.rstrip()):
            return f"ws ({begin})" if free else begin
        return f"{begin} | ws {lark.mark(reasoning.opened)} thinking"

    def _flow(self, forms: Sequence[CallFormat]) -> str:
        """Return the rule of free text with calls in it."""
        lark = self.lark
        first = [self._calls(form, index) for index, form in enumerate(forms) if form.at_start]
        items = [self._from_text(form, index) for index, form in enumerate(forms) if not form.at_start]
        text = lark.text(self._refused)
        if not items:
            return " | ".join([text, *first])
        lark.rule("item", " | ".join(items))
        flow = f"item* {lark.text()}" if self._parallel else f"{lark.text()} | item"
        if first:
            flow = f"{text} | item{' ' + lark.text() if self._parallel else ''}"
        return " | ".join([flow, *first])

    def _start_pattern(self, form: CallFormat) -> str:
        names = "|".join(map(escaped, self._schemas))
        space = r"[ \t\r\n]*"
        if form.body == "json":
            return rf'{space}\{{{space}("type"{space}:{space}"function"|{_START_KEYS}{space}:{space}"({names})")(.|\n)*'
        return rf"{space}{escaped(form.section[0])}{space}({names}){space}\((.|\n)*"

    def _from_text(self, form: CallFormat, index: int) -> str:
        """Return the rule of free text that ends in calls."""
        key, lark = f"item{index}", self.lark
        if key not in lark:
            heads = []
            if form.known_names:
                for name in self._schemas:
                    if form.body == "json":
                        heads.append(f"{self._up_to(form.head)} {self._tail(form, name)}")
                        continue
                    ends = parts_of(form.name_end) or (form.name_end,)
                    head = lark.up_to(form.head.strip() + name + ends[0], self._refused)
                    heads.append(f"{head} {lark.parts(ends[1:])} {self._after_name(form, name)}")
                rest = " | ".join(heads)
                self.lark.rule(key, rest)
            else:
                rests = [f"{self._up_to(parts[0])} {self._section(form, index, parts[1:])}" for parts in heads_of(form)]
                self.lark.rule(key, " | ".join(rests))
        return key

    def _calls(self, form: CallFormat, index: int) -> str:
        """Return the rule of one or more calls without text around them."""
        key = f"calls{index}"
        if key not in self.lark:
            self.lark.rule(f"{key}_one", self._section(form, index, parts_of(form.head)))
            repeat = self._parallel and form.parallel and not form.section[0]
            separator = self.lark.mark(form.separator)
            self.lark.rule(key, f"{key}_one (ws {separator} {key}_one)*" if repeat else f"{key}_one")
        return key

    def _section(self, form: CallFormat, index: int, head: Sequence[str]) -> str:
        """Return the expression of a section of calls; `head` is what of its head is not read yet."""
        lark = self.lark
        tools = [self._tail(form, name) for name in self._schemas]
        key = f"tool{index}"
        if key not in lark:
            lark.rule(key, " | ".join(tools))
        one = f"{lark.parts(head)} {'ws ' if form.head[-1:].isspace() else ''}{key}"
        more = ""
        if form.section[0]:
            if self._parallel and form.parallel:
                more = f"(ws {lark.mark(form.separator)} {lark.mark(form.call[0])} {key})*"
            more += f" {lark.mark(form.section[1])}"
        return f"{one} {more}"

    def _tail(self, form: CallFormat, name: str) -> str:
        """Return the expression of one call behind its head."""
        lark = self.lark
        if form.body == "json":
            name_key, args_key, id_key = form.keys
            number = lark.pattern("[a-zA-Z0-9]{9}" if form.id_rule == "alnum9" else "[0-9]{1,3}")
            before, after, last = '{"', "}", '"}'
            if id_key and form.id_first:
                before = f'{{"{id_key}": "'
                middle = f'", "{name_key}": "{name}", "{args_key}": '
                opened = f"{lark.text_of(before)} {number} {lark.text_of(middle)}"
            else:
                opened = lark.text_of(f'{before}{name_key}": "{name}", "{args_key}": ')
                after = f', "{id_key}": "' if id_key else "}"
            closed = lark.text_of(after)
            if id_key and not form.id_first:
                closed += f" {number} {lark.text_of(last)}"
            return f"{opened} {self._arguments(form).json(name)} {closed} {lark.mark(form.call[1])}"
        written = name
        if form.id_rule == "functions":
            return (
                f"{lark.text_of(f'functions.{name}:')} {lark.pattern('[0-9]{1,3}')} {lark.mark(form.name_end)} "
                f"{self._after_name(form, name)}"
            )
        opened = lark.text_of(written)
        if form.id_before:
            opened = f"{lark.pattern('[a-zA-Z0-9_-]{1,64}')} {lark.mark(form.id_before)} {opened}"
        if form.id_after:
            opened += f" {lark.mark(form.id_after)} {lark.pattern('[a-zA-Z0-9]{9}')}"
        is_exact = form.body == "python" or not form.name_end.strip()
        end = lark.text_of(form.name_end) if is_exact else lark.mark(form.name_end)
        return f"{opened} {end} {self._after_name(form, name)}"

    def _after_name(self, form: CallFormat, name: str) -> str:
        return f"{self._arguments(form).of(name)} {self.lark.mark(form.call[1])}"

    def _arguments(self, form: CallFormat) -> Arguments:
        return Arguments(self.lark, form, self._schemas, in_order=self._in_order)

    def _up_to(self, mark: str) -> str:
        """Return the expression of any text up to a mark, which ends it at once."""
        lark = self.lark
        first, *rest = parts_of(mark)
        return f"{lark.up_to(first, self._refused)} {lark.parts(rest)}"

    def _inside(self, form: CallFormat, prefill: str) -> str:
        """Return the expression of an answer that begins inside a call's head, which the prompt ends with."""
        head = parts_of(form.head)
        if not head or not prefill.rstrip().endswith(head[0]) or form.at_start:
            return ""
        first = " | ".join(self._tail(form, name) for name in self._schemas)
        text = [self.lark.text_of(mark.removeprefix(head[0])) for mark in form.drop if mark.startswith(head[0])]
        self.lark.rule("inside", f"{self.lark.parts(head[1:])} ({first})")
        more = f"(ws {self._calls(form, 0)})?" if self._parallel else ""
        if self._required:
            return f"inside {more}"
        if self._answer is not None:
            return " | ".join([f"inside {more}", *(f"{drop} answer" for drop in text)])
        return " | ".join([f"inside {'flow' if self._parallel else ''}", *(f"{drop} flow" for drop in text)])

    def harmony(self) -> None:
        """Write the rules of Harmony, where every message has a header."""
        lark = self.lark
        starts = "|".join(escaped(start) for start in message_starts(lark.marks))
        refused = rf"(.|\n)*({starts})(.|\n)*" if starts else ""
        text = lark.text(refused)
        end = f"{lark.text_of('<|end|>')} {lark.text_of('<|start|>assistant')}"
        if "<|end|>" not in lark.marks:
            text = ""
            end = f"{lark.up_to('<|end|>', refused)} {lark.text_of('<|start|>assistant')}"
        for channel in ("analysis", "commentary"):
            lark.rule(channel, f"{lark.text_of(f'<|channel|>{channel}<|message|>')} {text} {end}")
        arguments = self._arguments(CallFormat(name="Harmony", body="name_json"))
        calls = []
        for name in self._schemas:
            headers = (
                f" to=functions.{name}<|channel|>commentary json<|message|>",
                f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                f"<|channel|>commentary to=functions.{name} json<|message|>",
            )
            calls.append(f"({' | '.join(map(lark.text_of, headers))}) {arguments.of(name)}")
        lasts = [lark.rule("call", " | ".join(calls))] if calls else []
        if not self._required:
            body = "answer" if self._answer else lark.text(refused)
            lasts.append(lark.rule("final", f"{lark.text_of('<|channel|>final<|message|>')} {body}"))
        is_free = not self._required and self._answer is None
        before = "(analysis | commentary)" if is_free else "analysis"  # a preamble is free text
        lark.rule("start", f"{before}* ({' | '.join(lasts)})")
