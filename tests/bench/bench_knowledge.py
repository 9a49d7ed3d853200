"""Time to index a folder, to look for changes, and to search it.

    python tests/bench/bench_knowledge.py [--files 2000] [--megabytes 20]

Times are of one processor (`time.process_time`): a busy machine prints the same. No wait for a disk is in them.
The files are Markdown, code and notes of random words, as rare as words of a language are (Zipf's law).
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from edgelm import __version__
from edgelm.knowledge.index import Knowledge

QUESTIONS = 50


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=2_000)
    parser.add_argument("--megabytes", type=int, default=20)
    options = parser.parse_args()
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randrange(2, 11))) for _ in range(30_000)]
    weights = list(accumulate(1 / (rank + 2) for rank in range(len(words))))
    with tempfile.TemporaryDirectory() as scratch:
        root, file = Path(scratch, "files"), Path(scratch, "knowledge.db")
        write_files(root, options.files, options.megabytes * 10**6, rng, words, weights)
        measure(root, file, [" ".join(rng.choices(words, cum_weights=weights, k=8)) for _ in range(QUESTIONS)])


def write_files(
    root: Path, num_files: int, num_bytes: int, rng: random.Random, words: Sequence[str], weights: Sequence[float]
) -> None:
    """Write the files, of different lengths in folders of 50."""
    lengths = [rng.lognormvariate(0, 1) for _ in range(num_files)]
    scale = num_bytes / sum(lengths)
    for number, length in enumerate(lengths):
        folder = root / str(number // 50)
        folder.mkdir(parents=True, exist_ok=True)
        parts: list[str] = []
        size = 0
        suffix = ("md", "md", "py", "txt")[number % 4]
        while size < scale * length:
            part = " ".join(rng.choices(words, cum_weights=weights, k=rng.randrange(5, 120)))
            if suffix == "md" and rng.random() < 0.2:
                part = f"{'#' * rng.randrange(1, 4)} {part[:40]}"
            elif suffix == "py" and rng.random() < 0.2:
                part = f"def {rng.choice(words)}():\n    {part[:80]}"
            parts.append(part)
            size += len(part) + 2
        (folder / f"{number}.{suffix}").write_text("\n\n".join(parts)[: int(scale * length)])


def measure(root: Path, file: Path, questions: Sequence[str]) -> None:
    """Print the time of each kind of work."""
    knowledge = Knowledge(file)
    roots = [str(root)]
    print(f"edgelm {__version__}, SQLite {sqlite3.sqlite_version}, {platform.machine()}, {os.cpu_count()} CPUs")
    began = time.process_time()
    state = knowledge.refresh(roots)
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    print(f"index {state.num_files} files, {size / 1e6:.1f} MB: {time.process_time() - began:.2f} s")
    print(f"  {state.num_passages} passages, the index is {file.stat().st_size / 1e6:.1f} MB")
    time.sleep(2.5)  # files that were just written are read again
    knowledge.refresh(roots)
    times = [timed(lambda: knowledge.refresh(roots)) for _ in range(5)]
    print(f"refresh without changes: {1e3 * min(times):.0f} ms (the best of 5)")
    path = next(root.rglob("*.md"))
    path.write_text(path.read_text() + "\n\n# News\n\nnew\n")
    print(f"refresh with one changed file: {1e3 * timed(lambda: knowledge.refresh(roots)):.0f} ms")
    for name, asked in (
        ("8 words", questions),
        ("2 words", [" ".join(question.split()[:2]) for question in questions]),
        ("8 words, each with a typing error", [" ".join(map(mistyped, question.split())) for question in questions]),
    ):
        times = sorted(timed(lambda q=question: knowledge.search(roots, q, max_chars=6_000)) for question in asked)
        print(f"search, {name}: {1e3 * times[len(times) // 2]:.1f} ms (median), {1e3 * times[-1]:.0f} ms (the slowest)")
    knowledge.close()


def timed(work: object) -> float:
    """Return the seconds that a function takes."""
    assert callable(work)
    began = time.process_time()
    work()
    return time.process_time() - began


def mistyped(word: str) -> str:
    """Return a word with two letters swapped."""
    return word[:1] + word[2:3] + word[1:2] + word[3:]


if __name__ == "__main__":
    main()
