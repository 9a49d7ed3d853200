"""The tokens of messages that a conversation no longer sends: drafters read them, the model does not."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from edgelm.base.errors import RequestError
from edgelm.text.history import text_of
from edgelm.text.template import Message
from edgelm.text.tokenizer import Tokenizer

MAX_PAST_CHARS = 2**20  # the newest; a drafter keeps no more of one conversation
MAX_KEPT_PASTS = 4  # conversations


class PastTokens:
    """Keeps the last few pasts: the same one comes with every message of a shortened chat. Never fails a request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[tuple[str, ...], list[int]] = OrderedDict()

    async def tokens(self, past: Sequence[Message]) -> list[int]:
        """Return the tokens of the texts of these messages, as plain text."""
        if not past:
            return []
        texts = _newest([text_of(message["content"]) for message in past])
        if texts not in self._kept:
            self._kept[texts] = await asyncio.to_thread(self._encode, texts)
        self._kept.move_to_end(texts)
        tokens = self._kept[texts]
        while len(self._kept) > MAX_KEPT_PASTS:
            self._kept.popitem(last=False)
        return tokens

    def _encode(self, texts: tuple[str, ...]) -> list[int]:
        tokens: list[int] = []
        for text in texts:
            try:
                tokens += self._tokenizer.encode(text, special=False, bos=False)
            except RequestError:  # text that the vocabulary cannot encode cannot be drafted either
                continue
        return tokens


def _newest(texts: list[str]) -> tuple[str, ...]:
    """Return the last texts that fit into MAX_PAST_CHARS."""
    room, kept = MAX_PAST_CHARS, list[str]()
    for text in reversed(texts):
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    return tuple(reversed(kept))
