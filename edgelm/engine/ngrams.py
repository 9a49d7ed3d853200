"""NgramCounts: what followed each context of 1 to 16 tokens, and how often.

Owns the counts of one text that grows: a conversation, or the answers that are remembered. Knows nothing of drafts,
probabilities, files and whose text it is.

    tables[level]   hash of ORDERS[level] tokens -> the token that followed, as long as the context was seen once;
                    then minus the offset of its cell
    cells           six numbers: most frequent next token │ its count │ another, or -1 │ its count │ all │ state
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

ORDERS = (1, 2, 4, 8, 16)
_LONGEST = ORDERS[-1]
_LEVELS = range(len(ORDERS))
_TAILS = tuple(slice(-order, None) for order in ORDERS)

ONCE = 0  # states of a context, below NUM_STATES. 0 to 4: one continuation, seen 1, 2, 3-4, 5-8, more times
SEVERAL = 5  # from it on: by the share of the most frequent continuation, two for each (few or many counts)
NUM_STATES = SEVERAL + 14
NUM_KINDS = len(ORDERS) * NUM_STATES * 2
_ONLY_STATE = (0, 0, 1, 2, 2, 3, 3, 3, 3)  # by the count
_SHARE_STATE = tuple(SEVERAL + 2 * sum(share >= limit for limit in (4, 7, 10, 13, 16, 18)) for share in range(21))
_EVEN = _SHARE_STATE[10]
_FEW = 6
_MOSTLY = SEVERAL + 6  # from this share on, a half
_CELL = 6
_ENTRY_BYTES = 96  # of a context: its share of a dict, and the key (measured)

Evidence = tuple[int, int, int]  # next token, level, kind; no class, as two are made for each token of a draft


def kind_of(level: int, state: int, backed: bool) -> int:
    """Return a number below NUM_KINDS. `backed`: the same token mostly followed the next shorter context."""
    return (level * NUM_STATES + state) * 2 + backed


class NgramCounts:
    """The counts of one text, or of several."""

    __slots__ = ("_cells", "_levels", "tables")

    def __init__(self) -> None:
        self.tables: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._levels = tuple(zip(ORDERS, _TAILS, self.tables, strict=True))
        self._cells = array("i", (0,) * _CELL)  # a cell is named by minus its offset, so there is none at 0

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory."""
        return _ENTRY_BYTES * sum(map(len, self.tables)) + len(self._cells) * self._cells.itemsize

    def add(self, text: Seq[int], start: int, stop: int) -> None:
        """Count the tokens `text[start:stop]`, each after the contexts before it in `text`."""
        cells, count, levels = self._cells, self._count, self._levels
        for end in range(start, stop):
            token = text[end]
            last = tuple(text[max(end - _LONGEST, 0) : end])
            for order, tail, table in levels:
                if order > end:
                    break
                key = hash(last[tail])
                known = table.get(key)
                if known is None:
                    table[key] = token
                elif known < 0:
                    count(-known, token)
                else:
                    table[key] = -len(cells)
                    cells.extend((token, 2, -1, 0, 2, 1) if token == known else (token, 1, known, 1, 2, _EVEN))

    def _count(self, cell: int, token: int) -> None:
        """Add one to a cell. The second place is for whoever may become the first (Misra and Gries, 1982)."""
        cells = self._cells
        total = cells[cell + 4] = cells[cell + 4] + 1
        count = cells[cell + 1]
        if token == cells[cell]:
            count = cells[cell + 1] = count + 1
        else:
            second = cells[cell + 3]
            if token == cells[cell + 2] or second <= 1:
                second = second + 1 if token == cells[cell + 2] else 1
                if second >= count:  # the more recent of equals comes first
                    token, second, cells[cell], count = cells[cell], count, token, second
                    cells[cell + 1] = count
                cells[cell + 2] = token
            else:
                second -= 1
            cells[cell + 3] = second
        if cells[cell + 2] < 0:
            cells[cell + 5] = _ONLY_STATE[total] if total < len(_ONLY_STATE) else 4
        else:
            cells[cell + 5] = _SHARE_STATE[20 * count // total] + (total > _FEW)

    def evidence(self, level: int, known: int, shorter: int | None) -> Evidence:
        """Say what an entry of `tables[level]` means. `shorter`: the entry of the level below, where there is one."""
        cells = self._cells
        if known >= 0:
            token, state = known, ONCE
        else:
            token, state = cells[-known], cells[5 - known]
        kind = (level * NUM_STATES + state) * 2
        if shorter is not None:
            if shorter >= 0:
                kind += shorter == token
            elif cells[-shorter] == token:
                state = cells[5 - shorter]
                kind += state >= _MOSTLY or state < SEVERAL
        return token, level, kind


NOTHING = NgramCounts()  # counts of no text


def look_up(text: list[int], spoken: NgramCounts, remembered: NgramCounts) -> tuple[Evidence | None, Evidence | None]:
    """Return what each of two counts says of the token after `text`, by the longest context that it knows.

    What does not know a context knows no longer one either, so the search goes upwards.
    """
    last = tuple(text[-_LONGEST:])
    known = shorter = other = other_shorter = None
    level = other_level = 0
    for at, tail, table, other_table in zip(_LEVELS, _TAILS, spoken.tables, remembered.tables, strict=True):
        key = hash(last[tail])
        found, other_found = table.get(key), other_table.get(key)
        if found is not None:
            known, shorter, level = found, known, at
        elif other_found is None:
            break
        if other_found is not None:
            other, other_shorter, other_level = other_found, other, at
    return (
        None if known is None else spoken.evidence(level, known, shorter),
        None if other is None else remembered.evidence(other_level, other, other_shorter),
    )
