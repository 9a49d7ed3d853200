"""A loop for the fuzzing tests: many mutants, checks of memory and exceptions, a summary of the outcomes.

Knows no format: a test says how a mutant is made from random numbers, and what comes of it.
"""

from __future__ import annotations

import random
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from edgelm.base.errors import EdgeLMError
from tests.counts import Count

MUTANTS = Count(test=2_000, soak=100_000)
TIME_LIMIT = Count(test=120, soak=3600)  # seconds: a hang, not a measurement
MAX_ALLOCATED = 100_000_000
EXTREMES = [0, 1, 2, 3, 7, 8, 9, 13, 31, 32, 33, 255, 513, 2**15, 2**16, 2**24, 2**27, 2**31 - 1, 2**31, 2**32 - 1]
EXTREMES += [2**32, 2**40, 2**48, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 32, 2**64 - 8, 2**64 - 1]

Mutant = TypeVar("Mutant")


def fuzz(
    mutants: int,
    mutate: Callable[[random.Random], Mutant],
    outcome: Callable[[Mutant], str],
    *,
    stages: Sequence[str],
    kinds: int,
) -> None:
    """Make mutants and check that each gives an outcome in little memory, and no exception.

    An outcome is a stage, and behind a colon what was line. Each stage, and so many kinds, must be reached: mutations
    that end at the first check test nothing.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    most, slowest = 0, 0.0
    with watched():
        for i in range(mutants):
            mutant = mutate(rng)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            start = time.perf_counter()
            try:
                outcomes[outcome(mutant)] += 1
            except BaseException:
                print(f"mutant {i} of seed {seed}: {mutant!r}")
                raise
            slowest = max(slowest, time.perf_counter() - start)
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
            assert most < MAX_ALLOCATED, f"mutant {i} of seed {seed}"
    reached = Counter(dict.fromkeys(stages, 0))
    for what, count in outcomes.items():
        reached[what.partition(":")[0]] += count
    print(
        f"{mutants:,} mutants: {dict(reached)}; {len(outcomes)} kinds; {most:,} bytes at most; slowest {slowest:.3f} s"
    )
    for what, count in outcomes.most_common(40):
        print(f"{count:7,}  {what}")
    assert all(reached.values()), "the mutations reach only a part of the code"
    assert len(outcomes) >= kinds


def refusal(stage: str, error: EdgeLMError) -> str:
    """Return the outcome of a mutant that was refused, without its numbers and names."""
    line = str(error)
    assert line.isprintable()
    assert len(line) < 400
    return f"{stage}: {re.sub(r'.*?: |[0-9][0-9,.]*|(?<=begins with).*', '', error.message)[:40]}"


def put(path: Path, data: bytes) -> None:
    """Write a new file: some file systems take milliseconds to overwrite one."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


@contextmanager
def watched() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
