"""Pictures of the dialogs of presets and themes, and of a theme of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgelm.chats.presets import Preset, Presets
from edgelm.client.link import Link
from edgelm.tui.app import ChatApp
from edgelm.tui.commands.keymap import parse_keys
from edgelm.tui.dialogs.themes import parse_themes
from edgelm.tui.workspace import ChatDefaults
from tests.tui.test_snapshots import OPEN_QUICKSORT, fill, front, keys, no_guide

__all__ = ["front", "no_guide"]  # fixtures

PRESETS = (
    Preset("terse", "Answer in one sentence.\nNo lists.", "", {"temperature": 0.2, "top_k": 20}),
    Preset("code review", "Name the line, then the problem, then a mend.", "qwen3-4b-q4_k_m.gguf", {}, ("files",)),
    Preset("stories", None, "", {"temperature": 1.2, "min_p": 0.1, "seed": 7}),
)
THEMES = {
    "sea": {"primary": "#2a9d8f", "background": "#06222b", "accent": "orange"},
    "paper": {"primary": "#8a3324", "background": "#fbf6ea", "dark": False},
}


@pytest.fixture
def app(front: Path) -> ChatApp:
    fill(front / "chats.db")
    link = Link(endpoint=None, api_key=None, runtime=front, log=front / "log")
    presets = Presets(front / "config.toml", {preset.name: preset for preset in PRESETS})
    file = front / "config.toml"
    return ChatApp(
        front / "chats.db",
        link,
        ChatDefaults(presets=presets, preset=PRESETS[0]),
        themes=parse_themes(THEMES, file),
        keymap=parse_keys({"preset": "f10", "theme": "f11"}, file),
    )


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
def test_presets(app: ChatApp, theme: str, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(90, 28), run_before=keys("f10 down", theme=theme))


def test_presets_small_in_16_colours(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(60, 20), run_before=keys("f10", theme="ansi-dark"))


@pytest.mark.parametrize(
    ("theme", "typed"),
    [("textual-light", ""), ("textual-dark", "s e a"), ("ansi-dark", "p a p")],
    ids=["light", "own-dark", "own-light-small"],
)
def test_themes(app: ChatApp, theme: str, typed: str, snap_compare: Any) -> None:
    """The second and third show a theme of the user's own, before it is chosen."""
    size = (60, 20) if theme == "ansi-dark" else (90, 28)
    assert snap_compare(app, terminal_size=size, run_before=keys(OPEN_QUICKSORT, f"f11 {typed}", theme=theme))
