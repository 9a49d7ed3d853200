"""The GPUs that the driver's tool lists; whatever it does, the result is a list."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm.base.machine.gpu import Gpu, nvidia_gpus

MIB = 2**20


def tool(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_each_gpu_has_a_name_and_its_memory(tmp_path: Path) -> None:
    script = "printf 'NVIDIA H100 80GB HBM3, 580.65.06, 81559, 81079\\nGrid, of two, 550.1, 24576, 100\\n'"
    assert nvidia_gpus(tool(tmp_path, script)) == [
        Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB, 81079 * MIB, "580.65.06"),
        Gpu("Grid, of two", 24576 * MIB, 100 * MIB, "550.1"),
    ]


@pytest.mark.parametrize(
    "script", ["exit 9", "echo 'No devices were found'", "echo 'NVIDIA X, 550.1, [N/A], [N/A]'", "true"]
)
def test_a_tool_that_fails_or_prints_other_lines_lists_none(tmp_path: Path, script: str) -> None:
    assert nvidia_gpus(tool(tmp_path, script)) == []


def test_no_tool_is_no_gpu(tmp_path: Path) -> None:
    assert nvidia_gpus(str(tmp_path / "nothing")) == []
