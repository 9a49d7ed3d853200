"""The GPUs that the driver's tool lists; whatever it does, the result is a list."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from edgelm.__main__ import _count_gpus_by_bus
from edgelm.base.machine import gpu
from edgelm.base.machine.gpu import (
    CudaState,
    Gpu,
    StandingGpu,
    compute_capabilities,
    driver_place,
    llama_backend,
    nvidia_gpus,
    split_used,
    standing_gpu,
    usable_gpus,
)

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
    "script", ["exit 9", "echo 'No devices were found'", "echo 'NVIDIA X, 550.1, much, 1, GPU-1, [N/A]'", "true"]
)
def test_a_tool_that_fails_or_prints_other_lines_lists_none(tmp_path: Path, script: str) -> None:
    assert nvidia_gpus(tool(tmp_path, script)) == []


@pytest.mark.parametrize(("size", "mig"), [("[N/A]", "[N/A]"), ("[Insufficient Permissions]", "Enabled")])
def test_a_gpu_without_memory_to_see_is_listed(tmp_path: Path, size: str, mig: str) -> None:
    """That of a DGX Spark shares the processor's; a part of one (MIG) in a container shows none of the whole."""
    script = f"echo 'NVIDIA GB10, 580.95.05, {size}, {size}, GPU-1a, {mig}'"
    assert nvidia_gpus(tool(tmp_path, script)) == [Gpu("NVIDIA GB10", 0, 0, "580.95.05", "GPU-1a", mig == "Enabled")]


def test_a_tool_that_the_kernel_holds_is_not_waited_for_and_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL does not end a process in an uninterruptible call of a driver that hangs."""
    path = tool(tmp_path, f"PATH={os.defpath} exec sleep 600")
    answers: list[list[Gpu]] = []
    killed: list[subprocess.Popen[str]] = []

    def kill(process: subprocess.Popen[str]) -> None:
        killed.append(process)

    threads = [threading.Thread(target=lambda: answers.append(nvidia_gpus(path)), daemon=True) for _ in range(2)]
    with monkeypatch.context() as held:
        held.setattr(gpu, "TIME_LIMIT_S", 0.2)
        held.setattr(gpu, "KILL_S", 0)
        held.setattr(subprocess.Popen, "kill", kill)
        for thread in threads:
            thread.start()
            thread.join(20)
        answered, num_started = len(answers), len(killed)
        for process in killed:  # the driver answers again
            os.kill(process.pid, signal.SIGKILL)
            process.wait(20)
    assert answered == 2
    assert answers == [[], []]
    assert num_started == 1
    line = "NVIDIA X, 550.1, 24576, 100, GPU-2b, [N/A]"
    assert nvidia_gpus(tool(tmp_path, f"echo '{line}'")) == [Gpu("NVIDIA X", 24576 * MIB, 100 * MIB, "550.1", "GPU-2b")]
    assert gpu._held == []


def test_no_tool_is_no_gpu(tmp_path: Path) -> None:
    assert nvidia_gpus(str(tmp_path / "nothing")) == []


NO_DRIVER = StandingGpu("the NVIDIA GPU", "no NVIDIA driver was found", "install the NVIDIA driver")
AMD = StandingGpu("the AMD GPU", "our own kernels need one of NVIDIA", backend="vulkan")


def stand(
    root: Path, vendor: str = "0x10de", kind: str = "0x030000", memory: int | None = None, device: str = "0x1234"
) -> None:
    """Put a card on the bus of a machine whose files are under `root`."""
    card = root / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("class", kind), ("device", device), ("mem_info_vram_total", memory)):
        if text is not None:
            (card / name).write_text(f"{text}\n")


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one folder, without nvidia-smi; no GPU is hidden, and Kubernetes is not there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return folder


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
    stand(tmp_path, vendor, kind, memory)
    assert standing_gpu(tmp_path) == found


@pytest.mark.parametrize(
    ("device", "found"), [("0x56a0", True), ("0xe20b", True), ("0x46a6", False), ("0x7d55", False)]
)
def test_a_card_of_intel_is_seen_and_a_part_of_its_processor_is_not(tmp_path: Path, device: str, found: bool) -> None:
    stand(tmp_path, "0x8086", device=device)
    gpu_here = standing_gpu(tmp_path)
    assert (gpu_here.name if gpu_here else "", found) in (("the Intel GPU", True), ("", False))


@pytest.mark.parametrize(
    ("capabilities", "backend"),
    [
        ({"GPU-1": (6, 1)}, "vulkan"),
        ({"GPU-1": (7, 5)}, "cuda"),
        ({"GPU-1": (6, 1), "GPU-2": (8, 6)}, "cuda"),
        ({}, "cuda"),
    ],
)
def test_a_card_before_turing_is_told_of_vulkan(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, tuple[int, int]], backend: str
) -> None:
    monkeypatch.setattr(gpu, "compute_capabilities", lambda: capabilities)
    assert llama_backend(StandingGpu("NVIDIA GeForce GTX 1080")) == backend


@pytest.mark.parametrize(("visible", "stands"), [(None, True), ("0", True), ("", False), ("-1", False)])
def test_a_gpu_that_the_user_hides_does_not_stand_here(
    visible: str | None, stands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "nvidia_gpus", lambda: [Gpu("A", 1, 1), Gpu("B", 1, 1), Gpu("A", 1, 1)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert standing_gpu(tmp_path) == (StandingGpu("2 x A and B", num_cards=3) if stands else None)


def test_several_gpus_are_not_used() -> None:
    assert StandingGpu("A").is_not_used == "A is not used"
    assert StandingGpu("A and B", num_cards=2).is_not_used == "A and B are not used"


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, "AB"), ("1", "B"), ("GPU-a", "A"), ("", ""), ("1,0", "AB"), ("0,-1,1", "A"), ("7,0", "")],
)
def test_only_visible_gpus_are_ours(visible: str | None, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "nvidia_gpus", lambda: [Gpu("A", 1, 1, "", "GPU-a1"), Gpu("B", 1, 1, "", "GPU-b2")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(one.name for one in usable_gpus()) == names


@pytest.mark.parametrize(
    ("visible", "order"), [("0", "PCI_BUS_ID"), ("1, 0", "PCI_BUS_ID"), ("GPU-a", None), ("", None)]
)
def test_gpus_by_number_are_those_of_nvidia_smi(
    visible: str, order: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own first is the fastest one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # so that it is as before after this test
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    _count_gpus_by_bus()
    assert os.environ.get("CUDA_DEVICE_ORDER") == order


@pytest.mark.parametrize(
    ("names", "name", "uuid", "own"),
    [
        ("AA", "A", "0", 0),  # not the freest one: the user has ordered them
        ("AA", "A", "1", 1),
        ("AA", "A", "", 1),  # torch does not tell it
        ("AB", "A", "7", 0),  # a part of a GPU may have another UUID in CUDA
        ("AB", "C", "", None),
        ("A", "C", "", 0),
    ],
)
def test_the_gpu_of_our_kernels_is_known_by_its_uuid(names: str, name: str, uuid: str, own: int | None) -> None:
    gpus = [Gpu(letter, 80, 10 + index, "", f"GPU-{index}") for index, letter in enumerate(names)]
    used, others = split_used(gpus, CudaState("", "", name, uuid=uuid))
    assert used == (None if own is None else gpus[own])
    assert others == ([] if own is None else [gpu for gpu in gpus if gpu is not used])


CONTAINER = "this container was started without it"
GPUS_ALL = (
    "start it with --gpus all (Kubernetes: the limit nvidia.com/gpu); "
    "the host needs NVIDIA's driver and nvidia-container-toolkit"
)


@pytest.mark.parametrize("file", [".dockerenv", "run/.containerenv", None])
def test_a_container_without_the_gpu_is_not_told_to_install_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    stand(tmp_path)
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    else:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert standing_gpu(tmp_path) == StandingGpu("the NVIDIA GPU", CONTAINER, GPUS_ALL)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "restart the machine: the driver was updated"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            "restart the machine; if that does not help, install the NVIDIA driver again",
        ),
    ],
)
def test_a_driver_that_does_not_work_is_not_a_missing_one(tmp_path: Path, bare: Path, said: str, hint: str) -> None:
    stand(tmp_path)
    tool(bare, f'echo "{said}"\nexit 18')
    assert standing_gpu(tmp_path) == StandingGpu("the NVIDIA GPU", f"nvidia-smi says: {said}", hint)


def test_a_container_that_lost_its_gpu_is_started_again(tmp_path: Path, bare: Path) -> None:
    stand(tmp_path)
    (tmp_path / ".dockerenv").touch()
    tool(bare, "echo 'Failed to initialize NVML: Unknown Error'\nexit 255")
    found = standing_gpu(tmp_path)
    assert found is not None
    assert found.problem == "nvidia-smi says: Failed to initialize NVML: Unknown Error"
    assert found.hint.startswith("start the container again with --gpus all")


@pytest.mark.parametrize("works", [True, False])
def test_in_wsl_the_card_is_on_no_bus_and_the_driver_is_that_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    folder = tmp_path / "usr/lib/wsl/lib"
    assert driver_place(tmp_path) == ""
    folder.mkdir(parents=True)
    assert driver_place(tmp_path) == " in Windows"
    line = "echo 'NVIDIA GeForce RTX 4090, 581.15, 24564, 22000, GPU-1a, [N/A]'"
    tool(
        folder,
        line if works else "echo 'Failed to initialize NVML: GPU access blocked by the operating system'\nexit 17",
    )
    monkeypatch.setattr(gpu, "WSL", folder)  # the root of nvidia_gpus() is the machine's
    assert standing_gpu(tmp_path) == (
        StandingGpu("NVIDIA GeForce RTX 4090")
        if works
        else StandingGpu(
            "the NVIDIA GPU",
            "nvidia-smi says: Failed to initialize NVML: GPU access blocked by the operating system",
            "update NVIDIA's driver in Windows, and type there: wsl --shutdown",
        )
    )


LISTING = """#!/bin/sh
case "$1" in
-L) cat <<'END'
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1a)
  MIG 3g.40gb     Device  0: (UUID: MIG-aa)
  MIG 1g.10gb     Device  1: (UUID: MIG-bb)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-2b)
END
;;
-q) cat <<'END'
<nvidia_smi_log>
	<gpu id="00000000:10:00.0">
		<mig_devices>
			<mig_device>
				<index>0</index>
				<fb_memory_usage>
					<total>40192 MiB</total>
					<reserved>1 MiB</reserved>
					<used>192 MiB</used>
					<free>40000 MiB</free>
				</fb_memory_usage>
				<bar1_memory_usage><total>65535 MiB</total><used>1 MiB</used><free>65534 MiB</free></bar1_memory_usage>
			</mig_device>
			<mig_device>
				<index>1</index>
				<fb_memory_usage><total>9728 MiB</total><used>28 MiB</used><free>9700 MiB</free></fb_memory_usage>
			</mig_device>
		</mig_devices>
		<uuid>GPU-1a</uuid>
		<fb_memory_usage><total>81920 MiB</total><used>1 MiB</used><free>81919 MiB</free></fb_memory_usage>
	</gpu>
	<gpu id="00000000:20:00.0">
		<mig_devices>
			None
		</mig_devices>
		<uuid>GPU-2b</uuid>
	</gpu>
</nvidia_smi_log>
END
;;
*)
echo 'NVIDIA A100-SXM4-80GB, 580.65, SIZE, SIZE, GPU-1a, Enabled'
OTHER
;;
esac
"""


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        (None, {"NVIDIA A100-SXM4-80GB MIG 3g.40gb": 40000}),
        ("0", {"NVIDIA A100-SXM4-80GB MIG 3g.40gb": 40000}),
        ("MIG-bb", {"NVIDIA A100-SXM4-80GB MIG 1g.10gb": 9700}),
        ("1", {}),
    ],
)
@pytest.mark.parametrize("size", ["81920", "[Insufficient Permissions]"])
def test_of_a_divided_gpu_the_part_that_cuda_sees_is_ours(
    bare: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, free: dict[str, int], size: str
) -> None:
    tool(bare, LISTING.replace("SIZE", size).replace("OTHER", ""))
    monkeypatch.setenv("PATH", f"{bare}{os.pathsep}{os.defpath}")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert {one.name: one.free_bytes // MIB for one in usable_gpus()} == free


def test_beside_a_divided_gpu_a_whole_one_is_ours_too(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "echo 'NVIDIA A100-SXM4-80GB, 580.65, 81920, 70000, GPU-2b, Disabled'"
    tool(bare, LISTING.replace("SIZE", "81920").replace("OTHER", whole))
    monkeypatch.setenv("PATH", f"{bare}{os.pathsep}{os.defpath}")
    assert [one.free_bytes // MIB for one in usable_gpus()] == [40000, 70000]


def test_the_compute_capability_of_each_gpu(bare: Path) -> None:
    tool(bare, "echo 'GPU-1a, 8.6'\necho 'GPU-2b, 12.0'")
    assert compute_capabilities() == {"GPU-1a": (8, 6), "GPU-2b": (12, 0)}
    tool(bare, """echo 'Field "compute_cap" is not a valid field to query.'\nexit 2""")
    assert compute_capabilities() == {}


def test_the_memory_of_an_amd_card_is_counted_by_linux(tmp_path: Path) -> None:
    stand(tmp_path, "0x1002", "0x030000", 16 * 2**30)
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0/mem_info_vram_used").write_text(f"{6 * 2**30}\n")
    assert gpu.amd_gpus(tmp_path) == [Gpu("the AMD GPU", 16 * 2**30, 10 * 2**30)]
    stand(tmp_path / "apu", "0x1002", "0x030000", 2**29)
    (tmp_path / "apu/sys/bus/pci/devices/0000:01:00.0/mem_info_vram_used").write_text("0\n")
    assert gpu.amd_gpus(tmp_path / "apu") == [], "a part of the processor"
