"""Server-sent events by their standard (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Owns how bytes become events. Knows nothing of what they say.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\n|\r")  # and no other: a text may hold U+2028


class ServerEvent(NamedTuple):
    """One event. `name` is empty for one without."""

    name: str
    data: str


async def server_events(parts: AsyncIterator[bytes]) -> AsyncGenerator[ServerEvent, None]:
    """Yield the events of a stream; one without data (`retry:`, `id:`, an empty `data:`) or an end is left out.

    Raises UnicodeDecodeError.
    """
    name, data, lines = "", list[str](), _Lines()
    async for part in parts:
        for line in lines.ended_by(part):
            if not line:
                if text := "\n".join(data):
                    yield ServerEvent(name, text)
                name, data = "", []
                continue
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)


class _Lines:
    """The lines of a stream that comes in parts."""

    def __init__(self) -> None:
        self._held: list[bytes] = []  # of a line that is not complete
        self._is_first, self._after_return = True, False

    def ended_by(self, part: bytes) -> Iterator[str]:
        """Yield the lines whose end is in this part."""
        if self._after_return and part:  # "\r\n" may be cut in the middle
            part = part.removeprefix(b"\n")
            self._after_return = False
        if not part:
            return
        self._after_return = part.endswith(b"\r")
        first, *more = _LINE_END.split(part)
        self._held.append(first)
        for following in more:
            line = b"".join(self._held)
            yield (line.removeprefix(BOM_UTF8) if self._is_first else line).decode()
            self._is_first, self._held = False, [following]
