"""Every line about a GPU that is not used, or not wholly, and what one sees while our kernels are checked.

    python -m tests.bench.gpu_lines > docs/results/gpu-lines-DATE.txt

No GPU is needed. Machines are folders with the files and the nvidia-smi that they would have; packages and models are
facts that the choice of an engine is asked with. The commands at the end are run, with an nvidia-smi that lists a card.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from edgelm.backends.choice import Situation, choose_engine, partly_used
from edgelm.backends.gpu_check import CheckGpu, run_check
from edgelm.backends.llama import binding
from edgelm.backends.llama.placement import Placement
from edgelm.backends.torch import trial
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine import cuda, gpu
from edgelm.base.machine.gpu import NOT_NVIDIA, CudaState, StandingGpu, standing_gpu
from edgelm.base.machine.llama_build import InstalledLlama, extra_command, gpu_backend_command
from tests.tiny import write_tiny

SMI = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest ..."
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
BLOCKED = "Failed to initialize NVML: GPU access blocked by the operating system"
LOST = "Failed to initialize NVML: Unknown Error"
TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version {}). Please update your GPU"
OUR_WHEEL = InstalledLlama("edgelm-llama", "0.3.36.1", Path("/nowhere"))
PIPX = Path("/home/me/.local/share/pipx/venvs/edgelm")
TYPE = gpu_backend_command(OUR_WHEEL, "cuda", PIPX)
GGUF = Situation(model="a GGUF", cuda=CudaState(cuda.NO_GPU), offload_hint=TYPE)
LISTED = ("NVIDIA GeForce RTX 3060", 12288, 11300)
WORKER = """
import sys
from edgelm.backends.gpu_check import Begun, Checked, Counted
from edgelm.base.workers.child import run_job
from edgelm.backends.gpu_check import CheckGpu
def check(request, child):
    for op, detail in (("", ""), ("matmul", "q4_k, 4096 x 4096, 1 row"), ("matmul", "q6_k, 4096 x 14336, 1 row"),
                       ("attention", "f16, 32:8 heads of 128, 1 token"), ("sampling", "128256 tokens")):
        child.send(Begun(op, detail))
        if not op:
            child.send(Counted(4, 1, 1))
    child.send(Checked("NVIDIA GeForce RTX 3060", ()))
sys.exit(run_job({CheckGpu: check}))
"""


def machine(folder: Path, *, card: bool = True, tool: str = "", files: tuple[str, ...] = ()) -> StandingGpu | None:
    """Return what stands in a machine with a card on its bus, a driver's tool that fails with a line, and files."""
    root = Path(tempfile.mkdtemp(dir=folder))
    (root / "bin").mkdir()
    if card:
        device = root / "sys/bus/pci/devices/0000:01:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030000\n")
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    if tool:
        script = root / ("usr/lib/wsl/lib" if not card else "bin") / "nvidia-smi"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f'#!/bin/sh\necho "{tool}"\nexit 9\n')
        script.chmod(0o755)
    with patch.dict(os.environ, {"PATH": str(root / "bin")}), patch.object(gpu, "WSL", root / "usr/lib/wsl/lib"):
        return standing_gpu(root)


def machines(folder: Path) -> Iterator[tuple[str, StandingGpu | None]]:
    """Yield the machines whose driver lists no GPU."""
    yield "a card without a driver", machine(folder)
    yield "its driver was updated, and the machine not restarted", machine(folder, tool=MISMATCH)
    yield "its driver has no module for the running kernel", machine(folder, tool=SMI)
    yield "docker run without --gpus", machine(folder, files=(".dockerenv",))
    yield "podman run without --device", machine(folder, files=("run/.containerenv",))
    yield "a container that lost its GPU", machine(folder, tool=LOST, files=(".dockerenv",))
    yield "WSL, whose driver does not work", machine(folder, card=False, tool=BLOCKED)


def torch_without(version: int) -> CudaState:
    """Return the state of CUDA where the driver is too old for torch."""

    def warns() -> bool:
        warnings.warn(TOO_OLD.format(version), stacklevel=1)
        return False

    with (
        patch.object(torch.version, "cuda", "13.0"),
        patch.object(torch, "__version__", "2.13.0"),
        patch.object(torch.cuda, "is_available", warns),
        patch.object(cuda, "install_command", lambda package: f"type: pipx inject edgelm {package!r}"),
        patch.object(cuda, "gpu_backend_command", lambda _, backend: gpu_backend_command(OUR_WHEEL, backend, PIPX)),
    ):
        return cuda._check_gpu()


def llama_without(package: str) -> str:
    """Return why a build of llama.cpp for CUDA finds no GPU where the driver is too old."""
    line = "ggml_cuda_init: failed to initialize CUDA: CUDA driver version is insufficient for CUDA runtime version"
    with patch.object(binding, "standing_gpu", lambda: None):
        return f"{package} {binding._no_device([line], 'cuda')}"


def choices() -> Iterator[tuple[str, Settings, Situation]]:
    """Yield the machines whose driver lists a GPU that is not used."""
    card, big = StandingGpu(LISTED[0]), StandingGpu("NVIDIA GeForce RTX 4090")
    there = replace(GGUF, has_torch=True, cuda=CudaState("", "", big.name, 22 * 2**30, 24 * 2**30), gpu=big)
    alone = replace(GGUF, gpu=card, cuda=CudaState("torch is not installed", extra_command("cuda", PIPX)))
    unknown = "the torch engine does not support the architecture 'qwen35moe'"
    yield "RTX 3060, edgelm alone", Settings(), alone
    yield (
        "RTX 3060, edgelm[llama-cuda], driver 470",
        Settings(),
        replace(alone, offload_problem=llama_without("edgelm-llama-cuda")),
    )
    yield (
        "RTX 3060, llama-cpp-python with CUDA, driver 470",
        Settings(),
        replace(alone, offload_problem=llama_without("llama-cpp-python 0.3.36 with CUDA")),
    )
    yield "RTX 4090, edgelm[cuda], Qwen3.6", Settings(), replace(there, torch_problem=unknown)
    yield "RTX 4090, edgelm[cuda], driver 550", Settings(), replace(there, cuda=torch_without(12040))
    yield "RTX 4090, edgelm[cuda], driver 470", Settings(), replace(there, cuda=torch_without(11040))
    yield (
        "RTX 4090, edgelm[cuda], a model that is too large",
        Settings(),
        replace(there, fit_problem="it needs 40.10 GiB with --ctx 512 --kv k6v4, and 22.00 GiB of 24.00 GiB are free"),
    )
    yield "RTX 5090, edgelm[cuda], --lora", Settings(lora=("a",)), replace(there, gpu=StandingGpu("RTX 5090"))
    yield "RTX 5090, --engine llama", Settings(engine="llama"), replace(there, gpu=StandingGpu("RTX 5090"))
    yield (
        "GTX 1080, edgelm[cuda]",
        Settings(),
        replace(
            there,
            offload_hint=TYPE.replace("cuda", "vulkan"),
            gpu=StandingGpu("NVIDIA GeForce GTX 1080"),
            cuda=CudaState("the GPU is older than the Ampere generation (sm_80)", "llama.cpp runs on it"),
        ),
    )
    yield (
        "RTX 4090, a folder of safetensors, triton is missing",
        Settings(),
        replace(
            there,
            llama_problem="llama.cpp does not read safetensors",
            cuda=CudaState("triton is not installed", extra_command("cuda", PIPX)),
        ),
    )


def owners() -> Iterator[tuple[str, Settings, Situation]]:
    """Yield machines with their packages: what each way to run a GGUF says of itself."""
    there = CudaState("", "", "a GPU", 10 * 2**30, 12 * 2**30)
    no_torch = CudaState("torch is not installed", extra_command("cuda", PIPX))
    bare, nvidia = replace(GGUF, offload_hint=""), StandingGpu(LISTED[0])
    amd, arc = (StandingGpu(f"the {name} GPU", NOT_NVIDIA, backend="vulkan") for name in ("AMD", "Intel"))
    offload = {"has_offload": True, "has_card": True}
    vulkan = gpu_backend_command(OUR_WHEEL, "vulkan", PIPX)
    ours = replace(bare, gpu=nvidia, cuda=there, has_torch=True)
    yield "RTX 3060, edgelm[cuda,llama-cuda], before the trial", Settings(), replace(ours, **offload)
    yield "RTX 3060, edgelm[cuda,llama-cuda], a trial for ours", Settings(), replace(ours, **offload, faster="torch")
    yield (
        "RTX 4090, edgelm[cuda,llama-cuda], a trial for llama.cpp",
        Settings(),
        replace(ours, **offload, faster="llama"),
    )
    yield "RTX 5090, edgelm[cuda]", Settings(), replace(ours, offload_hint=TYPE)
    yield "RTX 5090 in WSL, edgelm[llama-cuda]", Settings(), replace(bare, gpu=nvidia, cuda=no_torch, **offload)
    yield (
        "laptop, Intel's GPU and an RTX 4060, edgelm[vulkan]",
        Settings(),
        replace(bare, gpu=nvidia, cuda=no_torch, **offload),
    )
    yield "laptop, Intel's GPU alone, edgelm[vulkan]", Settings(), replace(bare, has_offload=True)
    yield "laptop, Intel's GPU alone", Settings(), bare
    yield "RX 7900, edgelm alone", Settings(), replace(bare, gpu=amd, offload_hint=vulkan)
    yield "RX 7900, edgelm[vulkan]", Settings(), replace(bare, gpu=amd, **offload)
    yield "Arc B580, edgelm alone", Settings(), replace(bare, gpu=arc, offload_hint=vulkan)
    yield "a Mac, whose wheel has Metal", Settings(), replace(bare, has_offload=True)


def parts() -> Iterator[tuple[str, Placement, int]]:
    """Yield placements by llama.cpp of which a part is the processor's, and their numbers of layers."""
    yield "RTX 3060, Qwen3.6 27B", Placement(("CUDA0",), (21,)), 64
    yield "RTX 4090, Gemma 4 31B", Placement(("CUDA0",), (51,)), 60
    yield "RTX 3060, Qwen3.6 35B-A3B", Placement(("CUDA0",), (41,), expert_layers=24), 40
    yield "two cards", Placement(("CUDA0", "CUDA1"), (20, 11)), 64
    yield "a card that another program has filled", Placement(), 64


def show(title: str, *lines: str) -> None:
    print(f"[{title}]", *(f"  {line}" for line in lines), sep="\n")


def errors(call: Callable[[], Any]) -> str:
    try:
        call()
    except EdgeLMError as error:
        return f"{error.message}; {error.hint}"
    return "no error"


def commands(folder: Path) -> None:
    """Run the commands on this machine, whose nvidia-smi lists a card and whose llama.cpp has no GPU."""
    tool = folder / "nvidia-smi"
    name, total, free = LISTED
    tool.write_text(f"#!/bin/sh\necho '{name}, 580.65.06, {total}, {free}, GPU-1a, [N/A]'\n")
    tool.chmod(0o755)
    model, text = write_tiny(folder / "tiny.gguf", context=512), folder / "text.txt"
    text.write_text("Once upon a time there was a little girl. " * 40)
    places = {f"EDGELM_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
    environment = os.environ | places | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "160"}
    for arguments in (
        ("run", model, "hello", "--raw", "--max-tokens", "2"),
        ("bench", model),
        ("eval", model, text),
        ("plan", model),
        ("doctor",),
        ("doctor", "--gpu", "--out", folder / "report.txt"),
    ):
        command = [sys.executable, "-m", "edgelm", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
        about = [
            line.replace(str(folder), "~")
            for line in lines
            if "GPU" in line or "not used" in line or "kernels" in line or "here " in line
        ]
        shown = " ".join(Path(argument).name if isinstance(argument, Path) else argument for argument in arguments)
        show(f"edgelm {shown}", *(about or lines[-3:]))
    served(folder, model, environment)


def served(folder: Path, model: Path, environment: dict[str, str]) -> None:
    """Run a server with the model, and look at its log and `ps`."""

    def edgelm(*arguments: str) -> str:
        command = [sys.executable, "-m", "edgelm", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        return (done.stdout + done.stderr).replace(str(folder), "~")

    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "edgelm", "serve", str(model), "--port", "0"],
            env=environment,
            stdout=file,
            stderr=file,
        )
        try:
            deadline = time.monotonic() + 60
            while "http" not in log.read_text() and time.monotonic() < deadline:
                time.sleep(0.2)
            edgelm("load", "tiny")
            listing = edgelm("ps").splitlines()
        finally:
            server.terminate()
            server.wait(60)
    show("edgelm serve tiny.gguf (its log)", *(line for line in log.read_text().splitlines() if "not used" in line))
    show("edgelm ps", *listing[1:])


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        stack.enter_context(patch.dict(os.environ))
        for variable in ("CUDA_VISIBLE_DEVICES", "KUBERNETES_SERVICE_HOST"):
            os.environ.pop(variable, None)
        print("No driver lists the GPU: what run, bench, eval, chat, serve and ps say, and --device cuda\n")
        for title, card in machines(folder):
            with patch.object(cuda, "standing_gpu", lambda card=card: card):
                situation = replace(GGUF, gpu=card, cuda=cuda.find_cuda(("/nowhere",)))
            asked = errors(lambda situation=situation: choose_engine(Settings(device="cuda"), situation))
            show(title, choose_engine(Settings(), situation).unused_gpu, f"error: {asked}")
        print("\nThe driver lists it\n")
        for title, settings, situation in choices():
            show(title, choose_engine(settings, situation).unused_gpu)
        print("\nThe ways to run a GGUF, as `edgelm plan` shows them: > is taken\n")
        for title, settings, situation in owners():
            choice = choose_engine(settings, situation)
            ways = [f"{'>' if way.taken else ' '} {way.name:<26} {way.reason}".rstrip() for way in choice.routes]
            show(title, *ways, *filter(None, [choice.unused_gpu]))
        print("\nA part of the model is the processor's\n")
        used = choose_engine(Settings(), replace(GGUF, has_offload=True, has_card=True))
        for title, placement, layers in parts():
            show(title, partly_used(placement.describe(layers), used, Settings()))
        print("\nOur kernels are checked and compiled: each line replaces the one before\n")
        lines: list[str] = []
        run_check(CheckGpu(None, ("f16",), "off", short=True), lines.append, command=(sys.executable, "-c", WORKER))
        show("the check", *lines)
        with patch.object(trial, "install_command", lambda package: f"type: pipx inject edgelm {package}"):
            show("gcc is missing", errors(lambda: _raise(RuntimeError("Failed to find C compiler."))))
            show("Python.h is missing", errors(_without_headers))
        print("\nCommands where nvidia-smi lists a card, torch is one for processors, and so is llama.cpp\n")
        commands(folder)


def _raise(error: Exception) -> None:
    with trial.explained():
        raise error


def _without_headers() -> None:
    with patch.object(trial, "_has_headers", lambda: False):
        _raise(subprocess.CalledProcessError(1, "gcc"))


if __name__ == "__main__":
    main()
