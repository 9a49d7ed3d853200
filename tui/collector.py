"""When Python's garbage collector may stop the screen.

Owns its thresholds. A full collection looks at everything there is: with a long chat open it holds the event loop for
50 ms and more, and it comes whenever it wants to. So the young generations are collected as ever, and the old one
while nothing moves on the screen.
"""

from __future__ import annotations

import gc

NEVER = 1_000_000_000


def take_over() -> None:
    """Leave out what is there now, which stays, and wait with full collections for `collect_all`."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


def collect_all() -> None:
    """Collect everything, now that nobody waits."""
    gc.collect()
