"""Which section of the guide a question is about, or that it is about something else: a linear model of its words.

Owns the features of a question, and the file of weights, which packaging/starter/train_sections.py trains on the
questions of edgelm/guide/questions. It knows what people ask of a section in words that do not stand there; BM25 knows
the rest.
"""

from __future__ import annotations

import functools
import re
import zlib
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUM_FEATURES = 8192  # words, pairs of words and pieces of words share them by their checksums
PIECES = (3, 4)  # letters
MAX_WORDS = 200  # of a question
NUM_LIKELIEST = 3  # sections; many unlikely ones together say nothing
FILE = "sections.npz"

_WORD = re.compile(r"[^\W_]+")

Section = tuple[str, str]  # topic and heading


@dataclass(frozen=True, slots=True)
class Guess:
    """What a question is about."""

    sections: dict[Section, float]  # log-probabilities
    unknown: float  # the probability that it is none of them, beside the NUM_LIKELIEST likeliest sections


def features(question: str) -> list[int]:
    """Return the features of a question, each once."""
    words = _WORD.findall(question.lower())[:MAX_WORDS]
    text = f" {' '.join(words)} "
    names = {*words, *map(" ".join, pairwise(words))}
    names |= {text[begin : begin + length] for length in PIECES for begin in range(len(text) - length + 1)}
    return sorted({zlib.crc32(name.encode()) % NUM_FEATURES for name in names})


def guess(question: str) -> Guess:
    """Return what a question is about."""
    import numpy as np

    names, weights = _model()
    found = features(question)
    scores = weights[found].sum(axis=0) / max(len(found), 1) ** 0.5
    scores -= scores.max()
    logprobs = scores - np.log(np.exp(scores).sum())
    none, *likeliest = np.exp([logprobs[0], *np.sort(logprobs[1:])[-NUM_LIKELIEST:]])
    return Guess(dict(zip(names, map(float, logprobs[1:]), strict=True)), float(none / (none + sum(likeliest))))


@functools.cache
def _model() -> tuple[list[Section], NDArray[np.float32]]:
    """Return the names of the sections, and the weights [NUM_FEATURES, 1 + sections]; the first column is for none."""
    import numpy as np

    with files("edgelm.knowledge").joinpath(FILE).open("rb") as file, np.load(file) as arrays:
        names = [(str(topic), str(heading)) for topic, heading in arrays["names"]]
        return names, arrays["weights"].astype(np.float32) * arrays["scales"]
