"""The messages that wait between Enter and sending: for their files, and for those before them in their chat.

Owns their order: none overtakes another, so one that is not sent comes back with those behind it. Knows nothing of how
a message is checked, sent and given back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from edgelm.base.errors import EdgeLMError
from edgelm.client.session import Session
from edgelm.tui.prompt.outgoing import Outgoing


class Outbox:
    """A queue of messages for each chat. `run` starts a worker.

    `send` returns False for a message that comes back, or raises EdgeLMError, which `complain` shows.
    """

    def __init__(
        self,
        send: Callable[[Outgoing], Awaitable[bool]],
        give_back: Callable[[Sequence[Outgoing]], None],
        complain: Callable[[EdgeLMError], None],
        run: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._send = send
        self._give_back = give_back
        self._complain = complain
        self._run = run
        self._queues: dict[int, list[Outgoing]] = {}  # by chat

    @property
    def texts(self) -> list[str]:
        """Return the texts of the messages that wait."""
        return [message.typed for queue in self._queues.values() for message in queue]

    def has_messages(self, session: Session) -> bool:
        """Tell whether a message waits in a chat."""
        return session.chat.id in self._queues

    def add(self, message: Outgoing) -> None:
        """Send a message behind those that wait in its chat."""
        queue = self._queues.setdefault(message.session.chat.id, [])
        queue.append(message)
        if len(queue) == 1:
            self._run(self._send_all(message.session.chat.id))

    async def _send_all(self, chat_id: int) -> None:
        queue = self._queues[chat_id]
        try:
            while queue and await self._send(queue[0]):
                queue.pop(0)
        except EdgeLMError as error:
            self._complain(error)
        del self._queues[chat_id]
        self._give_back(queue)
