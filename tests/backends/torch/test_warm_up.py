"""After loading, no step compiles a kernel or needs more memory: prompts of any length, batches of any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends.torch.shape_models import MODELS
from tests.counts import Count

THOROUGH = Count(test=0, soak=1)  # all lengths and batches: three minutes
ROOT = Path(__file__).resolve().parents[3]


def run(module: str, *arguments: str, timeout: float, **variables: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, "-m", f"tests.backends.torch.{module}", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(Count(test=300, soak=7300))
def test_no_step_compiles_or_allocates_after_loading() -> None:
    results = run("warm_up_checks", *(["--all"] if THOROUGH else []), timeout=7200 if THOROUGH else 290)
    assert list(dict.fromkeys(result["model"] for result in results)) == list(MODELS)
    assert [fault for result in results for fault in result["faults"]] == []
    assert all(result["steps"] > 50 and result["kernels"] > 20 for result in results)


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """Kernels of two kinds stand for all: Triton keeps them under a key of source, arguments, options and versions."""
    names = ("rms_norm_kernel", "prepare_kernel")
    (first,), (second,) = (
        run("compilations", "small_f16", *names, timeout=290, TRITON_CACHE_DIR=str(tmp_path)) for _ in range(2)
    )
    assert first["compiled"] >= len(names)
    assert (second["compiled"], second["in_cache"]) == (0, first["compiled"])
