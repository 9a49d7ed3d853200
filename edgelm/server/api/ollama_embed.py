"""POST /api/embed, and the older /api/embeddings: Ollama's routes for vectors. Their fields and their answers."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from pydantic import Field

from edgelm.jobs.embed_request import MAX_INPUTS, Embedded, EmbedRequest, Ranked, RankRequest
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import KeepAliveFields, ModelName


class OllamaEmbedRequest(KeepAliveFields):
    """The body of POST /api/embed."""

    model: ModelName
    input: str | list[str]
    truncate: bool | None = None  # true by default
    dimensions: int | None = Field(default=None, ge=1)

    @property
    def streamed(self) -> bool:
        return False

    @cached_property
    def _began(self) -> float:
        return time.monotonic()

    def pooled_request(self) -> EmbedRequest | RankRequest:
        """Return the request in our words: none, or an empty text alone, only loads the model. Raises ApiError."""
        assert self._began
        inputs = list(filter(None, [self.input])) if isinstance(self.input, str) else self.input
        if len(inputs) > MAX_INPUTS:
            raise ApiError(400, "invalid_value", f"input has more than {MAX_INPUTS:,} texts", param="input")
        truncate = self.truncate is not False
        return EmbedRequest(inputs=inputs, dimensions=self.dimensions, truncate=truncate, takes_empty=True)

    def response(self, result: Embedded | Ranked, model: str) -> dict[str, Any]:
        """Return the answer."""
        assert isinstance(result, Embedded)
        return {
            "model": model,
            "embeddings": [vector.tolist() for vector in result.vectors],
            "total_duration": round((time.monotonic() - self._began) * 1e9),
            "load_duration": 0,  # loading has ended before
            "prompt_eval_count": sum(result.num_tokens),
        }


class OllamaEmbeddingsRequest(KeepAliveFields):
    """The body of POST /api/embeddings."""

    model: ModelName
    prompt: str

    @property
    def streamed(self) -> bool:
        return False

    def pooled_request(self) -> EmbedRequest | RankRequest:
        """Return the request in our words. Raises ApiError."""
        if not self.prompt:
            raise ApiError(400, "invalid_value", "prompt is empty", param="prompt")
        return EmbedRequest(inputs=[self.prompt], truncate=True, normalize=False)

    def response(self, result: Embedded | Ranked, model: str) -> dict[str, Any]:
        """Return the answer."""
        assert isinstance(result, Embedded)
        return {"embedding": result.vectors[0].tolist()}
