"""UniqueMatcher: keeps the items of a list apart where a schema says `uniqueItems`, around the grammar of the answer.

A grammar cannot refer to what was written before. This reads the JSON as it comes, and forbids tokens that complete an
item a second time; of items with few values, also tokens after which only a used one could follow. Which lists it holds
to that is told by the key before them: `"tags": [` is a list of `tags` wherever it stands.

Owns the reading of lists; unique_lists.py has the table of their keys. Knows nothing of chat, tools and llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgelm.engine.core import Masks, Matcher
from edgelm.engine.sampling.unique_lists import ANY_KEY, NO_KEY, Lists

_ENDS = b',]}"'  # a token that completes an item has one of them
_SPACE = b" \t\r\n"
_CLOSED = {ord("["): ord("]"), ord("{"): ord("}")}
_LITERALS = (b"true", b"false", b"null")
_LITERAL_STARTS = frozenset(literal[:size] for literal in _LITERALS for size in range(1, len(literal) + 1))
_NEAR_BYTES = 8  # before the end of a used item, a token is looked behind
_MAX_LOOK = 4  # tokens
_MAX_LOOKS = 64  # masks behind one row
_FEW_WAYS = 4  # tokens


# -- tokens ------------------------------------------------------------------------------------------------------------


class Pieces:
    """The bytes of all tokens, and which tokens may decide an item. Takes a while for a large vocabulary."""

    def __init__(self, num_tokens: int, piece: Callable[[int], bytes]) -> None:
        self.pieces = [piece(token) for token in range(num_tokens)]
        self.ends = np.array(
            [
                token
                for token, text in enumerate(self.pieces)
                if any(end in text for end in _ENDS) or text.strip(b" ,[") in _LITERAL_STARTS
            ],
            np.int64,
        )
        self.ids: dict[bytes, list[int]] = {}  # of short tokens
        for token, text in enumerate(self.pieces):
            if 0 < len(text) <= _NEAR_BYTES:
                self.ids.setdefault(text, []).append(token)


@dataclass(slots=True)
class _Frame:
    """An open list or object."""

    closed_by: int
    is_list: bool = False
    unique: bool = False
    values: tuple[bytes, ...] | None = None
    seen: list[bytes] = field(default_factory=list)  # canonical items
    written: list[bytes] = field(default_factory=list)  # the same as they were written
    item: bytearray = field(default_factory=bytearray)  # the current one, if the list is held apart

    def copy(self) -> _Frame:
        lists = [*self.seen], [*self.written], bytearray(self.item)
        return _Frame(self.closed_by, self.is_list, self.unique, self.values, *lists)

    def rests(self) -> Iterator[bytes]:
        """Yield what the current item lacks to be one of the earlier ones."""
        item = bytes(self.item)
        yield from (text[len(item) :] for text in self.written if text.startswith(item))


class _Reader:
    """Reads an answer byte by byte: text without lists, until one begins that is held apart."""

    def __init__(self, lists: Lists) -> None:
        self._lists = {key: None if values is None else tuple(map(str.encode, values)) for key, values in lists.items()}
        self._keys = [(f"{json.dumps(key, ensure_ascii=False)}:".encode(), key) for key in lists if key != ANY_KEY]
        self._longest = max((len(text) for text, _ in self._keys), default=0) + 8
        self._before = b""  # the last bytes: the key before a list is among them
        self.frames: list[_Frame] = []
        self._in_string = self._escaped = False

    def copy(self) -> _Reader:
        other = object.__new__(_Reader)
        other._lists, other._keys, other._longest = self._lists, self._keys, self._longest
        other._before, other._in_string, other._escaped = self._before, self._in_string, self._escaped
        other.frames = [frame.copy() for frame in self.frames]
        return other

    @property
    def holds(self) -> bool:
        """Whether a list is open whose items must differ."""
        return any(frame.unique for frame in self.frames)

    @property
    def has_few(self) -> bool:
        """Whether the next byte belongs to an item of few values."""
        return bool(self.frames) and self.frames[-1].values is not None

    @property
    def is_near(self) -> bool:
        """Whether an item is nearly the same as an earlier one."""
        return any(len(rest) <= _NEAR_BYTES for frame in self.frames for rest in frame.rests())

    def nearer(self) -> Iterator[bytes]:
        """Yield the texts of tokens that bring an item near to an earlier one."""
        for frame in self.frames:
            for rest in frame.rests():
                for size in range(max(1, len(rest) - _NEAR_BYTES), min(len(rest), _NEAR_BYTES) + 1):
                    yield rest[:size]
                    yield b" " + rest[:size]

    def read(self, text: bytes) -> bool:
        """Read bytes; return whether they leave all items apart."""
        return all(map(self._byte, text))

    def _byte(self, byte: int) -> bool:
        self._before = (self._before + bytes((byte,)))[-self._longest :]
        if not self.frames:
            self._read_outside(byte)
            return True
        top = self.frames[-1]
        if self._in_string:
            self._add(byte)
            if self._escaped:
                self._escaped = False
            elif byte == ord("\\"):
                self._escaped = True
            elif byte == ord('"'):
                self._in_string = False
                return self._whole(top)
            return self._may_follow(top)
        if byte == ord('"'):
            self._in_string = True
            self._add(byte)
            return self._may_follow(top)
        if byte in _CLOSED:
            self._add(byte)
            self._open(byte)
            return True
        if byte == top.closed_by:
            apart = self._end_item(top)
            self.frames.pop()
            self._add(byte)
            return apart and (not self.frames or self._whole(self.frames[-1]))
        if byte == ord(","):
            apart = self._end_item(top)
            self._add(byte)
            top.item.clear()
            return apart and self._is_left(top)
        self._add(byte)
        if byte in _SPACE:
            top.item = top.item.rstrip(_SPACE)
        return self._may_follow(top)

    def _read_outside(self, byte: int) -> None:
        """Read text, of which nothing is known but that JSON has no line break in a string."""
        if byte == ord("["):
            self._open(byte)
        elif self._escaped or byte == ord("\\"):
            self._escaped = not self._escaped and self._in_string
        elif byte == ord('"'):
            self._in_string = not self._in_string
        elif byte == ord("\n"):
            self._in_string = False

    def _add(self, byte: int) -> None:
        for frame in self.frames:
            if frame.unique:
                frame.item.append(byte)

    def _open(self, byte: int) -> None:
        frame = _Frame(_CLOSED[byte], byte == ord("["))
        if frame.is_list:
            key = self._key()
            if key is not None:
                frame.unique, frame.values, self._in_string = True, self._lists[key], False
        if frame.unique or self.frames:
            self.frames.append(frame)

    def _key(self) -> str | None:
        """Return the key of the list that begins now, if its items must differ."""
        before = self._before[:-1].rstrip(_SPACE)
        for text, key in self._keys:
            if key and before.endswith(text):
                return key
        if not self.frames and self._in_string:
            return None
        if before.endswith(b'":'):
            return ANY_KEY if ANY_KEY in self._lists else None
        inner = bool(self.frames) and self.frames[-1].is_list
        return NO_KEY if NO_KEY in self._lists and (inner or not self.frames) else None

    def _whole(self, top: _Frame) -> bool:
        """Return whether a string, a list or an object, which is complete, is no item that was there."""
        return not top.unique or _canonical(top.item) not in top.seen

    def _end_item(self, top: _Frame) -> bool:
        """Note the item before a comma or the end; return whether it is a new one."""
        if not top.unique or not top.item:
            return True
        item = _canonical(top.item)
        apart = item not in top.seen
        top.seen.append(item)
        top.written.append(bytes(top.item))
        return apart

    def _may_follow(self, top: _Frame) -> bool:
        """Return whether an item that begins like this may be a new one."""
        if not top.unique or not top.item:
            return True
        values = top.values
        if values is None:
            values = _LITERALS if bytes(top.item[:1]) in (b"t", b"f", b"n") else ()
        begun = [value for value in values if value.startswith(bytes(top.item))]
        return not begun or any(_canonical(value) not in top.seen for value in begun)

    def _is_left(self, top: _Frame) -> bool:
        """Return whether another item may follow."""
        return top.values is None or any(_canonical(value) not in top.seen for value in top.values)


def _number(text: str) -> float:
    return float(text) + 0.0  # -0 is 0


def _canonical(item: bytes | bytearray) -> bytes:
    """Return the same bytes for all JSON of a value: 1.0 is 1, and -0 is 0."""
    try:
        value = json.loads(item, parse_int=_number, parse_float=_number)
    except (ValueError, RecursionError):
        return bytes(item)
    return json.dumps(value, sort_keys=True).encode()


class UniqueMatcher:
    """A `Matcher` (core.py) around another one."""

    unrestricted = False

    def __init__(self, inner: Matcher, lists: Lists, pieces: Pieces) -> None:
        self._inner = inner
        self._pieces = pieces
        self._reader = _Reader(lists)
        self._num_words = 0  # of a mask
        self._looks = 0  # left for the current row
        self._error: str | None = None

    @property
    def done(self) -> bool:
        return self._inner.done

    @property
    def error(self) -> str | None:
        return self._error or self._inner.error

    def allowed(self, draft: list[int]) -> int:
        return self._num_distinct(draft[: self._inner.allowed(draft)])

    def forced(self, most: int) -> list[int]:
        forced = self._inner.forced(most)
        return forced[: self._num_distinct(forced)]

    def fill(self, draft: list[int], rows: Masks) -> None:
        self._inner.fill(draft, rows)
        reader = self._reader.copy() if draft else self._reader
        for index, (row, token) in enumerate(zip(rows, [*draft, None], strict=True)):
            if reader.holds:
                self._num_words, self._looks = row.size, _MAX_LOOKS
                self._forbid(reader, draft[:index], row, _MAX_LOOK)
                if not index and not row.any() and not self.error:
                    self._error = "each further item would repeat an earlier one"
            if token is not None and not reader.read(self._piece(token)):
                return

    def accept(self, token: int) -> None:
        self._inner.accept(token)
        self._reader.read(self._piece(token))

    def _piece(self, token: int) -> bytes:
        return self._pieces.pieces[token] if token < len(self._pieces.pieces) else b""

    def _num_distinct(self, tokens: list[int]) -> int:
        """Return how many of the tokens leave all items apart."""
        reader = self._reader.copy()
        for count, token in enumerate(tokens):
            if not reader.read(self._piece(token)):
                return count
        return len(tokens)

    def _forbid(self, reader: _Reader, before: list[int], row: Masks, look: int) -> None:
        """Take the tokens out of a mask that repeat an item, or leave no other way, as far as that is seen."""
        bits = row.view(np.uint32)
        if reader.has_few:
            tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        else:
            near = [token for text in {*reader.nearer()} for token in self._pieces.ids.get(text, ())]
            ends = np.concatenate([self._pieces.ends, np.array(near, np.int64)])
            tokens = ends[(bits[ends // 32] >> (ends % 32).astype(np.uint32)) & 1 == 1]
        near_after: list[tuple[int, _Reader]] = []
        for token in tokens.tolist():
            after = reader.copy()
            if not after.read(self._piece(token)):
                _clear(bits, token)
            elif look and after.holds and after.is_near:
                near_after.append((token, after))
        # Behind other tokens, a mask with several tokens is a way on.
        if look == _MAX_LOOK or np.bitwise_count(bits).sum() <= _FEW_WAYS:
            for token, after in near_after:
                if self._is_stuck(after, [*before, token], look - 1):
                    _clear(bits, token)

    def _is_stuck(self, reader: _Reader, before: list[int], look: int) -> bool:
        """Tell whether nothing can follow some tokens."""
        if not self._looks:
            return False
        self._looks -= 1
        rows = np.zeros((len(before) + 1, self._num_words), np.int32)
        self._inner.fill(before, rows)
        self._forbid(reader, before, rows[-1], look)
        return not rows[-1].any()


def _clear(bits: NDArray[np.uint32], token: int) -> None:
    bits[token // 32] &= ~np.uint32(1 << token % 32)
