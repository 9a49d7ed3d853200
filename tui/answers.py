"""The answers that are being written: at most one for each chat, also for chats that are not on the screen.

Owns their workers. Knows nothing of how an answer is written and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from textual.worker import Worker, WorkerError

from edgelm.tui.answering import Answer, Watcher, write_answer
from edgelm.tui.link import Link


class Answers:
    """Starts and stops answers. `run` makes a worker of a coroutine, `ended` hears of every end."""

    def __init__(
        self,
        link: Link,
        run: Callable[[Coroutine[Any, Any, None]], Worker[None]],
        watcher: Watcher,
        ended: Callable[[Answer], None],
    ) -> None:
        self._link = link
        self._run = run
        self._watcher = watcher
        self._ended = ended
        self._written: dict[int, tuple[Answer, Worker[None]]] = {}  # by chat

    def __bool__(self) -> bool:
        return bool(self._written)

    def of_chat(self, chat_id: int) -> Answer | None:
        """Return the answer that is being written in a chat."""
        found = self._written.get(chat_id)
        return found[0] if found else None

    def start(self, answer: Answer, wanted: Sequence[str]) -> None:
        """Write an answer, with the first of the wanted models that there is."""
        assert answer.session.chat.id not in self._written
        self._written[answer.session.chat.id] = answer, self._run(self._write(answer, wanted))

    def stop(self, chat_id: int) -> bool:
        """Stop the answer of a chat; say whether there was one."""
        found = self._written.get(chat_id)
        if found is not None:
            found[1].cancel()
        return found is not None

    async def end(self, chat_id: int | None = None) -> None:
        """Stop the answer of a chat, or all, and wait until what came of it is on its way to the disk."""
        for chat, (_, worker) in list(self._written.items()):
            if chat_id in (None, chat):
                worker.cancel()
                with suppress(WorkerError):
                    await worker.wait()

    async def _write(self, answer: Answer, wanted: Sequence[str]) -> None:
        try:
            await write_answer(self._link, answer, wanted, self._watcher)
        finally:
            del self._written[answer.session.chat.id]
            self._ended(answer)
