"""The rows of attachments below a message: one line with their names, and their texts when unfolded.

Owns the wording of the line. Knows nothing of how files are chosen and sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgelm.chats.attachments import Attachment
from edgelm.library.progress import size_text
from edgelm.tui.lines import FoldRow, PlainRow, Row
from edgelm.tui.prompt.room import tokens_of
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.transcript.picture_rows import PictureRow

MAX_SHOWN_LINES = 300
MAX_SHOWN_CHARS = 30_000  # wrapping a text of megabytes takes seconds


def attachment_words(attachment: Attachment) -> str:
    """Return name and size of an attachment."""
    name = one_line(attachment.name)
    if attachment.kind == "image":
        return f"{name} · picture, {size_text(attachment.size)}, {tokens_words(attachment)}"
    return f"{name} · {tokens_words(attachment)}"


def tokens_words(attachment: Attachment) -> str:
    """Return the tokens of a text, with a ~ where they are estimated."""
    tokens, exact = tokens_of(attachment)
    return f"{'' if exact else '~'}{tokens:,} token{'' if tokens == 1 else 's'}"


def attachment_rows(attachments: Sequence[Attachment], *, unfolded: bool) -> list[Row]:
    """Return the rows of the attachments of a message."""
    if not attachments:
        return []
    rows: list[Row] = [FoldRow(", ".join(map(attachment_words, attachments)), unfolded=unfolded)]
    rows += [PictureRow(attachment) for attachment in attachments if attachment.kind == "image"]
    if unfolded:
        for place, attachment in enumerate(attachments):
            gap = "\n" if place else ""
            rows.append(PlainRow(f"{gap}{one_line(attachment.name)}\n\n{_shown_text(attachment)}", muted=True))
    return rows


def _shown_text(attachment: Attachment) -> str:
    """Return the beginning of a text."""
    if attachment.kind == "image":
        return f"{attachment.media_type}, {size_text(attachment.size)}"
    text = attachment.text.strip("\n")
    lines = text[:MAX_SHOWN_CHARS].split("\n")[:MAX_SHOWN_LINES]
    shown = "\n".join(lines)
    num_more = text.count("\n") + 1 - len(lines)
    if len(shown) < len(text):
        shown += f"\n… and {num_more:,} more lines" if num_more > 0 else "\n…"
    return shown
