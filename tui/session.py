"""The open chat: what is said, and that all of it is saved as it happens.

Owns the chat, its tree, and the order in which both are written. Knows nothing of endpoints and widgets.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from edgelm.chats.keeper import Keeper
from edgelm.chats.model import Chat, Message, State, Tree, make_title, split_sent
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
        message = Message(chat=self.chat.id, parent=parent, role="user", text=text, sent_from=self._inherited(parent))
        past, sent = split_sent(self.tree.path())
        if past and sent[0].parent == parent:  # the first message that is sent was written anew
            message.sent_from = message.id
        return self._add(message)

    def begin_answer(self, parent: int, model: str, sent_from: int | None = None) -> Message:
        """Add the empty answer to a message; `sent_from` shortens the conversation from here on."""
        message = Message(chat=self.chat.id, parent=parent, role="assistant", state="streaming", model=model)
        message.sent_from = self._inherited(parent) if sent_from is None else sent_from
        return self._add(message)

    def shorten(self, message: Message, sent_from: int) -> None:
        """Shorten the conversation for what follows a message."""
        message.sent_from = sent_from
        self._write(message)

    def send_all(self) -> bool:
        """Send the whole branch again; say whether it was shortened."""
        cuts = [message for message in self.tree.path() if message.sent_from is not None]
        for message in cuts:
            message.sent_from = None
            self._write(message)
        return bool(cuts)

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

    def turns(self, answer: Message) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
        """Return what is not sent to the model any more of the conversation before an answer, and what is sent."""
        past, sent = split_sent(self.tree.path_to(answer.id))
        system = [Turn("system", self.chat.system)] if self.chat.system.strip() else []
        return _turns(past), (*system, *_turns(sent[:-1]))

    def _inherited(self, parent: int | None) -> int | None:
        """Return from where the branch on screen is sent, if a new one below a message would not know it."""
        past, sent = split_sent(self.tree.path())
        above = self.tree.path_to(parent)
        known, _ = split_sent(above)
        return sent[0].id if past and not known and sent[0] in above else None

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


def _turns(messages: Iterable[Message]) -> tuple[Turn, ...]:
    """Return messages as they are sent: answers without text are left out, and what the user wrote before and after
    such a one is one message, since most models' templates want turns to alternate.
    """
    found: list[Turn] = []
    for message in messages:
        if not message.text.strip():
            continue
        if found and found[-1].role == message.role:
            found[-1] = Turn(message.role, f"{found[-1].text}\n\n{message.text}")
        else:
            found.append(Turn(message.role, message.text))
    return tuple(found)
