"""The tools of the plain chat: what is asked before a call, and the lines about calls.

Owns the words. Without a terminal nobody can agree, and no call runs.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from edgelm.base.errors import EdgeLMError
from edgelm.chats.tool_calls import ToolCall
from edgelm.client.tool_runner import Asker, CallQuestion, LimitQuestion, Permit
from edgelm.tui.plain.lines import LineReader, Writer, raised_interrupt
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.transcript.tool_rows import call_state, pretty_arguments, short_arguments, visible, visible_line

NOBODY = "it is refused: only a person at a terminal can agree"
MAX_RESULT = 200  # characters of a result on one line
ANSWERS: dict[str, Permit] = {
    "n": "no",
    "no": "no",
    "once": "once",
    "o": "once",
    "chat": "chat",
    "c": "chat",
    "always": "always",
    "a": "always",
}


class LineAsker(Asker):
    """Asks in lines."""

    def __init__(self, lines: LineReader, writer: Writer) -> None:
        self._lines = lines
        self._writer = writer

    async def may_call(self, question: CallQuestion) -> Permit:
        tool = question.tool
        self._writer.line(
            f"the model asks for the tool {visible(tool.server)}/{visible(tool.name)} with the arguments:"
        )
        self._writer.line(pretty_arguments(question.arguments))
        self._writer.line(f"server: {visible(one_line(question.server.words))}")
        if question.changed:
            self._writer.line("this tool or its server has changed since you allowed it")
        word = self._answer("run it? once, chat (no more questions here), always, or no: ", tuple(ANSWERS))
        return ANSWERS.get(word, "no")

    async def may_go_on(self, question: LimitQuestion) -> bool:
        self._writer.line(f"the answer has made {question.num_calls:,} calls, the model asks for {question.num_more:,}")
        return self._answer("go on? y or n: ", ("y", "n")) == "y"

    def tell(self, error: EdgeLMError) -> None:
        self._writer.error(error)

    def _answer(self, prompt: str, words: tuple[str, ...]) -> str:
        """Return one of these words; empty where nobody gives one."""
        if not self._lines.is_terminal:
            self._writer.line(NOBODY)
            return ""
        with raised_interrupt(), suppress(KeyboardInterrupt, EOFError):
            _discard_typed()
            while True:
                word = self._lines.line(prompt).strip().lower()
                if word in words:
                    return word
        return ""


def _discard_typed() -> None:
    """Drop what was typed before the question: it is no answer to it."""
    with suppress(ImportError, OSError, ValueError):
        import termios

        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def call_line(call: ToolCall) -> str:
    """Return the line about a call that has ended, or that never did."""
    result = " ".join(visible(call.answer).split())
    if len(result) > MAX_RESULT:
        result = result[:MAX_RESULT] + "…"
    state = "failed" if call.state == "failed" else call_state(call, live=False)
    return f"tool {visible_line(call.name)}, {short_arguments(call)[:MAX_RESULT]}, {state}: {result}"
