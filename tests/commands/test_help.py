"""`edgelm help`: topics, pages, and sections that are found by words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgelm.chats.knowledge import guide
from edgelm.commands.cli import run_cli

LIMIT_S = 60


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["edgelm", "help", *words])
    return run_cli()


def test_without_a_topic_it_lists_them_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch) == 0
    out = capsys.readouterr().out
    for topic in guide.TOPICS:
        assert [line for line in out.splitlines() if line.startswith(f"{topic} ") and line.endswith(".")], topic
    assert "`edgelm COMMAND --help` shows the flags" in out


@pytest.mark.parametrize("name", ["memory", "MEMORY", "memo"])
def test_a_page_is_plain_markdown_in_a_pipe(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, name) == 0
    assert capsys.readouterr().out == guide.page("memory").rstrip() + "\n"


def test_a_page_is_drawn_for_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "dumb")  # of 80 columns, without colours
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call(monkeypatch, "tools-and-json") == 0
    out = capsys.readouterr().out
    assert "Get JSON from a model" in out
    assert "## " not in out
    assert "`" not in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("words", [["context is full"], ["context", "is", "full"], ["Context is full?"]])
def test_words_find_a_section(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert "## The context is full\n" in out
    assert "`F5`" in out
    assert "`edgelm help troubleshooting`" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("word", "near"),
    [("modles", "'models'"), ("trubleshooting", "'troubleshooting'"), ("xylophone", "lists the topics")],
)
def test_an_unknown_topic_names_near_ones(
    word: str, near: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, word) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert near in err
    assert "`edgelm run starter QUESTION`" in err, "it knows other languages, too"


def test_help_imports_nothing_heavy() -> None:
    """It starts as fast as `edgelm --version`."""
    code = (
        "import sys; sys.argv = ['edgelm', 'help', 'start']; from edgelm.commands.cli import run_cli; run_cli(); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'numpy', 'llama_cpp', 'textual', 'httpx2', "
        "'openai', 'torch', 'jinja2', 'starlette', 'huggingface_hub'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("words", "own"), [(["--help"], ""), (["service", "--help"], ""), (["ps", "--help"], "ps")])
def test_help_imports_no_module_of_another_command(words: list[str], own: str) -> None:
    code = (
        f"import sys; sys.argv = ['edgelm', *{words}]; from edgelm.commands.cli import COMMANDS, run_cli; run_cli(); "
        "print(*(name for name in COMMANDS if f'edgelm.commands.{name}' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    loaded = set(done.stdout.splitlines()[-1].split()) - {"list"}  # has the plain console of the others
    assert loaded == {own} - {""}


@pytest.mark.parametrize("group", ["chats", "memory", "service"])
def test_a_group_without_a_command_shows_its_commands_and_no_error(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["edgelm", group])
    assert run_cli() == 2, "a script that forgot the command notices"
    out, err = capsys.readouterr()
    assert "Commands" in out + err
    assert "error" not in out + err
