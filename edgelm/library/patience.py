"""How long to wait for a server, and how often to try again.

Owns the waits between tries. Knows nothing of what is tried.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds, and the number of failures in a row that is too many."""

    connect_s: float = 10.0
    metadata_s: float = 30.0
    stall_s: float = 30.0  # a transfer that gets less than `least_bytes` in this time is given up and continued
    least_bytes: int = 4096
    failures: int = 8  # without a byte of progress between them
    metadata_failures: int = 4
    first_wait_s: float = 0.5
    longest_wait_s: float = 20.0
    longest_asked_s: float = 300.0  # a server may ask for a longer wait, up to this


class Backoff:
    """The waits of one series of tries: each about twice as long as the one before, and never quite the same."""

    def __init__(self, patience: Patience, cancelled: threading.Event, most: int | None = None) -> None:
        self.failures = 0
        self._patience = patience
        self._cancelled = cancelled
        self._most = patience.failures if most is None else most

    def progressed(self) -> None:
        """Forget the failures: something has come."""
        self.failures = 0

    def next_wait_s(self, asked_s: float | None = None) -> float | None:
        """Return how long to wait before the next try; None: it failed too often, or a longer wait is asked for."""
        self.failures += 1
        if self.failures >= self._most:
            return None
        wait_s = min(self._patience.first_wait_s * 2.0 ** (self.failures - 1), self._patience.longest_wait_s)
        wait_s *= random.uniform(0.5, 1.0)
        if asked_s is None:
            return wait_s
        return max(asked_s, wait_s) if asked_s <= self._patience.longest_asked_s else None

    def wait(self, asked_s: float | None = None) -> bool:
        """Wait before the next try; return False where there is to be none."""
        wait_s = self.next_wait_s(asked_s)
        return wait_s is not None and not self._cancelled.wait(wait_s)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait: `Retry-After` as a number or a date, or the hub's `ratelimit`."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    value = headers.get("retry-after", "").strip()
    try:
        if value.isascii() and value.isdigit():
            return float(value)
        if value:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        limit = parse_ratelimit_headers(headers)
    except (ValueError, OverflowError):  # no number and no date that there is
        return None
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None
