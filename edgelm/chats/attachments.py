"""Files and long texts that were attached to a message, stored with it.

Owns their form, and how they stand before the text of the message for the model. Knows nothing of how they are chosen
and read.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "image"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file as it was when it was attached, or a pasted text.

    `text` is the text of the kind `text`, that of a PDF for example; `data` are the bytes of an image.
    """

    kind: Kind
    name: str  # as the user sees it
    path: str = ""  # absolute; empty: it was pasted
    text: str = ""
    data: bytes = b""
    media_type: str = "text/plain"
    digest: str = ""  # SHA-256 of the file, in hexadecimal
    size: int = 0  # of the file, in bytes
    mtime_ns: int = 0  # of the file
    tokens: int = 0  # as the model counted them when it was attached; 0: nobody counted them

    @property
    def url(self) -> str:
        """An image as a data URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


def with_attachments(text: str, attachments: Sequence[Attachment]) -> str:
    """Return the text of a message for the model: its attached texts, each in a fence, then its own text."""
    parts = [_fenced(attachment) for attachment in attachments if attachment.kind == "text"]
    return "\n\n".join([*parts, text]) if parts else text


def images(attachments: Sequence[Attachment]) -> tuple[str, ...]:
    """Return the images as data URLs."""
    return tuple(attachment.url for attachment in attachments if attachment.kind == "image")


def as_markdown(attachment: Attachment) -> str:
    """Return an attachment for an export: its text as the model got it; of an image, its name."""
    return _fenced(attachment) if attachment.kind == "text" else f"*{attachment.name} (a picture)*"


def _fenced(attachment: Attachment) -> str:
    fence = "```"
    while fence in attachment.text:
        fence += "`"
    end = "" if attachment.text.endswith("\n") else "\n"
    return f"{attachment.name}:\n{fence}\n{attachment.text}{end}{fence}"
