"""The tokens of what a conversation no longer sends: drafters read them, the model does not.

Owns the limits, and the memory of the last few pasts: the same one comes with each message of a shortened chat.
Nothing about it can fail a request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from edgelm.errors import RequestError
from edgelm.server.chat_request import Message
from edgelm.text.tokenizer import Tokenizer

MAX_CHARS = 2**20  # the newest; a drafter keeps no more of one conversation
MAX_KEPT = 4  # pasts


class PastTokens:
    """Encodes pasts, each of the last ones once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[tuple[str, ...], list[int]] = OrderedDict()

    async def tokens(self, past: Sequence[Message]) -> list[int]:
        """Return the tokens of the texts of these messages, one behind the other, as plain text."""
        if not past:
            return []
        texts = _newest([message.for_template()["content"] for message in past])
        if texts not in self._kept:
            self._kept[texts] = await asyncio.to_thread(self._encode, texts)
        self._kept.move_to_end(texts)
        found = self._kept[texts]
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found

    def _encode(self, texts: tuple[str, ...]) -> list[int]:
        tokens: list[int] = []
        for text in texts:
            try:
                tokens += self._tokenizer.encode(text, special=False, bos=False)
            except RequestError:  # what the vocabulary cannot write, it cannot draft either
                continue
        return tokens


def _newest(texts: list[str]) -> tuple[str, ...]:
    """Return the last texts that are short enough together."""
    room, kept = MAX_CHARS, list[str]()
    for text in reversed(texts):
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    return tuple(reversed(kept))
