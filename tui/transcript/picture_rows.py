"""A picture below a message, drawn with half blocks: two pixels a cell, in every terminal with colours.

Owns its size on the screen. A worker has decoded it, or does meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from rich.color import Color
from rich.style import Style
from rich.text import Text

from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.base.workers.pictures import Picture, decode_picture, kept_picture
from edgelm.chats.attachments import Attachment
from edgelm.tui.lines import Line, Row, text_width
from edgelm.tui.palette import Palette

PREVIEW_PIXELS = 4_000
COLUMNS, LINES = 48, 14
HALF = "▀"  # its colour is the upper pixel, the colour behind it the lower one


class PictureRow(Row):
    """One picture; nothing while it is not decoded, and where it cannot be."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self._data = attachment.data

    def draw(self, width: int, palette: Palette) -> list[Line]:
        picture = kept_picture(self._data, PREVIEW_PIXELS)
        if picture is None:
            return []
        return half_blocks(picture, min(text_width(width), COLUMNS), LINES)

    def guess(self, width: int) -> int:
        return LINES


def half_blocks(picture: Picture, columns: int, num_lines: int) -> list[Line]:
    """Draw a picture in at most so many columns and lines, in its own shape: a cell is two pixels high."""
    scale = min(columns / picture.width, 2 * num_lines / picture.height, 1.0)
    width = max(1, min(columns, round(picture.width * scale)))
    height = max(2, round(picture.height * scale) // 2 * 2)
    across = [(2 * x + 1) * picture.width // (2 * width) for x in range(width)]
    down = [(2 * y + 1) * picture.height // (2 * height) for y in range(height)]

    def color(x: int, y: int) -> Color:
        start = 3 * (y * picture.width + x)
        return Color.from_rgb(*picture.rgb[start : start + 3])

    lines = []
    for upper, lower in zip(down[::2], down[1::2], strict=True):
        text = Text()
        for x in across:
            text.append(HALF, Style(color=color(x, upper), bgcolor=color(x, lower)))
        lines.append(Line(text, prefix=len(text)))
    return lines


def undecoded(attachments: Iterable[Attachment]) -> list[Attachment]:
    """Return the pictures that are not decoded for the screen."""
    return [
        attachment
        for attachment in attachments
        if attachment.kind == "image" and kept_picture(attachment.data, PREVIEW_PIXELS) is None
    ]


async def decode_previews(attachments: Iterable[Attachment]) -> None:
    """Decode pictures for the screen. One that cannot be decoded is left out: its name is shown."""
    for attachment in attachments:
        with suppress(EdgeLMError):
            await in_daemon_thread(partial(decode_picture, attachment.data, PREVIEW_PIXELS))
