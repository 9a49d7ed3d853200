"""The memory layout of rows to be sampled, and of the answers.

Owns the columns of both tables. A column is a 64-bit word, an integer or a float64, so a table is a single transfer.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple

from torch import Tensor

MAX_TOP = 20  # most likely tokens of a row whose log-probabilities are returned
MAX_VOCAB = 2**19  # the sum of so many weights fits a 64-bit integer
WEIGHT_BITS = 43  # a weight of 1 is 2**43
ID_BITS = 0x7FFFFFFF  # the lower half of a composite is ID_BITS - token id


class Word(IntEnum):
    """The columns of `Batch.rows`."""

    FLAGS = 0
    TEMPERATURE = 1  # float64, within float32's range; not read in a greedy row
    CUT = 2  # float64: log(min_p) minus its slack; -inf: no min_p
    TOP_P = 3  # float64: top_p minus its slack; 1 or more: no top_p
    TOP_K = 4  # 0: all
    REPETITION = 5  # float64
    FREQUENCY = 6  # float64
    PRESENCE = 7  # float64
    SEED = 8  # 64 bits
    POSITION = 9
    CHOICE = 10
    NUM_TOP = 11  # requested most likely tokens, up to MAX_TOP; below 0: no log-probability at all
    BIAS_START = 12  # index into `Batch.bias_ids`
    BIAS_END = 13
    HISTORY_START = 14  # index into `Batch.history_ids`; an empty range: no penalties
    HISTORY_END = 15


class Flag(IntFlag):
    """Properties of a row. A row without ACTIVE is not read, and its token is -1."""

    ACTIVE = 1
    GREEDY = 2
    MASKED = 4  # apply its row of `Batch.masks`


class Answer(IntEnum):
    """The columns of the result of `sample`; those from SUM on are set if log-probabilities are requested."""

    TOKEN = 0  # -1: a logit is NaN or +inf, or no token is possible
    SUM = 1  # of the weights exp(logit - greatest logit), in units of 2**-WEIGHT_BITS
    MOST = 2  # the greatest logit, as a composite (see `reference.composites`)
    OWN = 3  # the token's logit, as a composite
    TOP = 4  # MAX_TOP composites, likeliest first


NUM_ANSWER = Answer.TOP + MAX_TOP


class Batch(NamedTuple):
    """The parameters of all rows. The ids of one row's bias, and of one row's history, are distinct."""

    rows: Tensor  # int64 [rows, len(Word)]
    bias_ids: Tensor  # int32
    bias: Tensor  # float64
    history_ids: Tensor  # int32
    history_counts: Tensor  # int32: occurrences of the token in the answer; 0: only the prompt has it
    masks: Tensor  # int32 [rows, ceil(vocab / 32)], bit i of word j allows token 32 * j + i
