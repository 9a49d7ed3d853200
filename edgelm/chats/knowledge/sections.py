"""A linear model that finds the section of the guide for a question by the question's words.

Owns the features of a question, and the file of weights, which packaging/starter/train_sections.py trains on the
questions beside the guide. Its weights hold the words that people use and the guide does not; the ranks of BM25
(starter.py) hold the words of the guide.
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
NUM_LIKELIEST = 3  # sections; the unlikely ones would add up to a large probability
FILE = "sections.npz"

_WORD = re.compile(r"[^\W_]+")

Section = tuple[str, str]  # topic and heading


@dataclass(frozen=True, slots=True)
class Guess:
    """The probabilities of the sections for a question, and of "no section"."""

    sections: dict[Section, float]  # log-probabilities
    unknown: float  # the probability of "no section", normalized over it and the NUM_LIKELIEST likeliest sections


def features(question: str) -> list[int]:
    """Return the numbers of a question's features, sorted and without duplicates."""
    words = _WORD.findall(question.lower())[:MAX_WORDS]
    text = f" {' '.join(words)} "
    names = {*words, *map(" ".join, pairwise(words))}
    names |= {text[begin : begin + length] for length in PIECES for begin in range(len(text) - length + 1)}
    return sorted({zlib.crc32(name.encode()) % NUM_FEATURES for name in names})


def guess(question: str) -> Guess:
    """Return the probabilities of the sections for a question."""
    import numpy as np

    names, weights = _model()
    rows = features(question)
    scores = weights[rows].sum(axis=0) / max(len(rows), 1) ** 0.5
    scores -= scores.max()
    logprobs = scores - np.log(np.exp(scores).sum())
    none, *likeliest = np.exp([logprobs[0], *np.sort(logprobs[1:])[-NUM_LIKELIEST:]])
    return Guess(dict(zip(names, map(float, logprobs[1:]), strict=True)), float(none / (none + sum(likeliest))))


@functools.cache
def _model() -> tuple[list[Section], NDArray[np.float32]]:
    """Return the names of the sections, and the weights [NUM_FEATURES, 1 + sections]; column 0 is "no section"."""
    import numpy as np

    with files("edgelm.chats.knowledge").joinpath(FILE).open("rb") as file, np.load(file) as arrays:
        names = [(str(topic), str(heading)) for topic, heading in arrays["names"]]
        return names, arrays["weights"].astype(np.float32) * arrays["scales"]
