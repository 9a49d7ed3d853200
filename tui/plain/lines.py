"""The lines of the plain chat: the input, and the output without any control character.

Owns when streamed text is written: by whole sentences and lines, because a screen reader stutters where single words
arrive. Knows nothing of chats.
"""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TextIO, TypeVar

from edgelm.tui.lines import clean

FENCE = '"""'  # around a message of several lines
MORE = "more: "  # the prompt of its further lines
NOTICE_S = 10.0  # between two lines about a long task
TICK_S = 0.5  # between two looks at a long task
# The end of a line or of a sentence. The dot of "1." is none, and no space follows a full stop of Chinese.
_BREAK = re.compile(r"\n|(?<!\d)[.!?…][^\w\s]*[ ]|[\u3002\uff01\uff1f][^\w\s]*")

T = TypeVar("T")


class Writer:
    """Writes lines to a stream. After a failure, as where its reader has left, nothing is written any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held = ""  # the begun sentence
        self._in_line = False
        self.failure: OSError | None = None
        self._told_at_start = ""  # the error of the first connection: every message would tell it again

    def line(self, text: str) -> None:
        """Write a line of its own, or several; a text that streams is ended before."""
        self.end()
        self._write(clean(text) + "\n")

    def error(self, error: object, *, at_start: bool = False) -> None:
        """Write an error, in one line; in few words where it was told at the start."""
        text = " ".join(str(error).split())
        self.line("error: the same as at the start" if text == self._told_at_start else f"error: {text}")
        if at_start:
            self._told_at_start = text

    def prompt(self, text: str) -> None:
        """Write the beginning of a line that the user ends."""
        self.end()
        self._write(text)
        self._in_line = False

    def stream(self, text: str) -> None:
        """Write the whole sentences and lines of a text that goes on; hold the rest."""
        self._held = (self._held + text).replace("\r\n", "\n")
        end = max((match.end() for match in _BREAK.finditer(self._held)), default=0)
        if end:
            ready, self._held = self._held[:end], self._held[end:]
            self._write(clean(ready))

    def end(self) -> None:
        """Write the held text, and end the line."""
        held, self._held = self._held, ""
        if held:
            self._write(clean(held))
        if self._in_line:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._in_line = not text.endswith("\n")
        if self.failure is not None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self.failure = error


class Notices:
    """Lines about one thing that takes long, such as loading a model: rare, so that they do not talk over the rest."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._last = time.monotonic()
        self._is_first = True

    def show(self, activity: str, first_s: float | None = None) -> None:
        """Write a line about the present task, unless one was written shortly before; the first one after `first_s`."""
        now = time.monotonic()
        wait_s = first_s if self._is_first and first_s is not None else NOTICE_S
        if now - self._last >= wait_s:
            self._last, self._is_first = now, False
            self._writer.line(activity)


async def told(writer: Writer, activity: str, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work, and tell the activity from time to time."""
    task = asyncio.create_task(work)
    notices = Notices(writer)
    try:
        while not (await asyncio.wait((task,), timeout=TICK_S))[0]:
            notices.show(activity)
        return task.result()
    finally:
        task.cancel()


@contextmanager
def raised_interrupt() -> Iterator[None]:
    """Let Ctrl+C raise KeyboardInterrupt while a line is read in the loop, whose own handler waits for the line.

    It stays ignored where it was: in the background of a script.
    """
    is_main = threading.current_thread() is threading.main_thread()  # the others get no signals
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class LineReader:
    """Reads the user's input. With `edits`, lines of a terminal are edited with readline, which has a history.

    Without it the terminal or the editor around it has the line editing. Input that is no terminal gets no prompt.
    """

    def __init__(self, stream: TextIO, writer: Writer, *, edits: bool) -> None:
        self._stream = stream
        self._writer = writer
        self.is_terminal = stream.isatty()
        self._readline = _load_readline() if edits and self.is_terminal else None

    @property
    def can_prefill(self) -> bool:
        """Tell whether a prompt can begin with a text: libedit discards one that its startup hook inserts."""
        return self._readline is not None and not _is_libedit(self._readline)

    def load_history(self, messages: Iterable[str]) -> None:
        """Put earlier messages into the history, the oldest first."""
        for message in messages:
            self._remember(message)

    def complete_with(self, suggest: Callable[[str], list[str]]) -> None:
        """Let Tab complete a line to one of the lines that are suggested for it."""
        if self._readline is None:
            return
        readline = self._readline

        def complete(_: str, state: int) -> str | None:
            suggested = suggest(readline.get_line_buffer())
            return suggested[state] if state < len(suggested) else None

        readline.set_completer_delims("")
        readline.set_completer(complete)
        readline.parse_and_bind("bind ^I rl_complete" if _is_libedit(readline) else "tab: complete")

    def message(self, prompt: str, prefill: str = "") -> str:
        """Return a message. Its lines go on where one ends with a backslash, and between two FENCEs.

        The end of the input ends the message, too. Raises EOFError where there is none, and KeyboardInterrupt.
        """
        text = self.line(prompt, prefill)
        if text.lstrip().startswith(FENCE):
            text = text.lstrip().removeprefix(FENCE)
            while not text.rstrip().endswith(FENCE) and (more := self._more()) is not None:
                text += f"\n{more}"
            text = text.rstrip().removesuffix(FENCE).strip("\n")
        else:
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{self._more() or ''}"
        self._remember(text)
        return text

    def confirm(self, question: str) -> bool:
        """Ask for yes or no; the end of the input is a no. Raises KeyboardInterrupt."""
        while True:
            try:
                word = self.line(f"{question} y or n: ").strip().lower()
            except EOFError:
                return False
            if word in ("y", "yes", "n", "no"):
                return word.startswith("y")

    def line(self, prompt: str, prefill: str = "") -> str:
        """Return a line; it begins with `prefill` where that can be edited. Raises EOFError and KeyboardInterrupt."""
        try:
            if self._readline is not None:
                return _edit_line(self._readline, clean(prompt), prefill)
            if self.is_terminal:
                self._writer.prompt(clean(prompt))
            if line := self._stream.readline():
                return line.removesuffix("\n").removesuffix("\r")
            raise EOFError
        except (EOFError, KeyboardInterrupt):
            if self.is_terminal:
                self._writer.line("")  # the terminal's cursor is still behind the prompt
            raise

    def _more(self) -> str | None:
        """Return the next line of a message; None at the end of the input."""
        try:
            return self.line(MORE)
        except EOFError:
            return None

    def _remember(self, message: str) -> None:
        if self._readline is not None and message.strip():
            self._readline.add_history(message)


def _load_readline() -> ModuleType | None:
    """Return Python's readline, which writes no escape sequence before a line is edited; None where there is none."""
    try:
        import readline
    except ImportError:
        return None
    for setting in ("enable-bracketed-paste off", "enable-meta-key off", "bell-style none"):
        readline.parse_and_bind(f"set {setting}")
    readline.set_auto_history(False)  # "y" is no message
    return readline


def _is_libedit(readline: ModuleType) -> bool:
    """Tell whether the module is macOS' own library, as most builds of Python have it there."""
    backend = getattr(readline, "backend", None)  # from Python 3.13
    return backend == "editline" if backend else "libedit" in (readline.__doc__ or "")


def _edit_line(readline: ModuleType, prompt: str, prefill: str) -> str:
    readline.set_startup_hook((lambda: readline.insert_text(prefill)) if prefill else None)
    try:
        return input(prompt)
    finally:
        readline.set_startup_hook(None)
