"""The tokens that a quantization is calibrated on: of a text, and of chats as the model's template renders them.

Owns the share of the chats. The template, a program from the model's file, runs in a worker of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.text.template_runner import TemplateRunner
from edgelm.text.tokenizer import Tokenizer

CHAT_SHARE = 4  # chats take at most one of so many tokens
MAX_CHAT_BYTES = 2**20
BYTES_PER_TOKEN = 16  # more than any text has on average: the rest of a long file is not read

Chat = Sequence[tuple[str, str]]  # roles and texts of its messages

log = logging.getLogger(__name__)


def calibration_tokens(tokenizer: Tokenizer, text: str, chats: Sequence[Chat], max_tokens: int) -> list[int]:
    """Return at most `max_tokens` tokens: the chats that fit their share, then the beginning of the text."""
    tokens: list[int] = []
    if chats and tokenizer.chat_template:
        for chat in asyncio.run(_rendered(tokenizer, chats)):
            if len(tokens) + len(chat) > max_tokens // CHAT_SHARE:
                break
            tokens += chat
    tokens += _encoded(tokenizer, text[: max_tokens * BYTES_PER_TOKEN])
    return tokens[:max_tokens]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, without the characters that a small vocabulary cannot write."""
    try:
        return tokenizer.encode(text, special=False, bos=False, unknown=True)
    except RequestError:
        writable = {char for char in set(text) if _is_writable(tokenizer, char)}
        return tokenizer.encode("".join(char for char in text if char in writable), special=False, bos=False)


def _is_writable(tokenizer: Tokenizer, char: str) -> bool:
    try:
        return bool(tokenizer.encode(char, special=False, bos=False))
    except RequestError:
        return False


async def _rendered(tokenizer: Tokenizer, chats: Sequence[Chat]) -> list[list[int]]:
    """Return the tokens of chats. A template that refuses them leaves the text alone."""
    runner = TemplateRunner(tokenizer)
    rendered = []
    try:
        for chat in chats:
            messages = [{"role": role, "content": text} for role, text in chat]
            rendered.append(await runner.render_tokens(messages, max_bytes=MAX_CHAT_BYTES, add_generation_prompt=False))
    except EdgeLMError as error:
        log.info("no chats for calibration: %s", error)
    finally:
        await runner.close()
    return rendered
