"""Untrusted JSON, walked member by member: it costs only the memory that the caller keeps.

Owns the walk over an object's members, and the limits of each value. `json` alone takes up to 40 times the size of a
hostile text, so it only parses pieces of limited size, or whole files with a limited number of values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, map_file, shown

MAX_DEPTH = 64
MAX_FILE_BYTES = 6 * 2**20  # of a file that is parsed whole: Gemma's tokenizer_config.json has 1.2 MB
MAX_VALUES = 2**18  # in such a file

STRING = rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
SPACE = re.compile(rb"[ \t\r\n]*+")
TEXT = re.compile(STRING)
MEMBER = re.compile(rb"(" + STRING + rb")[ \t\r\n]*+:[ \t\r\n]*+")
FLAT = re.compile(rb'\{(?:[^{}"]++|' + STRING + rb")*+\}")  # an object without objects in it
TOKEN = re.compile(STRING + rb'|[{}\[\]]|[,: \t\r\n]++|[^"{}\[\],: \t\r\n]++')


class JSONScan:
    """A position in the bytes of a JSON text. It raises only ModelError; `source` begins the messages."""

    def __init__(self, data: memoryview, start: int, end: int, source: str) -> None:
        self.data = data
        self.at = start
        self.end = end
        self.source = source

    def damaged(self, reason: str) -> ModelError:
        """Return the error for content that cannot be true."""
        return ModelError(f"{self.source} is damaged: {reason}", DOWNLOAD)

    def invalid(self) -> ModelError:
        """Return the error for invalid JSON at the position."""
        return self.damaged(f"it is not valid JSON at byte {self.at:,}")

    def members(self, key_limit: int) -> Iterator[str]:
        """Yield the keys of the object at the position; the caller reads each value before it takes the next key."""
        if self._char() != "{":
            raise self.invalid()
        self._step()
        if self._char() == "}":
            self._step()
            return
        while True:
            match = MEMBER.match(self.data, self.at, self.end)
            if match is None:
                raise self.invalid()
            key = self._decoded(match.start(1), match.end(1), key_limit)
            self.at = match.end()
            yield key
            self.skip_space()
            char = self._char()
            if char not in (",", "}"):
                raise self.invalid()
            self._step()
            if char == "}":
                return

    def string(self, limit: int) -> str:
        """Read a string of at most so many bytes."""
        start = self.at
        match = TEXT.match(self.data, start, self.end)
        if match is None:
            raise self.invalid()
        self.at = match.end()
        return self._decoded(start, self.at, limit)

    def flat(self, limit: int) -> dict[str, Any]:
        """Read an object of at most so many bytes that holds no objects and no key twice."""
        start = self.at
        match = FLAT.match(self.data, start, self.end)
        if match is None:
            raise self.invalid()
        if match.end() - start > limit:
            raise self.damaged(f"the value at byte {start:,} is {match.end() - start:,} bytes long")
        try:
            value: dict[str, Any] = STRICT.decode(str(match[0], "utf-8"))
        except (ValueError, RecursionError):
            raise self.invalid() from None
        self.at = match.end()
        return value

    def skip(self) -> None:
        """Step over a value of any type without building it."""
        depth = 0
        while True:
            match = TOKEN.match(self.data, self.at, self.end)
            if match is None:
                raise self.invalid()
            char = self._char()
            if char in ("{", "["):
                depth += 1
            elif char in ("}", "]"):
                depth -= 1
            elif not depth and char in (",", ":"):
                raise self.invalid()
            if not 0 <= depth <= MAX_DEPTH:
                raise self.invalid()
            self.at = match.end()
            if not depth:
                return

    def finish(self) -> None:
        """Check that nothing but space follows."""
        self.skip_space()
        if self.at != self.end:
            raise self.invalid()

    def skip_space(self) -> None:
        match = SPACE.match(self.data, self.at, self.end)
        assert match
        self.at = match.end()

    def _char(self) -> str:
        return chr(self.data[self.at]) if self.at < self.end else ""

    def _step(self) -> None:
        self.at += 1
        self.skip_space()

    def _decoded(self, start: int, end: int, limit: int) -> str:
        if end - start - 2 > limit:
            raise self.damaged(f"the string at byte {start:,} is {end - start - 2:,} bytes long")
        quoted = bytes(self.data[start:end])
        try:
            if b"\\" not in quoted:
                return str(quoted[1:-1], "utf-8")
            text: str = json.loads(quoted)
            text.encode()  # fails for half a surrogate pair, which is no character
        except ValueError:
            raise self.invalid() from None
        return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small file. Raises ModelError for a file that is missing, too large or no JSON."""
    name = shown(path.name)
    with map_file(path, "a folder with the files of a model") as mapped:
        if len(mapped) > MAX_FILE_BYTES:
            raise ModelError(f"{name} is {len(mapped):,} bytes long, but the limit is {MAX_FILE_BYTES:,}", DOWNLOAD)
        raw = mapped[:]
    if sum(raw.count(char) for char in (b",", b"[", b"{")) > MAX_VALUES:
        raise ModelError(f"{name} holds more than {MAX_VALUES:,} values", DOWNLOAD)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError(f"{name} is damaged: it is not valid JSON", DOWNLOAD) from None
    if not isinstance(value, dict):
        raise ModelError(f"{name} is damaged: it is not a JSON object", DOWNLOAD)
    return value


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


STRICT = json.JSONDecoder(object_pairs_hook=_require_unique, parse_constant=_refuse)
