"""Every line about a GPU that is not used, or not wholly, and what one sees while our kernels are checked.

    python -m tests.bench.gpu_lines [WHEEL of edgelm-llama [NUMBER…]] > docs/results/gpu-lines-DATE.txt

No GPU is needed. Machines are folders with the files and the nvidia-smi that they would have; packages and models are
facts that the choice of an engine is asked with. At the end commands run in faked machines (faked_machine.py), which
takes minutes; numbers choose some of these.
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
from tests.faked_machine import PARTS_OF_TORCH, Card, Machine, make
from tests.odd_models import write_odd
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
RTX_3060 = "NVIDIA GeForce RTX 3060"
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
    card, big = StandingGpu(RTX_3060), StandingGpu("NVIDIA GeForce RTX 4090")
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
    bare, nvidia = replace(GGUF, offload_hint=""), StandingGpu(RTX_3060)
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


def faked() -> Iterator[tuple[str, Machine, str]]:
    """Yield machines in which the commands are run, and the architecture of the model."""
    rtx_3060 = Card("NVIDIA GeForce RTX 3060", 12288, 11300)
    rtx_4090 = Card("NVIDIA GeForce RTX 4090", 24564, 22528, "8.9", "GPU-2b")
    divided = Card("NVIDIA A100-SXM4-80GB", 81920, 81000, "8.0", "GPU-3c", ((19968, 600), (9728, 9700)))
    two = [rtx_4090._replace(free_mib=4000), rtx_3060]

    def with_torch(*cards: Card, **more: Any) -> Machine:
        return Machine(cards, packages=PARTS_OF_TORCH, sees_cuda=True, **more)

    yield "RTX 3060, edgelm alone", Machine([rtx_3060]), "llama"
    yield "RTX 3060, torch is one for processors", Machine([rtx_3060], packages=PARTS_OF_TORCH), "llama"
    yield "RTX 4090, edgelm[cuda], driver 550", with_torch(rtx_4090, driver="550.54.15", driver_cuda=12040), "llama"
    yield "RTX 3060 in WSL, edgelm alone", Machine([rtx_3060], wsl=True), "llama"
    yield "RTX 3060 in WSL, whose driver does not work", Machine([rtx_3060], wsl=True, says=BLOCKED), "llama"
    yield (
        "A100 in parts (MIG), of which another program has filled the first, edgelm[cuda]",
        with_torch(divided),
        "llama",
    )
    yield "RTX 4090 that a game fills and RTX 3060, edgelm[cuda], LFM2", with_torch(*two), "lfm2"
    yield "RTX 3060 that a game fills, edgelm[cuda]", with_torch(rtx_3060._replace(free_mib=600)), "llama"
    yield "RTX 4090, edgelm[cuda], Nemotron-H", with_torch(rtx_4090), "nemotron_h"


def commands(folder: Path, machine: Machine, kind: str, llama: Path | None) -> None:
    """Run the commands in a machine whose llama.cpp has no GPU; print what they say about the GPU."""
    python, environment = make(machine, folder, llama)
    model, text = folder / "model.gguf", folder / "text.txt"
    if kind == "llama":
        write_tiny(model, context=512)
    else:
        write_odd(model, kind)  # type: ignore[arg-type]
    text.write_text("Once upon a time there was a little girl. " * 40)

    def edgelm(*arguments: str | Path) -> list[str]:
        command = [python, "-m", "edgelm", *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
        )
        return _told(folder, done.stderr + done.stdout)

    show("edgelm run model.gguf hello", *edgelm("run", model, "hello", "--max-tokens", "2"))
    show("edgelm bench model.gguf", *edgelm("bench", model))
    show("edgelm eval model.gguf text.txt", *edgelm("eval", model, text))
    show("edgelm plan model.gguf", *edgelm("plan", model))
    show("edgelm doctor", *edgelm("doctor"))
    if not machine.sees_cuda:  # it would try kernels
        show("edgelm doctor --gpu", *edgelm("doctor", "--gpu", "--out", folder / "report.txt"))
    log = folder / "log"
    with log.open("w") as file:
        command = [str(python), "-m", "edgelm", "serve", str(model), "--port", "0"]
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            _until(lambda: "http" in log.read_text())
            edgelm("load", "model")
            listing = edgelm("ps")
            row = _told(folder, chat_row([str(python), "-m", "edgelm", "--model", "model"], environment, folder))
        finally:
            server.terminate()
            server.wait(60)
    show("edgelm serve model.gguf: its log", *_told(folder, log.read_text()))
    show("edgelm ps", *listing)
    show("edgelm --model model, the row of its state (the whole line is a notification)", *row)


def _told(folder: Path, text: str) -> list[str]:
    """Return the lines about a GPU, without the folder's name."""
    words = ("GPU", "not used", "our kernels", "our own kernels", "WSL", "here  ")
    kept = [line for line in text.replace(str(folder), "~").splitlines() if any(word in line for word in words)]
    return kept or ["(nothing about a GPU)"]


def chat_row(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Return the row of state, by tmux, of a chat of 160 columns that has answered once."""

    def tmux(*arguments: str) -> str:
        asked = ["tmux", "-S", str(folder / "tmux"), "-f", os.devnull, *arguments]
        return subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout

    tmux("new-session", "-d", "-x", "160", "-y", "30", *command)
    try:
        _until(lambda: "model" in tmux("capture-pane", "-p"))
        tmux("send-keys", "hello")
        _until(lambda: "hello" in tmux("capture-pane", "-p"))
        tmux("send-keys", "Enter")
        _until(lambda: "not used" in tmux("capture-pane", "-p"), 20)
        parts = (line.split("│")[-1].strip() for line in tmux("capture-pane", "-p").splitlines())
        return next((part for part in parts if "used: " in part), "")
    finally:
        tmux("kill-server")


def _until(true: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.2)


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
        llama = Path(sys.argv[1]) if sys.argv[1:] else None
        for number, (title, here, kind) in enumerate(faked(), 1):
            if not sys.argv[2:] or str(number) in sys.argv[2:]:
                print(f"\nCommands, in faked machine {number}: {title}\n", flush=True)
                commands(folder / str(number), here, kind, llama)


def _raise(error: Exception) -> None:
    with trial.explained():
        raise error


def _without_headers() -> None:
    with patch.object(trial, "_has_headers", lambda: False):
        _raise(subprocess.CalledProcessError(1, "gcc"))


if __name__ == "__main__":
    main()
