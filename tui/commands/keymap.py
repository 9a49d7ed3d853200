"""The user's own keys: the table `[keys]` of config.toml, in which a name of a row or command gets other keys.

Owns the names, which keys can be bound, and the labels of the keys in force. The rows and their own keys are in
table.py; Textual's keymap does the binding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from textual.binding import Binding
from textual.keys import Keys, _character_to_key, key_to_character

from edgelm.base.errors import UsageError
from edgelm.tui.commands.table import COMMANDS, EVERYWHERE, GLOBAL_KEYS, KEY_GROUPS, KEY_NAMES, Group, Key
from edgelm.tui.hints import Hint

UNBOUND = "no_key"  # no terminal sends it
PREFIXES = {
    EVERYWHERE: "",
    "On a message": "message-",
    "In the inspector": "inspector-",
    "In the list of chats": "list-",
}
# The names of actions that have no name of their own in them.
ACTION_NAMES = {
    "app.command_palette": "palette",
    "toggle_sidebar": "sidebar",
    "toggle_reasoning": "reasoning",
    "select(-1)": "above",
    "pan(-1)": "pan-left",
    "pan(1)": "pan-right",
    "toggle_wrap": "wrap",
    "select(1)": "below",
    "scroll_home": "first",
    "scroll_end": "last",
    "find(1)": "find-next",
    "find(-1)": "find-previous",
    "move(-1)": "back",
    "move(1)": "on",
    "move(-20)": "page-back",
    "move(20)": "page-on",
    "move(-1000)": "first",
}
MODIFIERS = ("ctrl", "alt", "shift", "super", "meta", "hyper")
# Keys that the prompt, a list or a dialog needs: a key that works everywhere would take them away.
NEEDED = frozenset(
    "enter tab shift+tab backspace delete up down left right home end pageup pagedown space "
    "ctrl+j ctrl+m ctrl+i ctrl+h alt+enter shift+enter".split()
)  # fmt: skip
_BASES = frozenset(key.value.split("+")[-1] for key in Keys if not key.value.startswith("<"))
_SPELLINGS = {name.lower(): key for key, name in KEY_NAMES.items()}


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The keys in force, by the action of each row that the user has changed."""

    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def textual(self) -> dict[str, str]:
        """Return the changes as Textual takes them: keys by the id of a binding."""
        return {action: ",".join(keys) or UNBOUND for action, keys in self.changed.items()}

    @property
    def groups(self) -> list[Group]:
        """Return the tables with the keys in force, and with commands that have got a key."""
        groups: list[Group] = [(title, [self._in_force(key) for key in keys]) for title, keys in KEY_GROUPS]
        added = [self._in_force(key) for key in _KEYLESS if self.changed.get(key.action)]
        return [(title, [*keys, *added] if title == EVERYWHERE else keys) for title, keys in groups]

    def label(self, action: str, default: str) -> str:
        """Return the key of an action as a person reads it; empty where the user has taken it away."""
        keys = self.changed.get(action.removeprefix("screen."))
        if keys is None:
            return default
        return Key(_written(keys[0]), "", "").shown if keys else ""

    def key_of(self, command: str) -> str:
        """Return the key of a command as a person reads it; empty: it has none."""
        action = f"run({command!r})"
        return self.label(action, next((key.shown for key in GLOBAL_KEYS if key.action == action), ""))

    def relabel(self, hint: Hint) -> Hint:
        """Return a hint with the key in force."""
        return hint._replace(key=self.label(hint.action, hint.key))

    def _in_force(self, key: Key) -> Key:
        keys = self.changed.get(key.action) if key.action else None
        return key if keys is None else replace(key, keys=",".join(map(_written, keys)) or "-")


@runtime_checkable
class HasKeyMap(Protocol):
    """An app with keys of the user's own."""

    keymap: KeyMap


def keymap_of(app: object) -> KeyMap:
    """Return the keys in force in an app."""
    return app.keymap if isinstance(app, HasKeyMap) else KeyMap()


_BOUND = {key.action for key in GLOBAL_KEYS}
_KEYLESS = tuple(
    Key(UNBOUND, f"run({command.name!r})", command.help, priority=True)
    for command in COMMANDS
    if f"run({command.name!r})" not in _BOUND
)


def keyless_bindings() -> list[Binding]:
    """Return a binding for each command without a key, so that a keymap can give it one."""
    return [key.binding for key in _KEYLESS]


def rows_by_name() -> dict[str, tuple[str, Key]]:
    """Return the group and row of each name that `[keys]` may have."""
    rows: dict[str, tuple[str, Key]] = {}
    for title, keys in KEY_GROUPS:
        if title in PREFIXES:
            rows |= {PREFIXES[title] + _name(key.action): (title, key) for key in keys if key.action}
    return rows | {_name(key.action): (EVERYWHERE, key) for key in _KEYLESS}


def parse_keys(document: object, file: Path) -> KeyMap:
    """Return the keys of the table `keys` of config.toml.

    Raises UsageError for an unknown name or key, one that the prompt needs, and a key for two things.
    """
    if not isinstance(document, dict):
        raise UsageError(f"{file}: keys is no table", 'write [keys] and below it NAME = "ctrl+x"')
    rows = rows_by_name()
    changed: dict[str, tuple[str, ...]] = {}
    for name, value in document.items():
        if name not in rows:
            near = [known for known in rows if name.split("-")[-1] in known]
            hint = f"did you mean {', '.join(near)}?" if near else "the names are " + ", ".join(rows)
            raise UsageError(f"{file} [keys]: there is no {name}", hint)
        title, key = rows[name]
        changed[key.action] = tuple(
            _parse_key(text, f"{file} [keys]: {name}", everywhere=title == EVERYWHERE)
            for text in _texts(value, file, name)
        )
    keymap = KeyMap(changed)
    _check_conflicts(keymap, rows, file)
    return keymap


def _name(action: str) -> str:
    """Return the name of an action: the word in it, as in `run('copy')`, else that of its function."""
    quoted = re.search(r"'([^']+)'", action)
    return ACTION_NAMES.get(action) or (quoted[1] if quoted else re.sub(r"\(.*", "", action).replace("_", "-"))


def _written(key: str) -> str:
    """Return a key with its character in place of Textual's name for it: `ctrl+slash` is written `ctrl+/`."""
    *modifiers, name = key.split("+")
    character = key_to_character(name)
    return "+".join([*modifiers, character if character and character.isprintable() and character != " " else name])


def _texts(value: object, file: Path, name: str) -> list[str]:
    texts: Any = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or any(not isinstance(text, str) for text in texts):
        raise UsageError(f"{file} [keys]: {name} is {value!r}", 'give a key such as "ctrl+x", a list of keys, or ""')
    return [text for text in texts if text.strip()]


def _parse_key(text: str, source: str, *, everywhere: bool) -> str:
    """Return a key as Textual names it."""
    *modifiers, base = text.strip().split("+") if text.strip() != "+" else ["+"]
    modifiers = [modifier.strip().lower() for modifier in modifiers]
    base = base.strip()
    if len(base) > 1 or modifiers:
        base = _SPELLINGS.get(base.lower(), base.lower().replace(" ", "_"))
    if modifiers == ["shift"] and len(base) == 1:
        modifiers, base = [], base.upper()
    if len(base) == 1 and base.isprintable() and not base.isspace():
        name = _character_to_key(base)
    else:
        name = base
    is_known = name in _BASES or (len(base) == 1 and base.isprintable() and not base.isspace())
    if not is_known or any(modifier not in MODIFIERS for modifier in modifiers):
        raise UsageError(f"{source} is {text!r}, which is no key", "write ctrl+x, alt+x, f10, home, pagedown and so on")
    key = "+".join([*sorted(set(modifiers)), name])  # Textual's order
    if everywhere and (key in NEEDED or (not modifiers and name not in _NAMED)):
        raise UsageError(
            f"{source} is {text!r}, which is needed for writing", "take one with ctrl or alt, or f1 to f24"
        )
    return key


# Keys without a character: they may stand alone.
_NAMED = frozenset(base for base in _BASES if re.fullmatch(r"f\d+|escape|insert|pause|printscreen", base))


def _check_conflicts(keymap: KeyMap, rows: Mapping[str, tuple[str, Key]], file: Path) -> None:
    """Raise UsageError where a key in force is that of two rows of a group, or of one that works everywhere."""
    owners: dict[tuple[str, str], str] = {}
    for name, (title, key) in rows.items():
        for pressed in _keys_in_force(keymap, key):
            other = owners.setdefault((title, pressed), name)
            if other != name:
                raise _conflict(file, pressed, other, name)
    first = {pressed: name for (title, pressed), name in owners.items() if title == EVERYWHERE}
    for (title, pressed), name in owners.items():
        if title != EVERYWHERE and pressed in first and rows[first[pressed]][1].priority:
            raise _conflict(file, pressed, first[pressed], name)


def _conflict(file: Path, key: str, one: str, other: str) -> UsageError:
    return UsageError(f"{file} [keys]: {key} is the key of {one} and of {other}", "give one of them another key")


def _keys_in_force(keymap: KeyMap, key: Key) -> Iterable[str]:
    keys = keymap.changed.get(key.action)
    own = [_character_to_key(name) if len(name) == 1 else name for name in key.keys.split(",")]
    return [name for name in (own if keys is None else keys) if name != UNBOUND]
