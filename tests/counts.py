"""How often a randomised test repeats itself: a small number in `make test`, a big one in `make soak`.

Owns the choice between the two, which conftest.py makes before any test module is imported.
"""

from __future__ import annotations

from typing import Self

_soak = False


def choose_counts(soak: bool) -> None:
    """Let every `Count` made from now on be the small or the big number."""
    global _soak  # noqa: PLW0603 - test modules need the number when they are imported, before any fixture exists
    _soak = soak


class Count(int):
    """A number that `--soak` changes: `WORKLOADS = Count(test=500, soak=20_000)`, then `range(WORKLOADS)`."""

    def __new__(cls, *, test: int, soak: int) -> Self:
        return super().__new__(cls, soak if _soak else test)
