"""A conversation of edgelm's own export as JSON.

A file from somebody else must not allow tools, name files of the user, or send them anywhere: tools, consents,
knowledge, paths of files, and sampling that the chat does not know are not imported. A draft says what was there.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard, get_args

from edgelm.base.config import SETTINGS
from edgelm.base.passages import Passage
from edgelm.chats.attachments import Attachment
from edgelm.chats.export_json import FORMAT, VERSION
from edgelm.chats.history import Role, State
from edgelm.chats.imports.draft import (
    BadChatError,
    DraftChat,
    DraftMessage,
    items,
    key_of,
    one_line,
    seconds,
    strings,
    table,
    tag_names,
    text,
)
from edgelm.chats.presets import MAX_NAME_LEN, Parse, Value
from edgelm.chats.reading import Reading
from edgelm.chats.tool_calls import CallState, ToolCall

MAX_ID = 2**62  # ids of edgelm are below it until the year 2100, and the next ones fit
MAX_TOOK_S = 1e6
MAX_FIGURE = 1e12  # of an answer: tokens, or milliseconds
MAX_WORDS_LEN = 100  # of an answer's engine and device
SAMPLING: Mapping[str, Parse] = {name: setting.parse for name, setting in SETTINGS.items() if setting.sampling}
_COUNTS = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "drafted", "accepted", "context_used", "context_size",
    "reasoning_tokens",
)  # fmt: skip
_FIGURES = ("first_token_ms", "tokens_per_second", "reasoning_ms")
_PATH = re.compile(r"[/~.]|[A-Za-z]:[/\\]|.*\\|.*/\.\.?(?:/|$)|.*\.gguf$", re.IGNORECASE)
_STATES: dict[str, State] = {"done": "done", "streaming": "stopped", "stopped": "stopped", "failed": "failed"}
_CALL_STATES: dict[str, CallState] = {name: name for name in get_args(CallState)}


def is_own(document: Mapping[str, Any]) -> bool:
    """Tell whether a JSON object may be a chat of edgelm."""
    return document.get("format") == FORMAT


def read_own(document: Mapping[str, Any], parsers: Mapping[str, Parse] = SAMPLING) -> DraftChat:
    """Return a chat; `parsers` are those of the sampling parameters. Raises BadChatError."""
    version, chat_id = document.get("version"), _id(document.get("id"))
    if isinstance(version, int) and version > VERSION:
        raise BadChatError("a newer edgelm wrote it")
    if chat_id is None:
        raise BadChatError("it has no id")
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
        tags=tag_names(items(document.get("tags"))),
        more={
            "renamed": document.get("renamed") is True,
            "summarized": document.get("summarized") is True,
            "model": _model(document.get("model")),
            "preset": one_line(document.get("preset"))[:MAX_NAME_LEN],
            "sampling": _sampling(document.get("sampling"), parsers),
        },
        dropped=tuple(_dropped(document, parsers)),
    )


def _dropped(document: Mapping[str, Any], parsers: Mapping[str, Parse]) -> Iterator[str]:
    """Yield what a chat has and an import does not take."""
    if document.get("tools"):
        yield "tools"
    if document.get("consents") or document.get("tool_consents"):
        yield "consents"
    if document.get("knowledge"):
        yield "knowledge"
    if text(document.get("model")) != _model(document.get("model")):
        yield "the path of the model"
    if len(table(document.get("sampling"))) != len(_sampling(document.get("sampling"), parsers)):
        yield "sampling"
    messages = map(table, items(document.get("messages")))
    if any(table(file).get("path") for message in messages for file in items(message.get("attachments"))):
        yield "the paths of attached files"


def _model(value: object) -> str:
    """Return the name of a model; empty for a path, and what is no name."""
    name = text(value)
    return name if name.isprintable() and not _PATH.match(name) else ""


def _id(value: object) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_ID
    return value if fits and isinstance(value, int) else None


def _sampling(value: object, parsers: Mapping[str, Parse]) -> dict[str, Value]:
    kept: dict[str, Value] = {}
    for name, item in table(value).items():
        if name not in parsers or isinstance(item, bool) or not isinstance(item, int | float | str):
            continue
        try:
            parsed = parsers[name](item)
        except (ValueError, OverflowError):
            continue
        if parsed is not None:
            kept[name] = parsed
    return kept


def _message(item: Mapping[str, Any]) -> DraftMessage:
    role, key = text(item.get("role")), key_of(item.get("id"))
    if role not in ("user", "assistant") or key is None:
        raise BadChatError("a message has no role or no id")
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
        model=_model(item.get("model")) or one_line(re.split(r"[/\\]", text(item.get("model")))[-1]),
        stats=_stats(item.get("stats")),
        sent_from=key_of(item.get("sent_from")),
        reading=_reading(item.get("reading")),
        attachments=tuple(_attachment(table(value)) for value in items(item.get("attachments"))),
        calls=tuple(_call(table(value)) for value in items(item.get("calls"))),
        created=seconds(item.get("created")),
    )


def _stats(value: object) -> str:
    """Return the figures of an answer as JSON, without those that are none."""
    kept: dict[str, float | str] = {}
    for name, item in table(value).items():
        if name in ("engine", "device"):
            kept[name] = one_line(item)[:MAX_WORDS_LEN]
        elif name in _COUNTS and _is_figure(item) and item == int(item):
            kept[name] = int(item)
        elif name in _FIGURES and _is_figure(item):
            kept[name] = item
    kept = {name: item for name, item in kept.items() if item != ""}
    return json.dumps(kept) if kept else ""


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_FIGURE


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
        text=text(item.get("text")),
        data=data,
        media_type=text(item.get("media_type")) or "text/plain",
        size=_whole(item.get("size")),
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
