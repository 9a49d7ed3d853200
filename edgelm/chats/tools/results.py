"""The result of a call as a text for the model.

Owns what becomes of results that are no text, of control characters, and of results that are too long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 64 * 2**10
# Colours, titles and other sequences for terminals; they say nothing to a model.
_ESCAPES = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]|\x1b[\\]PX^_].*?(?:\x1b\\\\|\x07|\x9c|$)|\x9b[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]", re.DOTALL
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Result:
    """The text that a call returned; `failed`: it says what went wrong."""

    text: str
    failed: bool = False


def plain_text(text: str) -> str:
    """Return a text without escapes and control characters, which can be written as UTF-8."""
    text = text.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("\ufffd", _ESCAPES.sub("", text)) if not text.isprintable() else text


def cut(text: str, max_chars: int) -> str:
    """Return at most the beginning of a text, with a note where it was cut."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: these are the first {max_chars:,} of {len(text):,} characters]"


def result_text(blocks: Iterable[Any], structured: object, max_chars: int) -> str:
    """Return the texts of a result; what is no text is named."""
    texts = list(map(_block_text, blocks))
    if structured is not None and not any(text.strip() for text in texts):
        texts = [json.dumps(structured, ensure_ascii=False)]
    return cut(plain_text("\n".join(texts)), max_chars) or "(the tool returned nothing)"


def contents_text(contents: Iterable[Any], max_chars: int) -> str:
    """Return the texts of a resource; what is no text is named."""
    texts = [
        content.text if isinstance(getattr(content, "text", None), str) else f"[{content.uri}: not text, not shown]"
        for content in contents
    ]
    return cut(plain_text("\n".join(texts)), max_chars)


def _block_text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type} {block.mime_type}, {len(block.data) * 3 // 4:,} bytes: not shown to the model]"
    uri = block.uri if block.type == "resource_link" else block.resource.uri
    if block.type == "resource" and isinstance(getattr(block.resource, "text", None), str):
        return f"{uri}:\n{block.resource.text}"
    return f"[resource {uri}: not shown to the model]"
