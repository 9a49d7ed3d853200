"""The questions about calls of tools, on the full screen.

Owns when a dialog is closed. Knows nothing of their look and of what runs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from textual.app import App

from edgelm.base.errors import EdgeLMError
from edgelm.client.tool_runner import Asker, CallQuestion, LimitQuestion, Permit
from edgelm.tui.lines import clean

if TYPE_CHECKING:
    from edgelm.tui.dialogs.tools import AskScreen


class ScreenAsker(Asker):
    """Asks in dialogs, whatever chat is on the screen: they name the chat."""

    def __init__(self, app: App[Any]) -> None:
        self._app = app

    async def may_call(self, question: CallQuestion) -> Permit:
        from edgelm.tui.dialogs.tools import CallScreen  # after the first paint

        return await self._ask(CallScreen(question))

    async def may_go_on(self, question: LimitQuestion) -> bool:
        from edgelm.tui.dialogs.tools import LimitScreen

        return await self._ask(LimitScreen(question)) == "once"

    def tell(self, error: EdgeLMError) -> None:
        self._app.notify(clean(str(error)), severity="error", timeout=10, markup=False)

    async def _ask(self, dialog: AskScreen) -> Permit:
        """Return the dialog's result. It is closed where nobody waits for that any more: the answer was stopped."""
        try:
            return await self._app.push_screen_wait(dialog)
        except asyncio.CancelledError:
            if dialog in self._app.screen_stack:
                dialog.abandon()
            raise
