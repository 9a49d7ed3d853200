"""Kernels are compiled in several processes at load, found again by the next start, and a failure is one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 30.0
HINT = "see `edgelm doctor`, or use --engine llama"


def check(name: str, cache: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.torch.compiling_checks", name], cwd=ROOT, timeout=290, check=False,
        env={**environment, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_kernels_are_compiled_once_and_the_next_start_finds_them(tmp_path: Path) -> None:
    result = check("good", tmp_path)
    count = len(result["names"])
    assert set(result["names"]) == {"gated_kernel", "softcap_kernel", "rms_norm_kernel"}
    assert count == 6, "each for two types; a second launch needs no other one"
    assert result["first"] == {"progress": [[done, count] for done in range(count + 1)], "error": None}
    assert result["second"] == {"progress": [], "error": None}
    assert result["hits"] == [True] * count
    again = check("good", tmp_path)
    assert again["first"] == {"progress": [], "error": None}


def test_a_damaged_entry_of_the_cache_is_compiled_again(tmp_path: Path) -> None:
    """After a power cut a file is empty or full of zeros, and a cleaner removes old ones."""
    assert check("damaged", tmp_path) == {"done": [False] * 6, "again": [True] * 6}


def test_a_cache_of_binaries_only_is_no_failure(tmp_path: Path) -> None:
    result = check("binaries", tmp_path)
    assert result["widths"] in ([2, 2], [4, 4])
    assert "cubin" in result["stages"]


def test_a_damaged_probe_of_the_kernels_order_is_compiled_again(tmp_path: Path) -> None:
    widths = check("probe", tmp_path)["widths"]
    assert len(widths) == 7
    assert set(widths) in ({2}, {4})


def test_a_failure_is_one_line(tmp_path: Path) -> None:
    errors = check("bad", tmp_path)
    assert errors.pop("others") == [None, 6, 6], "where a kernel need not be compiled, the others are"
    assert errors == {
        "wrong": f"the GPU's kernel wrong_kernel cannot be compiled: CompileTimeAssertionFailure: is wrong; {HINT}",
        "deadly": f"the GPU's kernel deadly_kernel cannot be compiled: the compiler was killed by SIGKILL; {HINT}",
    }


def test_a_compiler_that_never_ends_is_ended_by_the_limit_and_by_the_end_of_the_process(tmp_path: Path) -> None:
    result = check("abandoned", tmp_path)
    assert re.fullmatch(rf"the GPU's kernel \w+_kernel is not compiled after 1 s; {HINT}", result["error"])
    assert result["progress"] == [[0, 6]]
    assert len(result["pids"]) == 4, "two until the limit, two until the end"
    wait_for_end(result["pids"])


def wait_for_end(pids: list[str]) -> None:
    """Wait until processes that were killed are gone; what never ends runs for a thousand seconds."""
    deadline = time.monotonic() + LIMIT_S
    while any(is_running(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, "a compiler is left"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x001000\x00"  # a zombie has none
    except (FileNotFoundError, ProcessLookupError):
        return False
