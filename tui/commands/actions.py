"""The function of each command of the table.

Owns the dialogs that a command asks with and what it reports. The commands about models are in model_actions.py, those
about the list of chats in chat_actions.py, about knowledge in knowledge.py, about presets, themes and the editor in
own_actions.py, those that look into the model in engine_actions.py. Knows nothing of keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from textual.app import App
from textual.screen import ModalScreen

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attached_files import full_path
from edgelm.chats.exports import export_chat, file_name, split_export
from edgelm.chats.history import Message, Tree
from edgelm.client.reader import Reader
from edgelm.tui.commands.chats import ChatActions
from edgelm.tui.commands.engine import EngineActions
from edgelm.tui.commands.keymap import keymap_of
from edgelm.tui.commands.knowledge import KnowledgeActions, Send
from edgelm.tui.commands.models import ModelActions
from edgelm.tui.commands.own import OwnActions
from edgelm.tui.commands.tools import ToolActions
from edgelm.tui.dialogs.basic import Choice, ConfirmScreen, LineScreen, PickScreen, TextScreen
from edgelm.tui.dialogs.params import EFFORTS, ParamsScreen, Value, effort_name, parse_params
from edgelm.tui.inspector.panel import InspectorPanel
from edgelm.tui.prompt.paths import file_to_write, unquoted
from edgelm.tui.prompt.shortening import ShortenScreen, plan_shortening
from edgelm.tui.pulls import Pulls
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.transcript.markdown import code_blocks
from edgelm.tui.workspace import Workspace

T = TypeVar("T")


class Actions:
    """Runs commands. Each method takes the command's argument, which may be empty, and may raise EdgeLMError."""

    def __init__(
        self,
        app: App[Any],
        workspace: Workspace,
        pulls: Pulls,
        reader: Reader,
        view: ScreenView,
        panel: InspectorPanel,
        send: Send,
    ) -> None:
        """`send` sends a message in the open chat."""
        self._app = app
        self._workspace = workspace
        self._pulls = pulls
        self._view = view
        self.models = ModelActions(app, workspace, pulls, view)
        self.chats = ChatActions(app, workspace, view)
        self.by_name: dict[str, Callable[[str], Awaitable[None]]] = {
            "new": self._new,
            "search": self._search,
            "system": self._system,
            "params": self._params,
            "think": self._think,
            "attach": self._attach,
            "paste": self._paste,
            "title": self._title,
            "regenerate": self._regenerate,
            "edit": self._edit,
            "shorten": self._shorten,
            "whole": self._send_whole,
            "drafts": self._toggle_drafts,
            "copy": self._copy,
            "code": self._copy_code,
            "export": self._export,
            **self.models.by_name,
            **self.chats.by_name,
            **OwnActions(app, workspace, view).by_name,
            **EngineActions(app, workspace, reader, view, panel).by_name,
            **KnowledgeActions(app, workspace, reader, view, send).by_name,
            **ToolActions(app, workspace, view).by_name,
            "quit": self._quit,
        }

    async def run(self, name: str, argument: str) -> None:
        """Run a command by its name. Raises EdgeLMError."""
        await self.by_name[name](argument)

    async def _ask(self, dialog: ModalScreen[T]) -> T | None:
        """Return the dialog's result; None where it was cancelled."""
        return await self._app.push_screen_wait(dialog)

    def _notify(self, text: str) -> None:
        self._app.notify(text, markup=False)

    # Chats

    async def _new(self, _argument: str) -> None:
        self._workspace.new_chat()
        self._view.show_new_chat()

    async def _search(self, argument: str) -> None:
        self._view.search(argument)

    async def _title(self, argument: str) -> None:
        session = self._workspace.session
        title: str | None = argument
        if not title:
            title = await self._ask(LineScreen("Title of the chat", session.chat.title))
        if title:
            session.rename(" ".join(title.split()))
            self._view.update_chat()

    async def _attach(self, argument: str) -> None:
        self._view.attach(full_path(unquoted(argument)) if argument else "")

    async def _paste(self, _argument: str) -> None:
        await self._view.attach_clipboard()

    async def _export(self, argument: str) -> None:
        session = self._workspace.session
        form, name = split_export(argument)
        if not session.tree.messages:
            raise RequestError("there is nothing to export yet", "write a message")
        tree = Tree(session.tree.messages.values(), session.tree.leaf)  # an answer may be written meanwhile
        text = await asyncio.to_thread(export_chat, form, session.chat, tree)
        await self._save("Export to", name, text, file_name(session.chat, form))

    async def _save(self, title: str, name: str, text: str, proposed: str = "") -> None:
        """Write a text to a file; ask for its name where none is given, and before another one is replaced."""
        if not name:
            chosen = await self._ask(LineScreen(title, proposed))
            if not chosen:
                return
            name = chosen
        path = await asyncio.to_thread(file_to_write, name.strip())
        if await asyncio.to_thread(path.exists) and not await self._ask(ConfirmScreen(f"{path} exists.", "Replace it")):
            return
        try:
            await asyncio.to_thread(path.write_text, text, encoding="utf-8")
        except OSError as error:
            raise EdgeLMError(f"{path} cannot be written: {error.strerror}", "choose another file") from error
        self._notify(f"written to {path}")

    # Settings

    async def _system(self, argument: str) -> None:
        session = self._workspace.session
        text: str | None = argument
        if not argument:
            help_text = "Sent before the conversation, for this chat only; empty: none."
            text = await self._ask(TextScreen("System prompt", session.chat.system, help_text))
        if text is not None:
            self._workspace.session.set_system(text)
            self._notify("system prompt set" if text else "no system prompt")

    async def _params(self, argument: str) -> None:
        session = self._workspace.session
        if argument:
            values: dict[str, Value] | None = parse_params(argument, session.chat.sampling)
        else:
            link = self._workspace.link
            is_edgelm = link.connected.is_edgelm if link.connected else link.remote is None
            defaults = self._workspace.defaults.sampling
            values = await self._ask(ParamsScreen(session.chat.sampling, defaults, is_edgelm=is_edgelm))
        if values is not None:
            session.set_sampling(values)
            shown = ", ".join(f"{name} {value}" for name, value in values.items())
            self._notify(f"this chat: {shown}" if shown else "this chat: the endpoint's defaults")

    async def _think(self, argument: str) -> None:
        session = self._workspace.session
        name: str | None = argument.lower()
        if not name:
            current = effort_name(session.chat.sampling.get("reasoning_effort"))
            choices = [Choice(name, name, effort.help) for name, effort in EFFORTS.items()]
            name = await self._ask(PickScreen("How much the model thinks", choices, current))
        if name:
            if effort_name(name) not in EFFORTS:
                raise RequestError(f"there is no effort {name!r}", "give " + ", ".join(EFFORTS))
            session.set_sampling(parse_params(f"reasoning_effort={name}", session.chat.sampling))
            self._notify(f"this chat: thinking {name}")

    async def _toggle_drafts(self, _argument: str) -> None:
        shown = not self._view.shows_drafts
        self._view.show_drafts(shown)
        self._workspace.remember("drafts", "shown" if shown else "")
        if shown and not any(self._workspace.drafted.values()):
            self._notify("drafted words will be tinted, in answers from now on")
        else:
            self._notify("drafted words are tinted" if shown else "drafted words are not tinted")

    async def _quit(self, _argument: str) -> None:
        workspace = self._workspace
        if names := ", ".join(pull.model for pull in self._pulls.running):
            question = f"Quitting stops the pull of {names}. Its partial files are kept; a new pull continues there."
            if not await self._ask(ConfirmScreen(question, "Quit")):
                return
        await workspace.answers.end()
        await self._pulls.end()
        problem, num_unsaved = workspace.store.problem, workspace.store.num_unsaved
        if problem and num_unsaved:
            question = f"{problem.message}. The last {num_unsaved:,} changes are not saved."
            if not await self._ask(ConfirmScreen(question, "Quit and lose them")):
                return
        self._app.exit()

    # Messages

    async def _regenerate(self, argument: str) -> None:
        self._workspace.require_no_answer()
        message = self._message(argument) or self._last("assistant") or self._last("user")
        if message is None:
            raise RequestError("there is nothing to answer yet", "write a message")
        self._begin_answer(_question_of(message))
        self._view.focus_prompt()

    async def _edit(self, argument: str) -> None:
        self._workspace.require_no_answer()
        message = self._message(argument) or self._last("user")
        if message is None:
            raise RequestError("there is nothing to edit yet", "write a message")
        self._view.begin_edit(self._workspace.session.tree.messages[_question_of(message)])

    async def _copy(self, argument: str) -> None:
        message = self._message(argument) or self._last("assistant")
        if message is None or not message.text:
            raise RequestError("there is no answer to copy yet")
        self._view.copy(message.text)

    async def _copy_code(self, argument: str) -> None:
        of, _, argument = argument.partition(" ") if argument.startswith("#") else ("", "", argument)
        argument, _, name = argument.partition(" ")
        selected = self._message(of)
        path = self._workspace.session.tree.path()
        messages = [selected] if selected else [message for message in path[::-1] if message.role == "assistant"]
        blocks = next((blocks for message in messages if (blocks := code_blocks(message.text))), [])
        if not blocks:
            raise RequestError("there is no block of code to copy")
        number: str | None = "1"
        if argument.isdecimal():
            number = argument
            if not 1 <= int(number) <= len(blocks):
                raise RequestError(f"there is no block {number}", f"give 1 to {len(blocks)}")
        elif len(blocks) > 1:
            choices = [Choice(str(i), *_outline(block)) for i, block in enumerate(blocks, 1)]
            number = await self._ask(PickScreen("Copy a block of code", choices))
        if not number:
            return
        code = blocks[int(number) - 1]
        if name:
            await self._save("Save the block of code to", "" if name == "save" else name, code)
        else:
            self._view.copy(code.removesuffix("\n"))

    def _message(self, argument: str) -> Message | None:
        """Return the message on which a key was pressed, as `#ID`."""
        return self._workspace.session.tree.messages.get(int(argument[1:])) if argument.startswith("#") else None

    def _last(self, role: str) -> Message | None:
        path = self._workspace.session.tree.path()
        return next((message for message in path[::-1] if message.role == role), None)

    def _begin_answer(self, parent: int, sent_from: int | None = None) -> None:
        """Answer a message; `sent_from` shortens the conversation from here on."""
        self._workspace.begin_answer(parent, sent_from)
        self._view.show_chat()

    # The sent part of the conversation

    async def _shorten(self, _argument: str) -> None:
        """Leave out the oldest messages; where the last answer is not complete, write a new one."""
        workspace = self._workspace
        workspace.require_no_answer()
        session = workspace.session
        shortening = plan_shortening(session, await self._context_size())
        if shortening is None:
            key = keymap_of(self._app).label("run('edit')", "F4") or "/edit"
            raise RequestError("there is nothing to leave out", f"edit the last message to shorten it alone: {key}")
        first = await self._ask(ShortenScreen(shortening))
        if first is None or workspace.session is not session or workspace.answer is not None:
            return
        leaf = session.tree.path()[-1]
        sent_from = shortening.exchanges[first].messages[0].id if first else None
        if sent_from is None:
            session.send_all()
        if leaf.role == "user" or leaf.state == "failed" or leaf.note == "context":
            self._begin_answer(_question_of(leaf), sent_from)
        elif sent_from is not None:
            session.shorten(leaf, sent_from)
        self._view.update_chat()
        self._view.focus_prompt()

    async def _send_whole(self, _argument: str) -> None:
        self._workspace.require_no_answer()
        if not self._workspace.session.send_all():
            raise RequestError("the whole conversation is sent already", "/shorten leaves out the oldest messages")
        self._view.update_chat()
        self._notify("the whole conversation is sent again")

    async def _context_size(self) -> int | None:
        """Return the context size of the chat's model in tokens; None where the endpoint does not tell."""
        workspace = self._workspace
        if workspace.link.connected is None:
            return None
        with suppress(EdgeLMError):
            models = await workspace.link.models()
            return next((model.context for model in models if model.id == workspace.model), None)
        return None


def _question_of(message: Message) -> int:
    """Return the id of a message of the user, or of the one that an answer belongs to."""
    question = message.id if message.role == "user" else message.parent
    assert question is not None, "an answer has a question"
    return question


def _outline(code: str) -> tuple[str, str]:
    lines = code.strip("\n").split("\n")
    return lines[0].strip()[:50] or "(empty)", f"{len(lines)} lines"
