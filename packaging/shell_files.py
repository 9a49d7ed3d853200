"""Writes what the wheel holds for shells: the completions of bash, zsh and fish, and the manual page.

    python packaging/shell_files.py

The files are kept in packaging/share; tests/test_shell_files.py fails if they are not those of the commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer._completion_shared import get_completion_script  # the script that --show-completion prints

from edgelm.commands.cli import app

SHARE = Path(__file__).parent / "share"
COMPLETIONS = {
    "bash": "bash-completion/completions/edgelm",
    "zsh": "zsh/site-functions/_edgelm",
    "fish": "fish/vendor_completions.d/edgelm.fish",
}
PAGE = "man/man1/edgelm.1"
_INTRODUCTION = """\
.TH EDGELM 1
.SH NAME
edgelm \\- run a language model on your own machine
.SH DESCRIPTION
Without a command, edgelm opens a chat in the terminal.
.B edgelm serve
gives every other program of this machine an endpoint in the dialects of OpenAI, Anthropic and Ollama.
Settings are read from config.toml, from variables EDGELM_NAME, and from flags, the later ones first;
.B edgelm config
shows them all.
"""
_EXIT_STATUS = """\
.SH EXIT STATUS
0 if all went well, 1 if something failed (one line says what), 2 for wrong usage, 130 after an interrupt.
"""


def shell_files() -> dict[str, str]:
    """Return the files by their paths below share/."""
    files = {
        path: get_completion_script(prog_name="edgelm", complete_var="_EDGELM_COMPLETE", shell=shell).strip() + "\n"
        for shell, path in COMPLETIONS.items()
    }
    return files | {PAGE: manual_page()}


def manual_page() -> str:
    """Return the manual page, in roff (man(7))."""
    root: Any = typer.main.get_command(app)
    parts = [_INTRODUCTION, ".SH OPTIONS\n", *_options(root, root), ".SH COMMANDS\n"]
    for names, command in _commands(root, ()):
        parts.append(f".SS {' '.join(names)}\n{_escaped(command.help or '')}\n")
        parts += _options(command, root)
    return "".join([*parts, _EXIT_STATUS])


def _commands(group: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the commands of a group with their words, those of groups in it too."""
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from _commands(command, (*names, name))
        elif not command.hidden:
            yield (*names, name), command


def _options(command: Any, root: Any) -> Iterator[str]:
    """Yield the entries of a command's arguments and flags."""
    context = typer.Context(command, info_name="edgelm", parent=None if command is root else typer.Context(root))
    for parameter in command.get_params(context):
        if not getattr(parameter, "hidden", False) and (record := parameter.get_help_record(context)):
            name, text = record
            yield f".TP\n.B {_escaped(name)}\n{_escaped(text)}\n"


def _escaped(text: str) -> str:
    """Return plain text as roff in ASCII: one line, which begins with no request."""
    line = re.sub(r"\s+", " ", text).strip().replace("\\", "\\e").replace("-", "\\-")
    line = re.sub(r"[^\x00-\x7f]", lambda match: f"\\[u{ord(match[0]):04X}]", line)
    return f"\\&{line}" if line.startswith((".", "'")) else line


def main() -> None:
    """Write the files."""
    for path, text in shell_files().items():
        (SHARE / path).parent.mkdir(parents=True, exist_ok=True)
        (SHARE / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
