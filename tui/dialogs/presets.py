"""The dialog that chooses a preset and shows what it sets.

Owns its look. Knows nothing of chats.
"""

from __future__ import annotations

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import OptionList, Static

from edgelm.chats.presets import Preset, Presets
from edgelm.tui.dialogs.basic import Choice, PickScreen
from edgelm.tui.lines import clean, short_name
from edgelm.tui.palette import list_text
from edgelm.tui.transcript.passages import one_line

OFF = "off"


class PresetScreen(PickScreen):
    """Choose a preset, or none."""

    DEFAULT_CSS = """
    PresetScreen OptionList { max-height: 8; }
    PresetScreen VerticalScroll {
        height: 8; margin-top: 1; border-top: solid $border-blurred; scrollbar-size-vertical: 1;
    }
    PresetScreen #preview { height: auto; }
    """

    def __init__(self, title: str, presets: Presets, current: str) -> None:
        choices = [Choice(name, one_line(name), _detail(preset)) for name, preset in presets.by_name.items()]
        super().__init__(title, [*choices, Choice(OFF, OFF, "no preset")], current)
        self._presets = presets

    def compose_below(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Static(id="preview")

    @on(OptionList.OptionHighlighted)
    def _show(self, event: OptionList.OptionHighlighted) -> None:
        preset = self._presets.by_name.get(event.option_id or "")
        text = preview(preset) if preset else Text("It takes away what the chat's preset has set.", "dim")
        self.query_one("#preview", Static).update(list_text(text, self.app.current_theme))
        self.query_one(VerticalScroll).scroll_home(animate=False)


def preview(preset: Preset) -> Text:
    """Return all that a preset sets, a line for each value, the system prompt whole."""
    text = Text()
    for name, value in preset.lines():
        text.append(f"{one_line(name)}  ", "dim")
        text.append((clean(value) if name == "system prompt" else one_line(value)) + "\n")
    return text or Text("It sets nothing.", "dim")


def _detail(preset: Preset) -> str:
    values = [
        one_line(short_name(value) if name == "model" else f"{name} {value}")
        for name, value in preset.lines()[:3]
        if name != "system prompt"
    ]
    return " · ".join(values)
