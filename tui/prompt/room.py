"""How many tokens attachments take, and what is left of the model's context.

Owns the count by an edgelm endpoint, and the estimate elsewhere. Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attachments import Attachment, with_attachments
from edgelm.chats.history import Message, split_sent
from edgelm.client.answer_stream import stats_from_json
from edgelm.client.endpoint import Client
from edgelm.client.link import Link, sees
from edgelm.client.session import Session
from edgelm.library.local import SEEING
from edgelm.tui.lines import short_name
from edgelm.tui.prompt.shortening import TOKENS_PER_CHAR, sent_len

MAX_COUNTED_CHARS = 200_000  # llama.cpp takes quadratic time for some texts
COUNT_S = 60.0
PICTURE_TOKENS = 300  # about what models make of a picture, where nobody counts them
MAX_NAMED = 3  # models


class Room(NamedTuple):
    """What is left of a context, in tokens; less than 0: the message does not fit."""

    left: int
    size: int
    exact: bool

    @property
    def words(self) -> str:
        about = "" if self.exact else "~"
        if self.left < 0:
            return f"too long by {about}{-self.left:,} tokens of {self.size:,}"
        return f"{about}{self.left:,} of {self.size:,} left"


def tokens_of(attachment: Attachment) -> tuple[int, bool]:
    """Return the tokens of an attachment, and whether they were counted."""
    if attachment.kind == "image":
        return (attachment.tokens, True) if attachment.tokens else (PICTURE_TOKENS, False)
    return (attachment.tokens, True) if attachment.tokens else (estimated(with_attachments("", (attachment,))), False)


def estimated(text: str) -> int:
    """Return about how many tokens a text has."""
    return round(len(text) * TOKENS_PER_CHAR)


def is_edgelm(link: Link) -> bool:
    """Tell whether the endpoint is edgelm, as far as that is known before the first connection."""
    return link.connected.is_edgelm if link.connected is not None else link.remote is None


async def require_sight(link: Link, model: str, attachments: Sequence[Attachment]) -> None:
    """Raise RequestError for a picture that the model does not see, as far as the endpoint tells."""
    picture = next((attachment for attachment in attachments if attachment.kind == "image"), None)
    if picture is None:
        return
    try:
        if await sees(link, model):
            return
        others = [short_name(entry.id) for entry in await link.models() if entry.pictures]
    except EdgeLMError:  # it is told when the message is sent
        return
    name = short_name(model) or "this model"
    hint = f"these do: {', '.join(others[:MAX_NAMED])}" if others else f"edgelm pull {SEEING} gets a model that does"
    raise RequestError(f"{name} reads no images: {picture.name} is not sent", hint)


async def counted(link: Link, model: str, attachment: Attachment) -> Attachment:
    """Return an attachment with its tokens, where the endpoint counts them."""
    text = with_attachments("", (attachment,))
    if len(text) > MAX_COUNTED_CHARS or not is_edgelm(link) or not model:
        return attachment
    with suppress(EdgeLMError, TimeoutError):
        async with asyncio.timeout(COUNT_S):
            client = await link.client()
            if client.is_edgelm and attachment.kind == "image":
                return replace(attachment, tokens=await _picture_tokens(client, model, attachment))
            if client.is_edgelm:
                reply = await client.post_own("/tokenize", {"model": model, "content": text})
                tokens = reply.get("tokens")
                return replace(attachment, tokens=len(tokens) if isinstance(tokens, list) else 0)
    return attachment


async def _picture_tokens(client: Client, model: str, attachment: Attachment) -> int:
    """Return by how many tokens a picture makes a message longer."""
    source = {"type": "base64", "media_type": attachment.media_type, "data": base64.b64encode(attachment.data).decode()}
    counts = []
    for pictures in ([], [{"type": "image", "source": source}]):
        content = [*pictures, {"type": "text", "text": "."}]
        body = {"model": model, "messages": [{"role": "user", "content": content}]}
        count = (await client.post_own("/v1/messages/count_tokens", body)).get("input_tokens")
        counts.append(count if isinstance(count, int) else 0)
    return max(counts[1] - counts[0], 0)


async def context_size(link: Link, session: Session, model: str) -> int | None:
    """Return the context size of the chat's model in tokens; None where the endpoint does not tell."""
    with suppress(EdgeLMError, TimeoutError):
        async with asyncio.timeout(COUNT_S):
            client = await link.client()
            if (size := await client.context(model)) is not None:
                return size
            for message in reversed(session.tree.path()):
                stats = stats_from_json(message.stats) if message.stats else None
                if stats is not None and stats.context_size:
                    return stats.context_size
            return next((entry.context for entry in await link.models() if entry.id == model), None)
    return None


def room(size: int, session: Session, parent: int | None, attachments: Sequence[Attachment], text: str = "") -> Room:
    """Return what is left of a context of `size` tokens with a message below `parent`."""
    used, exact = _used(session, session.tree.path_to(parent))
    for attachment in attachments:
        tokens, is_counted = tokens_of(attachment)
        used += tokens
        exact &= is_counted
    return Room(size - used - estimated(text), size, exact and not text)


def _used(session: Session, path: Sequence[Message]) -> tuple[int, bool]:
    """Return the tokens of a conversation, and whether an answer measured all of them."""
    _, sent = split_sent(path)
    rest = pictures = 0
    for place, message in enumerate(reversed(sent)):
        stats = stats_from_json(message.stats) if message.stats and message.state == "done" else None
        is_cut = place == 0 and message.sent_from is not None  # the answer was measured before it was shortened
        if stats is not None and stats.context_used and not is_cut:
            return stats.context_used + pictures + round(rest * TOKENS_PER_CHAR), rest == 0
        rest += sent_len(message)
        pictures += sum(tokens_of(attachment)[0] for attachment in message.attachments if attachment.kind == "image")
    estimate = pictures + round((rest + len(session.chat.system)) * TOKENS_PER_CHAR)
    return estimate, rest == 0 and not session.chat.system
