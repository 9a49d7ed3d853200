"""`edgelm run --save` and `--continue`: questions and answers are in the history, also when they are interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.config import load_config
from edgelm.chats import store_thread
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.store import ChatsError, Store
from edgelm.commands.run_chat import SavedChat
from tests.tiny import write_tiny

TIMEOUT_S = 60
LONG = ("--temperature", "1.5", "--top-k", "0", "--min-p", "0", "--top-p", "1", "--seed", "5")  # rarely an end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", context=512)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, measured_cache: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Start `edgelm run` with folders of its own: the machine is measured once for all tests."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(measured_cache, home / "cache")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EDGELM_")}
    environment |= {f"EDGELM_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "CACHE")}

    def run(data: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "edgelm", "run", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | {"EDGELM_DATA_DIR": str(data)},
        )

    return run


def saved(data: Path) -> tuple[Chat, list[Message]]:
    """Return the only chat, and the messages on screen."""
    store = Store(data / "chats.db")
    (chat,) = store.chats()
    path = Tree(store.messages(chat.id), chat.leaf).path()
    store.close()
    return chat, path


def document_of(process: subprocess.Popen[bytes]) -> Any:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return json.loads(out)


def test_a_run_goes_on_with_what_was_said(start: Any, model: Path, tmp_path: Path) -> None:
    first = document_of(start(tmp_path, model, "Hello there", "--save", "--json", "--max-tokens", "8", *LONG))
    chat, path = saved(tmp_path)
    assert chat.title == "Hello there"
    assert [message.role for message in path] == ["user", "assistant"]
    assert path[1].text == first["text"]
    store = Store(tmp_path / "chats.db")
    chat.sampling = {"max_tokens": 4, "temperature": 1.5, "presence_penalty": 1.0}
    chat.system = "Be brief."
    store.put_chat(chat)
    store.put_message(Message(chat=chat.id, parent=path[0].id, role="assistant", text="another version"))
    store.close()
    second = document_of(start(tmp_path, "-c", "And now?", "--json"))
    assert second["chat"] == first["chat"]
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    assert second["usage"]["completion_tokens"] <= 4, "the chat's own sampling"
    chat, path = saved(tmp_path)
    assert [message.text for message in path] == ["Hello there", first["text"], "And now?", second["text"]]
    assert {message.state for message in path} == {"done"}
    assert path[3].model == path[1].model
    assert json.loads(path[3].stats)["prompt_tokens"] == second["usage"]["prompt_tokens"]


def test_an_interrupted_answer_is_kept_as_stopped(start: Any, tmp_path: Path) -> None:
    size = {"context": 200_000, "layers": 12, "width": 256, "ffn": 1024}
    endless = write_tiny(tmp_path / "endless.gguf", endless=True, **size)
    with start(tmp_path, endless, "Go", "--save", "--ctx", "100000", *LONG) as process:
        begun = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    _, (question, answer) = saved(tmp_path)
    assert (question.text, answer.state) == ("Go", "stopped")
    assert answer.text.startswith((begun + rest).decode(errors="ignore").strip("\ufffd\n")[:1])


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path | None) -> Store:
        raise ChatsError(f"the disk with {path} is full", "make room on it", is_full=True)

    monkeypatch.setattr(store_thread, "Store", full)
    folders = {f"EDGELM_{kind}_DIR": str(tmp_path) for kind in ("CONFIG", "DATA")}
    with pytest.raises(ChatsError, match="is full; make room"):
        SavedChat(load_config({}, folders), None)


def test_a_model_that_cannot_be_loaded_leaves_no_question(start: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and no more")
    process = start(tmp_path, broken, "Hello", "--save")
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert len(err.decode().splitlines()) == 1
    store = Store(tmp_path / "chats.db")
    assert store.chats() == []
    store.close()
