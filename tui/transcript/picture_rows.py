"""A picture below a message: in full resolution where the terminal can, else with half blocks, two pixels a cell.

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
from edgelm.tui.transcript.kitty import KittyPictures
from edgelm.tui.transcript.sixel import SixelPictures

PREVIEW_PIXELS = 4_000
FINE_PIXELS = 200_000  # where the terminal draws the pixels
COLUMNS, LINES = 48, 14
CELL_PIXELS = (10, 20)  # about: a terminal fits a picture into its cells
HALF = "▀"  # its colour is the upper pixel, the colour behind it the lower one


class PictureRow(Row):
    """One picture; nothing while it is not decoded, and where it cannot be."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self._data = attachment.data

    def draw(self, width: int, palette: Palette) -> list[Line]:
        columns, pictures = min(text_width(width), COLUMNS), palette.pictures
        if isinstance(pictures, KittyPictures) and (picture := kept_picture(self._data, FINE_PIXELS)) is not None:
            texts = pictures.lines(picture, *_cells(picture, columns, LINES, CELL_PIXELS))
            return [Line(text, prefix=len(text)) for text in texts]
        picture = kept_picture(self._data, PREVIEW_PIXELS)
        if picture is None:
            return []
        drawn = pictures.kept(self._data) if isinstance(pictures, SixelPictures) else None
        if drawn is None or drawn.columns > columns:
            return half_blocks(picture, columns, LINES)
        lines = _blocks(picture, drawn.columns, len(drawn.lines))
        for line, sixels in zip(lines, drawn.lines, strict=True):
            line.sixels = sixels
        return lines

    def guess(self, width: int) -> int:
        return LINES


def _cells(picture: Picture, columns: int, num_lines: int, cell: tuple[int, int]) -> tuple[int, int]:
    """Return the columns and lines of a picture in its own shape, at most so many, with cells of so many pixels."""
    width, height = picture.width / cell[0], picture.height / cell[1]
    scale = min(columns / width, num_lines / height, 1.0)
    return max(1, min(columns, round(width * scale))), max(1, min(num_lines, round(height * scale)))


def half_blocks(picture: Picture, columns: int, num_lines: int) -> list[Line]:
    """Draw a picture in at most so many columns and lines, in its own shape: a cell is two pixels high."""
    scale = min(columns / picture.width, 2 * num_lines / picture.height, 1.0)
    return _blocks(
        picture, max(1, min(columns, round(picture.width * scale))), max(1, round(picture.height * scale) // 2)
    )


def _blocks(picture: Picture, width: int, num_lines: int) -> list[Line]:
    """Draw a picture in exactly so many columns and lines."""
    height = 2 * num_lines
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


def undecoded(attachments: Iterable[Attachment], palette: Palette) -> list[Attachment]:
    """Return the pictures that are not decoded for the screen."""
    pixels, pictures = _pixels(palette), palette.pictures
    return [
        attachment
        for attachment in attachments
        if attachment.kind == "image"
        and (
            kept_picture(attachment.data, pixels) is None
            or (isinstance(pictures, SixelPictures) and pictures.kept(attachment.data) is None)
        )
    ]


async def decode_previews(attachments: Iterable[Attachment], palette: Palette) -> None:
    """Decode pictures for the screen. One that cannot be decoded is left out: its name is shown."""
    for attachment in attachments:
        with suppress(EdgeLMError):
            await in_daemon_thread(partial(decode_picture, attachment.data, _pixels(palette)))
            if isinstance(palette.pictures, SixelPictures):
                await in_daemon_thread(partial(palette.pictures.draw, attachment.data, COLUMNS, LINES))


def _pixels(palette: Palette) -> int:
    return FINE_PIXELS if isinstance(palette.pictures, KittyPictures) else PREVIEW_PIXELS
