"""The GPUs that the driver's tool lists; whatever it does, the result is a list."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm.base.machine import gpu
from edgelm.base.machine.gpu import Gpu, StandingGpu, nvidia_gpus, standing_gpu, usable_gpus

MIB = 2**20


def tool(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_each_gpu_has_a_name_and_its_memory(tmp_path: Path) -> None:
    first = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 81079, GPU-1a, Enabled"
    script = f"printf '{first}\\nGrid, of two, 550.1, 24576, 100, GPU-2b, [N/A]\\n'"
    assert nvidia_gpus(tool(tmp_path, script)) == [
        Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB, 81079 * MIB, "580.65.06", "GPU-1a", mig=True),
        Gpu("Grid, of two", 24576 * MIB, 100 * MIB, "550.1", "GPU-2b"),
    ]


@pytest.mark.parametrize(
    "script", ["exit 9", "echo 'No devices were found'", "echo 'NVIDIA X, 550.1, [N/A], [N/A], GPU-1, [N/A]'", "true"]
)
def test_a_tool_that_fails_or_prints_other_lines_lists_none(tmp_path: Path, script: str) -> None:
    assert nvidia_gpus(tool(tmp_path, script)) == []


def test_no_tool_is_no_gpu(tmp_path: Path) -> None:
    assert nvidia_gpus(str(tmp_path / "nothing")) == []


NO_DRIVER = StandingGpu("the NVIDIA GPU", "no NVIDIA driver was found", "install the NVIDIA driver")
AMD = StandingGpu("the AMD GPU", "our own kernels need one of NVIDIA", backend="vulkan")


@pytest.mark.parametrize(
    ("vendor", "kind", "memory", "found"),
    [
        ("0x10de", "0x030000", None, NO_DRIVER),
        ("0x10de", "0x040300", None, None),  # its sound
        ("0x1002", "0x030000", 8 * 2**30, AMD),
        ("0x1002", "0x030000", 2**29, None),  # a part of the processor
        ("0x8086", "0x030000", None, None),
    ],
)
def test_a_card_without_a_driver_is_seen_on_the_bus(
    tmp_path: Path, vendor: str, kind: str, memory: int | None, found: StandingGpu | None
) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("class", kind), ("mem_info_vram_total", memory)):
        if text is not None:
            (card / name).write_text(f"{text}\n")
    assert standing_gpu(tmp_path) == found


@pytest.mark.parametrize(("visible", "stands"), [(None, True), ("0", True), ("", False), ("-1", False)])
def test_a_gpu_that_the_user_hides_does_not_stand_here(
    visible: str | None, stands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "nvidia_gpus", lambda: [Gpu("A", 1, 1), Gpu("B", 1, 1), Gpu("A", 1, 1)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert standing_gpu(tmp_path) == (StandingGpu("A, B") if stands else None)


@pytest.mark.parametrize(("visible", "names"), [(None, "AB"), ("1", "B"), ("GPU-a", "A"), ("", ""), ("1,0", "AB")])
def test_only_visible_gpus_are_ours(visible: str | None, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "nvidia_gpus", lambda: [Gpu("A", 1, 1, "", "GPU-a1"), Gpu("B", 1, 1, "", "GPU-b2")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(one.name for one in usable_gpus()) == names
