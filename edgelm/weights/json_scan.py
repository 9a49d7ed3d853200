"""JSON that nobody vouches for, walked member by member: what it costs in memory is what the caller keeps.

Owns the walk over an object's members, and the limits of each value. `json` itself takes up to 40 times the size of a
hostile text; it only ever sees pieces whose size is limited, or whole files whose number of values is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgelm.errors import ModelError
from edgelm.weights.mapped import DOWNLOAD, map_file, shown

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
    """A position in the bytes of a JSON text. What it raises is a ModelError that begins with `what`."""

    def __init__(self, data: memoryview, start: int, end: int, what: str) -> None:
        self.data = data
        self.at = start
        self.end = end
        self.what = what

    def damaged(self, how: str) -> ModelError:
        """Return the error for a text that cannot be true."""
        return ModelError(f"{self.what} is damaged: {how}", DOWNLOAD)

    def no_json(self) -> ModelError:
        """Return the error for a text that is no JSON where the position is."""
        return self.damaged(f"it is no valid JSON at byte {self.at:,}")

    def members(self, key_limit: int) -> Iterator[str]:
        """Yield the keys of the object that begins here; the caller reads each value before it takes the next key."""
        if self._sign() != "{":
            raise self.no_json()
        self._step()
        if self._sign() == "}":
            self._step()
            return
        while True:
            match = MEMBER.match(self.data, self.at, self.end)
            if match is None:
                raise self.no_json()
            key = self._decoded(match.start(1), match.end(1), key_limit)
            self.at = match.end()
            yield key
            self.blanks()
            sign = self._sign()
            if sign not in (",", "}"):
                raise self.no_json()
            self._step()
            if sign == "}":
                return

    def string(self, limit: int) -> str:
        """Read a text of at most so many bytes."""
        start = self.at
        match = TEXT.match(self.data, start, self.end)
        if match is None:
            raise self.no_json()
        self.at = match.end()
        return self._decoded(start, self.at, limit)

    def flat(self, limit: int) -> dict[str, Any]:
        """Read an object of at most so many bytes that has no objects in it; none of its keys may be there twice."""
        start = self.at
        match = FLAT.match(self.data, start, self.end)
        if match is None:
            raise self.no_json()
        if match.end() - start > limit:
            raise self.damaged(f"the value at byte {start:,} is {match.end() - start:,} bytes long")
        try:
            value: dict[str, Any] = STRICT.decode(str(match[0], "utf-8"))
        except (ValueError, RecursionError):
            raise self.no_json() from None
        self.at = match.end()
        return value

    def skip(self) -> None:
        """Step over a value, whatever it is, without building it."""
        depth = 0
        while True:
            match = TOKEN.match(self.data, self.at, self.end)
            if match is None:
                raise self.no_json()
            sign = self._sign()
            if sign in ("{", "["):
                depth += 1
            elif sign in ("}", "]"):
                depth -= 1
            elif not depth and sign in (",", ":"):
                raise self.no_json()
            if not 0 <= depth <= MAX_DEPTH:
                raise self.no_json()
            self.at = match.end()
            if not depth:
                return

    def finish(self) -> None:
        """Check that nothing but blanks follows."""
        self.blanks()
        if self.at != self.end:
            raise self.no_json()

    def blanks(self) -> None:
        """Step over blanks."""
        match = SPACE.match(self.data, self.at, self.end)
        assert match
        self.at = match.end()

    def _sign(self) -> str:
        return chr(self.data[self.at]) if self.at < self.end else ""

    def _step(self) -> None:
        self.at += 1
        self.blanks()

    def _decoded(self, start: int, end: int, limit: int) -> str:
        if end - start - 2 > limit:
            raise self.damaged(f"the text at byte {start:,} is {end - start - 2:,} bytes long")
        quoted = bytes(self.data[start:end])
        try:
            if b"\\" not in quoted:
                return str(quoted[1:-1], "utf-8")
            text: str = json.loads(quoted)
            text.encode()  # half a surrogate pair is no character
        except ValueError:
            raise self.no_json() from None
        return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a small file holds. Raises ModelError for one that is missing, too large or no JSON."""
    name = shown(path.name)
    with map_file(path, "a folder with the files of a model") as mapped:
        if len(mapped) > MAX_FILE_BYTES:
            raise ModelError(f"{name} is {len(mapped):,} bytes long, where {MAX_FILE_BYTES:,} are possible", DOWNLOAD)
        raw = mapped[:]
    if sum(raw.count(sign) for sign in (b",", b"[", b"{")) > MAX_VALUES:
        raise ModelError(f"{name} holds more than {MAX_VALUES:,} values", DOWNLOAD)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError(f"{name} is damaged: it is no valid JSON", DOWNLOAD) from None
    if not isinstance(value, dict):
        raise ModelError(f"{name} is damaged: it is no JSON object", DOWNLOAD)
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


STRICT = json.JSONDecoder(object_pairs_hook=_each_once, parse_constant=_refuse)
