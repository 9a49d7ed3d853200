"""Made-up exports of other programs, small but with the oddities of real ones."""

from __future__ import annotations

import base64
import sqlite3
from pathlib import Path
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 16


def chatgpt_node(
    name: str, parent: str | None, role: str, content: dict[str, Any] | None, **more: Any
) -> tuple[str, dict[str, Any]]:
    """Return a node of ChatGPT's tree; `more` are fields of its message."""
    message = None
    if content is not None:
        message = {
            "id": name,
            "author": {"role": role, "name": None, "metadata": {}},
            "content": content,
            "weight": 1.0,
        }
        message |= {"create_time": 1_700_000_000.5, "recipient": "all", "metadata": {}, "status": None} | more
    return name, {"id": name, "parent": parent, "children": [], "message": message}


def spoken(*parts: object) -> dict[str, Any]:
    return {"content_type": "text", "parts": list(parts)}


def chatgpt() -> dict[str, Any]:
    """A chat with a root, a hidden system message, an edited question, and an answer that thinks and runs code."""
    model = {"metadata": {"model_slug": "gpt-5"}}
    hidden = {"metadata": {"is_visually_hidden_from_conversation": True}}
    image = {"content_type": "image_asset_pointer", "asset_pointer": "sediment://file_01ab", "size_bytes": 5}
    nodes = [
        chatgpt_node("root", None, "", None),
        chatgpt_node("sys", "root", "system", spoken(""), **hidden),
        chatgpt_node("ctx", "sys", "user", {"content_type": "user_editable_context", "user_profile": "secret"}),
        chatgpt_node("q1", "ctx", "user", spoken("How old is the pelican?"), create_time=None),
        chatgpt_node("a1", "q1", "assistant", spoken("Very old."), **model),
        chatgpt_node("q2", "ctx", "user", spoken(image, "How big is it?", None) | {"content_type": "multimodal_text"}),
        chatgpt_node("think", "q2", "assistant", {"content_type": "thoughts", "thoughts": [
            {"summary": "Look", "content": "It is a bird."}, None]}),
        chatgpt_node("recap", "think", "assistant", {"content_type": "reasoning_recap", "content": "Thought for 5s"}),
        chatgpt_node("code", "recap", "assistant", {"content_type": "code", "language": "python", "text": "1 + 1"},
                     recipient="python"),
        chatgpt_node("out", "code", "tool", {"content_type": "execution_output", "text": "2"}),
        chatgpt_node("search", "out", "assistant", spoken('search("pelican")'), recipient="web"),
        chatgpt_node("page", "search", "tool", {"content_type": "tether_quote", "text": "a long page", "url": "x"}),
        chatgpt_node("a2", "page", "assistant", spoken("Two metres\ue200cite\ue202turn0search1\ue201."), **model),
        chatgpt_node("q3", "a2", "user", spoken("Thanks")),
        chatgpt_node("a3", "q3", "assistant", spoken("You are"), status="in_progress", **model),
    ]  # fmt: skip
    return {
        "title": "Pelicans", "create_time": 1_700_000_000.0, "update_time": 1_700_000_100.0, "mapping": dict(nodes),
        "current_node": "a3", "conversation_id": "6a-1", "id": "6a-1", "is_archived": True, "gizmo_id": None,
        "default_model_slug": "auto", "moderation_results": [], "plugin_ids": None,
    }  # fmt: skip


def openwebui() -> dict[str, Any]:
    """A chat with two answers to a question, thoughts and a call in the text, a picture and a file."""
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    thought = '<details type="reasoning" done="true" duration="3">\n<summary>Thought for 3 seconds</summary>\n'
    call = '<details type="tool_calls" done="true" name="weather" arguments="{&quot;city&quot;: 1}"'
    call += ' result="&quot;rain&quot;">'
    messages = {
        "u1": {"id": "u1", "parentId": None, "childrenIds": ["b1", "b2"], "role": "user", "content": "Rain?",
               "timestamp": 1_710_000_000, "models": ["a", "b"], "files": [
                   {"type": "image", "url": url},
                   {"type": "file", "name": "notes.txt", "file": {"data": {"content": "wet"}}}, None]},
        "b1": {"id": "b1", "parentId": "u1", "childrenIds": [], "role": "assistant", "content": "No.",
               "model": "llama3:8b", "timestamp": 1_710_000_010, "done": True},
        "b2": {"id": "b2", "parentId": "u1", "childrenIds": [], "role": "assistant", "model": "qwen3:4b",
               "content": f"{thought}&gt; Let me\n&gt; see &amp; think\n</details>\n{call}\n<summary>Tool</summary>\n"
               "</details>\nYes.", "timestamp": 1_710_000_020, "done": False},
        "b3": {"id": "b3", "parentId": "b2", "childrenIds": [], "role": "user", "content": "When?", "timestamp": None},
        "b4": {"id": "b4", "parentId": "b3", "childrenIds": [], "role": "assistant", "content": "", "model": "qwen3:4b",
               "error": {"content": "the model\nis gone"}},
    }  # fmt: skip
    chat = {
        "title": "Weather", "models": ["a", "b"], "params": {"system": "Be brief."}, "timestamp": 1_710_000_000_000,
        "history": {"messages": messages, "currentId": "b4"}, "messages": [],
    }  # fmt: skip
    return {
        "id": "ow-1", "user_id": "u", "title": "Weather", "chat": chat, "created_at": 1_710_000_000,
        "updated_at": 1_710_000_500, "archived": False, "pinned": True, "meta": {"tags": ["sky", None, "sky"]},
    }  # fmt: skip


def old_openwebui() -> dict[str, Any]:
    """A chat of an older version: a list of messages, and no tree."""
    messages = [{"role": "user", "content": "Old?"}, {"role": "assistant", "content": "Yes.", "model": "llama2"}]
    return {"id": "ow-0", "chat": {"title": "Old one", "messages": messages, "timestamp": 1_700_000_000_000}}


def write_ollama(path: Path) -> None:
    """Write the file of Ollama's desktop app, with a call of a tool and two attachments."""
    db = sqlite3.connect(path)
    db.executescript("""
        CREATE TABLE settings (id INTEGER PRIMARY KEY);
        CREATE TABLE chats (id TEXT PRIMARY KEY, title TEXT NOT NULL, created_at TIMESTAMP, browser_state TEXT);
        CREATE TABLE messages (id INTEGER PRIMARY KEY, chat_id TEXT, role TEXT, content TEXT, thinking TEXT,
            stream BOOLEAN, model_name TEXT, created_at TIMESTAMP, updated_at TIMESTAMP, tool_result TEXT);
        CREATE TABLE tool_calls (id INTEGER PRIMARY KEY, message_id INTEGER, type TEXT, function_name TEXT,
            function_arguments TEXT, function_result TEXT);
        CREATE TABLE attachments (id INTEGER PRIMARY KEY, message_id INTEGER, filename TEXT, data BLOB);
        INSERT INTO chats VALUES ('c-1', 'Sums', '2025-08-01 12:00:00', NULL), ('c-2', '', 'never', NULL),
            ('c-3', 'Empty', NULL, NULL);
        INSERT INTO messages VALUES
            (1, 'c-1', 'user', 'What is in it?', '', 0, NULL, '2025-08-01 12:00:01.5+02:00', NULL, NULL),
            (2, 'c-1', 'assistant', '', 'I look.', 0, 'gpt-oss:20b', '2025-08-01 12:00:02', NULL, NULL),
            (3, 'c-1', 'tool', 'forty two', '', 0, NULL, '2025-08-01 12:00:03', NULL, NULL),
            (4, 'c-1', 'assistant', 'It is 42.', '', 0, 'gpt-oss:20b', '2025-08-01 12:00:04', NULL, NULL),
            (5, 'c-2', 'user', 'Hello there', '', 0, NULL, 'never', NULL, NULL);
        INSERT INTO tool_calls VALUES (1, 2, 'function', 'read', '{"file": 1}', NULL);
    """)
    db.executemany(
        "INSERT INTO attachments (message_id, filename, data) VALUES (1, ?, ?)",
        [("a.txt", b"forty two"), ("a.png", PNG), ("a.bin", b"\xff\xfe\0")],
    )
    db.commit()
    db.close()
