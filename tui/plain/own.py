"""The plain chat's commands about what the user has made their own: presets, and the editor for long messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgelm.base.errors import RequestError
from edgelm.base.places import own_environment
from edgelm.chats.preset_file import save_preset
from edgelm.chats.presets import check_name, preset_of
from edgelm.tui.commands.own import MAKE_ONE, outline, working_folder
from edgelm.tui.dialogs.presets import OFF
from edgelm.tui.prompt.editor import edit_text, editor_command

if TYPE_CHECKING:
    from edgelm.tui.plain.chat import PlainChat


def own_commands(chat: PlainChat) -> dict[str, Callable[[str], None]]:
    """Return the commands by name. Each takes its argument, which may be empty, and may raise EdgeLMError."""
    return {"preset": lambda argument: _preset(chat, argument), "editor": lambda _: _edit(chat)}


def _preset(chat: PlainChat, argument: str) -> None:
    workspace, tell = chat.workspace, chat.writer.line
    verb, _, name = argument.partition(" ")
    name = name.strip()
    if verb == "save":
        _save(chat, name)
    elif verb == "folder" and name:
        tell(workspace.set_folder_preset(working_folder(), "" if name == OFF else name))
    elif verb == "folder":
        current = workspace.presets.of_folder(working_folder())
        tell(f"new chats here begin with the preset {current.name}" if current else "this folder has no preset")
    elif argument:
        preset = None if argument == OFF else workspace.presets.find(argument)
        problem = chat.wait_long("connecting", workspace.choose_preset(preset))
        tell(f"preset {preset.name}: {outline(preset)}" if preset else "no preset")
        if problem is not None:
            raise problem
    else:
        if not workspace.presets.by_name:
            raise RequestError("there are no presets yet", MAKE_ONE)
        for preset in workspace.presets.by_name.values():
            current_name = ", this chat's" if preset.name == workspace.session.chat.preset else ""
            tell(f"{preset.name}{current_name}: {outline(preset)}")
        tell("/preset NAME chooses one")


def _save(chat: PlainChat, name: str) -> None:
    workspace = chat.workspace
    if not name:
        raise RequestError("the preset has no name", "write /preset save NAME")
    preset = preset_of(workspace.session.chat, check_name(name), workspace.model)
    if preset.name in workspace.presets.by_name and not chat.lines.confirm(f"replace the preset {preset.name}?"):
        return
    save_preset(workspace.presets, preset)
    workspace.session.chat.preset = preset.name
    workspace.session.save()
    chat.writer.line(f"preset {preset.name}: {outline(preset)}")


def _edit(chat: PlainChat) -> None:
    """Let the user write a message in their editor, and send it if they say so."""
    if not chat.lines.is_terminal:
        raise RequestError("an editor needs a terminal", "write the message here")
    text = chat.wait(edit_text("", editor_command(own_environment())))
    if not text.strip():
        chat.writer.line("the message is empty")
        return
    chat.writer.line(f"your message: {text}")
    if chat.lines.confirm("send it?"):
        chat.send(text)
