"""The turns of a conversation as the messages of a request.

Owns where a system turn behind the history goes if the endpoint takes none there. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgelm.client.failures import ContextFullError

REFUSALS = (400, 422, 500)  # statuses with which servers answer what a chat template refuses


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation; the role is `system`, `user` or `assistant`.

    `reasoning` is the thought before an answer: sent to edgelm only, since other endpoints may refuse the field.
    """

    role: str
    text: str
    reasoning: str = ""


def as_messages(turns: Iterable[Turn], with_reasoning: bool) -> list[dict[str, str]]:
    """Return turns in OpenAI's form."""
    return [
        {"role": turn.role, "content": turn.text}
        | ({"reasoning_content": turn.reasoning} if with_reasoning and turn.reasoning else {})
        for turn in turns
    ]


def may_refuse_system(error: Exception, turns: Sequence[Turn]) -> bool:
    """Tell whether an endpoint may have refused a request because a system turn is not the first turn."""
    late = any(turn.role == "system" for turn in turns[1:])
    return late and not isinstance(error, ContextFullError) and getattr(error.__cause__, "status_code", 0) in REFUSALS


def with_joined_system(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return turns with each system turn behind the first turn at the beginning of the user's turn after it."""
    joined = list(turns[:1])
    for turn in turns[1:]:
        if turn.role == "user" and len(joined) > 1 and joined[-1].role == "system":
            turn = Turn("user", f"{joined.pop().text}\n\n{turn.text}")
        joined.append(turn)
    return tuple(joined)
