"""The commands about models: which one answers a chat, and pulls of new ones.

Owns what is asked and reported. The dialog is in picker.py, the processes that pull are in pulls.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from textual.app import App

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.client.endpoint import ModelEntry
from edgelm.library.catalog import hub_reference
from edgelm.library.progress import size_text
from edgelm.tui.commands.keymap import keymap_of
from edgelm.tui.dialogs.picker import Installed, PickerScreen
from edgelm.tui.lines import clean
from edgelm.tui.model_names import describe_model, existing, find_model, find_pulled, is_path
from edgelm.tui.prompt.paths import unquoted
from edgelm.tui.pulls import Pull, Pulls
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.workspace import Workspace


class ModelActions:
    """Runs the commands `model` and `pull`, and reports the end of a pull. Each may raise EdgeLMError."""

    def __init__(self, app: App[Any], workspace: Workspace, pulls: Pulls, view: ScreenView) -> None:
        self._app = app
        self._workspace = workspace
        self._pulls = pulls
        self._view = view
        self.by_name: dict[str, Callable[[str], Awaitable[None]]] = {"model": self._model, "pull": self._pull}

    async def _model(self, argument: str) -> None:
        """Use a model for this chat; without a name, show the installed models and those to pull."""
        models = await self._workspace.link.models(again=True)
        if not argument:
            await self._pick_model(models)
            return
        if is_path(path := unquoted(argument)):
            self._set_model(await self._workspace.offered(path))
        else:
            self._set_model(find_model(models, argument, can_pull=not self._no_pull_reason))

    async def _pull(self, argument: str) -> None:
        """Pull a model, or stop a pull."""
        verb, _, rest = argument.partition(" ")
        if verb == "stop":
            self._stop_pull(rest.strip())
        elif not argument:
            await self._pick_model(await self._workspace.link.models(again=True))
        else:
            if self._no_pull_reason:
                raise RequestError(self._no_pull_reason)
            hub_reference(argument)  # raises at once where the name is misspelt
            self._start_pull(argument)

    async def _pick_model(self, models: list[ModelEntry]) -> None:
        reason = self._no_pull_reason
        if reason and not models:
            raise RequestError("the endpoint offers no model", reason)
        details = {model.id: " · ".join(describe_model(model)) for model in models}
        recent = [] if reason else await asyncio.to_thread(existing, self._workspace.recent_paths)
        picked = await self._app.push_screen_wait(
            PickerScreen(
                "Model of this chat",
                [Installed(name, detail) for name, detail in details.items()],
                current=self._workspace.model,
                note=reason,
                recent=[path for path in recent if path not in details],
                free_bytes=0 if reason else await asyncio.to_thread(available_memory_bytes),
                pulls=lambda: self._pulls.running,
            )
        )
        if picked is None:
            return
        if picked.action == "use":
            self._set_model(await self._workspace.offered(picked.name))
        elif picked.action == "stop":
            self._stop_pull(picked.name)
        else:
            self._start_pull(picked.name)

    def _set_model(self, model: str) -> None:
        self._workspace.set_model(model)
        self._view.show_around()

    @property
    def _no_pull_reason(self) -> str:
        """Return why no model can be pulled; empty where one can."""
        remote = self._workspace.link.remote
        return "" if remote is None else f"these are the models of {remote}: pull more there"

    def _start_pull(self, model: str) -> None:
        self._pulls.start(model, self._workspace.session.chat.id)
        self._notify(f"pulling {model}; you can go on chatting")

    def _stop_pull(self, model: str) -> None:
        if not self._pulls.stop(model):
            raise RequestError(f"{model} is not being pulled" if model else "nothing is being pulled")

    async def pull_ended(self, pull: Pull) -> None:
        """Report the end of a pull; the model answers the chat that asked for it. Raises EdgeLMError if it failed."""
        name = clean(pull.model)
        if pull.state == "stopped":
            size = f" at {size_text(pull.done)}" if pull.done else ""
            self._notify(f"the pull of {name} was stopped{size}; /pull {name} {pull.again}")
            return
        if pull.state == "failed":
            raise EdgeLMError(pull.error)
        model = find_pulled(await self._workspace.link.models(again=True), pull)
        if model is None:
            self._notify(f"{name} is here, but the endpoint does not list it yet; /model shows its list")
        elif self._workspace.session.chat.id == pull.chat_id:
            self._set_model(model)
            place = f" in place of {name}" if pull.stand_in else ""
            self._notify(f"{model} is here{place}, and answers this chat from now on")
        else:
            key = keymap_of(self._app).label("run('model')", "Ctrl+O") or "/model"
            self._notify(f"{model} is here: {key} chooses it")

    def _notify(self, text: str) -> None:
        self._app.notify(text, markup=False)
