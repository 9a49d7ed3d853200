"""One chat in this process, saved as it changes.

Owns the chat, its tree of messages, the order in which both are written, and the turns that are sent to the model.
Knows nothing of endpoints and widgets.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from edgelm.chats.attachments import Attachment, as_markdown, images, with_attachments
from edgelm.chats.history import Chat, Message, State, Tree, make_title, split_sent
from edgelm.chats.knowledge.quote import system_message
from edgelm.chats.reading import Reading
from edgelm.chats.store_thread import Writes
from edgelm.chats.tool_calls import ToolCall, segments, tool_name
from edgelm.client.answer_stream import AnswerStats, stats_to_json
from edgelm.client.turns import Call, Turn

HISTORY = "history"
STOPPED = "(The answer was stopped here.)"


class Session:
    """One chat. It is not saved before its first message."""

    def __init__(self, store: Writes, chat: Chat, messages: list[Message]) -> None:
        self._store = store
        self.chat = chat
        self.tree = Tree(messages, chat.leaf)
        if self.tree.leaf is None and messages:  # the process was killed between writing a message and its chat
            self.tree.show(messages[0].id)
        self._saved = bool(messages)
        self.was_saved = bool(messages)  # before it was opened here

    def add_question(
        self, text: str, parent: int | None, roots: tuple[str, ...] = (), attachments: tuple[Attachment, ...] = ()
    ) -> Message:
        """Add a message of the user below another; `roots` are searched for it instead of the chat's knowledge."""
        if not self.tree.messages and not self.chat.renamed:
            self.chat.title = make_title(text if text.strip() or not attachments else attachments[0].name)
        self.chat.changed = time.time()
        sent_from = self._inherited_cut(parent)
        message = Message(chat=self.chat.id, parent=parent, role="user", text=text, sent_from=sent_from)
        message.reading = Reading(roots) if roots else None
        message.attachments = attachments
        past, sent = split_sent(self.tree.path())
        if past and sent[0].parent == parent:  # a new version of the first message that is sent
            message.sent_from = message.id
        self._add(message)
        chat_id = self.chat.id
        self._store.write(lambda store: store.restore_chat(chat_id))  # another program may have deleted it
        return message

    def begin_answer(
        self, parent: int, model: str, sent_from: int | None = None, *, text: str = "", reasoning: str = ""
    ) -> Message:
        """Add an answer to a message, which begins with `text`; `sent_from` shortens the conversation from here on."""
        message = Message(chat=self.chat.id, parent=parent, role="assistant", state="streaming", model=model)
        message.text, message.reasoning = text, reasoning
        message.sent_from = self._inherited_cut(parent) if sent_from is None else sent_from
        return self._add(message)

    def shorten(self, message: Message, sent_from: int) -> None:
        """Shorten the conversation for the messages after one."""
        message.sent_from = sent_from
        self._write(message)

    def send_all(self) -> bool:
        """Send the whole branch again; return whether it was shortened."""
        cuts = [message for message in self.tree.path() if message.sent_from is not None]
        for message in cuts:
            message.sent_from = None
            self._write(message)
        return bool(cuts)

    def append(self, message: Message, text: str, reasoning: str) -> None:
        """Append streamed text to the answer."""
        message.text += text
        message.reasoning += reasoning
        self._store.append(message.id, text, reasoning)

    def finish(self, message: Message, state: State, note: str = "", stats: AnswerStats | None = None) -> None:
        """End the answer."""
        message.state, message.note = state, note
        message.stats = stats_to_json(stats) if stats else ""
        self.chat.changed = time.time()
        self._write(message)

    def turn(self, message_id: int, by: int) -> bool:
        """Show the previous (-1) or next (1) version of a message; return whether there is one."""
        turned = self.tree.turn(message_id, by)
        if turned:
            self._leaf_changed()
        return turned

    def show(self, message_id: int) -> None:
        """Show the branch that holds a message, unless it is on screen."""
        if message_id in self.tree.messages and all(message.id != message_id for message in self.tree.path()):
            self.tree.show(message_id)
            self._leaf_changed()

    def drop(self, message: Message) -> None:
        """Remove an answer that nothing came of, and that is not on screen."""
        self.tree.remove(message.id)
        self._store.write(lambda store: store.delete_message(message.id))

    def rename(self, title: str) -> None:
        self.chat.title, self.chat.renamed = title, True
        self.save()

    def set_system(self, system: str) -> None:
        self.chat.system = system
        self.save()

    def set_model(self, model: str) -> None:
        self.chat.model = model
        self.save()

    def set_sampling(self, sampling: Mapping[str, float | int | str]) -> None:
        self.chat.sampling = dict(sampling)
        self.save()

    def add_knowledge(self, root: str) -> None:
        """Search a file or folder, too. Whether passages may be sent is asked again, also about a known one."""
        self.chat.consents = {key: may for key, may in self.chat.consents.items() if key.startswith(HISTORY)}
        self.chat.knowledge = (*(known for known in self.chat.knowledge if known != root), root)
        self.save()

    def remove_knowledge(self, roots: Collection[str]) -> None:
        """Search these files and folders no more."""
        self.chat.knowledge = tuple(known for known in self.chat.knowledge if known not in roots)
        self.save()

    def set_consent(self, endpoint: str, may_send: bool) -> None:
        """Keep whether passages may be sent to an endpoint, or after HISTORY the chat itself."""
        self.chat.consents = {**self.chat.consents, endpoint: may_send}
        self.save()

    def set_reading(self, question: Message, reading: Reading | None) -> None:
        """Keep what was read for a question."""
        if reading != question.reading:
            question.reading = reading
            self._write(question)

    def set_calls(self, answer: Message, calls: tuple[ToolCall, ...]) -> None:
        """Keep the calls of tools in an answer."""
        answer.calls = calls
        self._write(answer)

    def set_tools(self, servers: tuple[str, ...]) -> None:
        """Use the tools of these servers from now on."""
        self.chat.tools = servers
        self.save()

    def set_tool_consents(self, marks: tuple[str, ...]) -> None:
        """Keep the tools that may run in this chat without a question."""
        self.chat.tool_consents = marks
        self.save()

    def save(self) -> None:
        """Write the chat itself, if it has messages."""
        if self._saved:
            chat = replace(self.chat)
            self._store.write(lambda store: store.put_open_chat(chat))

    def turns(self, answer: Message, *, pictures: bool = True) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
        """Return the turns before an answer: those that are not sent to the model any more, and those that are.

        Without `pictures`, for a model that reads none, their names stand in their place.

        Those of the answer itself are among them, up to the results of its last calls. What was read for the question
        stands right before it, and what was read for earlier ones is not sent again: the turns above are the same in
        each request, so that the endpoint's prefix cache has them.
        """
        past, sent = split_sent(self.tree.path_to(answer.id))
        system = [Turn("system", self.chat.system)] if self.chat.system.strip() else []
        turns = _turns(sent[:-1], pictures=pictures)
        reading = self.tree.messages[answer.parent].reading if answer.parent is not None else None
        read = [Turn("system", system_message(reading.passages))] if reading and reading.passages else []
        begun = _answer_turns(answer) if answer.calls else []
        if begun and begun[-1].role == "assistant":  # text behind the calls
            begun.pop()
        return _turns(past, pictures=pictures), (*system, *turns[:-1], *read, *turns[-1:], *begun)

    def _inherited_cut(self, parent: int | None) -> int | None:
        """Return the `sent_from` of the branch on screen if a new message below `parent` must repeat it."""
        past, sent = split_sent(self.tree.path())
        above = self.tree.path_to(parent)
        past_above, _ = split_sent(above)
        return sent[0].id if past and not past_above and sent[0] in above else None

    def _add(self, message: Message) -> Message:
        self.tree.add(message)
        self._write(message)
        return message

    def _write(self, message: Message) -> None:
        self.chat.leaf = self.tree.leaf
        chat, copy, is_new = replace(self.chat), replace(message), not self._saved
        self._saved = True
        self._store.write(
            lambda store: store.put_chat(chat) if is_new else store.put_open_chat(chat),
            lambda store: store.put_message(copy),
        )

    def _leaf_changed(self) -> None:
        self.chat.leaf = self.tree.leaf
        self.save()


def _turns(messages: Iterable[Message], *, pictures: bool) -> tuple[Turn, ...]:
    """Return messages as turns. Answers without text are omitted, and the user's messages around one are joined:
    most models' templates require turns to alternate.
    """
    turns: list[Turn] = []
    for message in messages:
        if message.role == "assistant":
            turns += _answer_turns(message)
            if turns and turns[-1].role == "tool":  # it was stopped; templates want the assistant before the user
                turns.append(Turn("assistant", STOPPED))
            continue
        text, seen = with_attachments(message.text, message.attachments), images(message.attachments)
        if seen and not pictures:
            unseen = [as_markdown(attachment) for attachment in message.attachments if attachment.kind == "image"]
            text, seen = "\n\n".join([*unseen, text]), ()
        if not text.strip() and not seen:
            continue
        if turns and turns[-1].role == "user":
            before = turns.pop()
            text, seen = f"{before.text}\n\n{text}", before.images + seen
        turns.append(Turn("user", text, images=seen))
    return tuple(turns)


def _answer_turns(message: Message) -> list[Turn]:
    """Return an answer as turns: the text before calls of tools with these, their results, and so on to the end."""
    turns: list[Turn] = []
    for text, calls in segments(message.text, message.calls):
        if calls:
            turns.append(Turn("assistant", text, calls=tuple(map(_as_call, calls))))
            turns += [Turn("tool", call.answer, call_id=call.id) for call in calls]
        elif text.strip():
            turns.append(Turn("assistant", text, "" if message.calls else message.reasoning))
    return turns


def _as_call(call: ToolCall) -> Call:
    """Return a call for the model. Templates fail where its arguments are no object."""
    arguments = call.arguments if call.values is not None else "{}"
    return Call(call.id, tool_name(call.server, call.tool) if call.server else call.tool, arguments)


def on_disk(session: Session) -> list[Attachment]:
    """Return the newest version of each file that is attached to a message of the branch on screen."""
    files = {
        attachment.path: attachment
        for message in session.tree.path()
        for attachment in message.attachments
        if attachment.path
    }
    return list(files.values())
