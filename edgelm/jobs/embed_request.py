"""Requests for vectors and for rankings, and their results, in the words of every API.

Owns the types between an API and jobs/embed.py. Imports nothing heavy: a front uses them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edgelm.base.workers.messages import EngineJob

if TYPE_CHECKING:  # the front has no arrays
    from array import array

    import numpy as np
    from numpy.typing import NDArray

Format = Literal["table", "json", "npy"]  # of what `edgelm embed` prints
MAX_INPUTS = 4096  # of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """Inputs whose vectors are requested: texts, or tokens of the model."""

    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None = None  # of the vectors, which are cut; None: all
    truncate: bool = False  # cut inputs that are too long; without it they are refused
    max_tokens: int | None = None  # of an input; None: as many as the model reads
    normalize: bool = True  # the vectors get the length 1
    takes_empty: bool = False  # an empty text has the vector of the tokens that the model wants around a text


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors, in the order of the inputs."""

    vectors: NDArray[np.float32] | list[array[float]]  # [inputs, dimensions]; of another server: arrays of float32
    num_tokens: list[int]  # of each input


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Documents to compare with a query."""

    query: str
    documents: Sequence[str]
    truncate: bool = False  # cut documents that are too long
    max_tokens: int | None = None  # of a pair


@dataclass(frozen=True, slots=True)
class Ranked:
    """The scores, in the order of the documents."""

    scores: list[float]  # 0 to 1
    raw_scores: list[float]  # as the model computes them
    num_tokens: list[int]  # of each pair


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob(EngineJob):
    """Compute the vectors of texts, for `edgelm embed`."""

    texts: tuple[str, ...]
    dimensions: int | None = None
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class Vector:
    """The vector of one text."""

    index: int
    num_tokens: int | None  # None: another server computed it, and tells the sum only
    data: str  # base64 of little-endian float32
