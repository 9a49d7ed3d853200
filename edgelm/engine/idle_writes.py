"""IdleWrites: which prefixes are worth a file before the engine ends.

A state is large (128 KiB a token for a model of 8B) and writes wear a disk out, so a file is written early only for a
conversation that went on: a second request began with the first one and its answer. And it is written again only when
it has grown by a share since. All the rest is written when the engine ends, as far as that waits for the disk. So a
crash, or a slow disk, may lose conversations of one request, and the last fifth of others: their tokens are computed
again.

Owns the bytes written early within an hour, and what was sent to the disk and may not be in a file yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgelm.engine.core import StoredPrefix
from edgelm.engine.prefixes import MIN_PREFIX_LEN, PrefixIndex, Tokens
from edgelm.engine.save_points import ANSWER_START_LEN

GROWN_SHARE = 1 / 4  # of what the files hold of a prefix: when nothing runs
EVICTED_SHARE = 1 / 16  # the same when it leaves the memory: the rest is computed again
MAX_HOURLY_BYTES = 8 * 2**30  # twice the default of prefix_cache_disk
MAX_SENT = 64


@dataclass(eq=False, slots=True)
class _Sent:
    """A prefix that was sent to the disk."""

    tokens: Tokens
    cache_namespace: str


class IdleWrites:
    """Decides about early files. `divisible`: a longer file serves every prefix of it. `clock` gives seconds."""

    def __init__(self, divisible: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._divisible = divisible
        self._clock = clock
        self._left = float(MAX_HOURLY_BYTES)  # bytes that may be written early now
        self._filled = clock()
        self._sent: PrefixIndex[_Sent] = PrefixIndex()

    def add(self, cache_namespace: str, tokens: Tokens) -> None:
        """Note a prefix that is sent to the disk now."""
        if len(tokens) < MIN_PREFIX_LEN:
            return
        self._sent.add(_Sent(tokens, cache_namespace))
        if len(self._sent) > MAX_SENT:
            self._sent.remove(next(iter(self._sent)))

    def forget(self) -> None:
        """Forget what was sent: a step failed, and it may not have arrived."""
        self._sent = PrefixIndex()

    def has_grown(
        self, cache_namespace: str, tokens: Tokens, files: Iterable[tuple[StoredPrefix, int]], share: float
    ) -> bool:
        """Tell whether a prefix has this share more tokens than its files; they come with their common tokens."""
        sent = self._sent.matches(cache_namespace, tokens)
        lengths = [(len(prefix.tokens), common) for similar in (files, sent) for prefix, common in similar]
        held = max((common for length, common in lengths if self._divisible or length == common), default=0)
        return len(tokens) > held and len(tokens) >= (1 + share) * held

    def take(self, nbytes: int) -> bool:
        """Count bytes that are written early; False: there were too many within an hour."""
        now = self._clock()
        self._left = min(self._left + (now - self._filled) / 3600 * MAX_HOURLY_BYTES, MAX_HOURLY_BYTES)
        self._filled = now
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True


def asked_len(prompt_len: int) -> int:
    """Return how many tokens of a prompt a request has at least that continues its conversation.

    Templates start an answer with tokens that they omit later, and omit the thoughts of earlier turns.
    """
    return max(prompt_len - ANSWER_START_LEN, MIN_PREFIX_LEN)
