"""NgramCounts: the tokens that followed each context of 1 to 16 tokens, and how often.

Owns the counts of one growing text: a conversation, or past answers. Knows nothing of drafts, probabilities, files and
cache namespaces.

    tables[level]   hash of ORDERS[level] tokens -> the next token, while the context was seen once;
                    afterwards minus the offset of its cell
    cells           six numbers: most frequent next token │ its count │ another, or -1 │ its count │ total │ state
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

ORDERS = (1, 2, 4, 8, 16)
_LONGEST = ORDERS[-1]
_LEVELS = range(len(ORDERS))
_TAILS = tuple(slice(-order, None) for order in ORDERS)

# States of a context. 0 to 4: one next token, seen 1, 2, 3-4, 5-8 or more times. From SEVERAL on: by the share of the
# most frequent next token, two states for each share (few or many counts).
ONCE = 0
SEVERAL = 5
NUM_STATES = SEVERAL + 14
NUM_KINDS = len(ORDERS) * NUM_STATES * 2
_SINGLE_STATE = (0, 0, 1, 2, 2, 3, 3, 3, 3)  # by the count
_SHARE_STATE = tuple(SEVERAL + 2 * sum(share >= limit for limit in (4, 7, 10, 13, 16, 18)) for share in range(21))
_EVEN = _SHARE_STATE[10]
_FEW = 6
_MAJORITY = SEVERAL + 6  # the state of a share of one half
_CELL = 6
_ENTRY_BYTES = 96  # of a context: its part of a dict, and the key (measured)

Evidence = tuple[int, int, int]  # next token, level, kind; not a class, because each draft token makes two


def kind_of(level: int, state: int, agrees: bool) -> int:
    """Return a number below NUM_KINDS. `agrees`: mostly the same token followed the next shorter context."""
    return (level * NUM_STATES + state) * 2 + agrees


class NgramCounts:
    """The counts of one text, or of several."""

    __slots__ = ("_cells", "_levels", "tables")

    def __init__(self) -> None:
        self.tables: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._levels = tuple(zip(ORDERS, _TAILS, self.tables, strict=True))
        self._cells = array("i", (0,) * _CELL)  # offset 0 is unused: tables hold negative offsets

    @property
    def num_bytes(self) -> int:
        """Return the approximate size in memory."""
        return _ENTRY_BYTES * sum(map(len, self.tables)) + len(self._cells) * self._cells.itemsize

    def add(self, text: Seq[int], start: int, stop: int) -> None:
        """Count the tokens `text[start:stop]` as followers of the contexts before them in `text`."""
        cells, count, levels = self._cells, self._count, self._levels
        for end in range(start, stop):
            token = text[end]
            last = tuple(text[max(end - _LONGEST, 0) : end])
            for order, tail, table in levels:
                if order > end:
                    break
                key = hash(last[tail])
                entry = table.get(key)
                if entry is None:
                    table[key] = token
                elif entry < 0:
                    count(-entry, token)
                else:
                    table[key] = -len(cells)
                    cells.extend((token, 2, -1, 0, 2, 1) if token == entry else (token, 1, entry, 1, 2, _EVEN))

    def _count(self, cell: int, token: int) -> None:
        """Count a token in a cell. The second place holds the candidate for the first (Misra and Gries, 1982)."""
        cells = self._cells
        total = cells[cell + 4] = cells[cell + 4] + 1
        count = cells[cell + 1]
        if token == cells[cell]:
            count = cells[cell + 1] = count + 1
        else:
            second = cells[cell + 3]
            if token == cells[cell + 2] or second <= 1:
                second = second + 1 if token == cells[cell + 2] else 1
                if second >= count:  # of equal counts, the more recent token is first
                    token, second, cells[cell], count = cells[cell], count, token, second
                    cells[cell + 1] = count
                cells[cell + 2] = token
            else:
                second -= 1
            cells[cell + 3] = second
        if cells[cell + 2] < 0:
            cells[cell + 5] = _SINGLE_STATE[total] if total < len(_SINGLE_STATE) else 4
        else:
            cells[cell + 5] = _SHARE_STATE[20 * count // total] + (total > _FEW)

    def evidence(self, level: int, entry: int, shorter: int | None) -> Evidence:
        """Return the evidence in an entry of `tables[level]`. `shorter` is the entry of the level below, if any."""
        cells = self._cells
        if entry >= 0:
            token, state = entry, ONCE
        else:
            token, state = cells[-entry], cells[5 - entry]
        kind = (level * NUM_STATES + state) * 2
        if shorter is not None:
            if shorter >= 0:
                kind += shorter == token
            elif cells[-shorter] == token:
                state = cells[5 - shorter]
                kind += state >= _MAJORITY or state < SEVERAL
        return token, level, kind


NOTHING = NgramCounts()  # counts of no text


def look_up(text: list[int], current: NgramCounts, past: NgramCounts) -> tuple[Evidence | None, Evidence | None]:
    """Return the evidence of two counts for the token after `text`, by the longest context that each contains.

    Counts without a context contain no longer one either, so the search goes from short to long.
    """
    last = tuple(text[-_LONGEST:])
    entry = shorter = past_entry = past_shorter = None
    level = past_level = 0
    for at, tail, table, past_table in zip(_LEVELS, _TAILS, current.tables, past.tables, strict=True):
        key = hash(last[tail])
        match, past_match = table.get(key), past_table.get(key)
        if match is not None:
            entry, shorter, level = match, entry, at
        elif past_match is None:
            break
        if past_match is not None:
            past_entry, past_shorter, past_level = past_match, past_entry, at
    return (
        None if entry is None else current.evidence(level, entry, shorter),
        None if past_entry is None else past.evidence(past_level, past_entry, past_shorter),
    )
