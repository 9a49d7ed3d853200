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
from tests.models.tiny_models import MODELS
from tests.tiny import TYPES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.torch.fake_gpu_checks", tmp_path_factory.mktemp("models")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_family_and_format_runs_without_waiting(checked: list[dict[str, Any]]) -> None:
    seen = [(result["name"], result["kv"]) for result in checked]
    expected = [(name, "f16") for name in MODELS]
    for quant in TYPES:
        expected += [(quant, kv) for kv in (FORMATS if quant == "q8_0" else ["f16"])]
    assert seen == expected


def test_kernels_that_have_nothing_to_do_are_not_launched(checked: list[dict[str, Any]]) -> None:
    for result in checked:
        assert "draw_kernel" in result["sampling"]
        assert not {"bias_kernel", "penalize_kernel"} & set(result["sampling"])


def test_a_step_has_as_many_kernels_as_the_guide_says(checked: list[dict[str, Any]]) -> None:
    """Each layer: qkv, write_kv, attention's chunks and their sum, out, gate and up, down."""
    kernels = {result["name"]: result["kernels"] for result in checked}
    assert kernels["llama2"] == 1 + 3 * 7 + 2
