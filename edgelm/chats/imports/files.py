"""The files that chats are imported from: which program wrote them, and their conversations one after the other.

Owns zip files, Ollama's SQLite file, and which parser reads a JSON object.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attachments import Attachment
from edgelm.chats.folders import READ_FLAGS
from edgelm.chats.formats import Source
from edgelm.chats.imports.chatgpt import FindImage, is_chatgpt, read_chatgpt
from edgelm.chats.imports.draft import MAX_IMAGE_BYTES, BadChatError, DraftChat, image
from edgelm.chats.imports.json_stream import TruncatedError, json_values
from edgelm.chats.imports.messages import is_message, is_messages, read_messages
from edgelm.chats.imports.ollama import read_ollama
from edgelm.chats.imports.openwebui import is_openwebui, read_openwebui
from edgelm.chats.imports.own import SAMPLING, is_own, read_own
from edgelm.chats.presets import Parse

Item = DraftChat | BadChatError  # a conversation, or the reason why it was skipped
MAX_UNPACKED = 2 * 2**30  # bytes of the conversations of a zip file
MAX_RATIO = 100  # of them to the zip file: exports of text have 5 to 20
MIN_CHECKED = 32 * 2**20  # unpacked bytes, below which any ratio is harmless
MAX_CHAT_IMAGES = 256 * 2**20  # bytes: a conversation may name one picture many times

_CONVERSATIONS = re.compile(r"(?:.*/)?conversations(?:[-_]\d+)?\.json")
_SQLITE = b"SQLite format 3\0"
_ZIP = b"PK\x03\x04"


def read_file(path: Path, source: Source, parsers: Mapping[str, Parse] = SAMPLING) -> Iterator[Item]:
    """Yield the conversations of a file; `parsers` are those of the sampling parameters.

    Raises EdgeLMError for a file that cannot be read, or is no export.
    """
    try:
        with os.fdopen(os.open(path, READ_FLAGS), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(0, "it is not a regular file")
            head = file.read(len(_SQLITE))
            file.seek(0)
            if head.startswith(_ZIP):
                yield from _zipped(path, file, source, parsers)
            elif head == _SQLITE:
                yield from read_ollama(path)
            else:
                yield from _conversations(file, source, path.name, lambda: lambda _: None, parsers)
    except OSError as error:
        raise EdgeLMError(f"{path} cannot be read: {error.strerror or error}", "check its name") from None


def _zipped(path: Path, file: IO[bytes], source: Source, parsers: Mapping[str, Parse]) -> Iterator[Item]:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            parts = sorted(name for name in names if _CONVERSATIONS.fullmatch(name))
            parts = parts or sorted(name for name in names if name.lower().endswith(".json"))
            if not parts:
                raise RequestError(f"{path} has no conversations.json", "name the zip file of an export")
            _check_size(path, sum(archive.getinfo(part).file_size for part in parts))
            for part in parts:
                with archive.open(part) as entry:
                    find_images = partial(_images_of, archive, names)
                    yield from _conversations(entry, source, f"{path.name}: {part}", find_images, parsers)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise EdgeLMError(f"{path} cannot be unpacked: {error}", "download it again") from None


def _check_size(path: Path, unpacked: int) -> None:
    """Refuse a zip file whose conversations fill the disk. Nothing more is read than its list of files says."""
    size = f"{path} unpacks to {unpacked // 2**20:,} MiB"
    if unpacked > MAX_UNPACKED:
        raise RequestError(f"{size}, and the limit is {MAX_UNPACKED // 2**20:,} MiB", "unpack it, and import its files")
    if unpacked > max(MIN_CHECKED, MAX_RATIO * path.stat().st_size):
        raise RequestError(f"{size}, more than {MAX_RATIO} times its size", "no export is like that: download it again")


def _images_of(archive: zipfile.ZipFile, names: list[str]) -> FindImage:
    """Return a search for the pictures of one conversation.

    The file of `sediment://file_01ab` is called `file_01ab-….png`.
    """
    left = MAX_CHAT_IMAGES

    def find(pointer: str) -> Attachment | None:
        nonlocal left
        name = next((name for name in names if name.rpartition("/")[2].startswith(pointer)), None) if pointer else None
        size = archive.getinfo(name).file_size if name is not None else 0
        if name is None or size > min(left, MAX_IMAGE_BYTES):
            return None
        left -= size
        return image(archive.read(name), name.rpartition("/")[2])

    return find


def _conversations(
    file: IO[bytes], source: Source, name: str, find_images: Callable[[], FindImage], parsers: Mapping[str, Parse]
) -> Iterator[Item]:
    reader = TextIOWrapper(file, encoding="utf-8-sig", errors="replace")
    said: list[Any] = []  # messages that stand alone: together they are one conversation
    num_known = 0
    try:
        for text in json_values(reader.read):
            try:
                document = json.loads(text)
            except (ValueError, RecursionError):
                yield BadChatError("it is not valid JSON")
                continue
            if is_message(document):
                said.append(document)
                continue
            for item in _inside(document):
                parse = _parser(item, source, find_images(), parsers)
                if parse is None:
                    yield BadChatError("it is no conversation of a program that edgelm knows")
                    continue
                num_known += 1
                yield _read(parse, item)
    except TruncatedError:
        yield BadChatError(f"{name} ends in the middle of it")
    except RequestError as error:
        raise RequestError(f"{name}: {error.message}", error.hint) from None
    finally:
        reader.detach()  # the caller closes the file
    if said:
        yield _read(read_messages, {"messages": said})
    elif not num_known:
        raise RequestError(f"{name} has no conversations", "name an export of ChatGPT, Open WebUI, Ollama or edgelm")


def _inside(document: object) -> list[Any]:
    """Return the conversations of a value: itself, or the list that it has."""
    if isinstance(document, list):
        return [{"messages": document}] if any(map(is_message, document)) else document
    if isinstance(document, dict) and _kind(document) is None:
        for name in ("conversations", "chats", "data"):
            if isinstance(document.get(name), list):
                inside: list[Any] = document[name]
                return inside
    return [document]


def _kind(document: object) -> Source | None:
    if not isinstance(document, dict):
        return None
    if is_own(document):
        return "edgelm"
    if is_chatgpt(document):
        return "chatgpt"
    if is_openwebui(document):
        return "openwebui"
    return "ollama" if is_messages(document) else None


def _parser(
    document: object, source: Source, find_image: FindImage, parsers: Mapping[str, Parse] = SAMPLING
) -> Callable[[Mapping[str, Any]], DraftChat] | None:
    kind = _kind(document)
    if kind is None or source not in ("auto", kind):
        return None
    if kind == "chatgpt":
        return lambda item: read_chatgpt(item, find_image)
    if kind == "edgelm":
        return lambda item: read_own(item, parsers)
    return read_openwebui if kind == "openwebui" else read_messages


def _read(parse: Callable[[Mapping[str, Any]], DraftChat], document: Mapping[str, Any]) -> Item:
    try:
        return parse(document)
    except BadChatError as error:
        return error
