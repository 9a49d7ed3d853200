"""The host's work for a GPU: it reads nothing back, does not wait, and captures graphs that need no host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgelm.kernels.cache import FORMATS
from tests.counts import Count
from tests.models.tiny_models import MODELS
from tests.tiny import TYPES

THOROUGH = Count(test=0, soak=1)  # every family and format; a step of the others differs in its shapes alone
ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = [str(tmp_path_factory.mktemp("models")), *(["--all"] if THOROUGH else [])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.torch.fake_gpu_checks", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400 if THOROUGH else 200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_families_and_formats_run_without_waiting(checked: list[dict[str, Any]]) -> None:
    seen = {(result["name"], result["kv"]) for result in checked}
    everything = {(name, "f16") for name in (*MODELS, *TYPES)} | {("q8_0", kv) for kv in FORMATS}
    assert seen <= everything
    assert len(seen) == len(checked) == (len(everything) if THOROUGH else 8)


def test_kernels_that_have_nothing_to_do_are_not_launched(checked: list[dict[str, Any]]) -> None:
    for result in checked:
        assert "draw_kernel" in result["sampling"]
        assert not {"bias_kernel", "penalize_kernel"} & set(result["sampling"])


def test_a_step_has_as_many_kernels_as_the_guide_says(checked: list[dict[str, Any]]) -> None:
    """Each layer: qkv, write_kv, attention's chunks and their sum, out, gate and up, down."""
    kernels = {result["name"]: result["kernels"] for result in checked}
    assert kernels["llama2"] == 2 + 3 * 7 + 2
