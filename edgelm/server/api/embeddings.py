"""POST /v1/embeddings: the vectors of texts, in OpenAI's form.

Owns its fields, and its form of an answer.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from edgelm.jobs.embed_request import MAX_INPUTS, Embedded, EmbedRequest
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import KeepAliveFields, ModelName, text_form

MAX_WIDTH = 2**20


Ids = Annotated[list[int], Field(fail_fast=True, min_length=1)]
Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[str], Tag("strs"), Field(fail_fast=True)]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Ids], Tag("lists"), Field(fail_fast=True)],
    Discriminator(text_form),
]


class TruncateFields(KeepAliveFields):
    """Whether an input that is too long is cut, in vLLM's words and in those of Ollama and TEI."""

    truncate: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)  # -1: as many as the model reads

    @property
    def cuts(self) -> bool:
        return bool(self.truncate) or self.truncate_prompt_tokens is not None

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of an input. Raises ApiError for none."""
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens is 0: give at least 1, or -1 for as many as the model reads"
            raise ApiError(400, "invalid_value", message, param="truncate_prompt_tokens")
        return None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class EmbeddingsRequest(TruncateFields):
    """The body of POST /v1/embeddings."""

    token_lists = ("input",)
    model: ModelName
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=MAX_WIDTH)

    @property
    def streamed(self) -> bool:
        return False

    def pooled_request(self) -> EmbedRequest:
        """Return the request in our words. Raises ApiError."""
        inputs = inputs_of(self.input)
        return EmbedRequest(inputs=inputs, dimensions=self.dimensions, truncate=self.cuts, max_tokens=self.max_tokens)

    def response(self, result: Any, model: str) -> Any:
        embedded: Embedded = result
        as_text = self.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist(),
            }
            for index, vector in enumerate(embedded.vectors)
        ]
        tokens = sum(embedded.num_tokens)
        return {
            "object": "list",
            "data": data,
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def inputs_of(value: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return the inputs of a field that may hold one or several. Raises ApiError."""
    if isinstance(value, str):
        return _checked([value])
    if ids := [token for token in value if isinstance(token, int)]:
        return _checked([ids])
    return _checked([entry for entry in value if not isinstance(entry, int)])


def _checked(inputs: list[str | list[int]]) -> list[str | list[int]]:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        message = f"input has {len(inputs):,} entries: give 1 to {MAX_INPUTS:,}"
        raise ApiError(400, "invalid_value", message, param="input")
    for index, entry in enumerate(inputs):
        if not entry:
            given = "input" if len(inputs) == 1 else f"input[{index}]"
            raise ApiError(400, "invalid_value", f"{given} is empty: give a text", param="input")
    return inputs
