"""The commands about models: which one answers a chat, and pulls of new ones.

Owns what is asked and told. The dialog is in dialogs/picker.py, the processes that pull are in pulls.py.
"""

from __future__ import annotations

import asyncio

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.client.endpoint import ModelEntry
from edgelm.library.catalog import hub_reference
from edgelm.library.progress import size_text
from edgelm.tui.commands.face import Face, numbered
from edgelm.tui.dialogs.picker import Installed, Picked, PickerScreen
from edgelm.tui.lines import clean, short_name
from edgelm.tui.model_names import describe_model, existing, find_model, find_pulled, is_path
from edgelm.tui.prompt.paths import unquoted
from edgelm.tui.pulls import Pull
from edgelm.tui.screen_face import ScreenFace


async def model(face: Face, argument: str) -> None:
    """Use a model for this chat; without a name, show the installed models and those to pull."""
    workspace = face.workspace
    models = await face.connect(workspace.link.models(again=True))
    if not argument:
        await _pick_model(face, models)
    elif argument.isdecimal() and (listed := face.listed.get("model")):
        _set_model(face, numbered(listed, argument, "model", "/model lists them"))
    elif is_path(path := unquoted(argument)):
        _set_model(face, await workspace.offered(path))
    else:
        try:
            _set_model(face, find_model(models, argument, can_pull=not no_pull_reason(face)))
        except EdgeLMError:  # not by the names that are listed
            if not await (await workspace.link.client()).knows(argument):
                raise
            _set_model(face, argument)


async def pull(face: ScreenFace, argument: str) -> None:
    """Pull a model, or stop a pull."""
    verb, _, rest = argument.partition(" ")
    if verb == "stop":
        _stop_pull(face, rest.strip())
    elif not argument:
        await _pick_model(face, await face.workspace.link.models(again=True))
    else:
        if reason := no_pull_reason(face):
            raise RequestError(reason)
        hub_reference(argument)  # raises at once where the name is misspelt
        _start_pull(face, argument)


async def _pick_model(face: Face, models: list[ModelEntry]) -> None:
    workspace, reason = face.workspace, no_pull_reason(face)
    if reason and not models and face.either(on_screen=True, in_lines=False):
        raise RequestError("the endpoint offers no model", reason)
    listed = [model.id for model in models]
    recent = [] if reason else await asyncio.to_thread(existing, workspace.recent_paths)
    recent = [path for path in recent if path not in listed]
    free_bytes = 0 if reason else await asyncio.to_thread(available_memory_bytes)

    def dialog() -> PickerScreen:
        return PickerScreen(
            "Model of this chat",
            [Installed(model.id, " · ".join(describe_model(model))) for model in models],
            current=workspace.model,
            note=reason,
            recent=recent,
            free_bytes=free_bytes,
            pulls=lambda: face.pulls.running,
        )

    async def told() -> Picked | None:
        face.listed["model"] = [*listed, *recent]
        for number, model in enumerate(models, 1):
            current = "this chat's" if model.id == workspace.model else ""
            details = [short_name(model.id), *describe_model(model), current]
            face.tell(f"{number}. {', '.join(filter(None, details))}")
        for number, path in enumerate(recent, len(models) + 1):
            current = ", this chat's" if path == workspace.model else ""
            face.tell(f"{number}. {short_name(path)}, {path}, recent{current}")
        pull = "" if reason else ", /pull NAME gets another"
        face.tell(f"/model NUMBER chooses one{pull}" if models else f"the endpoint offers no model{pull}")
        return None

    picked = await face.ask(dialog, told)
    if picked is None:
        return
    if picked.action == "use":
        _set_model(face, await workspace.offered(picked.name))
    elif picked.action == "stop":
        _stop_pull(face, picked.name)
    else:
        _start_pull(face, picked.name)


def _set_model(face: Face, model: str) -> None:
    face.workspace.set_model(model)
    face.show("around")
    face.mention(f"model: {short_name(model)}")


def no_pull_reason(face: Face) -> str:
    """Return why no model can be pulled; empty where one can."""
    remote = face.workspace.link.remote
    return "" if remote is None else f"these are the models of {remote}: pull more there"


def _start_pull(face: Face, model: str) -> None:
    face.pulls.start(model, face.workspace.session.chat.id)
    face.tell(f"pulling {model}; you can go on chatting")


def _stop_pull(face: Face, model: str) -> None:
    if not face.pulls.stop(model):
        raise RequestError(f"{model} is not being pulled" if model else "nothing is being pulled")


async def tell_end(face: Face, pull: Pull) -> None:
    """Tell the end of a pull; the model answers the chat that asked for it. Raises EdgeLMError if it failed."""
    name = clean(pull.model)
    if pull.state == "stopped":
        size = f" at {size_text(pull.done)}" if pull.done and face.either(on_screen=True, in_lines=False) else ""
        face.tell(f"the pull of {name} was stopped{size}; /pull {name} {pull.again}")
        return
    if pull.state == "failed":
        raise EdgeLMError(pull.error)
    model = find_pulled(await face.workspace.link.models(again=True), pull)
    if model is None:
        face.tell(f"{name} is here, but the endpoint does not list it yet; /model shows its list")
    elif face.workspace.session.chat.id == pull.chat_id:
        face.workspace.set_model(model)
        face.show("around")
        place = f" in place of {name}" if pull.stand_in else ""
        face.tell(f"{short_name(model)} is here{place}, and answers this chat from now on")
    else:
        key = face.keymap.label("run('model')", "Ctrl+O") or "/model"
        face.tell(f"{short_name(model)} is here: {key} chooses it")
