"""A query and a document as the tokens that a reranker reads: by its template, or joined by special tokens.

Owns the form of a pair. Text of a user never becomes a special token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from edgelm.base.errors import RequestError
from edgelm.text.encoding import TextEncoder
from edgelm.text.patterns import any_of

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

_PLACES = re.compile(r"\{(query|document)\}")


class PairEncoder:
    """Encodes pairs. `template` has the places {query} and {document}; without one, `separator` is between the texts.

    A template is cut at its special tokens; between them it is encoded together with the texts. As in llama-server, it
    has all special tokens of a pair itself.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, separator: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer, unknown=True)
        self._separator = list(separator)
        self._parts: list[str] = []
        if template and {match[1] for match in _PLACES.finditer(template)} == {"query", "document"}:
            self._parts = re.split(f"({any_of(tokenizer.special_strings).pattern})", template)

    def encode(self, query: str, document: str, most: int, *, truncate: bool) -> list[int]:
        """Return the tokens of a pair, at most so many; `truncate` cuts the document.

        Raises RequestError for a pair that is too long, or whose query alone is.
        """
        tokens = self._by_template(query, document) if self._parts else self._joined(query, document)
        before, text, after = tokens
        excess = len(before) + len(text) + len(after) - most
        if excess <= 0:
            return before + text + after
        if not truncate:
            given = f"the query and a document have {most + excess:,} tokens"
            hint = "shorten the document, or let truncate cut it"
            raise RequestError(f"{given}, and the model reads at most {most:,}", hint)
        empty = self._by_template(query, "") if self._parts else self._joined(query, "")
        least = sum(map(len, empty))
        if least >= most:
            message = f"the query alone has {least:,} tokens, and the model reads at most {most:,}"
            raise RequestError(message, "shorten the query")
        return before + text[:-excess] + after

    def _joined(self, query: str, document: str) -> tuple[list[int], list[int], list[int]]:
        """Return the tokens before, of and behind a document."""
        begin, end = self._encoder.around
        return [*begin, *self._plain(query), *end, *self._separator], self._plain(document), end

    def _by_template(self, query: str, document: str) -> tuple[list[int], list[int], list[int]]:
        """Return the tokens before, of and behind the part of the template that ends with the document."""
        texts = {"query": query, "document": document}
        places = [index for index, part in enumerate(self._parts) if "{document}" in part]
        tokens: tuple[list[int], list[int], list[int]] = ([], [], [])
        for index, part in enumerate(self._parts):
            group = tokens[0 if index < places[-1] else 1 if index == places[-1] else 2]
            if part in self._tokenizer.special_strings:
                group += self._tokenizer.encode(part, special=True, bos=False)
            elif filled := _PLACES.sub(lambda match: texts[match[1]], part):
                group += self._plain(filled)
        return tokens

    def _plain(self, text: str) -> list[int]:
        return [token for piece in self._encoder.plain(text) for token in piece]
