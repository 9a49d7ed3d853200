#!/usr/bin/env python3
"""Prints modules and lines of each package, at one commit and at another.

    python packaging/count_lines.py BEFORE [AFTER]

Lines are those of the files, with comments and blank ones. Tests, packaging and benchmarks are one row each.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import PurePosixPath
from typing import NamedTuple

TOP = ("kernels", "models", "tui")  # imported as edgelm.NAME
OTHERS = ("tests", "packaging")


class Count(NamedTuple):
    """The size of a package."""

    modules: int = 0
    lines: int = 0


def package_of(path: PurePosixPath) -> str:
    """Return the row of a file: its package below edgelm, or the folder of what is not shipped."""
    if path.parts[0] in OTHERS:
        return path.parts[0]
    parts = path.parts[1:-1] if path.parts[0] == "edgelm" else path.parts[:-1]
    return parts[0] if parts else "edgelm"


def counts(commit: str) -> dict[str, Count]:
    """Return the size of each package at a commit."""
    listing = _git("ls-tree", "-r", "--full-tree", commit)
    found: dict[str, Count] = defaultdict(Count)
    for line in listing.splitlines():
        mode, _, rest = line.partition(" ")
        name = rest.partition("\t")[2]
        path = PurePosixPath(name)
        if mode == "120000" or path.suffix != ".py" or path.parts[0] not in ("edgelm", *TOP, *OTHERS):
            continue
        before = found[package_of(path)]
        found[package_of(path)] = Count(before.modules + 1, before.lines + _git("show", f"{commit}:{name}").count("\n"))
    return found


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def main(before: str, after: str = "HEAD") -> None:
    """Print the table."""
    old, new = counts(before), counts(after)
    print(f"{'package':14}{'modules':>9}{'lines':>9}{'modules':>12}{'lines':>9}")
    for name in sorted(old.keys() | new.keys(), key=lambda name: (name in OTHERS, name)):
        one, other = old.get(name, Count()), new.get(name, Count())
        print(f"{name:14}{one.modules:9,}{one.lines:9,}{other.modules:12,}{other.lines:9,}")
    shipped = [[size for name, size in side.items() if name not in OTHERS] for side in (old, new)]
    sums = [sum(values) for side in shipped for values in zip(*side, strict=True)]
    print(f"{'shipped':14}{sums[0]:9,}{sums[1]:9,}{sums[2]:12,}{sums[3]:9,}")


if __name__ == "__main__":
    main(*sys.argv[1:])
