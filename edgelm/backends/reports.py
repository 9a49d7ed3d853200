"""Reports of a model that is being loaded: the share of the weights, lines for the user, and signs of life.

Owns only that every report is a sign of life too. Knows nothing of who waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.child import Child, report_loading
from edgelm.base.workers.messages import Note, Status

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reports:
    """Callbacks for the progress of loading a model."""

    progress: Callable[[float], bool] | None = None  # gets the share of the weights, 0 to 1; False cancels
    notify: Callable[[str], None] = log.info  # a line that the next one replaces
    warn: Callable[[str], None] = log.warning  # a line that stays in sight
    alive: Callable[[], None] = lambda: None  # after each piece of work, all far shorter than the watchdog waits
    when_lost: Callable[[EdgeLMError], object] = lambda _: None  # the GPU hangs: ends the process; on any thread

    def loaded(self, share: float) -> bool:
        """Report a share of the weights; return whether loading goes on."""
        self.alive()
        return self.progress is None or self.progress(share)

    def say(self, text: str) -> None:
        """Report a line."""
        self.alive()
        self.notify(text)


LOGGED = Reports()  # nobody waits


def reports_to(child: Child) -> Reports:
    """Return reports that a worker sends to its parent."""
    return Reports(
        progress=partial(report_loading, child),
        notify=lambda text: child.send(Status(text)),
        warn=lambda text: child.send(Note(text)),
        when_lost=child.fail,
    )
