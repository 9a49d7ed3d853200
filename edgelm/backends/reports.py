"""Reports of a model that is being loaded: the share of the weights, lines of progress, and that it is alive.

Owns only that every report is a sign of life too. Knows nothing of who waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reports:
    """`progress` gets the share of the weights, 0 to 1, and returns False to cancel; `notify` gets lines.

    `alive` is called after each piece of work, which takes far less than a watchdog waits for it.
    """

    progress: Callable[[float], bool] | None = None
    notify: Callable[[str], None] = log.info
    alive: Callable[[], None] = lambda: None

    def loaded(self, share: float) -> bool:
        """Report a share of the weights; return whether loading goes on."""
        self.alive()
        return self.progress is None or self.progress(share)

    def say(self, text: str) -> None:
        """Report a line."""
        self.alive()
        self.notify(text)


LOGGED = Reports()  # nobody waits
