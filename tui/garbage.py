"""When Python's garbage collector runs while a chat is open. Knows nothing of chats."""

from __future__ import annotations

import gc

NEVER = 1_000_000_000  # as a threshold of the garbage collector


def delay_full_collections() -> None:
    """Let the collector collect only young objects; `gc.collect` at a quiet moment collects the others.

    With a long chat open, a full collection holds the event loop for 50 ms and more, and comes at any moment.
    """
    gc.freeze()  # all present objects stay: never look at them again
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
