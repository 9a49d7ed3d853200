"""Emulate cases and print a line of JSON for each.

    python -m tests.kernels.emulated.run [--main] [--seed N] [--capability N...] [--only WORD...]

A case is chosen by any of the words in its name. Launches that are equal on several architectures run once. The exit
code is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tests.kernels.emulated.case import CAPABILITIES, EmulatedCase, Result, all_cases, emulate
from tests.kernels.emulated.memory import collecting_by_hand


def chosen(options: argparse.Namespace) -> Iterator[tuple[EmulatedCase, int]]:
    """Yield the cases, each with an architecture. Ops take turns, so that a run that is cut off has some of each."""
    cases = [case for case in all_cases() if not options.only or any(word in case.name for word in options.only)]
    turns: Counter[str] = Counter()
    order = []
    for case in cases:
        order.append((turns[case.op], case))
        turns[case.op] += 1
    for _, case in sorted(order, key=lambda turn: turn[0]):
        for capability in options.capability or CAPABILITIES:
            if not options.main or capability in case.main:
                yield case, capability


def fields(result: Result) -> dict[str, Any]:
    """Return a result as JSON has it."""
    case, outcome = result.case, result.outcome
    return {
        "name": case.name,
        "op": case.op,
        "format": case.format,
        "kv": case.kv,
        "rows": case.rows,
        "detail": case.detail,
        "capability": result.capability,
        "kernels": result.kernels,
        "difference": outcome.difference,
        "bound": outcome.bound,
        "share": outcome.share,
        "fault": outcome.fault,
        "launches": result.launches,
        "replayed": result.replayed,
        "instructions": result.instructions,
        "seconds": round(result.seconds, 2),
    }


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.emulated.run", description=(__doc__ or "")[:50])
    parser.add_argument("--main", action="store_true", help="only the cases of every test run")
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--capability", type=int, nargs="+")
    parser.add_argument("--only", nargs="+", metavar="WORD")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    assert "TRITON_INTERPRET" not in os.environ, "kernels that are interpreted are not compiled"
    from tests.kernels.ptx.launch import forget
    from tests.kernels.ptx.replay import Launches

    options = options_of(arguments)
    faults, before, known = 0, "", Launches()
    for case, capability in chosen(options):
        if case.name != before:
            before, known = case.name, Launches()
            forget()
        result = emulate(case, capability, options.seed, known=known)
        faults += bool(result.outcome.fault)
        print(json.dumps(fields(result)), flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    with collecting_by_hand():
        status = main()
    sys.exit(status)
