"""The inspector as a panel of the chat: it follows the engine of the chat's model while it is open.

Owns the connection to the engine's events, and its renewal. The picture is in inspector.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical

from edgelm.base.errors import EdgeLMError
from edgelm.client.link import Link
from edgelm.tui.commands.keymap import keymap_of
from edgelm.tui.hints import Hint, footer
from edgelm.tui.inspector.view import Inspector
from edgelm.tui.lines import clean

TITLE = Hint("F6", "moves into it, and then closes it", "screen.run('inspect')")
RETRY_S = 2.0  # after a connection broke


class InspectorPanel(Vertical):
    """A closed panel costs nothing: it has no connection. `bandwidth` measures this machine's memory, in bytes/s."""

    DEFAULT_CSS = """
    InspectorPanel {
        height: 45%; min-height: 8; display: none;
        border-top: tall $boost; border-title-color: $text-muted;
    }
    InspectorPanel:focus-within { border-top: tall $primary; }
    InspectorPanel.-open { display: block; }
    """

    def __init__(self, link: Link, bandwidth: Callable[[], float]) -> None:
        super().__init__(id="inspector-panel")
        self._link = link
        self._measure = bandwidth
        self._model = ""
        self._inspector = Inspector()

    def compose(self) -> ComposeResult:
        key = keymap_of(self.app).label(TITLE.action, TITLE.key)
        self.border_title = footer([TITLE._replace(key=f"Inspector: {key}" if key else "Inspector:")])
        yield self._inspector

    @property
    def is_open(self) -> bool:
        return self.has_class("-open")

    def open(self, model: str) -> None:
        """Show the steps of a model's engine from now on."""
        self.add_class("-open")
        self._inspector.tell("asking the engine …")
        self._model = model
        self._follow(model)

    def close(self) -> None:
        """Hide the panel, and end its connection."""
        self.remove_class("-open")
        self.workers.cancel_node(self)

    def follow(self, model: str) -> None:
        """Show the steps of another model's engine, if the panel is open."""
        if self.is_open and model != self._model:
            self.open(model)

    def focus_picture(self) -> None:
        """Let keys stop the picture and go back in it."""
        self._inspector.focus()

    @property
    def has_keys(self) -> bool:
        """Tell whether keys go to the picture."""
        return self._inspector.has_focus

    @work(group="inspector", exclusive=True)
    async def _follow(self, model: str) -> None:
        inspector = self._inspector
        while True:
            try:
                client = await self._link.client()
                if not client.is_edgelm:
                    inspector.tell(f"{client.address} is no edgelm server: it does not send the steps of its engine")
                    return
                if not inspector.bandwidth and await self._link.is_own():
                    inspector.bandwidth = await asyncio.to_thread(self._measure)
                async with aclosing(client.watch(model or None)) as events:
                    async for seen in events:
                        inspector.feed(seen)
            except EdgeLMError as error:
                inspector.tell(clean(str(error)))
            await asyncio.sleep(RETRY_S)
