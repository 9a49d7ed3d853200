"""POST /v1/rerank, /v2/rerank and /rerank: documents in the order of a query, in the form of Jina, Cohere and TEI.

Owns its fields, and its forms of an answer.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from edgelm.jobs.embed_request import MAX_INPUTS, Ranked, RankRequest
from edgelm.server.api.embeddings import TruncateFields
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import Body, ModelName, Text


class TextObject(Body):
    """A document as an object."""

    text: str


def _form(value: object) -> str:
    return "str" if isinstance(value, str) else "object"


Document = Annotated[Annotated[str, Tag("str")] | Annotated[TextObject, Tag("object")], Discriminator(_form)]


class RerankRequest(TruncateFields):
    """The body of a request for a ranking. With `texts` it is TEI's, with `documents` Jina's and Cohere's."""

    model: ModelName
    query: Text
    documents: list[Document] | None = Field(default=None, fail_fast=True)
    texts: list[str] | None = Field(default=None, fail_fast=True)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None

    @property
    def streamed(self) -> bool:
        return False

    def pooled_request(self) -> RankRequest:
        """Return the request in our words. Raises ApiError."""
        if (self.documents is None) == (self.texts is None):
            message = "documents is missing" if self.texts is None else "documents and texts are both given: omit one"
            code = "missing_required_parameter" if self.texts is None else "invalid_value"
            raise ApiError(400, code, message, param="documents")
        documents, name = self._documents(), "documents" if self.texts is None else "texts"
        if not 1 <= len(documents) <= MAX_INPUTS:
            message = f"{name} has {len(documents):,} entries: give 1 to {MAX_INPUTS:,}"
            raise ApiError(400, "invalid_value", message, param=name)
        return RankRequest(query=self.query, documents=documents, truncate=self.cuts, max_tokens=self.max_tokens)

    def response(self, result: Any, model: str) -> Any:
        ranked: Ranked = result
        scores = ranked.raw_scores if self.raw_scores else ranked.scores
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n]
        documents = self._documents()
        if self.texts is not None:
            return [
                {"index": index, "score": scores[index]} | ({"text": documents[index]} if self.return_text else {})
                for index in order
            ]
        tokens = sum(ranked.num_tokens)
        return {
            "id": f"rerank-{secrets.token_hex(12)}",
            "object": "list",
            "model": model,
            "results": [
                {"index": index, "relevance_score": scores[index]}
                | ({"document": {"text": documents[index]}} if self.return_documents else {})
                for index in order
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _documents(self) -> list[str]:
        if self.texts is not None:
            return self.texts
        return [entry if isinstance(entry, str) else entry.text for entry in self.documents or ()]
