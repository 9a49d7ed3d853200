"""The commands about what the user has made their own: presets, themes, and the editor for long messages.

Owns what is asked and reported. The tables of config.toml are read by chats/presets.py, themes.py and keymap.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from textual.app import App, SuspendNotSupported

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.places import expand_home, own_environment
from edgelm.chats.preset_file import save_preset
from edgelm.chats.presets import Preset, check_name, preset_of
from edgelm.tui.dialogs.basic import ConfirmScreen, LineScreen
from edgelm.tui.dialogs.presets import OFF, PresetScreen
from edgelm.tui.dialogs.themes import ThemeScreen, find_theme
from edgelm.tui.lines import clean
from edgelm.tui.prompt.editor import edit_text, editor_command
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.workspace import Workspace

MAKE_ONE = "/preset save NAME makes one of this chat"


class OwnActions:
    """Runs the commands `preset`, `theme` and `editor`. Each may raise EdgeLMError."""

    def __init__(self, app: App[Any], workspace: Workspace, view: ScreenView) -> None:
        self._app = app
        self._workspace = workspace
        self._view = view
        self._editing = False
        self.by_name: dict[str, Callable[[str], Awaitable[None]]] = {
            "preset": self._preset,
            "theme": self._theme,
            "editor": self._edit,
        }

    def _notify(self, text: str) -> None:
        self._app.notify(clean(text), markup=False)

    # Presets

    async def _preset(self, argument: str) -> None:
        verb, _, name = argument.partition(" ")
        if verb == "save":
            await self._save(name.strip())
        elif verb == "folder":
            await self._set_folder(name.strip())
        else:
            chosen = argument or await self._pick("Preset of this chat", self._workspace.session.chat.preset)
            if chosen:
                await self._choose(chosen)

    async def _pick(self, title: str, current: str) -> str | None:
        presets = self._workspace.presets
        if not presets.by_name:
            raise RequestError("there are no presets yet", MAKE_ONE)
        return await self._app.push_screen_wait(PresetScreen(title, presets, current))

    async def _choose(self, name: str) -> None:
        preset = None if name == OFF else self._workspace.presets.find(name)
        problem = await self._workspace.choose_preset(preset)
        self._view.show_model()
        self._notify(f"preset {name}" if preset else "no preset: this chat has none of its values any more")
        if problem is not None:
            raise problem

    async def _save(self, name: str) -> None:
        workspace = self._workspace
        if not name:
            written = await self._app.push_screen_wait(LineScreen("Name of the preset", workspace.session.chat.preset))
            if written is None:
                return
            name = written
        preset = preset_of(workspace.session.chat, check_name(name), workspace.model)
        if preset.name in workspace.presets.by_name:
            question = f"There is a preset {preset.name} already."
            if not await self._app.push_screen_wait(ConfirmScreen(question, "Replace it")):
                return
        await asyncio.to_thread(save_preset, workspace.presets, preset)
        workspace.session.chat.preset = preset.name
        workspace.session.save()
        self._view.show_model()
        self._notify(f"preset {preset.name}: {outline(preset)}")

    async def _set_folder(self, name: str) -> None:
        """Let new chats in the working directory begin with a preset."""
        workspace = self._workspace
        folder = await asyncio.to_thread(working_folder)
        current = workspace.presets.of_folder(folder)
        title = f"New chats in {short_path(folder)} begin with"
        name = name or await self._pick(title, current.name if current else OFF) or ""
        if name:
            self._notify(await asyncio.to_thread(workspace.set_folder_preset, folder, "" if name == OFF else name))

    # Themes

    async def _theme(self, argument: str) -> None:
        app = self._app
        themes, before = app.available_themes, app.theme
        if argument:
            app.theme = find_theme(argument, themes)
        else:
            chosen = await app.push_screen_wait(ThemeScreen(themes, before))
            app.theme = before if chosen is None else chosen
        if argument or app.theme != before:
            self._workspace.remember("theme", app.theme)

    # The editor

    async def _edit(self, _argument: str) -> None:
        """Let the user write the message in their editor; it comes back into the prompt."""
        if self._editing:
            return
        command = await asyncio.to_thread(editor_command, own_environment())
        text, problem, edited = self._view.prompt_text, None, None
        self._editing = True
        try:
            # Answers go on meanwhile, but are not drawn over the editor.
            with self._app.batch_update(), self._app.suspend():
                try:
                    edited = await edit_text(text, command)
                except EdgeLMError as error:  # Textual does not resume after an error
                    problem = error
        except SuspendNotSupported:
            problem = EdgeLMError("an editor cannot open in this terminal", "write the message in the prompt")
        finally:
            self._editing = False
        self._app.screen.refresh()
        if problem is not None:
            raise problem
        if edited is not None and edited != text:
            self._view.put_prompt(edited)


def outline(preset: Preset) -> str:
    """Return the names of what a preset sets, with short values."""
    return (
        ", ".join(name if name == "system prompt" else f"{name} {value}" for name, value in preset.lines()) or "empty"
    )


def working_folder() -> Path:
    """Return the working directory. Raises EdgeLMError where it is gone."""
    try:
        return Path.cwd()
    except OSError as error:
        raise EdgeLMError(
            f"the working directory cannot be read: {error.strerror}", "start edgelm in another"
        ) from None


def short_path(folder: Path) -> str:
    """Return a path with ~ for the user's home."""
    home = expand_home("~")
    return f"~{str(folder).removeprefix(home)}" if f"{folder}/".startswith(f"{home}/") else str(folder)
