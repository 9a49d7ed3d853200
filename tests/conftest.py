"""The option `--soak`, the order of test files, and hypothesis's settings."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

import hypothesis
import pytest

from tests.counts import choose_counts
from tests.order import place_of_file

REAL = Path(__file__).parent / "real"

os.environ.setdefault("KERNEL_SEED", str(secrets.randbelow(2**31)))  # one for all processes that run the tests
os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: that decides what it becomes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the randomised tests with their big counts")


def pytest_configure(config: pytest.Config) -> None:
    choose_counts(config.getoption("--soak"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A busy machine is not a failure. New inputs in each run; a failing one prints how to repeat it.
    hypothesis.settings.register_profile("edgelm", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("edgelm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of_file(item.nodeid))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of real models (`make real`) unless they are named: they need pip's index, and minutes."""
    named = any("real" in Path(argument.partition("::")[0]).parts for argument in config.args)
    return True if collection_path == REAL and not named else None
