"""Runs the checks of a client, and prints the outcome of each as one line of JSON for run.py."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

ADDRESS = os.environ.get("EDGELM_ADDRESS", "")
MODEL = os.environ.get("EDGELM_MODEL", "")
ENCODER = os.environ.get("EDGELM_ENCODER", "")
PATIENCE_S = 600.0  # for one answer: the machine may be busy, and no check is about speed
E = TypeVar("E", bound=Exception)
_checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check: it passes unless it raises."""
    _checks.append(function)
    return function


def error_of(kind: type[E], call: Callable[[], object]) -> E:
    """Return the error that a call raises; another one, or none, fails the check."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def main(package: str = "", number: str = "") -> None:
    """Run the registered checks, or those whose names are arguments; `number` is the version of what is no package."""
    print(json.dumps({"version": number or version(package)}), flush=True)
    for function in _checks:
        name = function.__name__
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        outcome, reason = "passed", ""
        try:
            function()
        except Exception as error:  # noqa: BLE001 - a check may fail in any way, and the next one still runs
            outcome = "failed"
            reason = f"{type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stderr)
        print(json.dumps({"check": name, "outcome": outcome, "reason": reason}), flush=True)
