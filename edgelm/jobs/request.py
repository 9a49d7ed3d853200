"""A request for an answer, and the pieces in which the answer comes, in the words of every API.

Owns the types between an API and jobs/answer.py. Imports nothing heavy: a front uses them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from edgelm.base.errors import RequestError
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.engine.core import FinishReason, Sampled, Stats
from edgelm.text.calls.format import ToolChoice
from edgelm.text.parse import Content, Part, Reasoning

if TYPE_CHECKING:
    from edgelm.text.template import Message

AnswerReason = FinishReason | Literal["tool_calls"]
Span = tuple[int, int]  # of characters: start and end


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """A prompt and how to answer it. `sampling` has fields of SamplingParams; a missing one takes the setting."""

    messages: Sequence[Message] = ()
    prompt: str | Sequence[int] | None = None  # a text to continue as it is, in place of messages
    suffix: str | None = None  # the text after the answer: `prompt` is the one before it
    files: Sequence[tuple[str, str]] | None = None  # with a suffix: names and texts of others; all is cut to fit
    least_indent: int = 0  # the answer ends at a new line that is indented less
    echo: bool = False  # the answer begins with the prompt, and with its log-probabilities if they are requested
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool | None = None  # whether the client wants several calls at once; None: it does not say
    grammar: GrammarSpec | None = None  # of the content
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # enable_thinking, reasoning_effort, …
    thinking_budget: int | None = None  # tokens of reasoning
    continues_last: bool = False  # the answer continues the last message, which is an assistant's
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    interactive: bool = False  # somebody waits in an editor; a request with a suffix is interactive anyway
    time_limit_ms: int | None = None  # for the answer, from its first token on
    past: Sequence[Message] = ()  # the conversation before `messages`, used for drafting only
    notes: tuple[str, ...] = ()  # what was changed in it before
    prediction: str = ""  # a text that the answer probably repeats, used for drafting only

    @property
    def has_several_calls(self) -> bool:
        """Whether the answer may have more than one call.

        A named tool is called once. A model that must call something does not know when to stop, so that it calls once
        too, unless the client asks for more.
        """
        choice = self.tool_choice
        if choice.mode != "required":
            return self.parallel_tool_calls is not False
        return self.parallel_tool_calls is True and (choice.names is None or len(choice.names) > 1)


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The part of an answer since the previous delta of the same choice. The last one has a reason and stats."""

    parts: tuple[Part, ...]
    sampled: tuple[Sampled, ...] = ()
    choice: int = 0
    reason: AnswerReason | None = None
    stop: str | None = None  # the stop string that ended the answer
    stats: Stats | None = None
    reasoning_tokens: int = 0  # of the whole answer; in the last delta
    notes: tuple[str, ...] = ()  # what was relaxed or ignored; in the last delta

    @property
    def text(self) -> str:
        """The content of the delta."""
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        """The reasoning of the delta."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def drafted(self) -> list[Span]:
        """The drafted characters of `text`."""
        spans: list[Span] = []
        at = 0
        for part in self.parts:
            if isinstance(part, Content):
                if part.drafted:
                    start = spans.pop()[0] if spans and spans[-1][1] == at else at
                    spans.append((start, at + len(part.text)))
                at += len(part.text)
        return spans


class ContextError(RequestError):
    """The prompt leaves no room for an answer in the context."""


def too_long(problem: str, context: int) -> ContextError:
    """Return the error of a prompt that the context cannot hold."""
    return ContextError(
        f"{problem}, the context holds {context:,} tokens with the answer",
        "shorten it, or start edgelm with a larger --ctx",
    )


def thinking_kwargs(effort: str | None, enabled: bool | None) -> dict[str, Any]:
    """Return the variables by which chat templates turn reasoning on and off, and choose its effort.

    Templates differ in their names: Qwen, GLM and others read `enable_thinking`, DeepSeek, Granite and Kimi `thinking`,
    gpt-oss and others `reasoning_effort`. A template ignores the names that it does not read.
    """
    if effort in ("none", "off"):
        enabled = False
    elif effort is not None and enabled is None:
        enabled = True
    kwargs: dict[str, Any] = {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}
    return kwargs | ({} if effort is None or not enabled else {"reasoning_effort": effort})
