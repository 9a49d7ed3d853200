"""How much of a prompt the engine has read, in words: a long one takes minutes on a CPU.

Owns the wording, and the estimate of the time left. Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing, suppress

from edgelm.base.errors import EdgeLMError
from edgelm.client.endpoint import ChatRequest, Client
from edgelm.client.watching import Chunk, EngineSeen, StepSeen
from edgelm.tui.prompt.room import estimated
from edgelm.tui.transcript.thought import duration_text

BEGIN_S = 1.0  # a shorter wait is not explained
LARGE_SHARE = 0.3  # of the prompt; smaller parts are not named


class PromptProgress:
    """The steps in which one prompt is read."""

    def __init__(self, request: ChatRequest) -> None:
        self._prompt_tokens = estimated("".join(turn.text for turn in request.turns))
        self._num_tools = len(request.tools)
        self._tools_tokens = sum(
            estimated(f"{tool.name}{tool.description}{json.dumps(tool.parameters)}") for tool in request.tools
        )
        self._prompt_tokens += self._tools_tokens
        self._tokens = 0
        self._ms = 0.0

    @property
    def first_words(self) -> str:
        """Return what is read, before the first step ended."""
        return f"reading ~{self._prompt_tokens:,} tokens{self._tools(self._prompt_tokens)}"

    def words(self, chunk: Chunk, step_ms: float) -> str:
        """Return how far the prompt is read after a step; empty at its end."""
        self._tokens += chunk.computed
        self._ms += step_ms
        left = chunk.prompt - chunk.num_read
        if left <= 0 or not chunk.prompt:
            return ""
        seconds = left * self._ms / 1000 / max(self._tokens, 1)
        time = f", {duration_text(seconds)} left" if seconds >= 1 else ""
        share = 100 * chunk.num_read // chunk.prompt
        return f"reading {share} % of {chunk.prompt:,} tokens{self._tools(chunk.prompt)}{time}"

    def _tools(self, prompt: int) -> str:
        """Return the share of the tools in a prompt, where it is large."""
        if not self._num_tools or self._tools_tokens <= LARGE_SHARE * prompt:
            return ""
        plural = "" if self._num_tools == 1 else "s"
        return f" ({self._num_tools} tool{plural}: ~{min(self._tools_tokens, prompt):,})"


async def follow_prompt(client: Client, request: ChatRequest, show: Callable[[str], None]) -> None:
    """Show how a request's prompt is read, until this is cancelled; nothing where the endpoint does not tell."""
    progress = PromptProgress(request)
    await asyncio.sleep(BEGIN_S)
    with suppress(EdgeLMError):
        async with aclosing(client.watch(request.model)) as events:
            async for seen in events:
                if isinstance(seen, EngineSeen):  # it is loaded
                    show(progress.first_words)
                if not isinstance(seen, StepSeen):
                    continue
                for chunk in seen.chunks:
                    if chunk.request_id == request.request_id:
                        show(progress.words(chunk, seen.step_ms))
