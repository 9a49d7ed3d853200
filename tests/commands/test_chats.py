"""`edgelm chats` and `edgelm run -c` as scripts use them: what they print, and their exit codes."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from edgelm.chats.history import Chat, Message
from edgelm.chats.store import Store
from edgelm.commands import chats
from edgelm.commands.cli import run_cli
from tests.chats.exports_of_others import chatgpt, openwebui


@pytest.fixture
def store(home: Path) -> Any:
    opened = Store(home / "data" / "chats.db")  # as a chat that is open in another terminal
    yield opened
    opened.close()


class Edgelm:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command without a terminal; return its exit code, output and errors."""
        self._monkeypatch.setattr("sys.argv", ["edgelm", *arguments])
        self._monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        code = run_cli()
        output = self._capsys.readouterr()
        return code, output.out, output.err


@pytest.fixture
def edgelm(store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgelm:
    return Edgelm(monkeypatch, capsys)


def add(store: Store, title: str, text: str, **more: Any) -> Chat:
    chat = Chat(title=title, **more)
    store.put_chat(chat)
    question = Message(chat=chat.id, parent=None, role="user", text=text)
    store.put_message(question)
    chat.leaf = question.id
    store.put_chat(chat)
    return chat


def test_list(store: Store, edgelm: Edgelm) -> None:
    assert edgelm("chats", "list") == (0, "", "there are no chats yet\n")
    add(store, "Old \x1b[31mred", "one", changed=1e9, tags=("work",))
    add(store, "New", "two", pinned=True)
    add(store, "Kept", "three", archived=True)
    add(store, "Gone", "four", deleted=time.time() - 5.0)
    code, out, _ = edgelm("chats", "list")
    titles = [line.split("  ")[2].strip() for line in out.splitlines()[1:]]
    assert (code, titles) == (0, ["* New", "Old \ufffd[31mred"])
    rows = json.loads(edgelm("chats", "list", "--json", "--tag", "WORK")[1])
    assert [(row["title"], row["tags"], row["changed"]) for row in rows] == [
        ("Old \x1b[31mred", ["work"], "2001-09-09T01:46:40+00:00")
    ]
    assert "Kept" in edgelm("chats", "list", "--archived")[1]
    assert "Gone" in edgelm("chats", "list", "--deleted")[1]
    code, out, err = edgelm("chats", "list", "-n", "1")
    assert len(out.splitlines()) == 2
    assert err == "and 1 more: -n 0 lists all\n"


def test_show_prints_no_escapes(store: Store, edgelm: Edgelm) -> None:
    chat = add(store, "Colours", "red: \x1b[31m\x07")
    (row,) = json.loads(edgelm("chats", "list", "--json")[1])
    for name in ("last", row["id"], row["id"][:6], "colour"):
        assert edgelm("chats", "show", name) == (0, "# Colours\n\n## You\n\nred: \ufffd[31m\ufffd\n", "")
    assert json.loads(edgelm("chats", "show", "last", "--json")[1])["id"] == chat.id
    code, _, err = edgelm("chats", "show", "nothing")
    assert code == 1
    assert err == "error: there is no chat 'nothing'; `edgelm chats list` shows them\n"


def test_no_line_about_a_chat_has_escapes(store: Store, edgelm: Edgelm) -> None:
    for _ in range(2):
        add(store, "Red \x1b]52;c;aGk=\x07", "pelican \x9b2J")
    code, _, err = edgelm("chats", "show", "red")
    assert (code, err.isprintable() or err[:-1].isprintable()) == (1, True)
    assert "2 chats" in err
    (one, _) = json.loads(edgelm("chats", "list", "--json")[1])
    for arguments in (
        ("list",), ("search", "pelican"), ("delete", one["id"], "-y"), ("restore", one["id"]),
        ("delete", one["id"], "-y", "--forever"), ("search", "\x1b[31mx"),
        ("export", "last", "-o", "/dev/null/\x1b[2J"),
    ):  # fmt: skip
        _, out, err = edgelm("chats", *arguments)
        assert (out + err).replace("\n", "").isprintable(), arguments


@pytest.mark.parametrize("form", ["md", "json", "html"])
def test_export_is_raw_in_a_pipe_and_printable_on_a_terminal(
    store: Store, edgelm: Edgelm, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    add(store, "Colours", "red:\t\x9b31m\x07")
    piped = edgelm("chats", "export", "last", "--to", form)[1]
    assert "\x9b31m" in piped
    monkeypatch.setattr(chats, "_on_terminal", lambda: True)
    shown = edgelm("chats", "export", "last", "--to", form)[1]
    assert "\ufffd31m" in shown
    assert shown.replace("\n", "").replace("\t", "").isprintable()


def test_import_tells_what_it_does_not_take(store: Store, edgelm: Edgelm, tmp_path: Path) -> None:
    chat = add(store, "Evil", "Hi", tools=("files",), knowledge=("/home",), sampling={"frequency_penalty": 1.0})
    path = tmp_path / "a\x1b[2J.json"
    assert edgelm("chats", "export", "last", "-o", str(path))[0] == 0
    store.delete_chat(chat.id)
    code, out, err = edgelm("chats", "import", str(path), str(path))
    assert (code, out) == (0, "1 imported, 1 were here already\n")
    assert err == "note: left out of 1 chat, as only you choose them: tools, knowledge\n"
    assert store.chats()[0].sampling == {"frequency_penalty": 1.0}
    path.write_text('[{"mapping": {}, "id": "e"}]')
    _, _, err = edgelm("chats", "import", str(path), str(path) + "x")
    assert err.count("\n") == 2
    assert err.replace("\n", "").isprintable()


def test_search(store: Store, edgelm: Edgelm) -> None:
    add(store, "Birds", "the pelican is big")
    code, out, _ = edgelm("chats", "search", "pelican", "big")
    assert code == 0
    assert out.splitlines()[0].endswith("Birds")
    assert out.splitlines()[1] == "    the pelican is big"
    (hit,) = json.loads(edgelm("chats", "search", "elica", "--json")[1])
    assert (hit["title"], hit["in_title"]) == ("Birds", False)
    assert edgelm("chats", "search", "ostrich") == (1, "", "no chat has ostrich\n")


def test_delete_and_restore(store: Store, edgelm: Edgelm) -> None:
    add(store, "One", "1")
    add(store, "Two", "2")
    code, out, err = edgelm("chats", "delete", "One")
    assert (code, out) == (2, "")
    assert err.endswith("add --yes\n")
    assert len(store.chats()) == 2
    assert edgelm("chats", "delete", "One", "One", "Two", "--yes")[0] == 0
    assert store.chats() == []
    assert edgelm("chats", "restore", "One") == (0, "One: restored\n", "")
    assert [chat.title for chat in store.chats()] == ["One"]
    assert edgelm("chats", "delete", "Two", "One", "--forever", "-y") == (0, "Two: deleted\nOne: deleted\n", "")
    assert store.chats() == store.deleted_chats() == []
    assert edgelm("chats", "restore", "One")[::2] == (1, "error: the trash is empty\n")


def test_the_trash_is_emptied_after_30_days(store: Store, edgelm: Edgelm) -> None:
    now = time.time()
    for title, days in (("young", 29), ("old", 31)):
        add(store, title, title, deleted=now - days * 86_400)
    out = edgelm("chats", "list", "--deleted")[1]
    assert ("young" in out, "old" in out) == (True, False)
    assert [chat.title for chat in store.deleted_chats()] == ["young"]
    add(store, "old", "it was deleted while no chat was open", deleted=now - 31 * 86_400)
    assert edgelm("chats", "restore", "old")[0] == 1
    assert store.chats() == []


def test_chats_are_listed_while_the_trash_cannot_be_emptied(
    store: Store, edgelm: Edgelm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "BUSY_MS", 10)
    add(store, "old", "old", deleted=time.time() - 31 * 86_400)
    add(store, "here", "here")
    with store.transaction():
        store.put_setting("a", "writer")
        assert "here" in edgelm("chats", "list")[1]
    assert edgelm("chats", "list", "--deleted")[1] == ""


def test_export_and_import_again(store: Store, edgelm: Edgelm, tmp_path: Path) -> None:
    first, second = add(store, "One", "1"), add(store, "Two", "2", archived=True)
    assert edgelm("chats", "export", "last")[1].startswith("# One\n")
    page = tmp_path / "page.html"
    assert edgelm("chats", "export", "Two", "-o", str(page))[0] == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    folder = tmp_path / "all"
    assert edgelm("chats", "export", "--all", "--to", "json", "-o", str(folder))[2].startswith("2 chats written to ")
    files = sorted(map(str, folder.iterdir()))
    for chat in (first, second):
        store.delete_chat(chat.id)
    assert edgelm("chats", "import", *files)[:2] == (0, "2 imported\n")
    assert sorted(chat.title for chat in store.chats()) == ["One", "Two"]
    assert edgelm("chats", "import", *files)[:2] == (0, "2 were here already\n")
    for arguments in (("export",), ("export", "One", "--all"), ("export", "One", "Two")):
        assert edgelm("chats", *arguments)[0] == 2


def test_import_counts_what_it_leaves_out(store: Store, edgelm: Edgelm, tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps([chatgpt(), {"mapping": {}, "id": "x"}, openwebui()]))
    code, out, err = edgelm("chats", "import", str(path))
    assert (code, out) == (0, "2 imported, 1 left out\n")
    assert err == "note: conversation 2 of export.json is left out: it has no messages\n"
    code, out, err = edgelm("chats", "import", str(tmp_path / "none.json"), str(path), "--json")
    assert code == 1
    assert json.loads(out) == {"new": 0, "grown": 0, "same": 2, "deleted": 0, "skipped": 1, "failed_files": 1}
    assert err.startswith(f"error: {tmp_path}/none.json cannot be read: No such file")
    assert edgelm("chats", "import", str(path), "--from", "ollama")[0] == 1


def test_run_goes_on_only_with_a_chat_that_is_there(store: Store, edgelm: Edgelm) -> None:
    assert edgelm("run")[::2] == (
        2, "error: Missing argument 'MODEL'; see --help; only a chat that goes on has a model of its own\n",
    )  # fmt: skip
    assert edgelm("run", "-c", "Hi")[::2] == (1, "error: there are no chats yet; `edgelm` starts one\n")
    add(store, "Foreign", "Hi", model="some/model-that-is-not-here")
    code, _, err = edgelm("run", "-c", "Hi")
    assert code == 1
    assert err == (
        "error: the chat's model some/model-that-is-not-here is not on this machine; "
        "name one: edgelm run -c MODEL PROMPT\n"
    )
    assert edgelm("run", "-c", "starter", "Hi", "--raw")[0] == 2
    (chat,) = store.chats()
    assert len(store.messages(chat.id)) == 1, "nothing was added"
