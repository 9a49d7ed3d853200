"""A conversation of edgelm's own export as JSON.

Consents are not imported: a file from somebody else must not allow tools, or send files of the user anywhere.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, get_args

from edgelm.chats.attachments import Attachment
from edgelm.chats.export_json import FORMAT, VERSION
from edgelm.chats.history import Role, State
from edgelm.chats.imports.draft import BadChat, DraftChat, DraftMessage, items, key_of, seconds, strings, table, text
from edgelm.chats.reading import Reading
from edgelm.chats.tool_calls import CallState, ToolCall
from edgelm.knowledge.passages import Passage

MAX_ID = 2**62  # ids of edgelm are below it until the year 2100, and the next ones fit
MAX_TOOK_S = 1e6
_STATES: dict[str, State] = {"done": "done", "streaming": "stopped", "stopped": "stopped", "failed": "failed"}
_CALL_STATES: dict[str, CallState] = {name: name for name in get_args(CallState)}


def is_own(document: Mapping[str, Any]) -> bool:
    """Tell whether a JSON object may be a chat of edgelm."""
    return document.get("format") == FORMAT


def read_own(document: Mapping[str, Any]) -> DraftChat:
    """Return a chat. Raises BadChat."""
    version, chat_id = document.get("version"), _id(document.get("id"))
    if isinstance(version, int) and version > VERSION:
        raise BadChat("a newer edgelm wrote it")
    if chat_id is None:
        raise BadChat("it has no id")
    return DraftChat(
        key=f"edgelm:{chat_id}",
        id=chat_id,
        messages=[_message(table(item)) for item in items(document.get("messages"))],
        leaf=key_of(document.get("leaf")),
        title=text(document.get("title")),
        system=text(document.get("system")),
        created=seconds(document.get("created")),
        changed=seconds(document.get("changed")),
        pinned=document.get("pinned") is True,
        archived=document.get("archived") is True,
        tags=strings(document.get("tags")),
        more={
            "renamed": document.get("renamed") is True,
            "summarized": document.get("summarized") is True,
            "model": text(document.get("model")),
            "preset": text(document.get("preset")),
            "sampling": _sampling(document.get("sampling")),
            "knowledge": strings(document.get("knowledge")),
            "tools": strings(document.get("tools")),
        },
    )


def _id(value: object) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_ID
    return value if fits and isinstance(value, int) else None


def _sampling(value: object) -> dict[str, float | int | str]:
    return {name: item for name, item in table(value).items() if isinstance(item, int | float | str)}


def _message(item: Mapping[str, Any]) -> DraftMessage:
    role, key = text(item.get("role")), key_of(item.get("id"))
    if role not in ("user", "assistant") or key is None:
        raise BadChat("a message has no role or no id")
    kept: Role = "user" if role == "user" else "assistant"
    return DraftMessage(
        key=key,
        id=_id(item.get("id")),
        parent=key_of(item.get("parent")),
        role=kept,
        text=text(item.get("text")),
        reasoning=text(item.get("reasoning")),
        state=_STATES.get(text(item.get("state")), "done"),
        note=" ".join(text(item.get("note")).split()),
        model=text(item.get("model")),
        stats=_stats(item.get("stats")),
        sent_from=key_of(item.get("sent_from")),
        reading=_reading(item.get("reading")),
        attachments=tuple(_attachment(table(value)) for value in items(item.get("attachments"))),
        calls=tuple(_call(table(value)) for value in items(item.get("calls"))),
        created=seconds(item.get("created")),
    )


def _stats(value: object) -> str:
    """Return the figures of an answer as JSON, without those that are none."""
    kept = {
        name: item
        for name, item in table(value).items()
        if isinstance(item, str if name in ("engine", "device") else int | float) and not isinstance(item, bool)
    }
    return json.dumps(kept) if kept else ""


def _reading(value: object) -> Reading | None:
    if not isinstance(value, dict):
        return None
    passages = (table(passage) for passage in items(value.get("passages")))
    kept = (Passage(text(item.get("source")), text(item.get("heading")), text(item.get("text"))) for item in passages)
    return Reading(tuple(strings(value.get("roots"))), tuple(kept), text(value.get("note")))


def _attachment(item: Mapping[str, Any]) -> Attachment:
    try:
        data = base64.b64decode(text(item.get("data")).partition(",")[2], validate=True)
    except (ValueError, binascii.Error):
        data = b""
    return Attachment(
        kind="image" if item.get("kind") == "image" else "text",
        name=text(item.get("name")),
        path=text(item.get("path")),
        text=text(item.get("text")),
        data=data,
        media_type=text(item.get("media_type")) or "text/plain",
        digest=text(item.get("digest")),
        size=_whole(item.get("size")),
        mtime_ns=_whole(item.get("mtime_ns")),
    )


def _call(item: Mapping[str, Any]) -> ToolCall:
    state = text(item.get("state"))
    took = item.get("took_s")
    return ToolCall(
        id=text(item.get("id")),
        server=text(item.get("server")),
        tool=text(item.get("tool")),
        arguments=text(item.get("arguments")),
        at=_whole(item.get("at")),
        state=_CALL_STATES.get(state, "failed"),
        result=text(item.get("result")),
        took_s=float(took) if isinstance(took, int | float) and 0 <= took <= MAX_TOOK_S else 0.0,
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= MAX_ID else 0
