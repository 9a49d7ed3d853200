"""Pictures in full resolution, by kitty's graphics protocol: sent once, then shown where cells name their parts.

Owns which terminals can do that, and which pictures they have. The cells are text (Unicode placeholders), so that a
picture scrolls and is covered like any other line: https://sw.kovidgoyal.net/kitty/graphics-protocol/
"""

from __future__ import annotations

import base64
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable

from rich.color import Color
from rich.style import Style
from rich.text import Text

from edgelm.base.workers.pictures import Picture

QUESTION = "\x1b[>q"  # XTVERSION: which terminal is this?
# Others have the protocol without placeholders, and would show letters.
_ABLE = re.compile(r"\x1bP>\|(?:kitty\((\d+)\.(\d+)|ghostty )")
_FIRST_KITTY = (0, 28)
MAX_SENT = 64  # pictures that the terminal keeps
_FIRST_ID = 0xED6E00  # a cell's colour is the id; that of a dialog's shade is none
_CHUNK = 4096
_PLACEHOLDER = "\U0010eeee"
_MARKS = [  # the first of the protocol's combining characters, in its order: rows and columns are counted in them
    chr(code)
    for first, last in (
        *((mark, mark) for mark in (0x305, 0x30D, 0x30E, 0x310, 0x312)),
        *((0x33D, 0x33F), (0x346, 0x346), (0x34A, 0x34C), (0x350, 0x352), (0x357, 0x357), (0x35B, 0x35B)),
        *((0x363, 0x36F), (0x483, 0x487), (0x592, 0x595), (0x597, 0x599), (0x59C, 0x5A1)),
    )
    for code in range(first, last + 1)
]


def can_draw(answer: str) -> bool:
    """Tell whether the terminal that answers QUESTION so draws placeholders."""
    match = _ABLE.match(answer)
    return match is not None and (match[1] is None or (int(match[1]), int(match[2])) >= _FIRST_KITTY)


class KittyPictures:
    """The pictures that a terminal has. `write` sends to it, in order with what Textual sends."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._sent: OrderedDict[str, tuple[int, int, int]] = OrderedDict()  # by digest: id, columns and lines

    def lines(self, picture: Picture, columns: int, num_lines: int) -> list[Text]:
        """Return the cells of a picture, after sending it where the terminal does not have it."""
        assert max(columns, num_lines) <= len(_MARKS)
        style = Style(color=Color.parse(f"#{self._place(picture, columns, num_lines):06x}"))
        rows, across = _MARKS[:num_lines], _MARKS[:columns]
        return [Text("".join(_PLACEHOLDER + row + column for column in across), style) for row in rows]

    def forget(self) -> None:
        """Send all again: the terminal dropped them when another program got the screen."""
        self._sent.clear()

    def _place(self, picture: Picture, columns: int, num_lines: int) -> int:
        """Let the terminal have a picture in so many cells, and return its id."""
        sent = self._sent.get(picture.sha256)
        if sent is None:
            if len(self._sent) < MAX_SENT:
                image = _FIRST_ID + len(self._sent)
            else:
                _, (image, _, _) = self._sent.popitem(last=False)
                self._write(f"\x1b_Ga=d,d=I,i={image},q=2\x1b\\")
            self._send(picture, image, columns, num_lines)
        else:
            image = sent[0]
            if sent[1:] != (columns, num_lines):
                self._write(f"\x1b_Ga=p,U=1,q=2,i={image},p=1,c={columns},r={num_lines}\x1b\\")
        self._sent[picture.sha256] = (image, columns, num_lines)
        self._sent.move_to_end(picture.sha256)
        return image

    def _send(self, picture: Picture, image: int, columns: int, num_lines: int) -> None:
        data = base64.b64encode(zlib.compress(picture.rgb, 6)).decode()
        chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
        keys = f"a=T,U=1,q=2,i={image},p=1,f=24,o=z,s={picture.width},v={picture.height},c={columns},r={num_lines},"
        parts = []
        for place, chunk in enumerate(chunks):
            parts.append(f"\x1b_G{'' if place else keys}m={int(place < len(chunks) - 1)};{chunk}\x1b\\")
        self._write("".join(parts))
