"""The tokens of an answer, and the alternatives of one of them, from an edgelm endpoint.

Owns the requests for both. Knows nothing of how they are shown.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from edgelm.base.errors import EngineError
from edgelm.client.endpoint import ChatRequest, Client
from edgelm.client.json_values import mapping, number
from edgelm.client.turns import Turn

NUM_ALTERNATIVES = 10


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could stand at one place of an answer. `text` is empty for a token that ends the answer."""

    text: str
    name: str  # of the token, also where it has no text
    logprob: float


async def pieces(client: Client, model: str, text: str) -> list[str]:
    """Return the tokens of a text as texts; tokens that share a character are joined. Raises EdgeLMError."""
    reply = await client.post_own("/tokenize", {"model": model, "content": text, "with_pieces": True})
    tokens = reply.get("tokens")
    values = [mapping(token).get("piece") for token in (tokens if isinstance(tokens, list) else ())]
    joined = _characters(values)
    if "".join(joined) == f" {text}":  # a vocabulary that puts a space before the first word
        joined = [joined[0][1:], *joined[1:]] if len(joined[0]) > 1 else joined[1:]
    if "".join(joined) != text:
        raise EngineError(f"the tokens of {model} do not have the text of this answer")
    return joined


def _characters(values: Iterable[Any]) -> list[str]:
    """Return pieces, which are texts or lists of bytes, as whole characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    joined, held = [], ""
    for value in values:
        data = value.encode() if isinstance(value, str) else bytes(value) if isinstance(value, list) else b""
        held += decoder.decode(data)
        if held and decoder.getstate()[0] == b"":
            joined.append(held)
            held = ""
    rest = held + decoder.decode(b"", final=True)
    return [*joined, rest] if rest else joined


async def alternatives(client: Client, request: ChatRequest, begun: Turn) -> list[Alternative]:
    """Return the likeliest tokens behind the beginning of an answer, the likeliest first. Raises EdgeLMError.

    `request` has the turns before the answer. An answer that has no text yet may begin with a thought.
    """
    options = {**request.options, "max_tokens": 1}
    probe = replace(request, options=options, begun=begun if begun.text else None, num_logprobs=NUM_ALTERNATIVES)
    reply = await client.answer_at_once(probe)
    choices = reply.get("choices")
    choice = mapping(choices[0]) if isinstance(choices, list) and choices else {}
    content = mapping(choice.get("logprobs")).get("content")
    entry = mapping(content[0]) if isinstance(content, list) and content else {}
    top = entry.get("top_logprobs")
    return [_alternative(mapping(item)) for item in (top if isinstance(top, list) else ())]


def _alternative(entry: dict[str, Any]) -> Alternative:
    name, data, value = entry.get("token"), entry.get("bytes"), number(entry.get("logprob"))
    text = bytes(data).decode("utf-8", "replace") if isinstance(data, list) else str(name or "")
    return Alternative(text, str(name or text), value if value is not None else float("-inf"))
