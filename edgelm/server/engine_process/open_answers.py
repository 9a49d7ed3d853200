"""The answers that an engine process is writing, as llama-server's /slots shows them: each key sees its own.

Owns the list. Knows nothing of HTTP and of the texts.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from edgelm.jobs.answer import Prepared
from edgelm.jobs.request import AnswerDelta


@dataclass(slots=True)
class OpenAnswer:
    """One request."""

    id: int
    namespace: str
    context: int
    prompt_tokens: int
    max_tokens: int | None
    num_tokens: int = 0  # of the answer so far


class OpenAnswers:
    """The requests that are being answered now."""

    def __init__(self) -> None:
        self._open: dict[int, OpenAnswer] = {}
        self._ids = itertools.count()

    @contextmanager
    def entry(self, prepared: Sequence[Prepared], context: int) -> Iterator[OpenAnswer]:
        """Show a request while the block runs."""
        first = prepared[0]
        prompt_tokens = sum(len(one.ids) for one in prepared)
        answer = OpenAnswer(next(self._ids), first.cache_namespace, context, prompt_tokens, first.params.max_tokens)
        self._open[answer.id] = answer
        try:
            yield answer
        finally:
            del self._open[answer.id]

    def entries(self, namespace: str) -> list[dict[str, Any]]:
        """Return the requests of one namespace in llama-server's form."""
        own = [answer for answer in self._open.values() if answer.namespace == namespace]
        return [_slot(index, answer) for index, answer in enumerate(own)]


def _slot(index: int, answer: OpenAnswer) -> dict[str, Any]:
    remaining = -1 if answer.max_tokens is None else max(answer.max_tokens - answer.num_tokens, 0)
    return {
        "id": index,
        "id_task": answer.id,
        "n_ctx": answer.context,
        "is_processing": True,
        "n_prompt_tokens": answer.prompt_tokens,
        "next_token": [{"has_next_token": True, "n_decoded": answer.num_tokens, "n_remain": remaining}],
    }


async def counted(deltas: AsyncGenerator[AnswerDelta, None], answer: OpenAnswer) -> AsyncGenerator[AnswerDelta, None]:
    """Yield the deltas of an answer, and count its tokens."""
    async with aclosing(deltas):
        async for delta in deltas:
            answer.num_tokens += len(delta.sampled)
            yield delta
