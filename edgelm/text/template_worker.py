"""The worker that runs a model's chat template.

A template is a program from a model's file. It runs in a worker with limited time and memory, so that a template that
never ends or takes all memory fails one request only. Memory is limited on Linux alone; other systems have the time
limit.

Owns the worker and its messages. It imports neither llama.cpp nor torch nor the parent's side, template_runner.py.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from edgelm.base.workers.child import Child, answer_requests, limit_memory
from edgelm.text.chat import render_chat
from edgelm.text.template import ChatTemplate

LIMIT_S = 5.0  # to render one chat
MEMORY_BYTES = 2**30  # of the worker's address space


@dataclass(frozen=True, slots=True)
class UseTemplate:
    """Use this template for the requests that follow. The fields are those of ChatTemplate."""

    source: str
    bos: str
    eos: str
    special_strings: tuple[str, ...]
    user_defined: tuple[str, ...]
    limit_s: float  # for one rendering


@dataclass(frozen=True, slots=True)
class TemplateReady:
    """The worker has started and has the template."""


@dataclass(frozen=True, slots=True)
class Render:
    """Render a conversation, with the options of `render_chat`."""

    messages: list[Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedText:
    """The fields of Rendered."""

    text: str
    plain: dict[str, str]
    spans: list[Any]
    effort: str
    stays_on: bool


class _Renderer:
    """The state of the worker: the template and the time limit."""

    def __init__(self) -> None:
        self._template: ChatTemplate | None = None
        self._limit_s = LIMIT_S

    def use(self, request: UseTemplate, child: Child) -> None:
        self._template = ChatTemplate(
            source=request.source,
            bos=request.bos,
            eos=request.eos,
            special_strings=frozenset(request.special_strings),
            user_defined=frozenset(request.user_defined),
        )
        self._limit_s = request.limit_s
        child.send(TemplateReady())

    def render(self, request: Render, child: Child) -> None:
        assert self._template
        # SIGALRM kills this process even inside one long C call, and also after the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, self._limit_s + 1)
        try:
            rendered = render_chat(self._template, request.messages, **request.options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        child.send(RenderedText(rendered.text, rendered.plain, rendered.spans, rendered.effort, rendered.stays_on))


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit_memory(MEMORY_BYTES)
    renderer = _Renderer()
    answer_requests({UseTemplate: renderer.use, Render: renderer.render})
