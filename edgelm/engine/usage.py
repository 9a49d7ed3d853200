"""Usage: what one request of a client cost, with all its prompts and choices, or all its inputs.

Lives in one event loop. Knows nothing of steps and of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from edgelm.engine.core import Event, FinishReason


class Usage:
    """The tokens and times of the sequences of one request. Make it when the request arrives."""

    def __init__(self, request_id: str = "") -> None:
        self.request_id = request_id  # for logs
        self._arrived = time.perf_counter()
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._first_token_s: float | None = None  # since the arrival
        self._reason: FinishReason | None = None  # of the first sequence that ended
        self._num_open = 0
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def begin(self, *, counts_prompt: bool) -> Callable[[Event], None]:
        """Note a sequence that is submitted now; return the function to call with its last event.

        Several choices share a prompt: one of them counts it.
        """
        self._num_open += 1
        self._all_ended.clear()
        return partial(self._end, time.perf_counter() - self._arrived, counts_prompt)

    def add_inputs(self, num_tokens: int) -> None:
        """Count the tokens of texts whose vectors or scores were computed."""
        self._prompt_tokens += num_tokens

    def _end(self, submitted_s: float, counts_prompt: bool, event: Event) -> None:
        stats = event.stats
        assert stats
        if counts_prompt:
            self._prompt_tokens += stats.prompt_tokens
            self._cached_tokens += stats.cached_tokens
        self._generated_tokens += stats.completion_tokens
        if stats.completion_tokens:
            first_s = submitted_s + stats.first_token_ms / 1000
            self._first_token_s = first_s if self._first_token_s is None else min(self._first_token_s, first_s)
        self._reason = self._reason or event.finish_reason
        self._num_open -= 1
        if not self._num_open:
            self._all_ended.set()

    async def report(self) -> dict[str, Any]:
        """Wait until no sequence is open, and return the numbers as JSON has them."""
        await self._all_ended.wait()
        return {
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "generated_tokens": self._generated_tokens,
            "time_to_first_token_s": self._first_token_s,
            "finish_reason": self._reason,
        }
