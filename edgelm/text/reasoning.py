"""ReasoningFormat: how a model marks its reasoning, and where an answer begins.

Owns the table of marks. Knows nothing of parsing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning. `drop` are marks around the answer itself, which are no text."""

    opened: str
    closed: str
    drop: tuple[str, ...] = ()

    @property
    def strings(self) -> tuple[str, ...]:
        return (self.opened, self.closed, *self.drop)


_FORMATS = (
    ReasoningFormat("<|channel>thought\n", "<channel|>"),
    ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<mm:think>", "</mm:think>"),
    ReasoningFormat("<think:opensource>", "</think:opensource>"),
    ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ReasoningFormat("<|think|>", "<|end|>", ("<|begin|>assistant", "<|content|>")),
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]", ("[END FINAL RESPONSE]",)),
)
_GRANITE = ReasoningFormat("<think>", "</think>", ("<response>", "</response>"))


def find_reasoning(template: str, special_strings: Collection[str] = ()) -> ReasoningFormat | None:
    """Return the reasoning format whose marks stand in a template or, where that has none, in the vocabulary."""
    for form in (_GRANITE, *_FORMATS):
        required = form.strings if form is _GRANITE else (form.opened, form.closed)
        if all(mark.strip() in template for mark in required):
            return form
    return next((form for form in _FORMATS if {form.opened, form.closed} <= set(special_strings)), None)


def is_thinking(form: ReasoningFormat | None, prompt: str) -> bool:
    """Return whether a prompt ends with an open reasoning mark, so that the answer begins inside it."""
    return form is not None and prompt.rstrip().endswith(form.opened.rstrip())
