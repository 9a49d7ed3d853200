"""The words of `edgelm run`: which is the model, which are pictures, and the prompt, with that of standard input."""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from edgelm.base.errors import RequestError, UsageError
from edgelm.chats.attachments import Attachment

MAX_INPUT_BYTES = 64 * 2**20
STDIN = "-"
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
SILENT_S = 1.0  # a pipe beside a prompt may be silent this long before a line says so


@dataclass(frozen=True, slots=True)
class Words:
    """The arguments by their meaning."""

    model: str | None
    prompt: str | None
    pictures: Sequence[str]  # paths, or STDIN

    def read(self, *, stdin: bool) -> tuple[str, tuple[Attachment, ...]]:
        """Return the prompt, piped standard input (`stdin`), or both with an empty line between them; and the pictures.

        A picture on standard input takes the place of `-`, or comes last. Raises RequestError.
        """
        parts = [self.prompt] if self.prompt else []
        piped: Attachment | None = None
        if (stdin or STDIN in self.pictures) and not sys.stdin.isatty():
            if self.prompt and STDIN not in self.pictures and not _gives_something(sys.stdin):
                note = "note: waiting for standard input, an open pipe; < /dev/null or --no-stdin reads none"
                print(note, file=sys.stderr)
            given = _read_stdin()
            if isinstance(given, str):
                parts += [given] if given else []
            else:
                piped = given
        pictures: list[Attachment] = []
        for path in self.pictures:
            if path != STDIN:
                pictures.append(_read_picture(path))
            elif piped is not None:
                pictures.append(piped)
                piped = None
            elif len(parts) == bool(self.prompt):  # no text either
                raise RequestError("standard input is empty", "pipe a picture into it, or omit the -")
        pictures += [piped] if piped is not None else []
        if not parts and not pictures:
            raise RequestError("the prompt is empty", "give it as an argument or on standard input")
        return "\n\n".join(parts), tuple(pictures)


def parse_words(words: Sequence[str], *, has_chat: bool) -> Words:
    """Return the model, the prompt and the pictures among the arguments. Raises UsageError.

    A picture is `-`, standard input, or a word that ends like the name of one; where a chat goes on, it may come first.
    """
    if not words and not has_chat:
        raise UsageError("Missing argument 'MODEL'", "see --help; only a chat that goes on has a model of its own")
    first = [] if has_chat else list(words[:1])
    rest = words[len(first) :]
    pictures = [word for word in rest if _is_picture_name(word)]
    texts = [*first, *(word for word in rest if not _is_picture_name(word))]
    if len(texts) > 2:
        raise UsageError(f"Got unexpected extra argument ({texts[2]})", "put quotes around the prompt")
    if has_chat and len(texts) < 2:
        return Words(None, next(iter(texts), None), pictures)  # a single argument is the prompt
    return Words(next(iter(texts), None), texts[1] if len(texts) > 1 else None, pictures)


def _is_picture_name(word: str) -> bool:
    return word == STDIN or (word.lower().endswith(PICTURE_ENDINGS) and (" " not in word or Path(word).exists()))


def _read_stdin() -> str | Attachment:
    """Return the text or the picture on standard input. Raises RequestError."""
    raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(raw) > MAX_INPUT_BYTES:
        raise RequestError(f"standard input is longer than {MAX_INPUT_BYTES // 2**20} MiB", "shorten it")
    if not raw:
        return ""
    from edgelm.chats.attached_files import is_picture, picture_of  # most prompts are an argument alone

    if is_picture(raw):
        return picture_of(raw, "standard input")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        place = f"byte 0x{raw[error.start]:02x} at {error.start}"
        raise RequestError(f"standard input is not valid UTF-8 ({place})", "convert it first") from None


def _read_picture(path: str) -> Attachment:
    from edgelm.chats.attached_files import full_path, read_attachment

    attachment, _ = read_attachment(full_path(path))
    if attachment.kind != "image":
        raise RequestError(f"{attachment.name} is not a picture", "--know answers from texts and PDFs")
    return attachment


def _gives_something(stream: TextIO) -> bool:
    """Return whether a stream has bytes or its end within SILENT_S; a file always has."""
    try:
        return bool(select.select([stream], [], [], SILENT_S)[0])
    except (OSError, ValueError):  # not a stream of the system
        return True
