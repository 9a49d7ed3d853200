"""Vectors and rankings with a loaded model: texts in, normalized vectors or scores out.

Owns the tokens of the inputs, their checks, and what is done with a vector after the model. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.model import LoadedModel
from edgelm.base.errors import RequestError
from edgelm.base.workers.child import Child
from edgelm.base.workers.messages import Result
from edgelm.jobs.embed_request import MAX_INPUTS, Embedded, EmbedJob, EmbedRequest, Ranked, RankRequest, Vector
from edgelm.jobs.request import ContextError
from edgelm.text.encoding import TextEncoder

MAX_TOKEN_LEN = 128  # characters: the longest token of the known vocabularies
EDGE = 4  # tokens at the ends of an input, where it may have been cut
JOB_BATCH = 64  # texts of a job that are computed before their vectors are sent
FOREIGN_HINT = (
    "send texts, or ids of this model's own vocabulary; LangChain's OpenAIEmbeddings sends OpenAI's ids unless it has "
    "check_embedding_ctx_length=False"
)


class Embeddings:
    """Computes vectors and rankings. For any event loop."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._encoder = TextEncoder(loaded.tokenizer, unknown=True)

    async def embed(self, request: EmbedRequest, client: str = "") -> Embedded:
        """Return the vectors of the inputs. Cancelling the call stops the work.

        Raises RequestError for an input that is empty or not of this model, and for a model that only ranks;
        ContextError for one that is too long; the errors of `Engine.embed`.
        """
        self._loaded.require("embedding")
        if len(request.inputs) > MAX_INPUTS:
            raise RequestError(f"there are {len(request.inputs):,} inputs", f"give at most {MAX_INPUTS:,}")
        if not request.inputs:
            return Embedded([], [])
        tokens = await asyncio.to_thread(self._all_tokens, request)
        vectors = await self._loaded.engine.embed(tokens, client)
        return Embedded(_finished(vectors, request), [len(ids) for ids in tokens])

    async def rank(self, request: RankRequest, client: str = "") -> Ranked:
        """Return the scores of the documents. Cancelling the call stops the work.

        Raises RequestError for an empty query, a pair that is too long, and a model that does not rank; the errors of
        `Engine.embed`.
        """
        self._loaded.require("rerank")
        pairs = self._loaded.pairs
        assert pairs is not None
        if not request.query.strip():
            raise RequestError("the query is empty", "give a text")
        if not 1 <= len(request.documents) <= MAX_INPUTS:
            raise RequestError(f"there are {len(request.documents):,} documents", f"give 1 to {MAX_INPUTS:,}")
        most = self._token_limit(request.max_tokens)

        def encode(document: str) -> list[int]:
            cut = document
            for text in (request.query, document):
                if len(text) > most * MAX_TOKEN_LEN:
                    if text is request.query or not request.truncate:
                        raise RequestError(f"a text has {len(text):,} characters", "shorten it")
                    cut = text[: most * MAX_TOKEN_LEN]
            return pairs.encode(request.query, cut, most, truncate=request.truncate)

        tokens = await asyncio.to_thread(lambda: list(map(encode, request.documents)))
        scores = (await self._loaded.engine.embed(tokens, client)).astype(np.float64)
        raw = scores[:, 0]
        finished = 1 / (1 + np.exp(-raw)) if scores.shape[1] == 1 else raw  # several are probabilities already
        _require_finite(finished)
        return Ranked(finished.tolist(), raw.tolist(), [len(ids) for ids in tokens])

    def _token_limit(self, requested: int | None) -> int:
        context = self._loaded.engine.info.context
        return context if requested is None else min(requested, context)

    def _all_tokens(self, request: EmbedRequest) -> list[list[int]]:
        names = [f"input {index}" for index in range(len(request.inputs))] if len(request.inputs) > 1 else ["the input"]
        return [self._tokens(value, request, name) for value, name in zip(request.inputs, names, strict=True)]

    def _tokens(self, value: str | Sequence[int], request: EmbedRequest, name: str) -> list[int]:
        """Return the tokens of one input; `name` is for errors. Raises RequestError."""
        most = self._token_limit(request.max_tokens)
        if not isinstance(value, str):
            return self._checked_ids(list(value), most, request.truncate, name)
        if not value and not request.takes_empty:
            raise RequestError(f"{name} is empty", "give a text with at least one character")
        if len(value) > most * MAX_TOKEN_LEN and request.truncate:
            value = value[: most * MAX_TOKEN_LEN]
        elif len(value) > most * MAX_TOKEN_LEN:
            raise _too_long(f"{name} has {len(value):,} characters", most)
        ids: list[int] = []
        for piece in self._encoder.prompt(value, special=False):
            ids += piece
            if len(ids) > 2 * most and request.truncate:
                break
        if len(ids) <= most:
            if not ids:
                raise RequestError(f"{name} has no tokens", "give a text with visible characters")
            return ids
        if not request.truncate:
            raise _too_long(f"{name} has {len(ids):,} tokens", most)
        begin, end = self._encoder.around
        if most <= len(begin) + len(end):
            raise RequestError(f"{most} tokens are too few for {name}", f"allow at least {len(begin) + len(end) + 1}")
        return ids[: most - len(end)] + end

    def _checked_ids(self, ids: list[int], most: int, truncate: bool, name: str) -> list[int]:
        """Return the tokens of an input that came as ids. Raises RequestError for those of another vocabulary."""
        tokenizer = self._loaded.tokenizer
        if not ids:
            raise RequestError(f"{name} is empty", "give at least one token")
        if not 0 <= min(ids) <= max(ids) < tokenizer.num_tokens:
            wrong = next(token for token in ids if not 0 <= token < tokenizer.num_tokens)
            raise RequestError(
                f"token id {wrong} of {name} is outside of the model's vocabulary of {tokenizer.num_tokens:,}",
                FOREIGN_HINT,
            )
        if len(ids) > most:
            if not truncate:
                raise _too_long(f"{name} has {len(ids):,} tokens", most)
            ids = ids[:most]
        if not self._is_own(ids):
            raise RequestError(f"the token ids of {name} are no text in this model's vocabulary", FOREIGN_HINT)
        return ids

    def _is_own(self, ids: list[int]) -> bool:
        """Tell whether ids are the tokens of a text; those of another vocabulary are a text by chance only."""
        tokenizer = self._loaded.tokenizer
        plain = [token for token in ids if tokenizer.piece(token)]
        text = tokenizer.decode(plain, strip_prefix_space=True)
        again = tokenizer.encode(text, special=False, bos=False, unknown=True)
        inner = plain[EDGE:-EDGE] if len(plain) > 4 * EDGE else plain
        return _bytes(inner) in _bytes(again)


async def embed_texts(loaded: LoadedModel, job: EmbedJob, child: Child) -> None:
    """Send the vectors of a job one by one, then its totals. Raises EdgeLMError."""
    embeddings = Embeddings(loaded)
    total, width = 0, 0
    for first in range(0, len(job.texts), JOB_BATCH):
        texts = job.texts[first : first + JOB_BATCH]
        request = EmbedRequest(inputs=texts, dimensions=job.dimensions, truncate=job.truncate)
        embedded = await embeddings.embed(request)
        assert not isinstance(embedded.vectors, list)
        width = embedded.vectors.shape[1]
        for offset, (vector, num_tokens) in enumerate(zip(embedded.vectors, embedded.num_tokens, strict=True)):
            child.send(Vector(first + offset, num_tokens, base64_floats(vector)))
            total += num_tokens
    child.send(Result({"model": loaded.name, "dimensions": width, "texts": len(job.texts), "tokens": total}))


def base64_floats(vector: NDArray[np.float32]) -> str:
    """Return a vector as the base64 text of its little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def _finished(vectors: NDArray[np.float32], request: EmbedRequest) -> NDArray[np.float32]:
    """Return the vectors, cut and normalized as requested."""
    width = vectors.shape[1]
    if request.dimensions is not None:
        if not 1 <= request.dimensions <= width:
            raise RequestError(
                f"dimensions is {request.dimensions}, and the model's vectors have {width}", f"give 1 to {width}"
            )
        vectors = vectors[:, : request.dimensions]
    _require_finite(vectors)
    if not request.normalize:
        return vectors
    lengths = np.sqrt(np.square(vectors.astype(np.float64)).sum(1, keepdims=True))
    normalized: NDArray[np.float32] = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return normalized


def _require_finite(values: NDArray[np.floating]) -> None:
    """Raise RequestError for NaN and infinity, which JSON does not have."""
    if not np.isfinite(values).all():
        raise RequestError("the model computed no finite numbers for an input", "its file may be damaged")


def _too_long(given: str, most: int) -> ContextError:
    return ContextError(f"{given}, and the model reads at most {most:,} tokens", "shorten it, or let truncate cut it")


def _bytes(ids: list[int]) -> bytes:
    return np.array(ids, ">u4").tobytes()
