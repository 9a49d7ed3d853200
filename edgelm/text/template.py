"""Chat templates: a conversation becomes the text that a model was trained on.

Owns the jinja2 sandbox with what the templates of models expect of it, the generic template, and the errors of both.
Knows nothing of tokens. Whatever a model's file brings is run here: outside of tests, in a process that can be killed
(template_worker.py), compiling included.

A model whose file has no template gets a generic one. Where its vocabulary has `<|im_start|>` and `<|im_end|>`, that
is ChatML, as most chat models write it:

    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎

Any other is taken for a model that continues text, and gets what such a model can continue:

    User: Hi⏎⏎Assistant: Hello.⏎⏎User: How are you?⏎⏎Assistant:

A system message stands first, as a ChatML turn or as a paragraph of its own. The generic templates know no tools. As
the second kind of model does not end its turn by itself, `stop_strings` holds what ends it.
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
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgelm.errors import ModelError, RequestError

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

Message = dict[str, Any]

_CHECKS = """{%- if tools %}{{ raise_exception("the model has no chat template, and the generic one knows no tools") }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("the generic chat template has no role " ~ message.role|tojson) }}
    {%- elif message.tool_calls %}
        {{- raise_exception("the generic chat template knows no tool calls") }}
    {%- endif %}
{%- endfor %}"""
CHATML = (
    _CHECKS
    + """
{%- for message in messages %}
    {{- "<|im_start|>" ~ message.role ~ "\n" ~ (message.content or "") ~ "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}"""
)
PLAIN = (
    _CHECKS
    + """
{{- bos_token }}
{%- for message in messages %}
    {{- "" if message.role == "system" else message.role|capitalize ~ ": " }}
    {{- (message.content or "")|trim ~ ("" if loop.last and not add_generation_prompt else "\n\n") }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "Assistant:" }}
{%- endif %}"""
)

_MARKUP = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
# What the code of a template may raise, jinja2 being a small Python; what else it raises ends the worker's process.
_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError, TemplateError,
    TypeError, ValueError,
)  # fmt: skip


class RefusedError(RequestError):
    """The template itself refuses these messages; the message is in its own words."""


class TemplateFailedError(RequestError):
    """The template could not read these messages; in another form it may."""


class TooLongError(RequestError):
    """The rendered chat is longer than anything that fits the context."""


def too_long(max_bytes: int) -> TooLongError:
    """Return the error of a chat that is longer than `max_bytes`."""
    return TooLongError(
        f"the messages fill more than {max_bytes:,} bytes, more than the context can hold",
        "shorten them, or raise --ctx",
    )


class _RefusalError(TemplateError):
    """What `raise_exception` of a template raises."""


class ChatTemplate:
    """The template of one model, compiled at its first use.

    `special_strings` are those of its vocabulary; `user_defined` those of them that llama.cpp takes in any text.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos: str = "",
        eos: str = "",
        special_strings: frozenset[str] = frozenset(),
        user_defined: frozenset[str] = frozenset(),
    ) -> None:
        chatml = special_strings >= {"<|im_start|>", "<|im_end|>"}
        self.source = source or (CHATML if chatml else PLAIN)
        self.stop_strings: tuple[str, ...] = () if source or chatml else ("\nUser:",)
        self.bos = bos
        self.eos = eos
        self.special_strings = special_strings - {""}
        self.user_defined = user_defined
        self.control_strings = self.special_strings - user_defined

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the template that a tokenizer brings, or the generic one for its vocabulary."""
        specials = tokenizer.special_strings
        return cls(
            tokenizer.chat_template,
            bos="" if tokenizer.bos_id is None else tokenizer.text_of(tokenizer.bos_id),
            eos="" if tokenizer.eos_id is None else tokenizer.text_of(tokenizer.eos_id),
            special_strings=specials,
            user_defined=frozenset(text for text in specials if _is_user_defined(text, tokenizer)),
        )

    @cached_property
    def control(self) -> re.Pattern[str]:
        """Finds what only a template writes."""
        return any_of(self._spellings(self.control_strings))

    @cached_property
    def markers(self) -> re.Pattern[str]:
        """Finds what gives a chat its structure: `control`, and user-defined tokens such as `<tool_call>`.

        Runs of spaces, digits and the like, which some vocabularies define this way, are text.
        """
        return any_of(self._spellings({*self.control_strings, *filter(_MARKUP.fullmatch, self.user_defined)}))

    @cached_property
    def specials(self) -> re.Pattern[str]:
        """Finds every special string, as llama.cpp does."""
        return any_of(self.special_strings)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        max_bytes: int | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the text of a conversation. The other keywords, such as `enable_thinking`, are the template's.

        Raises RefusedError with the template's own words, TemplateFailedError, TooLongError; ModelError for a
        template that is broken or does what templates may not.
        """
        names = {
            "documents": None,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
        }
        try:
            return "".join(_bounded(self._compiled.generate(names), max_bytes))
        except _RefusalError as error:
            raise RefusedError(_words(error), "the model's chat template wants the messages otherwise") from None
        except SecurityError as error:
            raise ModelError(
                f"the model's chat template does what templates may not: {_words(error)}", "take the model elsewhere"
            ) from error
        except MemoryError as error:
            raise RequestError(
                "memory ran out in the model's chat template", "shorten the messages, or take the model elsewhere"
            ) from error
        except _FAILURES as error:
            raise TemplateFailedError(
                f"the model's chat template failed: {_words(error)}", "send the messages in another form"
            ) from error

    @cached_property
    def _compiled(self) -> Template:
        try:
            return _Sandbox().from_string(self.source)
        except _FAILURES as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise ModelError(
                f"the model's chat template is broken: {line}{_words(error)}", "take the model elsewhere, or use --raw"
            ) from error

    @staticmethod
    def _spellings(strings: Iterable[str]) -> set[str]:
        """Return strings with those that become the same token: SPM vocabularies write a space as U+2581."""
        return {each for text in strings for each in (text, text.replace("\u2581", " "))}


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the longest of the strings that starts at a place, in time that does not grow with them."""
    found = {text for text in strings if text}
    return re.compile(_trie(sorted(found)) if found else r"(?!)")


def _trie(strings: list[str]) -> str:
    """Return the pattern of sorted, different strings, of which the first may be empty."""
    optional = strings[0] == ""
    groups: dict[str, list[str]] = {}
    for text in strings[optional:]:
        groups.setdefault(text[0], []).append(text)
    branches = []
    for group in groups.values():
        prefix = _common_prefix(group[0], group[-1])
        branches.append(re.escape(prefix) + _trie([text[len(prefix) :] for text in group]))
    if len(branches) == 1 and not optional:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if optional else ''}" if branches else ""


def _common_prefix(one: str, other: str) -> str:
    pairs = zip(one, other, strict=False)
    return one[: next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


def _is_user_defined(text: str, tokenizer: Tokenizer) -> bool:
    try:
        ids = tokenizer.encode(text, special=False, bos=False)
    except RequestError:  # a vocabulary that cannot spell its own control token
        return False
    return len(ids) == 1 and tokenizer.text_of(ids[0]) == text


def _bounded(pieces: Iterator[str], max_bytes: int | None) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece.encode("utf-8", "surrogatepass"))
        if max_bytes is not None and size > max_bytes:
            raise too_long(max_bytes)
        yield piece


def _words(error: BaseException) -> str:
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return (kind + str(error))[:1000]


class _Generation(Extension):
    """`{% generation %}`, which marks what a training run learns from: here its body, in a scope of its own."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that templates are written for: that of transformers' `apply_chat_template`."""

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
    """Write JSON without the escapes for HTML that jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _RefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).astimezone().strftime(form)
