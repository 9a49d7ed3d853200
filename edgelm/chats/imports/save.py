"""Drafts become chats of the store: they get ids, and what is already there is not written twice.

A chat's id comes from its name in the program that it is from. So the same export again finds the same chat, and a
later one adds the messages that are new. Each chat is written in one transaction: an import that is interrupted leaves
whole chats.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Literal

from edgelm.chats.history import Chat, Message, make_title
from edgelm.chats.imports.draft import BadChatError, DraftChat, DraftMessage
from edgelm.chats.store import Store

NO_QUESTION = "(no question)"

UNDATED = 1e9  # the time in the id of a message without one: the same in the next export

Outcome = Literal["new", "grown", "same", "deleted"]


def save_draft(store: Store, draft: DraftChat) -> Outcome:
    """Write a draft into the store; `deleted`: the chat is in the trash and stays there.

    Raises BadChatError and ChatsError.
    """
    ordered = _parents_first(draft)
    if not ordered:
        raise BadChatError("it has no messages")
    with store.transaction():
        chat_id = draft.id if draft.id is not None else _hash(draft.key) >> 1
        there = store.chat(chat_id)
        if there is not None and there.deleted is not None:
            return "deleted"
        ids: dict[str, int] = {}
        new = _new_messages(store, draft, ordered, chat_id, ids)
        leaf = ids.get(draft.leaf or "") or ids[ordered[-1].key]
        if there is None:
            store.put_chat(_chat(draft, ordered, chat_id, leaf))
        elif not new:
            return "same"
        for message in new:
            store.put_message(message)
        if there is not None:
            store.put_chat(_grown(there, draft, new, leaf))
        return "new" if there is None else "grown"


def _parents_first(draft: DraftChat) -> list[DraftMessage]:
    """Return the messages, each after its parent. One whose parent is missing begins a branch; a circle is left out."""
    by_key = {message.key: message for message in draft.messages}
    for message in list(by_key.values()):
        above = by_key.get(message.parent or "")
        if message.role == "assistant" and (above is None or above.role == "assistant"):
            # An answer of edgelm has a question: other programs may begin with a greeting.
            parent = above.key if above else None
            question = DraftMessage(key=f"{message.key}?", parent=parent, role="user", text=NO_QUESTION)
            question.created = message.created
            by_key[question.key] = question
            message.parent = question.key
    children: dict[str | None, list[DraftMessage]] = {}
    for message in by_key.values():
        children.setdefault(message.parent if message.parent in by_key else None, []).append(message)
    ordered = list(children.get(None, []))
    for message in ordered:  # it grows
        ordered += children.get(message.key, [])
    return ordered


def _new_messages(
    store: Store, draft: DraftChat, ordered: list[DraftMessage], chat_id: int, ids: dict[str, int]
) -> list[Message]:
    """Return the messages that the store does not have yet; put the id of each into `ids`."""
    new: list[Message] = []
    now = time.time()
    base = draft.created or UNDATED
    last: dict[str | None, int] = {}  # ids of siblings, by their parent
    for item in ordered:
        parent = ids.get(item.parent or "")
        least = max(parent or 0, last.get(item.parent, 0)) + 1
        number = _hash(f"{draft.key}\0{item.key}")
        # Like the ids that edgelm makes: microseconds, of which an export knows the seconds, and ten more bits.
        made = int(item.created or base) * 1_000_000 + number % 1_000_000 << 10 | number >> 20 & 1023
        message_id = max(item.id if item.id is not None else made, least)
        while (owner := store.owner_of(message_id)) not in (None, chat_id):
            message_id += 1
        ids[item.key] = last[item.parent] = message_id
        if owner is None:
            new.append(_message(item, chat_id, message_id, parent, ids, draft.created or now))
    return new


def _message(
    item: DraftMessage, chat_id: int, message_id: int, parent: int | None, ids: dict[str, int], created: float
) -> Message:
    return Message(
        id=message_id, chat=chat_id, parent=parent, role=item.role, text=item.text, reasoning=item.reasoning,
        state=item.state, note=item.note, model=item.model, stats=item.stats,
        sent_from=message_id if item.sent_from == item.key else ids.get(item.sent_from or ""), reading=item.reading,
        attachments=item.attachments, calls=item.calls, created=created if item.created is None else item.created,
    )  # fmt: skip


def _chat(draft: DraftChat, ordered: list[DraftMessage], chat_id: int, leaf: int) -> Chat:
    first = next((message.text for message in ordered if message.role == "user"), "")
    title = " ".join(draft.title.split())
    times = [message.created for message in ordered if message.created is not None]
    created = draft.created if draft.created is not None else min(times, default=time.time())
    return Chat(
        id=chat_id,
        title=title or make_title(first),
        system=draft.system,
        leaf=leaf,
        created=created,
        changed=draft.changed if draft.changed is not None else max(times, default=created),
        pinned=draft.pinned,
        archived=draft.archived,
        tags=draft.tags,
        **({"summarized": bool(title)} | draft.more),  # the other program's title is kept
    )


def _grown(chat: Chat, draft: DraftChat, new: list[Message], leaf: int) -> Chat:
    """Return the chat with new messages: shown to their end if they go on where the user was."""
    parents = {message.id: message.parent for message in new}
    above: int | None = leaf
    while above in parents:
        above = parents[above]
    goes_on = above == chat.leaf
    return replace(chat, leaf=leaf if goes_on else chat.leaf, changed=max(chat.changed, draft.changed or 0.0))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "replace")).digest()[:8])
