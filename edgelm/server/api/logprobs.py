"""Log-probabilities in the two formats of OpenAI: that of chats, and that of completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from edgelm.core import Sampled

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's value for -inf, which JSON cannot hold


def chat_logprobs(tokenizer: Tokenizer, sampled: Iterable[Sampled]) -> list[dict[str, Any]]:
    """Return the log-probabilities of an answer's tokens, without the token that ends it."""

    def entry(token: int, value: float | None) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": finite(value), "bytes": list(tokenizer.piece(token))}

    return [
        entry(sample.id, sample.logprob) | {"top_logprobs": [entry(token, value) for token, value in sample.top]}
        for sample in sampled
        if sample.id not in tokenizer.stop_ids
    ]


class TextOffsets:
    """Counts the characters of a text while its tokens come; a character belongs to the token that completes it."""

    def __init__(self, first: int = 0) -> None:
        self._at = first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, piece: bytes) -> int:
        """Return where the text of the next token begins."""
        start = max(self._at, 0)
        self._at += len(self._decoder.decode(piece))
        return start


def completion_logprobs(tokenizer: Tokenizer, sampled: Sequence[Sampled], offsets: TextOffsets) -> dict[str, Any]:
    """Return the log-probabilities of the next tokens of a text; its first one may have none."""

    def name(token: int) -> str:
        try:
            return tokenizer.piece(token).decode() or tokenizer.text_of(token)
        except UnicodeDecodeError:  # OpenAI's spelling of a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.piece(token))

    known = [sample.logprob is not None for sample in sampled]
    return {
        "tokens": [name(sample.id) for sample in sampled],
        "token_logprobs": [finite(s.logprob) if has else None for s, has in zip(sampled, known, strict=True)],
        "top_logprobs": [
            {name(token): finite(value) for token, value in sample.top} if has else None
            for sample, has in zip(sampled, known, strict=True)
        ],
        "text_offset": [offsets.next(tokenizer.piece(sample.id)) for sample in sampled],
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text that a token adds, or the name of a control token."""
    piece = tokenizer.piece(token)
    return piece.decode("utf-8", "replace") if piece else tokenizer.text_of(token)


def finite(value: float | None) -> float:
    """Return a log-probability as JSON can hold it."""
    return value if value is not None and value > LEAST_LOGPROB else LEAST_LOGPROB
