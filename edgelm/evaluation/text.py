"""A text file as tokens, and the windows of it that a model sees.

    TextTokens(path, tokenizer)  ->  tokens  ->  Cut.windows  ->  Window  ->  steps

Owns reading and decoding, where a text may be split without changing its tokens, which tokens of a window are scored,
and in which steps. The file's size does not matter for memory. Knows nothing of logits.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from edgelm.base.errors import EdgeLMError
from edgelm.text.tokenizer import Tokenizer

PIECE_CHARS = 65_536  # tokenizers may take minutes for megabytes without a space
CONTEXT_CHARS = 16
MIN_WINDOW = 4  # tokens
_READ_BYTES = 65_536
# No token joins a letter or digit with the space after it. Other splits are less safe: the last of several spaces may
# belong to the next word, and punctuation may take the newlines after it.
_WORD_END = re.compile(r".*[^\W_](?=\s)", re.DOTALL)


class TextTokens:
    """The tokens of a UTF-8 file, without BOS. Iterate once; `num_tokens` of `num_bytes` were read so far."""

    def __init__(self, path: Path, tokenizer: Tokenizer, piece_chars: int = PIECE_CHARS) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._piece_chars = piece_chars
        self.size_bytes = path.stat().st_size
        self.num_bytes = 0
        self.num_tokens = 0

    @property
    def estimated_tokens(self) -> int:
        """The number of tokens in the whole file, extrapolated from the part that was read; exact at its end."""
        return self.num_tokens * self.size_bytes // self.num_bytes if self.num_bytes else 0

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens. Raises EdgeLMError for a file that is not text, or not in the vocabulary."""
        context = ""
        for piece in self._pieces():
            tokens = self._encode(context, piece)
            self.num_bytes += len(piece.encode())
            self.num_tokens += len(tokens)
            yield from tokens
            context = piece[-CONTEXT_CHARS:]
        self.num_bytes = self.size_bytes  # a byte order mark may have been left out

    def _encode(self, context: str, piece: str) -> list[int]:
        """Return the tokens of a piece as they are after its context: some vocabularies put a space before a text."""
        if not context:
            return self._tokenizer.encode(piece, special=False, bos=False)
        before = self._tokenizer.encode(context, special=False, bos=False)
        both = self._tokenizer.encode(context + piece, special=False, bos=False)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._tokenizer.encode(piece, special=False, bos=False)  # a token spans the split

    def _pieces(self) -> Iterator[str]:
        buffered = ""
        for text in self._decoded():
            buffered += text
            while len(buffered) >= self._piece_chars:
                end = _split_at(buffered[: self._piece_chars])
                yield buffered[:end]
                buffered = buffered[end:]
        if buffered:
            yield buffered

    def _decoded(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        num_read = 0
        with self._path.open("rb") as file:
            before = os.fstat(file.fileno())
            while True:
                data = file.read(_READ_BYTES)
                num_held = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    position, byte = num_read - num_held + error.start, error.object[error.start]
                    raise EdgeLMError(
                        f"{self._path.name} is not valid UTF-8 (byte 0x{byte:02x} at {position:,})", "convert it first"
                    ) from None
                if "\0" in text:
                    raise EdgeLMError(f"{self._path.name} is not a text: it has NUL bytes", "give a text file")
                num_read += len(data)
                yield text
                if not data:
                    break
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise EdgeLMError(f"{self._path.name} changed while it was read", "run it again")


def _split_at(text: str) -> int:
    """Return the best place to split a text: after its last word, or else its end."""
    match = _WORD_END.match(text)
    return match.end() if match else len(text)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that the model sees from an empty cache on; `tokens[first:]` are scored, and `first` is at least 1."""

    tokens: list[int]
    first: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The rule by which a text is cut into windows of at most `length` tokens.

    Without a stride, the windows do not overlap and their second half is scored, so each scored token has a context of
    at least half a window. This is what llama.cpp's perplexity tool does; an incomplete window at the end is left out.

    With a stride, each window starts `stride` text tokens after the one before and scores the tokens that the earlier
    one did not reach, so each token is scored once, as in Hugging Face's guide to the perplexity of fixed-length
    models. The last window may be shorter.
    """

    length: int
    stride: int | None = None

    def require_stride(self) -> None:
        """Raise EdgeLMError for a stride that does not fit the window."""
        limit = self.length - 1
        if self.stride is not None and not 1 <= self.stride <= limit:
            raise EdgeLMError(
                f"--stride is {self.stride:,}", f"give 1 to {limit}, less than the window of {self.length}"
            )

    def windows(self, text: Iterator[int], bos: Sequence[int]) -> Iterator[Window]:
        """Yield the windows of a text without its BOS. Each begins with `bos`, which may be empty.

        Without a stride, BOS replaces the first token of each window; the text itself has one at its start already.
        """
        if self.stride is None:
            stream = chain(bos, text)
            while len(tokens := list(islice(stream, self.length))) == self.length:
                tokens[: len(bos)] = bos
                yield Window(tokens, self.length // 2 + 1)
            return
        current = list(islice(text, self.length - len(bos)))
        if len(bos) + len(current) > 1:
            yield Window([*bos, *current], 1)
        while fresh := list(islice(text, self.stride)):
            current = current[self.stride :] + fresh
            yield Window([*bos, *current], len(bos) + len(current) - len(fresh))

    def count(self, num_tokens: int, bos: Sequence[int]) -> int:
        """Return the number of windows in a text of `num_tokens` tokens, its BOS not counted."""
        if self.stride is None:
            return (len(bos) + num_tokens) // self.length
        after_first = max(num_tokens - (self.length - len(bos)), 0)
        return int(len(bos) + num_tokens > 1) + -(-after_first // self.stride)


def steps(window: Window, max_tokens: int, max_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, rows): run `tokens[start:end]`, and score by the logits of the last `rows` tokens.

    The logits at a position predict the next token, so the window's last token is not run.
    """
    start, last, first_row = 0, len(window.tokens) - 1, window.first - 1
    while start < last:
        first_scored = max(start, first_row)
        end = min(start + max_tokens, first_scored + max_rows, last)
        yield start, end, max(end - first_scored, 0)
        start = end
