"""`edgelm watch`: the inspector as an application of its own.

Owns the connection, and the end of the application when it breaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from edgelm.base.errors import EdgeLMError
from edgelm.client.watching import watch
from edgelm.tui.inspector.view import Inspector

if TYPE_CHECKING:
    import ssl


class WatchApp(App[EdgeLMError | None]):
    """The inspector of the server at an address; its result is the error that ended it, None: the user closed it."""

    TITLE = "edgelm watch"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,escape", "close", "Close")]

    def __init__(
        self,
        address: str,
        headers: dict[str, str],
        verify: ssl.SSLContext | bool,
        model: str | None = None,
        bandwidth: float = 0.0,
    ) -> None:
        super().__init__()
        self._connection: tuple[Any, ...] = (address, headers, verify, model)
        self._bandwidth = bandwidth

    def compose(self) -> ComposeResult:
        yield Inspector(self._bandwidth)

    def on_mount(self) -> None:
        # A terminal of 16 colours shows a theme of 16 million badly.
        if not self.is_headless and self.console.color_system in (None, "standard"):
            self.theme = "ansi-dark"
        self.run_worker(self._follow())

    def action_close(self) -> None:
        self.exit(None)

    async def _follow(self) -> None:
        inspector = self.query_one(Inspector)
        try:
            async for seen in watch(*self._connection):
                inspector.feed(seen)
        except EdgeLMError as error:
            self.exit(error)
        else:
            self.exit(EdgeLMError("the server has ended", "start it again with `edgelm serve`"))
