"""The commands that look into the model: the inspector, the tokens of an answer, and two versions side by side.

Owns which answer is meant, and the requests for its tokens. The dialogs are in explore.py and compare.py, the panel is
inspector_panel.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from textual.app import App

from edgelm.base.errors import RequestError
from edgelm.chats.history import Message
from edgelm.client.endpoint import ChatRequest, Client
from edgelm.client.probing import Alternative, alternatives, pieces
from edgelm.client.reader import Reader
from edgelm.client.session import Session
from edgelm.client.turns import Turn
from edgelm.tui.dialogs.basic import Choice, PickScreen
from edgelm.tui.dialogs.compare import CompareScreen, Side
from edgelm.tui.dialogs.explore import ExploreScreen
from edgelm.tui.dialogs.params import parse_params
from edgelm.tui.inspector.panel import InspectorPanel
from edgelm.tui.model_names import find_model
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.workspace import Workspace

NUM_SHOWN = 5  # likeliest tokens that the inspector shows


class EngineActions:
    """Runs the commands `inspect`, `explore` and `compare`. Each may raise EdgeLMError."""

    def __init__(
        self, app: App[Any], workspace: Workspace, reader: Reader, view: ScreenView, panel: InspectorPanel
    ) -> None:
        self._app = app
        self._workspace = workspace
        self._reader = reader
        self._view = view
        self._panel = panel
        self.by_name: dict[str, Callable[[str], Awaitable[None]]] = {
            "inspect": self._inspect,
            "explore": self._explore,
            "compare": self._compare,
        }

    async def _inspect(self, _argument: str) -> None:
        """Open the inspector, then move into it, then close it."""
        panel = self._panel
        if not panel.is_open:
            panel.open(self._workspace.model)
        elif not panel.has_keys:
            panel.focus_picture()
        else:
            panel.close()
            self._view.focus_prompt()
        self._workspace.answers.num_logprobs = NUM_SHOWN if panel.is_open else 0

    async def _explore(self, argument: str) -> None:
        """Choose a token of an answer, and go on from another one."""
        self._workspace.require_no_answer()
        message = self._answer(argument)
        client = await self._edgelm("its tokens")
        if not message.text.strip():
            raise RequestError("this answer has no text", "choose another one")
        if message.calls:
            raise RequestError("this answer has calls of tools", "choose an answer without any")
        session = self._workspace.session
        await self._reader.require_consent(session)
        # A thought comes before the first token; its alternatives are those of the thought.
        first = 1 if message.reasoning else 0
        begun = await self._app.push_screen_wait(
            ExploreScreen(message.model, AnswerTokens(client, session, message), first)
        )
        if begun is not None and session is self._workspace.session:
            self._workspace.require_no_answer()
            self._workspace.go_on(message, begun)
            self._view.show_chat()
            self._view.focus_prompt()

    async def _compare(self, argument: str) -> None:
        """Answer again with another model or other settings, beside the answer that is there."""
        workspace = self._workspace
        workspace.require_no_answer()
        message = self._answer("")
        model, sampling, setting = message.model or workspace.model, workspace.session.chat.sampling, ""
        if "=" in argument:
            sampling, setting = parse_params(argument, sampling), argument
        else:
            models = [entry for entry in await workspace.link.models(again=True) if entry.kind in ("", "text")]
            chosen = argument or await self._choose([entry.id for entry in models], message.model)
            if chosen is None:
                return
            model = find_model(models, chosen, can_pull=False)
        session = workspace.session
        answer = workspace.compare(message, model, sampling)
        self._view.show_chat()
        sides = (Side(message, ""), Side(answer.message, setting))
        kept = await self._app.push_screen_wait(CompareScreen(answer.question.text, sides))
        if kept is None:  # cancelled: as if it had not been asked
            await workspace.answers.end(session.chat.id)
            session.show(message.id)
        elif session is workspace.session and workspace.answer is None:
            session.show(kept)
        if session is workspace.session:
            self._view.update_chat()
            self._view.focus_prompt()

    async def _choose(self, names: list[str], current: str) -> str | None:
        choices = [Choice(name, name, "the model of this answer" if name == current else "") for name in names]
        return await self._app.push_screen_wait(PickScreen("Compare with", choices))

    def _answer(self, argument: str) -> Message:
        """Return the answer that a key was pressed on, as `#ID`, or the last one. Raises RequestError without any."""
        session = self._workspace.session
        message = session.tree.messages.get(int(argument[1:])) if argument.startswith("#") else None
        if message is None:
            message = next((m for m in session.tree.path()[::-1] if m.role == "assistant"), None)
        if message is None or message.role != "assistant":
            raise RequestError("there is no answer here", "choose an answer, or write a message")
        return message

    async def _edgelm(self, things: str) -> Client:
        client = await self._workspace.link.client()
        if not client.is_edgelm:
            raise RequestError(f"{client.address} is no edgelm server: it does not tell {things}")
        return client


class AnswerTokens:
    """The tokens of an answer of a chat, and their alternatives, from the model that wrote it."""

    def __init__(self, client: Client, session: Session, message: Message) -> None:
        self._client = client
        self._message = message
        past, turns = session.turns(message)
        self._request = ChatRequest(message.model, turns, session.chat.sampling, past)

    async def pieces(self) -> list[str]:
        """Return the tokens as texts. Raises EdgeLMError."""
        return await pieces(self._client, self._message.model, self._message.text)

    async def alternatives(self, begun: str) -> list[Alternative]:
        """Return the likeliest tokens behind a beginning of the answer. Raises EdgeLMError."""
        return await alternatives(self._client, self._request, Turn("assistant", begun, self._message.reasoning))
