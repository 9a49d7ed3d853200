"""The vocabulary in a tokenizer.model of SentencePiece: pieces, scores and types, read without its library.

Owns the fields of the file (sentencepiece_model.proto) that a GGUF needs, and the protobuf encoding they are in. The
bytes are untrusted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from edgelm.base.errors import ModelError

PIECE, TRAINER, NORMALIZER = 1, 2, 3  # fields of the model
TEXT, SCORE, TYPE = 1, 2, 3  # of a piece
MODEL_TYPE = 3  # of the trainer
DUMMY_PREFIX = 3  # of the normalizer
BPE = 2  # a model type
NORMAL, BYTE = 1, 6  # types of a piece: those of SentencePiece are those of llama.cpp
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
MAX_PIECES = 2**22


@dataclass(frozen=True, slots=True)
class Piece:
    """A token."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """The parts of a model that a GGUF has."""

    pieces: tuple[Piece, ...]
    is_bpe: bool
    adds_space: bool  # before a text


def parse_pieces(data: bytes) -> SentencePieces | None:
    """Parse a tokenizer.model; None: it is another kind of file. Raises ModelError for one that is damaged."""
    if not data.startswith(bytes([PIECE << 3 | BYTES])):
        return None
    pieces: list[Piece] = []
    is_bpe, adds_space = False, True
    for number, value in _fields(data):
        if number == PIECE and isinstance(value, bytes):
            pieces.append(_piece(value))
            if len(pieces) > MAX_PIECES:
                raise _damaged()
        elif number == TRAINER and isinstance(value, bytes):
            is_bpe = any(inner == MODEL_TYPE and kind == BPE for inner, kind in _fields(value))
        elif number == NORMALIZER and isinstance(value, bytes):
            flags = [flag for inner, flag in _fields(value) if inner == DUMMY_PREFIX]
            adds_space = bool(flags[-1]) if flags else True
    return SentencePieces(tuple(pieces), is_bpe, adds_space)


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == TEXT and isinstance(value, bytes):
            text = value.decode("utf-8", "replace")
        elif number == SCORE and isinstance(value, bytes) and len(value) == 4:
            score = struct.unpack("<f", value)[0]
        elif number == TYPE and isinstance(value, int):
            kind = value
    if not NORMAL <= kind <= BYTE or score != score:
        raise _damaged()
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: a number, and a varint or the bytes of another type."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(wire)
        if wire == BYTES:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise _damaged()
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise _damaged()


def _damaged() -> ModelError:
    return ModelError("tokenizer.model is damaged", "download it again (edgelm pull --verify MODEL)")
