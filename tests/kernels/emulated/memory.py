"""The memory of the programs of this package."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Collect garbage only where gc.collect() is called: it took an eighth of the time of a run, and found nothing."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
