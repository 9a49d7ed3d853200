"""One model's engine through all its lives: starting, ready, died and started again, stopped.

Owns restarts and their pauses, and who waits for a start. Knows nothing of other models, and of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal

from edgelm.errors import EdgeLMError, EngineError
from edgelm.library.local import LocalModel
from edgelm.server.engine_link import EngineLink

State = Literal["starting", "ready", "stopping", "failed"]
Launch = Callable[[Path], Awaitable[EngineLink]]

# Before the restart after so many deaths without an answer between.
PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
DEATH_LIMIT_S = 5.0  # from a broken connection to the end of the process
MAX_RESTARTS = len(PAUSES_S) - 1  # then only a request starts it again

log = logging.getLogger(__name__)


class StillLoadingError(EdgeLMError):
    """The engine is being started: the same request succeeds later."""

    def __init__(self, name: str, progress: float | None, remaining_s: float | None, last: EdgeLMError | None) -> None:
        done = "" if progress is None else f" ({progress:.0%})"
        after = "" if last is None else f" again, because {last.message}"
        super().__init__(f"{name} is being loaded{after}{done}", "try again, or send the header Prefer: wait")
        self.progress = progress
        self.remaining_s = remaining_s


class EngineSlot:
    """Where one model's engine runs. Made inside the event loop; starts the engine at once."""

    def __init__(self, model: LocalModel, launch: Launch) -> None:
        self.model = model
        self.state: State = "starting"
        self.link: EngineLink | None = None
        self.error: EdgeLMError | None = None  # why it failed, or died last
        self.leases = 0  # requests that use it or wait for it
        self._launch = launch
        self._deaths = 0  # since the last answer
        self._used = self._began = time.monotonic()
        self._retry_at = 0.0
        self.stopped = asyncio.Event()
        self._settled = asyncio.Event()  # not starting
        self._begin()

    @property
    def idle_s(self) -> float:
        return 0.0 if self.leases else time.monotonic() - self._used

    @property
    def progress(self) -> float | None:
        if self.state == "ready":
            return 1.0
        return self.link.progress if self.link is not None and self.state == "starting" else None

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Keep the engine from being unloaded."""
        self.leases += 1
        try:
            yield
        finally:
            self.leases -= 1
            self._used = time.monotonic()

    def answered(self) -> None:
        """Note that the engine did its work: what kills it next is another matter."""
        self._deaths = 0

    async def ready(self, wait_s: float) -> EngineLink:
        """Return the engine, started if need be, within a time.

        Raises StillLoadingError when the time is over, and the EdgeLMError with which the start failed.
        """
        if self.state == "failed" and time.monotonic() >= self._retry_at:
            self._begin()
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    link = await self._settled_link()
            except TimeoutError:
                raise self._still_loading() from None
            if link is None:
                assert self.error is not None
                raise self.error
            if await link.outdated():
                log.warning("%s changed while it was in use: it is loaded again", self.model.name)
                await link.close()
            elif not link.exited:
                return link

    async def stop(self, reason: str) -> None:
        """End the engine, whatever it does; the reason continues a sentence that begins with the model's name."""
        self.state = "stopping"
        self.error = EngineError(f"{self.model.name} {reason}", "try again")
        self._settled.set()
        self._life.cancel()
        await asyncio.wait({self._life})
        if self.link is not None:
            await self.link.close()
        self.stopped.set()

    async def death(self, link: EngineLink) -> EngineError:
        """Return why the connection to an engine broke."""
        if self.state == "stopping":
            assert isinstance(self.error, EngineError)
            return self.error
        try:
            async with asyncio.timeout(DEATH_LIMIT_S):
                return await link.ended()
        except TimeoutError:
            return EngineError("the engine closed the connection", "try again")

    async def unreachable(self, link: EngineLink) -> EngineError:
        """End an engine that takes no connection, if it has not ended, and return why; another follows."""
        await link.close()
        return await self.death(link)

    @property
    def _just_died(self) -> bool:
        """Whether the engine's end is known to the system, and not yet dealt with here."""
        return self.state == "ready" and self.link is not None and self.link.exited

    async def _settled_link(self) -> EngineLink | None:
        """Wait until the engine is ready; None where it failed."""
        while self.state == "starting" or self._just_died:
            if self._just_died:
                self._settled.clear()
            await self._settled.wait()
        assert self.state != "ready" or self.link is not None
        return self.link if self.state == "ready" else None

    def _begin(self) -> None:
        self._to_starting()
        self._life = asyncio.create_task(self._live())
        self._life.add_done_callback(self._on_end)

    def _to_starting(self) -> None:
        self.state, self.link = "starting", None
        self._began = time.monotonic()
        self._settled.clear()

    async def _live(self) -> None:
        while True:
            try:
                self.link = await self._launch(self.model.path)
                await self.link.ready()
            except EdgeLMError as error:
                await self._fail(error)
                return
            self.state, self.error = "ready", None
            self._settled.set()
            link = self.link
            death = await link.ended()
            self._to_starting()
            self.error = death
            await link.close()
            self._deaths += 1
            if self._deaths > MAX_RESTARTS:
                await self._fail(death)
                return
            log.warning("%s: %s", self.model.name, death)
            await asyncio.sleep(self._pause_s)

    def _on_end(self, life: asyncio.Task[None]) -> None:
        """Wake who waits where a bug ended the task."""
        if not life.cancelled() and life.exception() is not None:
            self.state, self.error = "failed", EngineError(f"edgelm failed: {life.exception()!r}")
            log.error("%s", self.error, exc_info=life.exception())
            self._settled.set()

    async def _fail(self, error: EdgeLMError) -> None:
        log.warning("%s: %s", self.model.name, error)
        if self.link is not None:
            await self.link.close()
        self.state, self.error = "failed", error
        self._retry_at = time.monotonic() + self._pause_s
        self._deaths += 1
        self._settled.set()

    @property
    def _pause_s(self) -> float:
        return PAUSES_S[min(self._deaths, MAX_RESTARTS)]

    def _still_loading(self) -> StillLoadingError:
        progress = self.progress
        took = time.monotonic() - self._began
        remaining = took * (1 - progress) / progress if progress else None
        return StillLoadingError(self.model.name, progress, remaining, self.error)
