"""Chat templates: render a conversation as the text that a model was trained on.

Owns the jinja2 sandbox and the functions that templates expect in it, the generic templates, and their errors. Knows
nothing of tokens. A template is a program from a model's file: except in tests, compile and run it only in a process
that can be killed (template_worker.py).

A model without a template gets a generic one. If its vocabulary has `<|im_start|>` and `<|im_end|>`, that is ChatML,
the format of most chat models:

    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎

Otherwise the model is assumed to continue text, and gets a text that it can continue:

    User: Hi⏎⏎Assistant: Hello.⏎⏎User: How are you?⏎⏎Assistant:

A system message comes first, as a ChatML turn or as a paragraph. The generic templates have no tools. The second kind
of model does not end its turn by itself, so `stop_strings` ends it. A vocabulary that cannot write a newline gets a
space there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Self

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import SandboxedEnvironment

from edgelm.base.errors import ModelError, RequestError
from edgelm.text.patterns import any_of

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

Message = dict[str, Any]

_NEWLINE = "\n"
_CHECKS = """{%- if tools %}{{ raise_exception("the model has no chat template, and the generic one has no tools") }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("the generic chat template has no role " ~ message.role|tojson) }}
    {%- elif message.tool_calls %}
        {{- raise_exception("the generic chat template has no tool calls") }}
    {%- endif %}
{%- endfor %}"""
CHATML = (
    _CHECKS
    + """
{%- for message in messages %}
    {{- "<|im_start|>" ~ message.role ~ newline ~ (message.content or "") ~ "<|im_end|>" ~ newline }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant" ~ newline }}
{%- endif %}"""
)
PLAIN = (
    _CHECKS
    + """
{{- bos_token }}
{%- for message in messages %}
    {{- "" if message.role == "system" else message.role|capitalize ~ ": " }}
    {{- (message.content or "")|trim ~ ("" if loop.last and not add_generation_prompt else newline ~ newline) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "Assistant:" }}
{%- endif %}"""
)

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning, as the APIs name them
_MARKUP = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
# Errors that the code of a template can raise: jinja2 is a small Python. Others end the worker.
_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError, TemplateError,
    TypeError, ValueError,
)  # fmt: skip


class RefusedError(RequestError):
    """The template itself refuses the conversation; the message is the template's own."""


class TemplateFailedError(RequestError):
    """The template failed with these messages; it may accept another form of them."""


class TooLongError(RequestError):
    """The rendered chat is too long to fit the context."""


def too_long(max_bytes: int) -> TooLongError:
    """Return the error of a chat that is longer than `max_bytes`."""
    return TooLongError(
        f"the messages fill more than {max_bytes:,} bytes, more than the context can hold",
        "shorten them, or raise --ctx",
    )


class _RefusalError(TemplateError):
    """Raised by `raise_exception` of a template."""


class ChatTemplate:
    """The template of one model, compiled at its first use.

    `special_strings` are those of the vocabulary; `user_defined` is the part of them that llama.cpp turns into tokens
    in any text. `newline` ends a line of the generic templates.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos: str = "",
        eos: str = "",
        special_strings: frozenset[str] = frozenset(),
        user_defined: frozenset[str] = frozenset(),
        newline: str = _NEWLINE,
    ) -> None:
        chatml = special_strings >= {"<|im_start|>", "<|im_end|>"}
        generic = f"{{%- set newline = {newline!r} %}}{CHATML if chatml else PLAIN}"
        self.source = source or generic
        self.stop_strings: tuple[str, ...] = () if source or chatml else (f"{newline}User:",)
        self.bos = bos
        self.eos = eos
        self.special_strings = special_strings - {""}
        self.user_defined = user_defined
        self.control_strings = self.special_strings - user_defined

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the tokenizer's template, or the generic one for its vocabulary."""
        specials = tokenizer.special_strings
        return cls(
            tokenizer.chat_template,
            bos="" if tokenizer.bos_id is None else tokenizer.text_of(tokenizer.bos_id),
            eos="" if tokenizer.eos_id is None else tokenizer.text_of(tokenizer.eos_id),
            special_strings=specials,
            user_defined=frozenset(text for text in specials if is_user_defined(text, tokenizer)),
            newline=_NEWLINE if _has_newline(tokenizer) else " ",
        )

    @cached_property
    def control(self) -> re.Pattern[str]:
        """Matches the strings that only a template may write."""
        return any_of(self._spellings(self.control_strings))

    @cached_property
    def markers(self) -> re.Pattern[str]:
        """Matches the strings that structure a chat: `control`, and user-defined tokens such as `<tool_call>`.

        Some vocabularies also define runs of spaces or digits this way; these are text.
        """
        return any_of(self._spellings({*self.control_strings, *filter(_MARKUP.fullmatch, self.user_defined)}))

    @cached_property
    def specials(self) -> re.Pattern[str]:
        """Matches every special string, as llama.cpp does."""
        return any_of(self.special_strings)

    @cached_property
    def control_signs(self) -> re.Pattern[str]:
        """Matches the first sign of each control string: a character that is no letter, digit, space or _."""
        strings = self.control_strings
        signs = {next((char for char in text if not (char.isalnum() or char in " _")), "") for text in strings} - {""}
        return re.compile(f"[{re.escape(''.join(sorted(signs)))}]" if signs else "(?!)")

    def render(
        self,
        /,  # a variable of the template may be named self
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        max_bytes: int | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the text of a conversation. Other keywords, such as `enable_thinking`, go to the template.

        Raises RefusedError with the template's own message, TemplateFailedError, TooLongError; ModelError for a
        template that is broken or does something forbidden.
        """
        turns = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        names = {"documents": None, **_copied({**kwargs, **turns}), "bos_token": self.bos, "eos_token": self.eos}
        try:
            return "".join(_bounded(self._compiled.generate(names), max_bytes))
        except _RefusalError as error:
            raise RefusedError(_message(error), "change the messages as the model's chat template requires") from None
        except SecurityError as error:
            raise ModelError(
                f"the model's chat template does something forbidden: {_message(error)}", "get the model elsewhere"
            ) from error
        except MemoryError as error:
            raise RequestError(
                "memory ran out in the model's chat template", "shorten the messages, or get the model elsewhere"
            ) from error
        except _FAILURES as error:
            raise TemplateFailedError(
                f"the model's chat template failed: {_message(error)}", "send the messages in another form"
            ) from error

    @cached_property
    def _compiled(self) -> Template:
        try:
            return _Sandbox().from_string(self.source)
        except _FAILURES as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise ModelError(
                f"the model's chat template is broken: {line}{_message(error)}",
                "give another with --template, or use --raw",
            ) from error

    @staticmethod
    def _spellings(strings: Iterable[str]) -> set[str]:
        """Return the strings in all spellings of the same token: SPM vocabularies write a space as U+2581."""
        return {spelling for text in strings for spelling in (text, text.replace("\u2581", " "))}


def other_efforts(effort: object, refusal: str) -> list[str]:
    """Return the efforts to try after a template refused one, the nearest first, and of two the higher one.

    There are none if the template's message names no effort: it refuses something else.
    """
    if effort not in EFFORTS or not re.search(rf"effort|\b{effort}\b", refusal, re.IGNORECASE):
        return []
    at = EFFORTS.index(str(effort))
    return sorted(EFFORTS[at + 1 :] + EFFORTS[:at], key=lambda other: abs(EFFORTS.index(other) - at))


def _has_newline(tokenizer: Tokenizer) -> bool:
    try:
        return bool(tokenizer.encode(_NEWLINE, special=False, bos=False))
    except RequestError:
        return False


def is_user_defined(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether a special string is a token in any text."""
    try:
        ids = tokenizer.encode(text, special=False, bos=False)
    except RequestError:  # the vocabulary cannot spell its own control token
        return False
    return len(ids) == 1 and tokenizer.text_of(ids[0]) == text


def _bounded(pieces: Iterator[str], max_bytes: int | None) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece.encode("utf-8", "surrogatepass"))
        if max_bytes is not None and size > max_bytes:
            raise too_long(max_bytes)
        yield piece


def _copied(value: Any) -> Any:
    """Return a JSON value in new lists and dictionaries: a template may change those that it gets."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def _message(error: BaseException) -> str:
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return (kind + str(error))[:1000]


class _Generation(Extension):
    """`{% generation %}`, which marks the text that training learns from: rendered as its body, in its own scope."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Sandbox(SandboxedEnvironment):
    """The environment that templates expect: that of `apply_chat_template` of transformers.

    But a template may change lists, as those of Kimi K2 do with their own: `render` gives it copies.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON, with what a filter such as `map` returns as a list. The filter of jinja2 would also escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_as_list
    )


def _as_list(value: object) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: object) -> NoReturn:
    raise _RefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).astimezone().strftime(form)
