"""Pictures in messages: while a template runs, one rare character stands for each picture.

    content   [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {"url": "data:…"}}]
    marked    "What is 𰀀", and 𰀀 means <picture:…>, with the hash of the picture's address
    tokens    …, PICTURE: in its place come the tokens of the picture

The character is in no text of the request, so that no text can show a picture. Owns these marks. Knows nothing of what
a picture shows, and of how it is encoded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgelm.base.errors import RequestError
from edgelm.text.message_forms import Message

PICTURE = -3  # in the tokens of a rendered chat: a picture
NAME = re.compile(r"<picture:[0-9a-f]{64}>")
_MARKS = range(0x30000, 0x31340)  # as rare as the placeholders of chat.py: CJK extension G
_RARE = re.compile(f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]")


def picture_urls(messages: Sequence[Message]) -> list[str]:
    """Return the addresses of the pictures in messages, each once, in their order."""
    return list(dict.fromkeys(url for message in messages for part in _parts(message) if (url := _url(part))))


def name_of(url: str) -> str:
    """Return the text that stands for a picture in a rendered chat."""
    return f"<picture:{hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()}>"


def with_marks(messages: Sequence[Message], *others: object) -> tuple[list[Message], dict[str, str]]:
    """Return messages with marks in place of pictures, and the name behind each mark. Raises RequestError.

    `others` is all else that a client sent for the template.
    """
    taken = {char for value in (messages, *others) for text in texts_in(value) for char in _RARE.findall(text)}
    free = (chr(code) for code in _MARKS if chr(code) not in taken)
    marks: dict[str, str] = {}
    for url in picture_urls(messages):
        char = next(free, None)
        if char is None:
            raise RequestError("the messages have too many pictures", "send fewer of them")
        marks[name_of(url)] = char
    marked = [
        {**message, "content": _marked(message["content"], marks)} if _parts(message) else message
        for message in messages
    ]
    return marked, {char: name for name, char in marks.items()}


def names_in(text: str, plain: Mapping[str, str]) -> list[str]:
    """Return the names of the pictures in a rendered text, in order."""
    marks = {char: name for char, name in plain.items() if NAME.fullmatch(name)}
    return [marks[char] for char in text if char in marks] if marks else []


def _marked(content: list[Any], marks: Mapping[str, str]) -> list[Any]:
    """Return parts with marks in the texts around pictures: no template puts anything between a picture and a text."""
    parts: list[Any] = []
    joins = False
    for part in content:
        url = _url(part)
        if not url and not _is_text(part):
            parts.append(part)
            joins = False
            continue
        text = marks[name_of(url)] if url else part["text"]
        if parts and (joins or url) and _is_text(parts[-1]):
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + text}
        else:
            parts.append({"type": "text", "text": text})
        joins = bool(url)
    return parts


def _parts(message: Message) -> list[Any]:
    """Return the parts of a message that has pictures; none: it has no pictures."""
    content = message.get("content")
    return content if isinstance(content, list) and any(map(_url, content)) else []


def _url(part: object) -> str:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return url
    return ""


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def texts_in(value: object) -> Iterator[str]:
    """Yield all texts in a JSON value, including the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from texts_in(name)
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
