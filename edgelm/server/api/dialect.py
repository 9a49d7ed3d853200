"""The two sides of a dialect, an API that clients speak: its request in our words, and its form of an answer.

Owns the protocols between the routes and the modules of each API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from edgelm.engine.core import ExecutorInfo
from edgelm.jobs.embed_request import EmbedRequest, RankRequest
from edgelm.jobs.request import AnswerDelta, AnswerRequest
from edgelm.server.api.errors import ApiError

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer


DONE = b"data: [DONE]\n\n"  # the end of a stream of OpenAI's older APIs
COMMENT = b": still at work\n\n"  # resets the idle clock of most clients, and is no event


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The facts about the answering model that a reply may show."""

    model: str  # as the client named it
    tokenizer: Tokenizer
    executor: ExecutorInfo
    prompt: Sequence[int] = ()


class Reply(Protocol):
    """The form of one answer, or of several choices. It follows the deltas in order.

    A dialect inherits what it does as most do: neither opening nor closing, OpenAI's error, a comment as ping.
    """

    def opening(self) -> bytes:
        """Return the events that open a stream, before any delta."""
        return b""

    def delta(self, delta: AnswerDelta) -> bytes:
        """Return the events of a delta, one write for all; empty: it has nothing to show."""

    def closing(self) -> bytes:
        """Return the events after the last delta."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the event of a failure after `opening`."""
        return error.event()

    def ping(self) -> bytes:
        """Return bytes that reset a client's idle clock."""
        return COMMENT

    def whole(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        """Return the response of a request that does not stream."""


class Routed(Protocol):
    """The fields of a body that the front itself obeys."""

    @property
    def model(self) -> str: ...

    @property
    def streamed(self) -> bool: ...

    @property
    def keep_alive(self) -> float | None:
        """Seconds that the model stays loaded after the request, or infinity; None: as the settings say."""


class PooledRequest(Routed, Protocol):
    """A parsed and checked body that requests vectors or a ranking."""

    def pooled_request(self) -> EmbedRequest | RankRequest:
        """Return the request in our words. Raises ApiError."""

    def response(self, result: Any, model: str) -> Any:
        """Return the response as JSON has it; `result` is Embedded or Ranked, as requested."""


class ApiRequest(Routed, Protocol):
    """A parsed and checked body."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed in the body, for the answer to say."""

    def answer_requests(self) -> list[AnswerRequest]:
        """Return the request in our words, one for each prompt. Raises ApiError."""
