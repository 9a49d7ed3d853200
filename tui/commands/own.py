"""The commands about what the user has made their own: presets, themes, and the editor for long messages.

Owns what is asked and told. The tables of config.toml are read by chats/presets.py, dialogs/themes.py and keymap.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from textual.app import SuspendNotSupported

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.places import expand_home, own_environment
from edgelm.chats.preset_file import save_preset
from edgelm.chats.presets import Preset, Presets, check_name, preset_of
from edgelm.tui.commands.face import Face
from edgelm.tui.commands.table import in_lines
from edgelm.tui.dialogs.basic import LineScreen
from edgelm.tui.dialogs.presets import OFF, PresetScreen
from edgelm.tui.dialogs.themes import ThemeScreen, find_theme
from edgelm.tui.prompt.editor import edit_text, editor_command
from edgelm.tui.screen_face import ScreenFace

MAKE_ONE = "/preset save NAME makes one of this chat"


async def preset(face: Face, argument: str) -> None:
    """Choose a preset for this chat, save one, or set the working directory's."""
    verb, _, name = argument.partition(" ")
    if verb == "save":
        await _save(face, name.strip())
    elif verb == "folder":
        await _set_folder(face, name.strip())
    elif chosen := argument or await _pick_preset(face):
        await _choose(face, chosen)


async def _pick_preset(face: Face) -> str | None:
    current = face.workspace.session.chat.preset

    async def told() -> None:
        for preset in face.workspace.presets.by_name.values():
            mark = ", this chat's" if preset.name == current else ""
            face.tell(f"{preset.name}{mark}: {outline(preset)}")
        face.tell("/preset NAME chooses one")

    return await face.ask(lambda: PresetScreen("Preset of this chat", _presets(face), current), told)


def _presets(face: Face) -> Presets:
    if not face.workspace.presets.by_name:
        raise RequestError("there are no presets yet", MAKE_ONE)
    return face.workspace.presets


async def _choose(face: Face, name: str) -> None:
    preset = None if name == OFF else face.workspace.presets.find(name)
    problem = await face.connect(face.workspace.choose_preset(preset))
    face.show("model")
    if preset is not None:
        face.tell(face.either(f"preset {name}", f"preset {name}: {outline(preset)}"))
    else:
        face.tell(face.either("no preset: this chat has none of its values any more", "no preset"))
    if problem is not None:
        raise problem


async def _save(face: Face, name: str) -> None:
    workspace = face.workspace

    async def unnamed() -> None:
        raise RequestError("the preset has no name", "write /preset save NAME")

    written: str | None = name
    if not written:
        written = await face.ask(lambda: LineScreen("Name of the preset", workspace.session.chat.preset), unnamed)
    if written is None:
        return
    preset = preset_of(workspace.session.chat, check_name(written), workspace.model)
    if preset.name in workspace.presets.by_name:
        question = f"There is a preset {preset.name} already."
        if not await face.confirm(f"replace the preset {preset.name}?", question, "Replace it"):
            return
    await asyncio.to_thread(save_preset, workspace.presets, preset)
    workspace.session.chat.preset = preset.name
    workspace.session.save()
    face.show("model")
    face.tell(f"preset {preset.name}: {outline(preset)}")


async def _set_folder(face: Face, name: str) -> None:
    """Let new chats in the working directory begin with a preset."""
    workspace = face.workspace
    folder = await asyncio.to_thread(working_folder)
    current = workspace.presets.of_folder(folder)

    async def told() -> None:
        face.tell(f"new chats here begin with the preset {current.name}" if current else "this folder has no preset")

    title, now = f"New chats in {short_path(folder)} begin with", current.name if current else OFF
    chosen: str | None = name
    if not chosen:
        chosen = await face.ask(lambda: PresetScreen(title, _presets(face), now), told)
    if chosen:
        face.tell(await asyncio.to_thread(workspace.set_folder_preset, folder, "" if chosen == OFF else chosen))


# Themes


async def theme(face: ScreenFace, argument: str) -> None:
    """Choose the colours."""
    app = face.app
    themes, before = app.available_themes, app.theme
    if argument:
        app.theme = find_theme(argument, themes)
    else:
        chosen = await app.push_screen_wait(ThemeScreen(themes, before))
        app.theme = before if chosen is None else chosen
    if argument or app.theme != before:
        face.workspace.remember("theme", app.theme)


# The editor


async def editor(face: ScreenFace, _argument: str) -> None:
    """Let the user write the message in their editor; it comes back into the prompt."""
    if face.is_editing:
        return
    command = await asyncio.to_thread(editor_command, own_environment())
    text, problem, edited = face.view.prompt_text, None, None
    face.is_editing = True
    try:
        # Answers go on meanwhile, but are not drawn over the editor.
        with face.app.batch_update(), face.app.suspend():
            try:
                edited = await edit_text(text, command)
            except EdgeLMError as error:  # Textual does not resume after an error
                problem = error
    except SuspendNotSupported:
        problem = EdgeLMError("an editor cannot open in this terminal", "write the message in the prompt")
    finally:
        face.is_editing = False
    face.app.screen.refresh()
    if problem is not None:
        raise problem
    if edited is not None and edited != text:
        came = face.view.prompt_text.removesuffix(text).rstrip("\n")  # back, above the text, meanwhile
        face.view.put_prompt(in_lines((came, edited)))


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
