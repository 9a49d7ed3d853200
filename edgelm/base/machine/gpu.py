"""The GPUs of this machine as data, for processes that import no native code.

Owns the query to the driver's tool, and the type that cuda.py fills. Knows nothing of what runs on a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

TIME_LIMIT_S = 10
KILL_S = 1  # for a killed process to end; the kernel may hold it for as long as the driver hangs
FIELDS = ("name", "driver_version", "memory.total", "memory.free", "uuid", "mig.mode.current")  # of nvidia-smi
VISIBLE = "CUDA_VISIBLE_DEVICES"
MIB = 2**20
WSL = Path("usr/lib/wsl/lib")  # the driver of Windows in WSL: a service's PATH may lack it
CONTAINER_FILES = ".dockerenv", "run/.containerenv"  # Docker, Podman
KUBERNETES = "KUBERNETES_SERVICE_HOST"
NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"  # vendors on the PCI bus
ARC = re.compile(r"0x(56|e2)")  # Intel's cards: Alchemist, Battlemage; others are a part of the processor
DISPLAY = "0x03"  # the class of a graphics card begins so
LEAST_VRAM = 2**31  # an AMD processor with graphics has less of its own, as a rule
QUERY = f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"
SIZE = re.compile(r"[0-9]+|\[[A-Za-z/ ]+\]")  # "[N/A]", "[Insufficient Permissions]"
ONE_GPU = re.compile(r"^\s*<gpu id=|^GPU \d+: ", re.MULTILINE)  # begins a GPU in the tool's two other listings
MIG_MEMORY = re.compile(
    r"<index>(\d+)<(?:(?!</mig_device>).)*?<fb_memory_usage>(?:(?!</mig_device>).)*?"
    r"<total>(\d+) MiB<(?:(?!</mig_device>).)*?<free>(\d+) MiB<",
    re.DOTALL,
)
MIG_NAME = re.compile(r"MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")
CONTAINER_HOST = "the host needs NVIDIA's driver and nvidia-container-toolkit"
NOT_NVIDIA = "our own kernels need one of NVIDIA"
TURING = 7, 5  # compute capability
NVIDIA_CARD = "the NVIDIA GPU"  # whose name is not known
NO_DRIVER = "no NVIDIA driver was found"

_held: list[subprocess.Popen[str]] = []  # killed processes of the tool that have not ended


@dataclass(frozen=True, slots=True)
class CudaState:
    """Whether our kernels can run on a GPU here. `problem` is empty if they can run on `name`.

    A problem continues the line "CUDA is not used: ".
    """

    problem: str
    hint: str = ""
    name: str = ""
    free_bytes: int = 0  # beside the context of the process that asked
    total_bytes: int = 0
    context_bytes: int = 0  # of that context; 0: not known
    old_driver: bool = False  # the problem is the driver's age
    uuid: str = ""  # of `name`, without what the driver's tool begins it with; empty: torch does not tell it


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str = ""  # its version
    uuid: str = ""
    mig: bool = False  # it is divided into parts, each of which CUDA takes for a GPU


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None


class StandingGpu(NamedTuple):
    """A graphics card that stands in this machine. `problem` is why our kernels cannot use it, whatever the model."""

    name: str  # of several: all of them
    problem: str = ""
    hint: str = ""
    backend: str = "cuda"  # ggml's, of llama.cpp
    num_cards: int = 1

    @property
    def is_not_used(self) -> str:
        """The beginning of a line that says why."""
        return f"{self.name} {'is' if self.num_cards == 1 else 'are'} not used"

    @property
    def ours(self) -> bool:
        """Whether it is one that our kernels could run on, if its driver were there."""
        return self.backend == "cuda"


def standing_gpu(root: Path = Path("/")) -> StandingGpu | None:
    """Return the graphics card with memory of its own in this machine, whatever its driver; None: there is none.

    One that the user hides from CUDA is none.
    """
    if os.environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return None
    if gpus := nvidia_gpus():
        names = Counter(gpu.name for gpu in gpus)
        name = " and ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
        return StandingGpu(name, num_cards=len(gpus))
    if (root / WSL / "nvidia-smi").exists():  # Windows has the driver, and its card is not on this bus
        return StandingGpu(NVIDIA_CARD, *_why_unlisted(root))
    for card in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind, device, memory = (
            _word(card / name) for name in ("vendor", "class", "device", "mem_info_vram_total")
        )
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            return StandingGpu(NVIDIA_CARD, *_why_unlisted(root))
        if vendor == AMD and memory.isdecimal() and int(memory) >= LEAST_VRAM:
            return StandingGpu("the AMD GPU", NOT_NVIDIA, backend="vulkan")
        if vendor == INTEL and kind.startswith(DISPLAY) and ARC.match(device):
            return StandingGpu("the Intel GPU", NOT_NVIDIA, backend="vulkan")
    return None


def amd_gpus(root: Path = Path("/")) -> list[Gpu]:
    """Return AMD's graphics cards with memory of their own, by what Linux's driver counts."""
    found = []
    for card in sorted((root / "sys/bus/pci/devices").glob("*")):
        sizes = [_word(card / f"mem_info_vram_{name}") for name in ("total", "used")]
        if all(size.isdecimal() for size in sizes) and int(sizes[0]) >= LEAST_VRAM:
            total, used = map(int, sizes)
            found.append(Gpu("the AMD GPU", total, max(0, total - used)))
    return found


def _why_unlisted(root: Path) -> tuple[str, str]:
    """Return why the driver's tool lists no GPU though one stands here, and what to do."""
    contained = any((root / file).exists() for file in CONTAINER_FILES) or KUBERNETES in os.environ
    tool = _find_tool(root)
    if tool is None and contained:
        return (
            "this container was started without it",
            f"start it with --gpus all (Kubernetes: the limit nvidia.com/gpu); {CONTAINER_HOST}",
        )
    if tool is None:
        return NO_DRIVER, "install the NVIDIA driver"
    problem = f"nvidia-smi says: {_ask_driver(tool, *QUERY)[1]}"
    if contained:
        return problem, f"start the container again with --gpus all; {CONTAINER_HOST}"
    if driver_place(root):
        return problem, "update NVIDIA's driver in Windows, and type there: wsl --shutdown"
    if "version mismatch" in problem:
        return problem, "restart the machine: the driver was updated"
    return problem, "restart the machine; if that does not help, install the NVIDIA driver again"


def driver_place(root: Path = Path("/")) -> str:
    """Return where the driver is to be installed, as the end of a clause: in WSL it is that of Windows."""
    return " in Windows" if (root / WSL).exists() else ""


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nvidia_gpus(tool: str | None = None) -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists; none if the tool is missing, fails, or does not answer."""
    lines, _ = _ask_driver(tool or _find_tool(), *QUERY)
    return [gpu for line in lines if (gpu := _parse_gpu(line)) is not None]


def compute_capabilities() -> dict[str, tuple[int, int]]:
    """Return the compute capability of each GPU by its UUID; none where the tool is older than this question."""
    lines, _ = _ask_driver(_find_tool(), "--query-gpu=uuid,compute_cap", "--format=csv,noheader")
    matches = (re.fullmatch(r"(\S+), (\d+)\.(\d+)", line.strip()) for line in lines)
    return {match[1]: (int(match[2]), int(match[3])) for match in matches if match}


def llama_backend(gpu: StandingGpu) -> str:
    """Return ggml's backend for a card. Our wheel of llama.cpp for CUDA has no kernels for one before Turing."""
    known = compute_capabilities() if gpu.ours and not gpu.problem else {}
    return "vulkan" if known and max(known.values()) < TURING else gpu.backend


def usable_gpus() -> list[Gpu]:
    """Return the GPUs, and parts of one (MIG), that CUDA_VISIBLE_DEVICES leaves to us.

    Unless it names parts, CUDA sees the first part of a divided GPU only.
    """
    gpus = nvidia_gpus()
    parts = _parts(gpus) if any(gpu.mig for gpu in gpus) else {}
    if VISIBLE not in os.environ:
        return [part for gpu in gpus for part in parts.get(gpu.uuid, [gpu])[:1]]
    names = [name.strip() for name in os.environ[VISIBLE].split(",")]
    named = [
        part for gpu in gpus for part in parts.get(gpu.uuid, ()) if any(_is_named(part, -1, name) for name in names)
    ]
    whole = [part for gpu in gpus for part in parts.get(gpu.uuid, [gpu])[:1]]
    chosen: list[Gpu] = []
    for name in names:
        found = [gpu for index, gpu in enumerate(whole) if _is_named(gpu, index, name)]
        if not found:
            break  # CUDA sees none behind an entry that is wrong
        chosen += found
    return named or [gpu for gpu in whole if gpu in chosen]


def split_used(gpus: Sequence[Gpu], state: CudaState) -> tuple[Gpu | None, list[Gpu]]:
    """Return the GPU that our kernels run on, and the others. Without a UUID it is the freest one of that name."""
    same = [gpu for gpu in gpus if state.uuid and gpu.uuid.endswith(state.uuid)]
    same = same or [gpu for gpu in gpus if gpu.name == state.name]
    own = max(same, key=lambda gpu: gpu.free_bytes, default=None)
    if own is None and len(gpus) == 1:  # CUDA names a part of a GPU, and the driver's tool another way
        own = gpus[0]
    return own, [gpu for gpu in gpus if gpu is not own] if own else []


def _parts(gpus: Sequence[Gpu]) -> dict[str, list[Gpu]]:
    """Return the parts of the divided GPUs by the GPU's UUID: one listing has their memory, another one their names."""
    sizes, names = (_sections(option, gpus) for option in (("-q", "-x"), ("-L",)))
    found: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        known = {index: (name, uuid) for name, index, uuid in MIG_NAME.findall(names.get(gpu.uuid, ""))}
        for index, total, free in MIG_MEMORY.findall(sizes.get(gpu.uuid, "")):
            name, uuid = known.get(index, (index, ""))
            part = Gpu(f"{gpu.name} MIG {name}", int(total) * MIB, int(free) * MIB, gpu.driver, uuid, mig=True)
            found.setdefault(gpu.uuid, []).append(part)
    return found


def _sections(options: tuple[str, ...], gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return what the driver's tool prints about each GPU, by its UUID."""
    texts = ONE_GPU.split("\n".join(_ask_driver(_find_tool(), *options)[0]))
    return {gpu.uuid: text for text in texts for gpu in gpus if gpu.uuid and gpu.uuid in text}


def _find_tool(root: Path = Path("/")) -> str | None:
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=str(root / WSL))


def _ask_driver(tool: str | None, *options: str) -> tuple[list[str], str]:
    """Return the lines that nvidia-smi prints; none, and the reason, where it is missing, fails or does not answer."""
    if tool is None:
        return [], "it is missing"
    no_answer = f"no answer within {TIME_LIMIT_S} s"
    _held[:] = [process for process in _held if process.poll() is None]
    if _held:  # another one would hang too, and stay
        return [], no_answer
    try:
        process = subprocess.Popen(
            [tool, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return [], str(error.strerror)
    try:
        output, errors = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        return [], no_answer
    finally:
        _end(process)
    lines = output.splitlines()
    if process.returncode == 0:
        return lines, ""
    said = next((line.strip() for line in [*lines, *errors.splitlines()] if line.strip()), "")
    return [], said or f"exit code {process.returncode}"


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process of the tool if it runs, and close its pipes; `subprocess.run` would wait for its end for ever."""
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
    if process.poll() is not None:
        return
    process.kill()
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        _held.append(process)


def _is_named(gpu: Gpu, index: int, name: str) -> bool:
    return name == str(index) or (name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name))


def _parse_gpu(line: str) -> Gpu | None:
    """Parse the FIELDS of one GPU; return None for any other line.

    Sizes are 0 where the tool does not tell them: its memory is the processor's, or it is divided and not ours to see.
    """
    fields = line.strip().rsplit(", ", len(FIELDS) - 1)
    if len(fields) != len(FIELDS) or not all(SIZE.fullmatch(size) for size in fields[2:4]):
        return None
    name, driver, total, free, uuid, mig = fields
    total_bytes, free_bytes = (int(size) * MIB if size.isdecimal() else 0 for size in (total, free))
    return Gpu(name, total_bytes, free_bytes, driver, uuid, mig == "Enabled")
