"""A GPU whose memory runs out at each stage of loading: less is used where that helps, or one line says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgelm.backends.torch import failures

ROOT = Path(__file__).resolve().parents[3]
SMALLER = "take a smaller model, use --quantize int4, or --engine llama"
LESS = "lower --ctx, choose a smaller --kv, or use --engine llama"


def dropped(which: str) -> list[str]:
    line = f"CUDA graphs {which}are not used, and such steps take longer: the memory of the GPU is used up"
    return [f"{line}; {failures.OTHER_PROGRAMS}, {failures.LESS}"]


ALL = {"graphs": 32, "sampled": 32}  # those of two sequences
NONE = {"graphs": 0, "sampled": 0}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.torch.fake_gpu_failures", tmp_path_factory.mktemp("models")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("stage"): line for line in lines}


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("none", {"context": 2048, **ALL, "log": []}),
        ("cache", {"context": 512, **ALL, "log": []}),
        ("one graph", {"context": 2048, "graphs": 24, "sampled": 24, "log": dropped("of more than 24 tokens ")}),
        ("large graphs", {"context": 2048, "graphs": 8, "sampled": 8, "log": dropped("of more than 8 tokens ")}),
        (
            "graphs of more than a token",
            {"context": 2048, "graphs": 1, "sampled": 1, "log": dropped("of more than 1 token ")},
        ),
        ("every graph", {"context": 2048, **NONE, "log": dropped("")}),
        ("the sampler's graphs", {"context": 2048, **NONE, "log": dropped("")}),
        ("warm-up", {"context": 512, **ALL, "log": []}),
    ],
)
def test_less_is_used_where_that_helps(
    results: dict[str, dict[str, Any]], stage: str, expected: dict[str, Any]
) -> None:
    assert results[stage] == expected


@pytest.mark.parametrize(
    ("stage", "kind", "error"),
    [
        ("weights", "DoesNotFitError", f"tiny llama q8_0 does not fit in the memory of the GPU; {SMALLER}"),
        (
            "every cache",
            "DoesNotFitError",
            f"m and 512 tokens of context do not fit in the memory of NVIDIA H200; {LESS}",
        ),
        (
            "capture ends badly",
            "DeviceError",
            "the memory of the GPU is used up, while CUDA graphs were captured; use --no-graphs",
        ),
    ],
)
def test_or_one_line_says_why(results: dict[str, dict[str, Any]], stage: str, kind: str, error: str) -> None:
    assert results[stage] == {"error": error, "kind": kind, "log": []}
