"""What a front looks after while it serves, perhaps for months: the record by which it is found, certificates and keys.

Owns when that is checked, and what stays where a file cannot be read any more. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import FrontRecord, announce
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.server.keys import Key, Keys, read_key_file
from edgelm.server.listener import private_folder
from edgelm.server.tls import Tls, read_tls

CHECK_S = 60.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadAgain:
    """Files that are read again when they change. What they had stays in use where they cannot be read."""

    files: Sequence[Path]
    read: Callable[[], None]  # raises EdgeLMError, OSError
    _seen: list[tuple[int, ...]] = field(default_factory=list)  # of the files, when they were last read

    def check(self) -> None:
        """Read the files if one was replaced, written or given other rights since the last check."""
        now = [_identity(file) for file in self.files]
        if now == self._seen:
            return
        self._seen = now  # first: what is written meanwhile is read at the next check
        try:
            self.read()
        except (EdgeLMError, OSError) as error:
            names = " and ".join(map(str, dict.fromkeys(self.files)))
            log.warning("warning: what %s had before stays in use: %s", names, error)


def _identity(file: Path) -> tuple[int, ...]:
    """Return what is different for every change of a file; empty: it cannot be found."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_ctime_ns


@dataclass(slots=True)
class Renewal:
    """What is made again where it has to be: a certificate of our own. Each failure is told once."""

    renew: Callable[[], None]  # raises EdgeLMError, OSError
    _problem: str = ""

    def check(self) -> None:
        """Renew."""
        before, self._problem = self._problem, ""
        try:
            self.renew()
        except (EdgeLMError, OSError) as error:
            self._problem = str(error)
        if self._problem not in ("", before):
            log.warning("warning: %s", self._problem)


class Upkeep:
    """Checks each minute what a front has begun with, in this order."""

    def __init__(self, runtime: Path, record: FrontRecord, *more: Renewal | ReadAgain) -> None:
        self._runtime = runtime
        self._record = record
        self._more = more
        self._ended = False

    async def run(self) -> None:
        """Check until it is cancelled. A check that hangs, at a drive or a name server, holds up no end."""
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                await in_daemon_thread(self.check)
        finally:
            self._ended = True

    def check(self) -> None:
        """Put right what is not as it was."""
        if self._ended:
            return
        with suppress(EdgeLMError):  # only root can make the folder of a session that has ended: the next one has it
            private_folder(self._runtime)
            announce(self._runtime, self._record)
        for part in self._more:
            part.check()


def certificate_files(tls: Tls) -> ReadAgain:
    """Return the files of a certificate that may be renewed while it is served. Names that are new are not allowed."""

    def read() -> None:
        new = read_tls(tls.certificate, tls.key)
        if new.warning != tls.warning and new.warning:  # the other one was told at the start
            log.warning("warning: %s", new.warning)
        tls.replace_by(new)

    return ReadAgain([tls.certificate, tls.key], read)


def key_file(path: Path, keys: Keys, others: Sequence[Key]) -> ReadAgain:
    """Return the file of keys, which are accepted beside the others. A key that it has no more is refused."""

    def read() -> None:
        of_file = read_key_file(path)
        if keys.replace([*others, *of_file]):
            log.info("keys: %s", ", ".join(key.label for key in of_file))

    return ReadAgain([path], read)
