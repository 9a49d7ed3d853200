"""The plain chat: the same chats as on the full screen, as lines for a screen reader, a braille line or an Emacs shell.

Owns the prompt, the end of the chat, and what Ctrl+C does. It waits for the user between two runs of asyncio's loop:
nothing goes on meanwhile. What commands need of it is in face.py, the words about an answer in answer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from edgelm.base.errors import EdgeLMError, RequestError
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
from edgelm.tui.commands.table import ALL_COMMANDS, PLAIN_COMMANDS, parse_call, parse_offer
from edgelm.tui.commands.tools import take_offer
from edgelm.tui.lines import short_name
from edgelm.tui.plain.answer import SpokenAnswer
from edgelm.tui.plain.face import PlainFace
from edgelm.tui.plain.lines import LineReader, Writer, raised_interrupt, told
from edgelm.tui.plain.tools import LineAsker
from edgelm.tui.prompt.offers import EXAMPLES, PULL
from edgelm.tui.prompt.paths import suggest_paths
from edgelm.tui.pulls import COMMAND
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.workspace import ChatDefaults, LastRun, Workspace

CLOSE_S = 5.0
LOOK_S = 0.1  # between two looks at problems of the file of the chats
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
        self._lines = lines
        self._writer = writer
        self._reader = Reader(knowledge, link, self._ask_to_send)
        self._problems: list[ChatsError | None] = []  # of the store, not told yet; None: the last one has passed
        store = StoreThread(chats, self._report_problem)
        self._toolbox = toolbox or Toolbox(Consents(chats.with_name("tool_consents.json")))
        tools = ToolRunner(self._toolbox, LineAsker(lines, writer))
        answers = Answers(link, self._reader, self._start, self, tools)
        self._workspace = Workspace(store, link, defaults, answers)
        self._face = PlainFace(self._workspace, self._reader, lines, writer, pull_command)
        self.num_lost = 0  # changes that were not saved when the chat ended
        self._lacks_last_run = True
        self._unsent = ""  # text in the prompt of the full screen when it was closed
        self._runner = asyncio.Runner()
        self._work: Work | None = None  # of the answer that a command or message began
        self._spoken: SpokenAnswer | None = None
        self._told = {""}  # lines about an unused GPU

    def run(self) -> None:
        """Chat until the user leaves. Errors are told, not raised."""
        with self._runner:
            try:
                self._begin()
                self._converse()
            finally:
                self._runner.run(self._close())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. Raises KeyboardInterrupt where the user stopped it, and its own errors."""
        try:
            return self._runner.run(coroutine)
        except asyncio.CancelledError:  # Ctrl+C at a line that it asked for
            raise KeyboardInterrupt from None

    # The watcher of answers

    def answer_changed(self, answer: Answer) -> None:
        self._spoken_of(answer).changed()

    def answer_progressed(self, answer: Answer, activity: str, stats: AnswerStats | None) -> None:
        self._spoken_of(answer).progressed(activity)

    def answer_noted(self, answer: Answer, note: str) -> None:
        self._writer.line(one_line(note))

    def answer_ended(self, answer: Answer) -> None:
        self._workspace.chats[answer.session.chat.id] = answer.session.chat
        self._spoken_of(answer).ended()
        self._spoken = None
        unused_gpu = self._workspace.link.unused_gpu.get(answer.message.model, "")
        if unused_gpu not in self._told:
            self._told.add(unused_gpu)
            self._writer.line(one_line(unused_gpu))

    def _spoken_of(self, answer: Answer) -> SpokenAnswer:
        if self._spoken is None:
            self._spoken = SpokenAnswer(answer, self._writer, reads_reasoning=self._face.reads_reasoning)
        return self._spoken

    def _write_answer(self) -> None:
        """Write the answer that was begun, if there is one, to its end; Ctrl+C stops it."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            self._runner.run(self._answered(work))
        except KeyboardInterrupt:  # of two Ctrl+C, the second does not wait until the answer has ended
            self._runner.run(self._workspace.answers.end())

    async def _answered(self, work: Work) -> None:
        try:
            await work.wait()
        except asyncio.CancelledError:
            await self._workspace.answers.end()
            raise

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> Work:
        self._work = TaskWork(coroutine)
        return self._work

    # Begin and end

    def _begin(self) -> None:
        """Load the last run's state, connect, and say which model answers."""
        try:
            self._lines.complete_with(self._suggest)
            if (last_run := self._wait(self._loaded())) is not None:
                self._go_on_from(last_run)
            self._wait(told(self._writer, "connecting", self._workspace.link.models()))
            if note := self._wait(self._workspace.choose_default()):
                self._writer.line(note)
        except EdgeLMError as error:
            self._writer.error(error, at_start=True)
        except KeyboardInterrupt:
            self._writer.line("stopped")
        model = short_name(self._workspace.model) or "none yet"
        preset = f", preset {self._workspace.preset.name}" if self._workspace.preset else ""
        self._writer.line(f"edgelm, model {model}{preset}, /help lists the commands")
        if self._workspace.defaults.note:
            self._writer.line(self._workspace.defaults.note)
        if self._workspace.link.remote is None and self._workspace.link.is_ready and self._workspace.model == STARTER:
            self._writer.line(f"you can ask: {' '.join(EXAMPLES)}")
            if FIRST_CHAT not in self._workspace.link.listed:
                self._writer.line(f"{PULL} gets a small model for a chat (98 MB)")

    async def _loaded(self) -> LastRun | None:
        """Load the last run's state; wait where the file is locked, return None where the disk is full."""
        loading = asyncio.ensure_future(self._workspace.load())
        try:
            while not (await asyncio.wait([loading], timeout=LOOK_S))[0]:
                self._tell_problems()
                store = self._workspace.store
                if not store.is_open and store.problem is not None and store.problem.is_full:
                    return None
            return loading.result()
        finally:
            loading.cancel()

    def _go_on_from(self, last_run: LastRun) -> None:
        self._lacks_last_run = False
        self._lines.load_history(last_run.sent)
        self._unsent = last_run.unsent if self._lines.can_prefill else ""

    def _load_again(self) -> None:
        """Load the last run's state, which could not be read at the start, and say which model answers now."""
        before = self._workspace.model
        try:
            self._lacks_last_run = False
            self._go_on_from(self._wait(self._workspace.load()))
            if note := self._wait(self._workspace.choose_default()):
                self._writer.line(note)
        except EdgeLMError as error:
            self._writer.error(error)
        except KeyboardInterrupt:
            self._writer.line("stopped")
        if self._workspace.model != before:
            self._writer.line(f"model {short_name(self._workspace.model)}")

    async def _close(self) -> None:
        await self._workspace.answers.end()
        self.num_lost = await asyncio.to_thread(self._workspace.store.close, CLOSE_S)
        await asyncio.to_thread(self._reader.thread.close)
        await self._toolbox.close()
        await self._workspace.link.close()

    # The prompt

    def _converse(self) -> None:
        interrupted = False  # at the prompt before this one
        while not self._face.has_left and self._writer.failure is None:
            self._tell_problems()
            if self._lacks_last_run and self._workspace.store.is_open:
                self._load_again()
            try:
                text = self._read_message()
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                self._writer.line("Ctrl+C once more quits")
                continue
            interrupted = False
            try:
                self._take(text)
            except EdgeLMError as error:
                self._writer.error(error)
            except KeyboardInterrupt:
                self._writer.line("stopped")

    def _read_message(self) -> str:
        unsent, self._unsent = self._unsent, ""
        text = self._lines.message(PROMPT, unsent)
        if unsent:
            self._workspace.remember_unsent("")
        return text

    def _take(self, text: str) -> None:
        """Run a command, or send a message. Raises EdgeLMError."""
        if (call := parse_call(text.strip())) is not None:
            self._wait(self._run_command(*call))
        elif (offer := parse_offer(text.strip(), self._toolbox.servers)) is not None:
            self._wait(take_offer(self._face, *offer))
        elif text.strip():
            self._wait(self._face.send(text.removeprefix("/") if text.startswith("//") else text))
        self._write_answer()

    async def _run_command(self, name: str, argument: str) -> None:
        """Run a command by its name, or by the beginning of only one."""
        known = list(dict.fromkeys(command.name for command in ALL_COMMANDS))
        names = [name] if name in known else [word for word in known if word.startswith(name)]
        if len(names) != 1:
            which = f"/{name} may be {', '.join(f'/{word}' for word in names)}"
            raise RequestError(which if names else f"there is no command /{name}", "" if names else "/help lists them")
        command = next((command for command in PLAIN_COMMANDS if command.name == names[0]), None)
        if command is None:
            raise RequestError(f"/{names[0]} works on the full screen only")
        await command.run(self._face, argument)

    def _suggest(self, text: str) -> list[str]:
        """Return the completions of a line by Tab: commands, or paths behind one."""
        names = [command.name for command in PLAIN_COMMANDS if text and f"/{command.name}".startswith(text)]
        return [suggestion.text for suggestion in suggest_paths(text)] or [f"/{name} " for name in names]

    # What others report and ask

    def _report_problem(self, problem: ChatsError | None) -> None:
        """Keep a report of the store's thread until the next prompt."""
        self._problems.append(problem)

    def _tell_problems(self) -> None:
        problems, self._problems = self._problems, []
        for problem in problems:
            if problem is None:
                self._writer.line("the chats are saved again")
            elif problem.temporary or self._workspace.store.in_memory:
                self._writer.error(f"not saved: {problem}")
            else:
                self._writer.error(problem)

    async def _ask_to_send(self, question: SendQuestion) -> bool:
        """Ask whether passages, or the chat, may go to the endpoint. Without a terminal nobody can agree."""
        if question.num_messages:
            self._writer.line(f"this chat was not written with {question.host}: {question.num_messages - 1} messages")
            return self._agrees(f"send this chat to {question.host}, from now on?")
        num_chars = sum(len(passage.text) for passage in question.passages)
        names = "; ".join(one_line(passage.name) for passage in question.passages)
        self._writer.line(f"this question would send {num_chars:,} characters of your files: {names}")
        return self._agrees(f"send passages to {question.host} in this chat?")

    def _agrees(self, question: str) -> bool:
        if not self._lines.is_terminal:
            self._writer.line("they are not sent: only a person at a terminal can agree")
            return False
        with raised_interrupt(), suppress(KeyboardInterrupt):
            return self._lines.confirm(question)
        return False
