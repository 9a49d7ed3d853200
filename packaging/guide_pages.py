"""Writes the lists of the guide that are made from the code: commands, keys, settings, KV modes, agents.

    python packaging/guide_pages.py

A list stands in docs/guide between `<!-- made: KIND NAMES -->` and `<!-- end -->`; `rest` are the names that no other
list of the kind has, so a new command or setting lands there. tests/test_guide.py fails if a list is not the code's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from edgelm.base.config import SETTINGS, Settings
from edgelm.base.kv_modes import KV_MODES, KVMode
from edgelm.commands.cli import app
from edgelm.commands.launch.agents import AGENTS, Agent
from edgelm.tui.commands.table import COMMANDS, KEY_GROUPS

FOLDER = Path(__file__).parent.parent / "docs" / "guide"
REST = "rest"
_LIST = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_KINDS = re.compile(r"(keys [^:]+:|chat-commands|commands|settings|kv-modes|agents)\s*(.*)")


def guide_pages() -> dict[Path, str]:
    """Return the pages with their lists as the code has them. Raises ValueError for a name that is not in the code."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
    lines = known_lines()
    named: dict[str, list[str]] = {kind: [] for kind in lines}
    for text in texts.values():
        for _, mark, _ in _LIST.findall(text):
            kind, names = _parse(mark)
            named[kind] += names
    for kind, names in named.items():
        if sorted(set(names) - {REST}) != sorted(name for name in names if name != REST):
            raise ValueError(f"a list of {kind} repeats a name")
        if unknown := set(names) - set(lines[kind]) - {REST}:
            raise ValueError(f"there are no {kind} {', '.join(unknown)}")
        if missing := set() if REST in names else set(lines[kind]) - set(names):
            raise ValueError(f"no list has the {kind} {', '.join(missing)}")

    def fill(match: re.Match[str]) -> str:
        kind, names = _parse(match[2])
        shown = [name for name in lines[kind] if name not in named[kind]] if names == [REST] else names
        return match[1] + "\n" + "".join(f"{lines[kind][name]}\n" for name in shown) + "\n" + match[3]

    return {path: _LIST.sub(fill, text) for path, text in texts.items()}


def known_lines() -> Mapping[str, Mapping[str, str]]:
    """Return the line of each name, by kind."""
    keys = {
        f"keys {group}:": {_key_name(key.keys): f"- {_spans(key.shown)}: {key.help}" for key in keys}
        for group, keys in KEY_GROUPS
    }
    return keys | {
        "chat-commands": {command.name: f"- `{command.usage}`: {command.help}" for command in COMMANDS},
        "commands": dict(_command_lines()),
        "settings": {name: _setting_line(name) for name in SETTINGS},
        "kv-modes": {mode.name: f"- `{mode.name}`: {mode.help} ({_engines(mode)})" for mode in KV_MODES.values()},
        "agents": {agent.name: _agent_line(agent) for agent in AGENTS},
    }


def _parse(mark: str) -> tuple[str, list[str]]:
    """Return the kind and the names of a mark."""
    match = _KINDS.fullmatch(mark)
    if match is None:
        raise ValueError(f"a list of the guide is made of {mark!r}")
    return match[1], match[2].split() or [REST]


def _key_name(keys: str) -> str:
    return keys.partition(",")[0]


def _spans(shown: str) -> str:
    return ", ".join(f"`{key}`" for key in shown.split(", "))


def all_commands(group: Any) -> Iterator[Any]:
    """Yield the commands of a group, those of groups in it too."""
    for command in group.commands.values():
        yield command
        if getattr(command, "commands", None):
            yield from all_commands(command)


def _command_lines() -> Iterator[tuple[str, str]]:
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        parts = {f"{name} {part}": below for part, below in getattr(command, "commands", {}).items()} or {name: command}
        yield name, "\n".join(f"- `edgelm {words}`: {_first_line(below.help)}" for words, below in parts.items())


def _first_line(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _setting_line(name: str) -> str:
    setting, default = SETTINGS[name], getattr(Settings(), name)
    flag = f"--{name.replace('_', '-')}"
    flags = f"`{flag}`, `--no-{flag[2:]}`" if setting.kind == "switch" else f"`{flag}`"
    shown = (
        "on"
        if default is True
        else "off"
        if default is False
        else f"{default:g}"
        if isinstance(default, float)
        else default
    )
    return f"- `{name}` ({flags}): {setting.help}" + (f"; default `{shown}`" if default not in (None, ()) else "")


def _agent_line(agent: Agent) -> str:
    return f"- {agent.title} (`edgelm launch {agent.name}`): at least {agent.least:,}, better {agent.advised:,}"


def _engines(mode: KVMode) -> str:
    return ", ".join(name for name, has in (("llama.cpp", mode.llama), ("torch", mode.torch)) if has)


def main() -> None:
    """Write the pages."""
    for path, text in guide_pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
