"""Limits of an import: values that only the user may set, numbers that are not finite, and sizes."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from edgelm.base.config import SETTINGS
from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attachments import Attachment
from edgelm.chats.export_json import to_json
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.imports import files as files_module
from edgelm.chats.imports import json_stream
from edgelm.chats.imports.draft import DraftChat
from edgelm.chats.imports.files import read_file
from edgelm.chats.imports.save import save_draft
from edgelm.chats.store import Store
from tests.chats.exports_of_others import PNG, chatgpt
from tests.chats.test_imports import imported, store, written, zipped

__all__ = ["store"]


def test_an_export_turns_on_no_tools_and_points_at_no_files(store: Store, tmp_path: Path) -> None:
    chat = Chat(
        title="From a friend", consents={"http://evil.example": True}, tool_consents=("abc",), tools=("files",),
        knowledge=("/home",), model="/data/evil.gguf", tags=("one\n\x1b[31mtwo", "x" * 999, "\x07", "one"),
        sampling={"temperature": 0.5, "reasoning_effort": "low", "top_k": -1, "model": "x"},
    )  # fmt: skip
    file = Attachment(
        kind="text", name="a.txt", path="/home/a.txt", text="kept", digest="ab", size=4, mtime_ns=5, tokens=0
    )
    question = Message(chat=chat.id, parent=None, role="user", text="Hi", attachments=(file,))
    answer = Message(chat=chat.id, parent=question.id, role="assistant", text="Hello", model="/data/evil.gguf")
    path = written(tmp_path, to_json(chat, Tree([question, answer])))
    parsers = {name: SETTINGS[name].parse for name in ("temperature", "top_k")} | {"reasoning_effort": str}
    (draft,) = read_file(path, "auto", parsers)
    assert isinstance(draft, DraftChat)
    assert draft.dropped == (
        "tools", "consents", "knowledge", "the path of the model", "sampling", "the paths of attached files",
    )  # fmt: skip
    save_draft(store, draft)
    (kept,) = store.chats()
    assert (kept.tools, kept.tool_consents, kept.consents, kept.knowledge, kept.model) == ((), (), {}, (), "")
    assert kept.sampling == {"temperature": 0.5, "reasoning_effort": "low"}
    assert kept.tags == ("one \ufffd[31mtwo", "x" * 40, "\ufffd", "one")
    question, answer = store.messages(kept.id)
    (attachment,) = question.attachments
    assert (attachment.name, attachment.text, attachment.size) == ("a.txt", "kept", 4)
    assert (attachment.path, attachment.digest, attachment.mtime_ns) == ("", "", 0)
    assert answer.model == "evil.gguf", "a name to show"


@pytest.mark.parametrize(
    ("model", "kept"),
    [("qwen3:4b", "qwen3:4b"), ("org/name", "org/name"), ("hf.co/org/name-GGUF:Q4_K_M", "hf.co/org/name-GGUF:Q4_K_M"),
     ("/a/b", ""), ("~/b", ""), ("../b", ""), ("./b", ""), ("C:\\b", ""), ("C:/b", ""), ("a/../b", ""), ("b.gguf", ""),
     ("\x1b[2J", "")],
)  # fmt: skip
def test_a_model_is_a_name_and_no_path(store: Store, tmp_path: Path, model: str, kept: str) -> None:
    chat = Chat(title="x", model=model)
    message = Message(chat=chat.id, parent=None, role="user", text="Hi")
    assert imported(store, written(tmp_path, to_json(chat, Tree([message])))) == ["new"]
    assert store.chats()[0].model == kept


def test_figures_that_are_no_figures_are_left_out(store: Store, tmp_path: Path) -> None:
    text = """{"format": "edgelm-chat", "version": 1, "id": 5, "messages": [
      {"id": 6, "parent": null, "role": "user", "text": "Hi"},
      {"id": 7, "parent": 6, "role": "assistant", "text": "Ho", "reasoning": "hm", "created": 1e9, "stats": {
        "reasoning_ms": Infinity, "first_token_ms": 1e999, "completion_tokens": Infinity, "prompt_tokens": NaN,
        "cached_tokens": -1, "drafted": 2.5, "accepted": true, "context_used": 1e300, "context_size": 4096.0,
        "tokens_per_second": 7.5, "engine": "llama", "device": 3, "of_tomorrow": "x"}}]}"""
    assert imported(store, written(tmp_path, text)) == ["new"]
    answer = store.messages(5)[1]
    assert json.loads(answer.stats) == {"context_size": 4096, "tokens_per_second": 7.5, "engine": "llama"}


def test_one_conversation_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "MAX_VALUE", 1_000)
    monkeypatch.setattr(json_stream, "CHUNK", 100)
    for length in (1_001, 3_000):
        with pytest.raises(RequestError, match="one conversation has more than"):
            list(read_file(written(tmp_path, [{"mapping": "x" * length}]), "auto"))
    (item,) = read_file(written(tmp_path, [{"messages": [{"role": "user", "content": "x" * 900}]}]), "auto")
    assert isinstance(item, DraftChat)


def test_a_zip_that_unpacks_to_far_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zipped(tmp_path, {"conversations.json": b"[" + b" " * 40 * 2**20 + b"]"})
    with pytest.raises(RequestError, match="unpacks to 40 MiB, more than 100 times its size"):
        list(read_file(bomb, "auto"))
    monkeypatch.setattr(files_module, "MAX_UNPACKED", 2**20)
    large = zipped(tmp_path, {f"conversations-00{i}.json": random.Random(i).randbytes(2**20) for i in range(2)})
    with pytest.raises(RequestError, match="unpacks to 2 MiB, and the limit is 1 MiB"):
        list(read_file(large, "auto"))


def test_pictures_of_one_conversation_have_a_limit(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_CHAT_IMAGES", len(PNG))
    exports = [chatgpt(), chatgpt() | {"id": "6a-2", "conversation_id": None}]
    for export in exports:
        export["mapping"]["q2"]["message"]["content"]["parts"] *= 2
    path = zipped(tmp_path, {"conversations.json": json.dumps(exports).encode(), "file_01ab-photo.png": PNG})
    assert imported(store, path) == ["new", "new"]
    messages = [message for chat in store.chats() for message in store.messages(chat.id) if message.attachments]
    assert [len(message.attachments) for message in messages] == [1, 1]
    assert all("not in the export" in message.text for message in messages)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(EdgeLMError, match="not a regular file"):
            list(read_file(path, "auto"))
