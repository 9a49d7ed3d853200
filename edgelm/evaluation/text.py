"""A text file as tokens, in pieces: its size does not matter for memory.

Owns reading, decoding and where a text may be cut without changing its tokens. Knows nothing of windows.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from pathlib import Path

from edgelm.errors import EdgeLMError
from edgelm.text.tokenizer import Tokenizer

PIECE_CHARS = 65_536  # tokenizers may take minutes for megabytes without a space
CONTEXT_CHARS = 16
_READ_BYTES = 65_536
# No token joins a letter or digit to the space behind it. Elsewhere some do: of several spaces the last may belong to
# the next word, and punctuation may take the newlines behind it.
_WORD_END = re.compile(r".*[^\W_](?=\s)", re.DOTALL)


class TextTokens:
    """The tokens of a UTF-8 file, without BOS. Iterate once; `num_tokens` in `num_bytes` were read so far."""

    def __init__(self, path: Path, tokenizer: Tokenizer, piece_chars: int = PIECE_CHARS) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._piece_chars = piece_chars
        self.size_bytes = path.stat().st_size
        self.num_bytes = 0
        self.num_tokens = 0

    @property
    def likely_tokens(self) -> int:
        """How many tokens the whole file may have, judged by what was read; exact at its end."""
        return self.num_tokens * self.size_bytes // self.num_bytes if self.num_bytes else 0

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens. Raises EdgeLMError for a file that is no text, or that the vocabulary cannot write."""
        context = ""
        for piece in self._pieces():
            tokens = self._encode(context, piece)
            self.num_bytes += len(piece.encode())
            self.num_tokens += len(tokens)
            yield from tokens
            context = piece[-CONTEXT_CHARS:]
        self.num_bytes = self.size_bytes  # a byte order mark may have been left out

    def _encode(self, context: str, piece: str) -> list[int]:
        """Return the tokens of a piece as they are behind its context: some vocabularies begin a text with a space."""
        if not context:
            return self._tokenizer.encode(piece, special=False, bos=False)
        before = self._tokenizer.encode(context, special=False, bos=False)
        both = self._tokenizer.encode(context + piece, special=False, bos=False)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._tokenizer.encode(piece, special=False, bos=False)  # a token spans the cut: there is no better one

    def _pieces(self) -> Iterator[str]:
        waiting = ""
        for text in self._decoded():
            waiting += text
            while len(waiting) >= self._piece_chars:
                end = _cut(waiting[: self._piece_chars])
                yield waiting[:end]
                waiting = waiting[end:]
        if waiting:
            yield waiting

    def _decoded(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        read = 0
        with self._path.open("rb") as file:
            before = os.fstat(file.fileno())
            while True:
                data = file.read(_READ_BYTES)
                held = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    at = read - held + error.start
                    raise EdgeLMError(
                        f"{self._path.name} is not valid UTF-8 (byte 0x{error.object[error.start]:02x} at {at:,})",
                        "convert it first",
                    ) from None
                if "\0" in text:
                    raise EdgeLMError(f"{self._path.name} is not a text: it has NUL bytes", "give a text file")
                read += len(data)
                yield text
                if not data:
                    break
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise EdgeLMError(f"{self._path.name} changed while it was read", "run it again")


def _cut(text: str) -> int:
    """Return where a text is best divided: behind its last word, or else at its end."""
    found = _WORD_END.match(text)
    return found.end() if found else len(text)
