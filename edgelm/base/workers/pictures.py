"""Pictures of users and clients, decoded by a worker: a file that hangs or crashes a decoder costs only itself.

Owns the requests, the limits, and the pictures decoded last. The worker is picture_worker.py; only that process loads
a library that decodes pictures.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from edgelm.base.errors import EdgeLMError, EngineError, RequestError
from edgelm.base.workers.parent import Worker, WorkerDiedError, ask

T = TypeVar("T")

MAX_FILE_BYTES = 20 * 2**20
MAX_FILE_PIXELS = 64 * 2**20  # of a picture before it is decoded: 8,192 x 8,192
MAX_PIXELS = 8 * 2**20  # of a decoded one; larger ones are reduced to it
MAX_STORED_PIXELS = 2048 * 2048  # the most that a projector takes of one picture: 4,096 tokens of 32 x 32 pixels
MAX_STORED_BYTES = 2**20  # so that the body of a request has room for about ten
MAX_RATIO = 200  # of a picture's sides; projectors for any shape refuse more
DECODE_S = 20.0
MAX_KEPT_BYTES = 64 * 2**20  # of decoded pictures: a chat sends its pictures again with each message

_IN_WORK = threading.BoundedSemaphore(2)  # each worker takes memory for a whole picture, whoever sent it


@dataclass(frozen=True)
class Picture:
    """A decoded picture, upright and without transparency."""

    width: int
    height: int
    rgb: bytes  # [height, width, 3]
    sha256: str  # of its size and its pixels, in hexadecimal


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """A picture as it is stored and sent: a PNG or JPEG file."""

    width: int
    height: int
    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """Decode a picture, of at most `max_pixels` afterwards. As a file again, it has at most `max_bytes`; 0: as RGB."""

    data: str  # base64
    max_pixels: int
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DrawPicture:
    """Draw a picture as sixels, in at most so many cells of so many pixels, with so many colours."""

    data: str  # base64
    columns: int
    num_lines: int
    cell: tuple[int, ...]  # width and height
    num_colors: int


@dataclass(frozen=True, slots=True)
class DrawnPicture:
    """A picture as sixels: a sequence for each line of the screen, which draws that line's part and nothing below."""

    columns: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The picture as RGB, or as a file of `media_type`."""

    width: int
    height: int
    data: str  # base64
    media_type: str = ""


class _Kept:
    """The pictures decoded last, by the file and the limit they were decoded with."""

    def __init__(self) -> None:
        self._pictures: OrderedDict[tuple[bytes, int], Picture] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[bytes, int]) -> Picture | None:
        with self._lock:
            if (picture := self._pictures.get(key)) is not None:
                self._pictures.move_to_end(key)
            return picture

    def put(self, key: tuple[bytes, int], picture: Picture) -> None:
        with self._lock:
            self._pictures[key] = picture
            while sum(len(kept.rgb) for kept in self._pictures.values()) > MAX_KEPT_BYTES:
                self._pictures.popitem(last=False)


_kept = _Kept()


def decode_picture(data: bytes, max_pixels: int = MAX_PIXELS, name: str = "the picture") -> Picture:
    """Return the pixels of a PNG, JPEG, WebP, BMP or the first frame of a GIF; `name` is for messages.

    A picture of more than `max_pixels` is reduced to it. Raises RequestError for a picture that is not taken.
    """
    key = (hashlib.sha256(data).digest(), max_pixels)
    if (picture := _kept.get(key)) is None:
        result = _read(data, name, max_pixels)
        rgb = base64.b64decode(result.data)
        digest = hashlib.sha256(f"{result.width}x{result.height}:".encode() + rgb).hexdigest()
        picture = Picture(result.width, result.height, rgb, digest)
        _kept.put(key, picture)
    return picture


def kept_picture(data: bytes, max_pixels: int) -> Picture | None:
    """Return a picture that was decoded before, without waiting; None: it was not, or too long ago."""
    return _kept.get((hashlib.sha256(data).digest(), max_pixels))


def storable_picture(data: bytes, name: str = "the picture") -> StoredPicture:
    """Return a picture as it is stored: no larger than a projector takes, and without EXIF, which may hold a place.

    A PNG or JPEG that is so already is kept as it is. Raises RequestError for a picture that is not taken.
    """
    result = _read(data, name, MAX_STORED_PIXELS, MAX_STORED_BYTES)
    return StoredPicture(result.width, result.height, base64.b64decode(result.data), result.media_type)


def draw_sixels(data: bytes, columns: int, num_lines: int, cell: tuple[int, int], num_colors: int) -> DrawnPicture:
    """Return a picture as sixels, in its own shape. Raises RequestError for a picture that is not taken."""
    _check_bytes(data, "the picture")
    request = DrawPicture(base64.b64encode(data).decode(), columns, num_lines, cell, num_colors)
    return _ask(request, DrawnPicture, "the picture")


def _read(data: bytes, name: str, max_pixels: int, max_bytes: int = 0) -> ReadResult:
    _check_bytes(data, name)
    return _ask(ReadPicture(base64.b64encode(data).decode(), max_pixels, max_bytes), ReadResult, name)


def _check_bytes(data: bytes, name: str) -> None:
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"{name} is larger than {MAX_FILE_BYTES // 2**20} MiB", "send a smaller one")


def _ask(request: ReadPicture | DrawPicture, kind: type[T], name: str) -> T:
    """Let a worker do it. Raises RequestError for a picture that is not taken."""
    try:
        with _IN_WORK:
            worker = Worker("edgelm.base.workers.picture_worker", replies=(kind,), errors=(RequestError,), grace_s=0.0)
            reply = ask(worker, request, DECODE_S)
    except TimeoutError:
        raise RequestError(f"{name} takes longer than {DECODE_S:.0f} s to decode", "send a smaller one") from None
    except WorkerDiedError:
        raise RequestError(f"{name} is damaged: decoding it failed", "save it again as PNG or JPEG") from None
    except RequestError as error:
        raise RequestError(f"{name} {error.message}", error.hint) from None
    except EdgeLMError as error:
        raise EngineError(f"{name} cannot be decoded: {error.message}", error.hint or "try again") from None
    assert isinstance(reply, kind)
    return reply
