"""The open chat: what is said, and that all of it is saved as it happens.

Owns the chat, its tree, and the order in which both are written. Knows nothing of endpoints and widgets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from edgelm.chats.keeper import Keeper
from edgelm.chats.model import Chat, Message, State, Tree, make_title
from edgelm.client.endpoint import AnswerStats, Turn, stats_to_json


class Session:
    """One chat in this process. A chat without a message is not saved."""

    def __init__(self, keeper: Keeper, chat: Chat, messages: list[Message]) -> None:
        self._keeper = keeper
        self.chat = chat
        self.tree = Tree(messages, chat.leaf)
        if self.tree.leaf is None and messages:  # killed between a message and its chat
            self.tree.show(messages[0].id)
        self._saved = bool(messages)

    def say(self, text: str, parent: int | None) -> Message:
        """Add what the user wrote below a message."""
        if not self.tree.messages and not self.chat.renamed:
            self.chat.title = make_title(text)
        self.chat.changed = time.time()
        return self._add(Message(chat=self.chat.id, parent=parent, role="user", text=text))

    def begin_answer(self, parent: int, model: str) -> Message:
        """Add the empty answer to a message."""
        message = Message(chat=self.chat.id, parent=parent, role="assistant", state="streaming", model=model)
        return self._add(message)

    def append(self, message: Message, text: str, reasoning: str) -> None:
        """Add what came to the answer."""
        message.text += text
        message.reasoning += reasoning
        self._keeper.write(lambda store: store.append(message.id, text, reasoning))

    def finish(self, message: Message, state: State, note: str = "", stats: AnswerStats | None = None) -> None:
        """End the answer."""
        message.state, message.note = state, note
        message.stats = stats_to_json(stats) if stats else ""
        self.chat.changed = time.time()
        self._write(message)

    def turn(self, message_id: int, by: int) -> bool:
        """Show the version before or after a message."""
        turned = self.tree.turn(message_id, by)
        if turned:
            self._leaf_changed()
        return turned

    def show(self, message_id: int) -> None:
        """Show the branch that holds a message, if the one on screen does not."""
        if message_id in self.tree.messages and all(each.id != message_id for each in self.tree.path()):
            self.tree.show(message_id)
            self._leaf_changed()

    def rename(self, title: str) -> None:
        self.chat.title, self.chat.renamed = title, True
        self.save()

    def set_system(self, system: str) -> None:
        self.chat.system = system
        self.save()

    def set_model(self, model: str) -> None:
        self.chat.model = model
        self.save()

    def set_sampling(self, sampling: Mapping[str, float | int]) -> None:
        self.chat.sampling = dict(sampling)
        self.save()

    def save(self) -> None:
        """Write the chat itself, if it has messages."""
        if self._saved:
            chat = replace(self.chat)
            self._keeper.write(lambda store: store.put_chat(chat))

    def turns(self, up_to: int) -> tuple[Turn, ...]:
        """Return the conversation up to a message, as it is sent: answers without text are left out, and what the
        user wrote before and after such a one is one message, since most models' templates want turns to alternate.
        """
        found = [Turn("system", self.chat.system)] if self.chat.system.strip() else []
        at: int | None = up_to
        branch: list[Message] = []
        while at is not None:
            branch.append(self.tree.messages[at])
            at = branch[-1].parent
        for message in reversed(branch):
            if not message.text.strip():
                continue
            if found and found[-1].role == message.role:
                found[-1] = Turn(message.role, f"{found[-1].text}\n\n{message.text}")
            else:
                found.append(Turn(message.role, message.text))
        return tuple(found)

    def _add(self, message: Message) -> Message:
        self.tree.add(message)
        self._write(message)
        return message

    def _write(self, message: Message) -> None:
        self.chat.leaf = self.tree.leaf
        chat, written = replace(self.chat), replace(message)
        self._saved = True
        self._keeper.write(lambda store: store.put_chat(chat), lambda store: store.put_message(written))

    def _leaf_changed(self) -> None:
        self.chat.leaf = self.tree.leaf
        self.save()
