"""Work that runs beside the input: an answer that is written, a model that is pulled.

Owns what a caller needs of it: to cancel it and to wait for its end. Textual's workers are such work, and so is a task
of asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol


class Work(Protocol):
    """Running work."""

    def cancel(self) -> None:
        """Cancel it; it may take some time to end."""

    async def wait(self) -> object:
        """Wait for its end. Textual's worker raises WorkerError where it was cancelled."""


class TaskWork:
    """Work in a task of asyncio."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(coroutine)

    def cancel(self) -> None:
        self._task.cancel()

    async def wait(self) -> None:
        """Wait for its end, cancelled or not. Raises its error."""
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.result()
