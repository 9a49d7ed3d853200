"""`edgelm serve` as a worker of this process: it ends when this process ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgelm.base.config import API_KEYS
from edgelm.base.errors import EngineError
from edgelm.base.runtime import FrontRecord

if TYPE_CHECKING:
    from edgelm.base.workers.parent import Worker

START_S = 60.0
STOP_S = 5.0


class OwnFront:
    """A front that ends when its standard input closes, so it ends even if this process is killed.

    `environment` sets variables of the front.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str | None] | None = None
    ) -> None:
        self._arguments = ("serve", "--port", "0", "--until-stdin-closes", *arguments)
        self._log = log
        self._environment = environment
        self._worker: Worker | None = None

    @property
    def died(self) -> bool:
        """Return whether it ended without being stopped."""
        return self._worker is not None and self._worker.exited

    async def start(self) -> FrontRecord:
        """Start it; return how to reach it. Raises EngineError with the reason where it does not start."""
        from edgelm.base.workers.messages import Serving  # the chat imports this after its first paint
        from edgelm.base.workers.parent import Worker

        try:
            self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            opened = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = f"the endpoint's log {self._log} cannot be written: {error.strerror}"
            raise EngineError(message, "make its folder writable, or set EDGELM_CACHE_DIR") from None
        with os.fdopen(opened, "wb") as log:
            self._worker = Worker(
                "edgelm",
                *self._arguments,
                replies=(Serving,),
                environment=self._environment,
                keys=API_KEYS,
                log=log,
                grace_s=STOP_S,
            )
        try:
            async with asyncio.timeout(START_S):
                reply = await self._worker.areceive()
        except TimeoutError:
            await self.stop()
            raise EngineError("the endpoint does not start", f"see {self._log}") from None
        if reply is None:
            await self.stop()
            raise EngineError(f"the endpoint does not start: {self._reason()}", f"see {self._log}")
        return FrontRecord(self._worker.pid, reply.address, reply.key, reply.certificate)

    async def stop(self) -> None:
        """End it; kill it if it does not leave within STOP_S, or longer while it saves conversations."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.aclose()

    def _reason(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.removeprefix("error: ") for line in reversed(lines) if line.strip()), "it gave no reason")
