"""Server-sent events by their standard (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Owns how bytes become events. Knows nothing of what they say.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
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
    name, data = "", list[str]()
    async with aclosing(_lines(parts)) as lines:
        async for line in lines:
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


async def _lines(parts: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    held: list[bytes] = []  # of a line that is not complete
    is_first, after_return = True, False
    async for part in parts:
        if after_return and part:  # "\r\n" may be cut in the middle
            part = part.removeprefix(b"\n")
            after_return = False
        if not part:
            continue
        after_return = part.endswith(b"\r")
        first, *more = _LINE_END.split(part)
        held.append(first)
        for following in more:
            line = b"".join(held)
            yield (line.removeprefix(BOM_UTF8) if is_first else line).decode()
            is_first, held = False, [following]
