"""The facts about a GPU and its software by which kernels are chosen."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.kernels import gpu_target


class FakeDriver:
    """A driver with one GPU, which counts how often it is asked for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.asked = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(arch=self.capability)


@pytest.mark.parametrize(
    ("version", "faults"),
    [("3.6.0", True), ("3.7.1+git1e2", True), ("3.8.0", True), ("3.9.0", False), ("3.10.0", False), ("4.0", False)],
)
def test_triton_before_3_9_has_faults(monkeypatch: pytest.MonkeyPatch, version: str, faults: bool) -> None:
    monkeypatch.setattr(gpu_target, "triton_version", lambda: version)
    assert gpu_target.triton_has_faults.__wrapped__() == faults


@pytest.mark.parametrize(
    ("capability", "faults", "stages"), [(80, True, 3), (89, True, 3), (90, True, 1), (120, True, 3), (90, False, 3)]
)
def test_products_of_sm_90_are_not_pipelined_by_a_triton_with_faults(
    monkeypatch: pytest.MonkeyPatch, capability: int, faults: bool, stages: int
) -> None:
    from triton.runtime import driver

    active = FakeDriver(capability)
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(gpu_target, "interpreting", lambda: False)
    monkeypatch.setattr(gpu_target, "triton_has_faults", lambda: faults)
    assert gpu_target.stages_of_products(3) == stages


@pytest.mark.parametrize(
    ("capability", "hbm"), [(80, True), (86, False), (89, False), (90, True), (100, True), (103, True), (120, False)]
)
def test_which_gpus_have_hbm(monkeypatch: pytest.MonkeyPatch, capability: int, hbm: bool) -> None:
    from triton.runtime import driver

    active = FakeDriver(capability)
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(gpu_target, "interpreting", lambda: False)
    assert gpu_target.has_hbm() == hbm
    assert gpu_target.has_hbm() == hbm
    assert active.asked == 1, "it is asked at each launch"


def test_interpreted_kernels_have_no_hbm() -> None:
    assert not gpu_target.has_hbm()


@pytest.mark.parametrize(("status", "version"), [(0, "581.15"), (9, "unknown")])
def test_in_wsl_the_drivers_library_tells_its_version(
    monkeypatch: pytest.MonkeyPatch, status: int, version: str
) -> None:
    """Measurements that are kept are of one driver; WSL has no /proc/driver/nvidia."""

    def write(text: Any, size: int) -> int:
        assert size >= 80, "NVML's own least"
        text.value = b"581.15"
        return 0

    library = SimpleNamespace(nvmlInit_v2=lambda: status, nvmlSystemGetDriverVersion=write, nvmlShutdown=lambda: 0)

    def no_module(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_module)
    monkeypatch.setattr(ctypes, "CDLL", {"libnvidia-ml.so.1": library}.__getitem__)
    assert gpu_target._driver_version() == version
