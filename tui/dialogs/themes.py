"""Themes: those of config.toml, `[themes."NAME"]`, and the dialog that shows a theme before it is chosen.

Owns the fields of a theme in the file and their errors. What can be read in any theme is palette.py's matter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.color import Color, ColorParseError
from textual.theme import BUILTIN_THEMES, Theme
from textual.widgets import OptionList, Static

from edgelm.base.errors import RequestError, UsageError
from edgelm.tui.dialogs.basic import Choice, PickScreen
from edgelm.tui.hints import CANCEL, Hint
from edgelm.tui.palette import make_palette

PANES = (("surface", 0.05), ("panel", 0.1))  # and their share of the foreground over the background
ALIASES = {"dark": "textual-dark", "light": "textual-light"}
COLOURS = (
    "primary",
    "secondary",
    "accent",
    "foreground",
    "background",
    "surface",
    "panel",
    "boost",
    "warning",
    "error",
    "success",
)


def parse_themes(document: object, file: Path) -> tuple[Theme, ...]:
    """Return the themes of the table `themes` of config.toml. Raises UsageError."""
    if not isinstance(document, dict):
        raise UsageError(f"{file}: themes is no table", 'write [themes."NAME"] and its colours below it')
    return tuple(_theme(name, entries, file) for name, entries in document.items())


def find_theme(name: str, known: Collection[str]) -> str:
    """Return the theme that is called so; `dark` and `light` are short names. Raises RequestError."""
    found = ALIASES.get(name, name)
    if found not in known:
        raise RequestError(f"there is no theme {name}", "/theme shows all; try dark or light")
    return found


def _theme(name: str, entries: object, file: Path) -> Theme:
    source = f'{file} [themes."{name}"]'
    if not isinstance(entries, dict):
        raise UsageError(f"{file}: themes.{name} is no table", f'write [themes."{name}"] and its colours below it')
    if name in BUILTIN_THEMES or name in ALIASES or not re.fullmatch(r"\S(.{0,38}\S)?", name) or not name.isprintable():
        raise UsageError(f"{source}: this name cannot be used", "take one that no theme has, of at most 40 characters")
    values: dict[str, Any] = {}
    for key, value in entries.items():
        if key == "dark":
            if not isinstance(value, bool):
                raise UsageError(f"{source}: dark is {value!r}", "give true or false")
            values[key] = value
        elif key in COLOURS:
            values[key] = _colour(key, value, source)
        else:
            raise UsageError(f"{source}: {key} sets nothing", f"a theme has {', '.join(COLOURS)} and dark")
    if "primary" not in values:
        raise UsageError(f"{source}: it has no primary colour", 'write primary = "#0178d4" or another colour')
    return Theme(name=name, **_filled(values))


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a theme with those that the user left out: they go with the colours that are there."""
    background = Color.parse(values["background"]) if "background" in values else None
    dark = values.get("dark", background is None or background.brightness < 0.5)
    like = BUILTIN_THEMES["textual-dark" if dark else "textual-light"]
    filled = {name: getattr(like, name) for name in ("warning", "error", "success", "accent", "background")}
    filled |= {"foreground": "#e0e0e0" if dark else "#1f1f1f", "dark": dark, **values}
    if background is not None:  # Textual's own greys would stand beside it
        foreground = Color.parse(filled["foreground"])
        filled = {name: background.blend(foreground, share).hex for name, share in PANES} | filled
    return filled


def _colour(key: str, value: object, source: str) -> str:
    try:
        if not isinstance(value, str) or value.strip().startswith(("ansi", "auto")):
            raise ValueError
        return Color.parse(value.strip()).hex
    except (ValueError, ColorParseError):
        hint = 'give "#rrggbb", or the name of a colour such as "navy"'
        raise UsageError(f"{source}: {key} is {value!r}", hint) from None


class ThemeScreen(PickScreen):
    """Choose a theme: the one of the chosen line is shown at once."""

    # The conversation behind it shows the theme too.
    DEFAULT_CSS = """
    ThemeScreen { background: transparent; }
    ThemeScreen OptionList { max-height: 10; }
    ThemeScreen #sample { height: auto; margin-top: 1; }
    """

    def __init__(self, themes: Mapping[str, Theme], current: str) -> None:
        own = [name for name in themes if name not in BUILTIN_THEMES]
        names = [*sorted(own), *sorted(set(themes) - set(own))]
        choices = [
            Choice(
                name, name, " · ".join(["dark" if themes[name].dark else "light", *(["yours"] if name in own else [])])
            )
            for name in names
        ]
        super().__init__(
            "Colours",
            choices,
            current,
            hints=[
                Hint("↑", "", "screen.move(-1)"),
                Hint("↓", "shows", "screen.move(1)"),
                Hint("Enter", "keeps", "screen.choose"),
                CANCEL,
            ],
        )

    def compose_below(self) -> ComposeResult:
        yield Static(id="sample")

    @on(OptionList.OptionHighlighted)
    def _show(self, event: OptionList.OptionHighlighted) -> None:
        assert event.option_id is not None
        self.app.theme = event.option_id
        self.call_after_refresh(self._draw_sample)

    def _draw_sample(self) -> None:
        self.query_one("#sample", Static).update(sample(self.app))


def sample(app: App[Any]) -> Text:
    """Return a few words in the styles of the conversation, in the app's present theme."""
    palette = make_palette(app.current_theme, app.theme_variables, drafts=True)
    return Text.assemble(
        ("▌ ", palette.user + palette.asked),
        ("Which of them is stable? ", palette.text + palette.asked),
        ("\n  Merge sort", palette.strong),
        (": ", palette.text),
        ("sorted()", palette.code),
        (" is. ", palette.text),
        ("drafted", palette.drafted or palette.text),
        ("\n  ", ""),
        ("secondary  ", palette.muted),
        ("link", palette.link),
        ("  ", ""),
        ("a note", palette.note),
        ("  ", ""),
        ("an error", palette.error),
        no_wrap=True,
        overflow="ellipsis",
    )
