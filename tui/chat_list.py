"""The lines of the list of chats: pinned ones, the others by age, the archive, and the hits of a search.

Owns the order and the headings. Knows nothing of widgets.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import groupby

from rich.text import Text

from edgelm.chats.history import Chat, Hit
from edgelm.tui.lines import clean
from edgelm.tui.tags import with_marks
from edgelm.tui.transcript.passages import one_line

MAX_SHOWN = 300  # chats
ARCHIVE = "archive"  # the id of the line that unfolds the archive
PIN = "★ "


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of the list. `id` is that of a chat, or ARCHIVE; None: it cannot be chosen."""

    id: str | None
    text: Text = field(hash=False)


def chat_rows(chats: Iterable[Chat], open_id: int | None, *, unfolded: bool) -> list[Row]:
    """Return the lines of all chats, newest first; those in the archive only if it is `unfolded`."""
    ordered = sorted(chats, key=lambda chat: (chat.changed, chat.id), reverse=True)
    archived = [chat for chat in ordered if chat.archived]
    pinned = [chat for chat in ordered if chat.pinned and not chat.archived]
    others = [chat for chat in ordered if not chat.pinned and not chat.archived]
    rows = []
    if pinned:
        rows.append(_heading("Pinned", first=True))
        rows += [_chat_row(chat, open_id, PIN) for chat in pinned[:MAX_SHOWN]]
    num_shown = max(MAX_SHOWN - len(pinned), 0)
    today = _local(time.time()).date()
    for name, group in groupby(others[:num_shown], key=lambda chat: _group(chat, today)):
        rows.append(_heading(name, first=not rows))
        rows += [_chat_row(chat, open_id) for chat in group]
    if len(others) > num_shown:
        rows.append(Row(None, Text(f"… {len(others) - num_shown:,} more: search")))
    if archived:
        gap = "\n" if rows else ""
        rows.append(Row(ARCHIVE, Text(f"{gap}{'▾' if unfolded else '▸'} Archived ({len(archived):,})", "dim")))
        if unfolded:
            rows += [_chat_row(chat, open_id) for chat in archived[:MAX_SHOWN]]
            if len(archived) > MAX_SHOWN:
                rows.append(Row(None, Text(f"… {len(archived) - MAX_SHOWN:,} more: search")))
    return rows or [Row(None, Text("no chats yet"))]


def hit_rows(hits: Sequence[Hit], open_id: int | None) -> list[Row]:
    """Return the lines of what a search found."""
    rows = [_hit_row(hit, open_id) for hit in hits[:MAX_SHOWN]]
    if len(hits) > MAX_SHOWN:
        rows.append(Row(None, Text(f"… {len(hits) - MAX_SHOWN:,} more: add a word")))
    return rows or [Row(None, Text("nothing found"))]


def short_date(timestamp: float) -> str:
    """Return a time in the past, as short as its age allows."""
    then, now = _local(timestamp), _local(time.time())
    days = (now.date() - then.date()).days
    if days <= 0:
        return f"{then:%H:%M}"
    if days == 1:
        return "yesterday"
    if days < 7:
        return f"{then:%A}"
    return f"{then.day} {then:%b}" if then.year == now.year else f"{then.day} {then:%b %Y}"


def _local(timestamp: float) -> datetime:
    return datetime.fromtimestamp(timestamp).astimezone()


def _group(chat: Chat, today: date) -> str:
    """Return the heading of a chat: its age in days, then the month of its last message."""
    day = _local(chat.changed).date()
    age = (today - day).days
    if age <= 0:
        return "Today"
    if age == 1:
        return "Yesterday"
    if age < 7:
        return "Last 7 days"
    return f"{day:%B}" if day.year == today.year else f"{day:%B %Y}"


def _heading(name: str, *, first: bool) -> Row:
    return Row(None, Text.assemble("" if first else "\n", (name, "bold dim")))


def _chat_row(chat: Chat, open_id: int | None, mark: str = "") -> Row:
    text = Text(mark, no_wrap=True, overflow="ellipsis")
    text.append(one_line(chat.title), "bold" if chat.id == open_id else "")
    if chat.tags:
        text.append(f"\n{' ' * len(mark)}{one_line(with_marks(chat.tags))}", "dim")
    return Row(str(chat.id), text)


def _hit_row(hit: Hit, open_id: int | None) -> Row:
    chat = hit.chat
    text = Text(no_wrap=True, overflow="ellipsis")
    if hit.message is not None or not hit.snippet:
        text.append(one_line(chat.title), "bold" if hit.message is not None or chat.id == open_id else "")
        text.append("\n" if hit.snippet else "")
    for i, part in enumerate(re.sub("[\r\n]+", " ", hit.snippet).split("\x02")):
        match, _, rest = part.partition("\x03") if i else ("", "", part)
        text.append(clean(match), "bold underline")
        text.append(clean(rest), "dim" if hit.message is not None else "bold")
    details = " ".join(filter(None, (one_line(with_marks(chat.tags)), "archived" if chat.archived else "")))
    if details:
        text.append(f"\n{details}", "dim")
    return Row(str(chat.id), text)
