"""The option `--soak`, the order of test files, hypothesis's settings, and the facts of this machine."""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

from tests.counts import choose_counts
from tests.interpreter import quicken_interpreter
from tests.order import place_of_file

# The real check of llama.cpp.
CANARY = """
import sys
from edgelm.backends.llama.canary import check
from edgelm.base.machine.facts import Checked, CheckKernels
from edgelm.base.workers.child import run_job
sys.exit(run_job({
    CheckKernels: lambda job, child: child.send(Checked(check(job.folder, job.threads, job.repack))),
}))
"""

REAL = Path(__file__).parent / "real"

os.environ.setdefault("KERNEL_SEED", str(secrets.randbelow(2**31)))  # one for all processes that run the tests
os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: that decides what it becomes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the randomised tests with their big counts")


def pytest_configure(config: pytest.Config) -> None:
    choose_counts(config.getoption("--soak"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if in_worker(config):
        gc.disable()  # while tests are collected
        atexit.register(os._exit, 0)  # all has been reported; to take torch and Triton apart takes a second
    # A busy machine is not a failure. New inputs in each run; a failing one prints how to repeat it.
    hypothesis.settings.register_profile("edgelm", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("edgelm")


def in_worker(config: pytest.Config) -> bool:
    """Whether this is a process of xdist; its variables are inherited by a pytest that a test starts, too."""
    return hasattr(config, "workerinput")


def pytest_collection_finish(session: pytest.Session) -> None:
    if "triton.runtime.interpreter" in sys.modules:
        quicken_interpreter()
    if in_worker(session.config):
        gc.freeze()  # full collections, of which pytest's end makes five, look at what tests have made
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of_file(item.nodeid))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of real models (`make real`) unless they are named: they need pip's index, and minutes."""
    named = any("real" in Path(argument.partition("::")[0]).parts for argument in config.args)
    return True if collection_path == REAL and not named else None


@pytest.fixture(scope="session")
def measured_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A cache folder with the measured facts of the machine, for all processes that run the tests."""
    from edgelm.base.machine import facts as machine  # not before TRITON_INTERPRET is set

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if in_worker(pytestconfig) else base) / "measured-cache"
    with FileLock(folder.with_name("measured-cache.lock")):
        machine.facts(folder, notify=print, command=(sys.executable, "-c", CANARY))
    return folder
