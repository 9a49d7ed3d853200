"""The pictures of requests: from the address in a message to tokens of a prompt.

Owns which addresses are read; picture_fetch.py has those of other hosts. Knows nothing of files of pictures and of how
they are encoded.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import NotSeenError, RequestError
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.engine.core import PicturePart, PictureSpan, in_prompt
from edgelm.jobs.request import too_long
from edgelm.text.pictures import PICTURE, name_of, names_in, picture_urls, with_marks
from edgelm.text.prompt_token_cache import Prompt
from edgelm.text.template import Message

_DATA = re.compile(r"data:(?:image/[\w.+-]+|application/octet-stream)?(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_ELSEWHERE = re.compile("https?:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Messages with marks in place of pictures, and the tokens of each picture."""

    messages: Sequence[Message]
    marks: Mapping[str, str] = field(default_factory=dict)  # the name behind each mark (text/pictures.py)
    parts: Mapping[str, tuple[PicturePart, ...]] = field(default_factory=dict)  # by the name

    def expanded(self, prompt: Prompt) -> tuple[list[int], tuple[PictureSpan, ...]]:
        """Return the tokens of a prompt with those of its pictures, and the places of these."""
        if not self.marks:
            return prompt.ids, ()
        names = iter(names_in(prompt.rendered.text, prompt.rendered.plain))
        ids: list[int] = []
        spans: list[PictureSpan] = []
        for token in prompt.ids:
            if token != PICTURE:
                ids.append(token)
                continue
            spans += in_prompt(self.parts[next(names)], ids)[1]
        return ids, tuple(spans)


async def read_pictures(
    loaded: LoadedModel, settings: Settings, messages: Sequence[Message], *others: object
) -> Pictures:
    """Return messages with their pictures read. `others` is all else that goes to the template.

    Raises NotSeenError, RequestError for a picture that is not taken, BusyError.
    """
    if not any(isinstance(message.get("content"), list) for message in messages) or not picture_urls(messages):
        return Pictures(messages)
    if loaded.pictures is None:
        raise NotSeenError("this model reads no images", "use one that does, such as gemma3:4b")
    from edgelm.jobs.picture_fetch import PictureFetcher  # most requests have no picture

    reader, context = loaded.pictures, loaded.engine.info.context
    fetcher = PictureFetcher(settings.picture_host)

    def read(url: str, fetched: bytes | None) -> tuple[str, tuple[PicturePart, ...]]:
        return name_of(url), reader.read(_data_of(url) if fetched is None else fetched)

    # Not on the threads of asyncio.to_thread, which encode the prompts of others meanwhile; on none while it fetches.
    marked, marks = await in_daemon_thread(partial(with_marks, messages, *others))
    parts: dict[str, tuple[PicturePart, ...]] = {}
    num_tokens = 0
    for url in picture_urls(messages):
        fetched = await fetcher.fetch(url) if _ELSEWHERE.match(url) else None
        name, own = await in_daemon_thread(partial(read, url, fetched))
        parts[name] = own
        num_tokens += sum(len(part.tokens) for part in own)
        if num_tokens >= context:  # the others may be thousands
            raise too_long(f"{len(parts)} pictures have {num_tokens:,} tokens", context)
    return Pictures(marked, marks, parts)


def _data_of(url: str) -> bytes:
    """Return the bytes of a picture that its address holds. Raises RequestError for another one."""
    if match := _DATA.match(url):
        try:
            return base64.b64decode(url[match.end() :], validate=True)
        except binascii.Error:
            raise RequestError("the base64 of a picture is damaged", "encode it again") from None
    from edgelm.jobs.picture_fetch import SEND

    kind = url.partition(":")[0][:20]
    raise RequestError(f"a picture's address begins with {kind!r}, and nothing is fetched for a client", SEND)
