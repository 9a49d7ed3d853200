"""What a front looks after while it serves, perhaps for months: the record by which it is found.

Owns when that is checked. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import FrontRecord, announce
from edgelm.server.listener import private_folder

CHECK_S = 60.0


class Upkeep:
    """Checks each minute what a front has begun with."""

    def __init__(self, runtime: Path, record: FrontRecord) -> None:
        self._runtime = runtime
        self._record = record

    async def run(self) -> None:
        """Check until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.check()

    async def check(self) -> None:
        """Put right what is not as it was."""
        await asyncio.to_thread(self._announce_again)

    def _announce_again(self) -> None:
        with suppress(EdgeLMError):  # only root can make the folder of a session that has ended: the next one has it
            private_folder(self._runtime)
            announce(self._runtime, self._record)
