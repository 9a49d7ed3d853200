"""An event loop whose clock jumps to the next timer when nothing else can be done: a test of minutes takes none."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Do not use it with threads or sockets: the clock does not wait for them."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.seconds = 0.0

    def time(self) -> float:
        return self.seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen: somebody waits for ever"
        self._loop.seconds += max(timeout, 0.0)
        return super().select(0)
