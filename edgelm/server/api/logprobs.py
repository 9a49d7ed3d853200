"""Log-probabilities in the two formats of OpenAI: that of chats, and that of completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from edgelm.engine.core import Sampled

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

FEW_TOKENS = 256  # whose log-probabilities the event loop encodes; those of 50,000 take seconds
LEAST_LOGPROB = -9999.0  # OpenAI's value for -inf, which JSON cannot hold


def chat_logprobs(tokenizer: Tokenizer, sampled: Iterable[Sampled]) -> list[dict[str, Any]]:
    """Return the log-probabilities of an answer's tokens, without the token that ends it."""
    return [*each_logprobs(tokenizer, sampled)]


def each_logprobs(tokenizer: Tokenizer, sampled: Iterable[Sampled]) -> Iterator[dict[str, Any]]:
    """Yield the entries of `chat_logprobs`: all those of 16 long answers would be a million objects."""

    def entry(token: int, value: float | None) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": finite(value), "bytes": list(tokenizer.piece(token))}

    for sample in sampled:
        if sample.id not in tokenizer.stop_ids:
            top = [entry(token, value) for token, value in sample.top]
            yield entry(sample.id, sample.logprob) | {"top_logprobs": top}


class TextOffsets:
    """Finds where the tokens of a text begin while they come; a character belongs to the token that completes it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_prompt(self, text: str, ids: Sequence[int]) -> list[int]:
        """Return where each token of an echoed prompt begins in it; the answer begins behind it.

        A prompt may spell control tokens, which have no text of their own, and vocabularies may put a space before a
        text or behind a control token.
        """
        starts, at = [], 0
        for token in ids:
            starts.append(at)
            piece = self._tokenizer.piece(token)
            if not piece:
                mark = self._tokenizer.text_of(token)
                at += len(mark) if text.startswith(mark, at) else 0
                continue
            added = self._decoder.decode(piece)
            at += len(added) - (added.startswith(" ") and not text.startswith(" ", at))
        self._at = len(text)
        self._decoder.reset()
        return [min(start, self._at) for start in starts]

    def next(self, token: int) -> int:
        """Return where the text of the next token of the answer begins."""
        start = self._at
        if token not in self._tokenizer.stop_ids:
            self._at += len(self._decoder.decode(self._tokenizer.piece(token)))
        return start


def completion_logprobs(tokenizer: Tokenizer, sampled: Sequence[Sampled], offsets: Sequence[int]) -> dict[str, Any]:
    """Return the log-probabilities of tokens that begin at these offsets; the first one of a prompt has none."""

    def name(token: int) -> str:
        try:
            return tokenizer.piece(token).decode() or tokenizer.text_of(token)
        except UnicodeDecodeError:  # OpenAI's spelling of a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.piece(token))

    def likeliest(sample: Sampled) -> dict[str, float]:
        """Return the likeliest tokens and the token itself; of two with the same text, the likelier one."""
        values: dict[str, float] = {}
        for token, value in (*sample.top, (sample.id, sample.logprob)):
            values.setdefault(name(token), finite(value))
        return values

    known = [sample.logprob is not None for sample in sampled]
    return {
        "tokens": [name(sample.id) for sample in sampled],
        "token_logprobs": [finite(s.logprob) if has else None for s, has in zip(sampled, known, strict=True)],
        "top_logprobs": [likeliest(s) if has else None for s, has in zip(sampled, known, strict=True)],
        "text_offset": list(offsets),
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text that a token adds, or the name of a control token."""
    piece = tokenizer.piece(token)
    return piece.decode("utf-8", "replace") if piece else tokenizer.text_of(token)


def finite(value: float | None) -> float:
    """Return a log-probability as JSON can hold it."""
    return value if value is not None and value > LEAST_LOGPROB else LEAST_LOGPROB
