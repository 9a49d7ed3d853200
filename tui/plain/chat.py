"""The plain chat: the same chats as on the full screen, as lines for a screen reader, a braille line or an Emacs shell.

Owns the prompt, the end of the chat, and what Ctrl+C does. It waits for the user between two runs of asyncio's loop:
nothing goes on meanwhile. The commands are in plain_commands.py, the words about an answer in plain_answer.py.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edgelm.base.errors import EdgeLMError
from edgelm.chats.attachments import Attachment
from edgelm.chats.store import ChatsError
from edgelm.chats.store_thread import StoreThread
from edgelm.chats.tools.consents import Consents
from edgelm.chats.tools.toolbox import Toolbox
from edgelm.client.answer_stream import AnswerStats
from edgelm.client.link import Link
from edgelm.client.reader import Reader, SendQuestion
from edgelm.client.tool_runner import ToolRunner
from edgelm.client.work import TaskWork, Work
from edgelm.library.catalog import FIRST_CHAT
from edgelm.library.names import STARTER
from edgelm.tui.answers import Answer, Answers
from edgelm.tui.commands.table import parse_call
from edgelm.tui.lines import short_name
from edgelm.tui.plain.answer import SpokenAnswer
from edgelm.tui.plain.files import PlainFiles
from edgelm.tui.plain.lines import LineReader, Notices, Writer
from edgelm.tui.plain.tools import LineAsker
from edgelm.tui.prompt.offers import EXAMPLES, PULL
from edgelm.tui.prompt.paths import suggest_paths
from edgelm.tui.pulls import COMMAND
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.workspace import ChatDefaults, Workspace

if TYPE_CHECKING:
    from edgelm.tui.plain.commands import PlainCommands

CLOSE_S = 5.0
TICK_S = 0.5  # between two looks at a long task
PROMPT = "you: "

T = TypeVar("T")


class PlainChat:
    """The chat in lines. `knowledge` is the file of the index."""

    def __init__(
        self,
        chats: Path,
        link: Link,
        defaults: ChatDefaults,
        lines: LineReader,
        writer: Writer,
        *,
        knowledge: Path,
        pull_command: Sequence[str] = COMMAND,
        toolbox: Toolbox | None = None,
    ) -> None:
        self.lines = lines
        self.writer = writer
        self.pull_command = pull_command
        self.reader = Reader(knowledge, link, self._ask_to_send)
        self._problems: list[ChatsError | None] = []  # of the store, not told yet; None: the last one has passed
        store = StoreThread(chats, self._report_problem)
        self._toolbox = toolbox or Toolbox(Consents(chats.with_name("tool_consents.json")))
        tools = ToolRunner(self._toolbox, LineAsker(lines, writer, _raised_interrupt))
        self.workspace = Workspace(store, link, defaults, Answers(link, self.reader, self._start, self, tools))
        self.reads_reasoning = False
        self.files = PlainFiles(self)
        self.num_lost = 0  # changes that were not saved when the chat ended
        self._unsent = ""  # text in the prompt of the full screen when it was closed
        self._runner = asyncio.Runner()
        self._work: Work | None = None  # of the last answer
        self._spoken: SpokenAnswer | None = None
        self._left = False

    def run(self) -> None:
        """Chat until the user leaves. Errors are told, not raised."""
        with self._runner:
            try:
                self._begin()
                self._converse()
            finally:
                self._runner.run(self._close())

    def leave(self) -> None:
        """End the chat after this command."""
        self._left = True

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. Raises KeyboardInterrupt where the user stopped it, and its own errors."""
        return self._runner.run(coroutine)

    def wait_long(self, activity: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and tell its progress from time to time."""
        return self._runner.run(self._told(activity, coroutine))

    def send(self, text: str, edited: int | None = None, roots: tuple[str, ...] = ()) -> None:
        """Send a message, or a new version of an edited one, and write its answer. Raises EdgeLMError."""
        attached: tuple[Attachment, ...] = ()
        if not roots:
            text, attached = self.files.take(text)
        if edited is not None:
            attached = (*self.workspace.session.tree.messages[edited].attachments, *attached)
        with suppress(ChatsError):
            if note := self.wait(self.workspace.adopt(self.workspace.session)):
                self.writer.line(note)
        self.answer(lambda: self.workspace.send(text, edited, roots, attached))

    def answer(self, begin: Callable[[], None]) -> None:
        """Begin an answer and write it; Ctrl+C stops it. Raises RequestError."""
        try:
            self._runner.run(self._answered(begin))
        except KeyboardInterrupt:  # of two Ctrl+C, the second does not wait until the answer has ended
            self._runner.run(self.workspace.answers.end())

    # The watcher of answers

    def answer_changed(self, answer: Answer) -> None:
        self._spoken_of(answer).changed()

    def answer_progressed(self, answer: Answer, activity: str, stats: AnswerStats | None) -> None:
        self._spoken_of(answer).progressed(activity)

    def answer_ended(self, answer: Answer) -> None:
        self.workspace.chats[answer.session.chat.id] = answer.session.chat
        self._spoken_of(answer).ended()
        self._spoken = None

    def _spoken_of(self, answer: Answer) -> SpokenAnswer:
        if self._spoken is None:
            self._spoken = SpokenAnswer(answer, self.writer, reads_reasoning=self.reads_reasoning)
        return self._spoken

    async def _answered(self, begin: Callable[[], None]) -> None:
        begin()
        assert self._work is not None, "an answer is started at once"
        try:
            await self._work.wait()
        except asyncio.CancelledError:
            await self.workspace.answers.end()
            raise

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> Work:
        self._work = TaskWork(coroutine)
        return self._work

    # Begin and end

    def _begin(self) -> None:
        """Load the last run's state, connect, and say which model answers."""
        try:
            last_run = self.wait(self.workspace.load())
            self.lines.load_history(last_run.sent)
            self.lines.complete_with(self._suggest)
            self._unsent = last_run.settings.get("draft", "") if self.lines.can_prefill else ""
            models = self.wait_long("connecting", self.workspace.link.models())
            if note := self.workspace.choose_default(models):
                self.writer.line(note)
        except EdgeLMError as error:
            self.writer.error(error)
        except KeyboardInterrupt:
            self.writer.line("stopped")
        model = short_name(self.workspace.model) or "none yet"
        preset = f", preset {self.workspace.preset.name}" if self.workspace.preset else ""
        self.writer.line(f"edgelm, model {model}{preset}, /help lists the commands")
        if self.workspace.defaults.note:
            self.writer.line(self.workspace.defaults.note)
        if self.workspace.link.remote is None and self.workspace.link.is_ready and self.workspace.model == STARTER:
            self.writer.line(f"you can ask: {' '.join(EXAMPLES)}")
            if FIRST_CHAT not in self.workspace.link.listed:
                self.writer.line(f"{PULL} gets a small model for a chat (98 MB)")

    async def _close(self) -> None:
        await self.workspace.answers.end()
        self.num_lost = await asyncio.to_thread(self.workspace.store.close, CLOSE_S)
        await asyncio.to_thread(self.reader.thread.close)
        await self._toolbox.close()
        await self.workspace.link.close()

    # The prompt

    def _converse(self) -> None:
        interrupted = False  # at the prompt before this one
        while not self._left and self.writer.failure is None:
            self._tell_problems()
            try:
                text = self._read_message()
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                self.writer.line("Ctrl+C once more quits")
                continue
            interrupted = False
            try:
                self._take(text)
            except EdgeLMError as error:
                self.writer.error(error)
            except KeyboardInterrupt:
                self.writer.line("stopped")

    def _read_message(self) -> str:
        unsent, self._unsent = self._unsent, ""
        text = self.lines.message(PROMPT, unsent)
        if unsent:
            self.workspace.remember("draft", "")
        return text

    def _take(self, text: str) -> None:
        """Run a command, or send a message. Raises EdgeLMError."""
        if (call := parse_call(text.strip())) is not None:
            self._commands.run(*call)
        elif text.strip():
            self.send(text.removeprefix("/") if text.startswith("//") else text)

    def _suggest(self, text: str) -> list[str]:
        """Return the completions of a line by Tab: commands, or paths behind one."""
        return [suggestion.text for suggestion in suggest_paths(text)] or self._commands.complete(text)

    @cached_property
    def _commands(self) -> PlainCommands:
        from edgelm.tui.plain.commands import PlainCommands  # its imports take longer than the first prompt should

        return PlainCommands(self)

    # What others report and ask

    async def _told(self, activity: str, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(coroutine)
        notices = Notices(self.writer)
        try:
            while not (await asyncio.wait((task,), timeout=TICK_S))[0]:
                notices.show(activity)
            return task.result()
        finally:
            task.cancel()

    def _report_problem(self, problem: ChatsError | None) -> None:
        """Keep a report of the store's thread until the next prompt."""
        self._problems.append(problem)

    def _tell_problems(self) -> None:
        problems, self._problems = self._problems, []
        for problem in problems:
            if problem is None:
                self.writer.line("the chats are saved again")
            elif problem.temporary or self.workspace.store.in_memory:
                self.writer.error(f"not saved: {problem}")
            else:
                self.writer.error(problem)

    async def _ask_to_send(self, question: SendQuestion) -> bool:
        """Ask whether passages, or the chat, may go to the endpoint. Without a terminal nobody can agree."""
        if question.num_messages:
            self.writer.line(f"this chat was not written with {question.host}: {question.num_messages - 1} messages")
            return self._agrees(f"send this chat to {question.host}, from now on?")
        num_chars = sum(len(passage.text) for passage in question.passages)
        names = "; ".join(one_line(passage.name) for passage in question.passages)
        self.writer.line(f"this question would send {num_chars:,} characters of your files: {names}")
        return self._agrees(f"send passages to {question.host} in this chat?")

    def _agrees(self, question: str) -> bool:
        if not self.lines.is_terminal:
            self.writer.line("they are not sent: only a person at a terminal can agree")
            return False
        with _raised_interrupt(), suppress(KeyboardInterrupt):
            return self.lines.confirm(question)
        return False


@contextmanager
def _raised_interrupt() -> Iterator[None]:
    """Let Ctrl+C raise KeyboardInterrupt while a line is read in the loop, whose own handler waits for the line."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
