"""The commands that look into the model: the inspector, the tokens of an answer, and two versions side by side.

Owns which answer is meant, and the requests for its tokens. The dialogs are in dialogs/explore.py and
dialogs/compare.py, the panel in inspector/panel.py. Of plain lines only versions can be compared, one after the other.
"""

from __future__ import annotations

import asyncio

from edgelm.base.errors import RequestError
from edgelm.chats.history import Message
from edgelm.client.endpoint import ChatRequest, Client
from edgelm.client.link import sees
from edgelm.client.probing import Alternative, alternatives, pieces
from edgelm.client.session import Session
from edgelm.client.turns import Turn
from edgelm.tui.commands.face import Face
from edgelm.tui.commands.messages import last_message, message_of
from edgelm.tui.dialogs.basic import Choice, PickScreen
from edgelm.tui.dialogs.compare import CompareScreen, Side
from edgelm.tui.dialogs.explore import ExploreScreen
from edgelm.tui.dialogs.params import parse_params
from edgelm.tui.lines import clean, short_name
from edgelm.tui.model_names import find_model
from edgelm.tui.screen_face import ScreenFace

NUM_SHOWN = 5  # likeliest tokens that the inspector shows


async def inspect(face: ScreenFace, _argument: str) -> None:
    """Open the inspector, then move into it, then close it."""
    panel = face.panel
    if not panel.is_open:
        panel.open(face.workspace.model)
    elif not panel.has_keys:
        panel.focus_picture()
    else:
        panel.close()
        face.show("prompt")
    face.workspace.answers.num_logprobs = NUM_SHOWN if panel.is_open else 0


async def explore(face: ScreenFace, argument: str) -> None:
    """Choose a token of an answer, and go on from another one."""
    workspace = face.workspace
    workspace.require_no_answer()
    message = _answer(face, argument)
    client = await _edgelm(face, "its tokens")
    if not message.text.strip():
        raise RequestError("this answer has no text", "choose another one")
    if message.calls:
        raise RequestError("this answer has calls of tools", "choose an answer without any")
    session = workspace.session
    await face.reader.require_consent(session, message.model)
    # A thought comes before the first token; its alternatives are those of the thought.
    first = 1 if message.reasoning else 0
    pictures = await sees(workspace.link, message.model)
    dialog = ExploreScreen(message.model, AnswerTokens(client, session, message, pictures=pictures), first)
    begun = await face.app.push_screen_wait(dialog)
    if begun is not None and session is workspace.session:
        workspace.require_no_answer()
        workspace.go_on(message, begun)
        face.show("chat", "prompt")


async def compare(face: Face, argument: str) -> None:
    """Answer again with another model or other settings, beside the answer that is there."""
    workspace = face.workspace
    workspace.require_no_answer()
    message, session = _answer(face, ""), workspace.session
    model, sampling, setting = message.model or workspace.model, session.chat.sampling, ""
    if "=" in argument:
        sampling, setting = parse_params(argument, sampling), argument
    else:
        models = [entry for entry in await workspace.link.models(again=True) if entry.kind in ("", "text")]
        chosen = argument or await _choose(face, [entry.id for entry in models], message.model)
        if chosen is None:
            return
        model = find_model(models, chosen, can_pull=False)
        workspace.require_open(session)  # a message that waited may have been sent meanwhile, too
        workspace.require_no_answer()
        message, session = _answer(face, f"#{message.id}"), workspace.session
    answer = workspace.compare(message, model, sampling)
    face.show("chat")
    sides = (Side(message, ""), Side(answer.message, setting))

    async def told() -> int | None:
        """Write the new answer, then ask; Ctrl+C keeps the old one."""
        try:
            await workspace.answers.wait(session.chat.id)
            return answer.message.id if await face.confirm("keep the new answer?") else None
        except asyncio.CancelledError:
            return None

    face.mention(f"again with {setting or short_name(model)}")
    kept = await face.ask(lambda: CompareScreen(answer.question.text, sides), told)
    if kept is None:  # cancelled: the chat stays on the old answer
        await workspace.answers.end(session.chat.id)
        session.show(message.id)
        if not answer.message.text.strip() and not answer.message.calls:
            session.drop(answer.message)
    elif session is workspace.session and workspace.answer is None:
        session.show(kept)
    if session is workspace.session:
        face.show("branch", "prompt")
    face.mention("the old answer stays" if kept in (None, message.id) else "the new answer stays")


async def _choose(face: Face, names: list[str], current: str) -> str | None:
    async def told() -> None:
        for name in names:
            face.tell(name)
        face.tell("/compare MODEL answers again, and so does /compare temperature=0.2")

    choices = [
        Choice(name, clean(short_name(name)), "the model of this answer" if name == current else "") for name in names
    ]
    return await face.ask(lambda: PickScreen("Compare with", choices), told)


def _answer(face: Face, argument: str) -> Message:
    """Return the answer that a key was pressed on, as `#ID`, or the last one. Raises RequestError without any."""
    message = message_of(face, argument) or last_message(face, "assistant")
    if message is None or message.role != "assistant":
        raise RequestError("there is no answer here", "choose an answer, or write a message")
    return message


async def _edgelm(face: ScreenFace, things: str) -> Client:
    client = await face.workspace.link.client()
    if not client.is_edgelm:
        raise RequestError(f"{client.address} is no edgelm server: it does not tell {things}")
    return client


class AnswerTokens:
    """The tokens of an answer of a chat, and their alternatives, from the model that wrote it."""

    def __init__(self, client: Client, session: Session, message: Message, *, pictures: bool) -> None:
        self._client = client
        self._message = message
        past, turns = session.turns(message, pictures=pictures)
        self._request = ChatRequest(message.model, turns, session.chat.sampling, past)

    async def pieces(self) -> list[str]:
        """Return the tokens as texts. Raises EdgeLMError."""
        return await pieces(self._client, self._message.model, self._message.text)

    async def alternatives(self, begun: str) -> list[Alternative]:
        """Return the likeliest tokens behind a beginning of the answer. Raises EdgeLMError."""
        return await alternatives(self._client, self._request, Turn("assistant", begun, self._message.reasoning))
