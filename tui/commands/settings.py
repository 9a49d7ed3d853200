"""The commands about how a chat is answered: system prompt, sampling, thinking.

Owns what is asked and told. The parameters and their ranges are in dialogs/params.py.
"""

from __future__ import annotations

from functools import partial

from edgelm.base.errors import RequestError
from edgelm.tui.commands.face import Face
from edgelm.tui.dialogs.basic import Choice, PickScreen, TextScreen
from edgelm.tui.dialogs.params import EFFORTS, ParamsScreen, Value, effort_name, parse_params
from edgelm.tui.screen_face import ScreenFace


async def system(face: Face, argument: str) -> None:
    """Set the system prompt of this chat."""
    before = face.workspace.session.chat.system
    help_text = "Sent before the conversation, for this chat only; empty: none."
    text: str | None = argument
    if not text:
        dialog = partial(TextScreen, "System prompt", before, help_text)
        text = await face.ask(dialog, lambda: face.line("", before, "system prompt: "))
    if text is None:
        face.mention(f"system prompt: {before}" if before else "no system prompt")
    else:
        face.workspace.session.set_system(text)
        face.tell("system prompt set" if text else "no system prompt")


async def params(face: Face, argument: str) -> None:
    """Set how this chat is sampled."""
    workspace, session = face.workspace, face.workspace.session

    def tell() -> None:
        own = session.chat.sampling
        values = face.either(own, {**workspace.defaults.sampling, **own})
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        face.tell(f"this chat: {shown}" if shown else "this chat: the endpoint's defaults")

    def dialog() -> ParamsScreen:
        link = workspace.link
        is_edgelm = link.connected.is_edgelm if link.connected else link.remote is None
        return ParamsScreen(session.chat.sampling, workspace.defaults.sampling, is_edgelm=is_edgelm)

    async def told() -> dict[str, Value] | None:
        tell()
        return None

    values = parse_params(argument, session.chat.sampling) if argument else await face.ask(dialog, told)
    if values is not None:
        session.set_sampling(values)
        tell()


async def think(face: Face, argument: str) -> None:
    """Set how much the model thinks."""
    session = face.workspace.session
    current = effort_name(session.chat.sampling.get("reasoning_effort"))

    async def told() -> None:
        face.tell(f"this chat: thinking {current}; give {', '.join(EFFORTS)}")

    choices = [Choice(name, name, effort.help) for name, effort in EFFORTS.items()]
    name: str | None = argument.lower()
    if not name:
        name = await face.ask(lambda: PickScreen("How much the model thinks", choices, current), told)
    if name:
        if (effort := effort_name(name)) not in EFFORTS:
            raise RequestError(f"there is no effort {name!r}", "give " + ", ".join(EFFORTS))
        session.set_sampling(parse_params(f"reasoning_effort={effort}", session.chat.sampling))
        face.tell(f"this chat: thinking {effort}")


async def drafts(face: ScreenFace, _argument: str) -> None:
    """Tint the drafted words, or stop it."""
    shown = not face.view.shows_drafts
    face.view.show_drafts(shown)
    face.workspace.remember("drafts", "shown" if shown else "")
    if shown and not any(face.workspace.drafted.values()):
        face.tell("drafted words will be tinted, in answers from now on")
    else:
        face.tell("drafted words are tinted" if shown else "drafted words are not tinted")
