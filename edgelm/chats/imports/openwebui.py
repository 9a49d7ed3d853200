"""A conversation of Open WebUI's export: a list of chats, each with its tree in `chat.history`, older ones with a list
in `chat.messages`.

Thoughts and calls of tools stand in the text of an answer, in elements `<details type="reasoning">`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from typing import Any

from edgelm.chats.attachments import Attachment
from edgelm.chats.history import State
from edgelm.chats.imports.draft import (
    BadChatError,
    DraftChat,
    DraftMessage,
    Said,
    draft_of,
    image_of_base64,
    items,
    joined,
    key_of,
    linear,
    seconds,
    table,
    tag_names,
    text,
    tool_text,
)
from edgelm.chats.imports.messages import content_of

_OPENING = re.compile(r'<details type="(reasoning|tool_calls)"([^>]*)>')
_CLOSING = "</details>"
_SUMMARY = re.compile(r"\s*<summary>[^<]*</summary>")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def is_openwebui(document: Mapping[str, Any]) -> bool:
    """Tell whether a JSON object may be a conversation of Open WebUI."""
    chat = table(document.get("chat")) or document
    if isinstance(table(chat.get("history")).get("messages"), dict):
        return True
    return "chat" in document and isinstance(chat.get("messages"), list)


def read_openwebui(document: Mapping[str, Any]) -> DraftChat:
    """Return a conversation. Raises BadChatError."""
    chat = table(document.get("chat")) or document
    key = key_of(document.get("id")) or key_of(chat.get("id"))
    if key is None:
        raise BadChatError("it has no id")
    history = table(chat.get("history"))
    nodes = {name: node for name, node in table(history.get("messages")).items() if isinstance(node, dict)}
    system = text(chat.get("system")) or text(table(chat.get("params")).get("system"))
    if nodes:
        messages = [message for name, node in nodes.items() if (message := _message(name, node, nodes)) is not None]
    else:
        said, messages = linear(_said(table(item)) for item in items(chat.get("messages")))
        system = system or said
    return DraftChat(
        key=f"openwebui:{key}",
        messages=messages,
        leaf=key_of(history.get("currentId")) or (messages[-1].key if messages else None),
        title=text(document.get("title")) or text(chat.get("title")),
        system=system,
        created=seconds(document.get("created_at")) or seconds(chat.get("timestamp")),
        changed=seconds(document.get("updated_at")) or seconds(chat.get("timestamp")),
        archived=document.get("archived") is True,
        pinned=document.get("pinned") is True,
        tags=_tags(table(document.get("meta")).get("tags")) or _tags(chat.get("tags")),
    )


def _tags(value: object) -> tuple[str, ...]:
    return tag_names([tag if isinstance(tag, str) else table(tag).get("name") for tag in items(value)])


def _message(name: str, node: Mapping[str, Any], nodes: Mapping[str, Any]) -> DraftMessage | None:
    role = text(node.get("role"))
    if role not in ("user", "assistant"):
        return None
    parent = key_of(node.get("parentId"))
    while (
        parent is not None and parent in nodes and text(nodes[parent].get("role")) not in ("user", "assistant")
    ):  # a system message
        above = key_of(nodes[parent].get("parentId"))
        parent = None if above == parent else above
    return draft_of(_said(node), name, parent)


def _said(node: Mapping[str, Any]) -> Said:
    role = text(node.get("role"))
    written, attachments = content_of(node.get("content"))
    reasoning = ""
    if role == "assistant":
        written, reasoning = _without_details(written) if written.strip() else _output(node.get("output"))
    error = node.get("error")
    state: State = "stopped" if node.get("done") is False else "done"
    note = ""
    if error:
        state, note = "failed", " ".join(text(table(error).get("content") or error).split()) or "the answer failed"
    return Said(
        role=role, text=written, reasoning=reasoning, model=text(node.get("model")) if role == "assistant" else "",
        created=seconds(node.get("timestamp")), state=state, note=note,
        attachments=attachments + _files(node.get("files")),
    )  # fmt: skip


def _output(value: object) -> tuple[str, str]:
    """Return the text and the thoughts of the items in which newer versions keep an answer, whose text is empty."""
    written = reasoning = ""
    results = {
        text(item.get("call_id")): content_of(item.get("output"))[0]
        for item in map(table, items(value))
        if text(item.get("type")) == "function_call_output"
    }
    for item in map(table, items(value)):
        kind = text(item.get("type"))
        if kind == "message":
            written = joined(written, content_of(item.get("content"))[0])
        elif kind == "reasoning":
            thought = content_of(item.get("content"))[0] or content_of(item.get("summary"))[0]
            reasoning = joined(reasoning, thought)
        elif kind == "function_call":
            result = results.get(text(item.get("call_id")), "")
            written = joined(written, tool_text(text(item.get("name")), text(item.get("arguments")), result))
    return written.strip(), reasoning.strip()


def _files(value: object) -> tuple[Attachment, ...]:
    found: list[Attachment] = []
    for item in map(table, items(value)):
        file = table(item.get("file"))
        name = text(item.get("name")) or text(file.get("filename")) or "file"
        content = text(table(file.get("data")).get("content"))
        if text(item.get("type")) == "image":
            picture = image_of_base64(item.get("url"))
            found += [picture] if picture else []
        elif content:
            found.append(Attachment(kind="text", name=name, text=content, size=len(content.encode("utf-8", "replace"))))
    return tuple(found)


def _without_details(written: str) -> tuple[str, str]:
    """Return the text of an answer without its folded parts, and the thoughts that stood in them."""
    parts: list[str] = []
    reasoning = ""
    begin = 0
    while match := _OPENING.search(written, begin):
        end = written.find(_CLOSING, match.end())
        if end < 0:
            break
        parts.append(written[begin : match.start()])
        if match[1] == "reasoning":
            summary = _SUMMARY.match(written, match.end(), end)
            inner = unescape(written[summary.end() if summary else match.end() : end]).strip()
            reasoning = joined(reasoning, "\n".join(re.sub(r"^> ?", "", line) for line in inner.splitlines()))
        else:
            values = {name: unescape(value) for name, value in _ATTRIBUTE.findall(match[2])}
            parts.append(
                f"\n\n{tool_text(values.get('name', ''), values.get('arguments', ''), values.get('result', ''))}\n\n"
            )
        begin = end + len(_CLOSING)
    parts.append(written[begin:])
    return "".join(parts).strip(), reasoning
