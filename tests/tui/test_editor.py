"""The user's own editor for a message: scripts in place of editors, and what can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.tui.prompt.editor import edit_text, editor_command
from tests.tui.conftest import Open

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a function that makes an editor of a shell script; temporary files are in `temporary`."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))

    def make(text: str) -> str:
        path = tmp_path / "an editor"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        return f"'{path}'"

    return make


def kept(tmp_path: Path) -> list[Path]:
    """Return the files that are kept for the user."""
    return list((tmp_path / "temporary").rglob("*.md"))


def edit(text: str, editor: str) -> str:
    return asyncio.run(edit_text(text, editor_command({"EDITOR": editor, "PATH": "/usr/bin:/bin"})))


def test_an_editor_with_arguments_changes_the_text(script: Script, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    editor = script(f'ls -ld "$(dirname "$3")" "$3" > "{seen}"; printf "%s %s\\ttab\\r\\nlast\\n" "$1" "$2" >> "$3"')
    assert edit("before", f"{editor} --wait 'two words'") == "before\n--wait two words\ttab\nlast"
    assert [line[:10] for line in seen.read_text().splitlines()] == ["drwx------", "-rw-------"], "nobody else reads it"
    assert list((tmp_path / "temporary").iterdir()) == []


def test_visual_comes_first() -> None:
    environment = {"VISUAL": "sh -c", "EDITOR": "cat", "PATH": "/usr/bin:/bin"}
    assert editor_command(environment) == ["sh", "-c"]
    assert editor_command(environment | {"VISUAL": " "}) == ["cat"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "there is no editor: neither VISUAL nor EDITOR is set; set VISUAL or EDITOR"),
        ({"EDITOR": "no-such-editor -x"}, "EDITOR is 'no-such-editor -x', which is no program here"),
        ({"VISUAL": "vi 'x"}, "No closing quotation"),
    ],
)
def test_no_editor(environment: dict[str, str], words: str) -> None:
    with pytest.raises(EdgeLMError, match=words):
        editor_command({"PATH": "/usr/bin:/bin", **environment})


@pytest.mark.parametrize(
    ("text", "words", "num_kept"),
    [
        ("exit 3", "exit code 3; the message is as it was", 0),
        ("echo more >> $1; exit 3", "exit code 3; the message is as it was; the edited text is kept in", 1),
        ("kill -TERM $$", "ended by signal 15; the message is as it was", 0),
        ("rm $1", "the editor has removed its file; the message is as it was", 0),
        (r"printf '\377' >> $1", "not UTF-8; the message is as it was; the edited text is kept in", 1),
        ("head -c 5000000 /dev/zero > $1", "longer than 4 MiB; it is kept in", 1),
    ],
)
def test_no_text_is_lost(script: Script, tmp_path: Path, text: str, words: str, num_kept: int) -> None:
    with pytest.raises(EdgeLMError, match=words) as caught:
        edit("before", script(text))
    assert "\n" not in str(caught.value)
    assert len(kept(tmp_path)) == num_kept
    for file in kept(tmp_path):
        assert str(file) in str(caught.value)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_escape_gets_into_the_prompt(script: Script) -> None:
    assert edit("", script(r"""printf '\033]52;c;aGk=\007x' > $1""")) == "�]52;c;aGk=�x"


async def test_the_prompt_gets_the_text(
    open_chat: Open, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VISUAL", script('cat "$1" > "$0.seen"; printf "and\\nmore\\n" >> "$1"'))
    async with open_chat() as chat:
        chat.prompt.put("half a message")
        await chat.press("f9")
        await chat.hears("an editor cannot open in this terminal")  # the tests' terminal is none
        assert chat.prompt.text == "half a message"
        chat.app.suspend = contextlib.nullcontext
        await chat.press("f9")
        await chat.until(lambda: chat.prompt.text == "half a message\nand\nmore", "the editor's text")
        assert (tmp_path / "an editor.seen").read_text() == "half a message\n"
        assert chat.prompt.has_focus
        assert chat.turns == [], "it is not sent"
        monkeypatch.setenv("VISUAL", script("exit 1"))
        await chat.press("f9")
        await chat.hears("exit code 1", "the message is as it was")
        assert chat.prompt.text == "half a message\nand\nmore"


async def test_answers_go_on_behind_the_editor(
    open_chat: Open, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    go_on: Any = tmp_path / "go on"
    monkeypatch.setenv("EDITOR", script(f'while ! test -e "{go_on}"; do sleep 0.05; done'))
    monkeypatch.delenv("VISUAL", raising=False)
    async with open_chat() as chat:
        await chat.ready()
        chat.app.suspend = contextlib.nullcontext
        await chat.press("f9")
        await chat.until(lambda: chat.app._batch_count, "the editor")
        chat.screen.send("Explain quicksort")
        await chat.answered()
        assert "It is not stable" in chat.turns[-1][1]
        go_on.write_text("")
        await chat.sees("It is not stable")
