"""A machine with NVIDIA GPUs that are not there, as edgelm's commands find it: an nvidia-smi, a torch that sees them.

Every process of a faked machine reads SITE when it starts. Owns what torch and nvidia-smi answer. No kernel can run:
it is for lines about a GPU that is not used, and for plans.
"""

from __future__ import annotations

import json
import os
import site
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edgelm.base.machine.gpu import FIELDS

CONTEXT_MIB = 300  # of CUDA
PARTS_OF_TORCH = ("torch", "functorch", "triton")

SITE = '''
"""Read by every Python of a faked machine, before any other module."""
import importlib.abc, importlib.util, json, os, sys, types, warnings

FAKED = json.loads(os.environ.get("EDGELM_FAKED", "{}"))


def _torch(torch):
    gpus = FAKED["gpus"]

    def first():
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return next((gpu for name in names for gpu in gpus if name and gpu["uuid"].startswith(name)), gpus[0])

    def available():
        if FAKED["driver_cuda"] >= 13000:
            return True
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version "
            f"{FAKED['driver_cuda']}). Please update your GPU driver by downloading and installing a new version."
        )
        return False

    def memory(_=0):
        gpu = first()
        mib = gpu["parts"][0] if gpu["parts"] else (gpu["total_mib"], gpu["free_mib"])
        return (mib[1] - FAKED["context_mib"]) * 2**20, mib[0] * 2**20

    torch.version.cuda, torch.__version__ = "13.0", "2.13.0"
    torch.cuda.is_available, torch.cuda.mem_get_info = available, memory
    torch.cuda.get_device_name = lambda _=0: first()["name"] + (" MIG 2g.20gb" if first()["parts"] else "")
    torch.cuda.get_device_capability = lambda _=0: tuple(map(int, first()["capability"].split(".")))
    torch.cuda.get_device_properties = lambda _=0: types.SimpleNamespace(uuid=first()["uuid"].partition("-")[2])


def _gpu(gpu):
    from pathlib import Path

    gpu.CONTAINER_FILES = ()  # the tests may run in a container
    if FAKED["wsl"]:
        gpu.WSL = Path(FAKED["wsl"])


PATCHES = {"edgelm.base.machine.gpu": _gpu} if FAKED else {}
if FAKED.get("sees_cuda"):
    PATCHES["torch"] = _torch
if FAKED.get("wsl"):
    import platform

    platform.release = lambda: "6.6.87.2-microsoft-standard-WSL2"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        patch = PATCHES.pop(name, None)
        spec = importlib.util.find_spec(name) if patch else None
        if spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), patch(module))
            PATCHES[name] = patch  # a look for the package is not its import
        return spec


if PATCHES:
    sys.meta_path.insert(0, _Finder())
'''


class Card(NamedTuple):
    """A GPU as nvidia-smi lists it. `parts` are total and free MiB of those that it is divided into."""

    name: str
    total_mib: int
    free_mib: int
    capability: str = "8.6"
    uuid: str = "GPU-1a"
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Machine:
    """What stands in a machine, and what is installed beside edgelm."""

    cards: Sequence[Card]
    driver: str = "580.65.06"
    driver_cuda: int = 13000  # 12040: CUDA 12.4
    packages: Sequence[str] = ()  # of PARTS_OF_TORCH
    sees_cuda: bool = False  # torch is one for CUDA
    wsl: bool = False
    says: str = ""  # nvidia-smi fails with this line


def make(machine: Machine, folder: Path) -> tuple[Path, dict[str, str]]:
    """Make a machine in a folder; return its Python and its environment. Its llama.cpp is that of this environment."""
    tools = folder / ("usr/lib/wsl/lib" if machine.wsl else "bin")
    tools.mkdir(parents=True)
    (tools / "nvidia-smi").write_text(_tool(machine))
    (tools / "nvidia-smi").chmod(0o755)
    python = _installed(folder / "pipx" / "venvs" / "edgelm", machine)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    facts = {
        "gpus": [card._asdict() for card in machine.cards], "driver_cuda": machine.driver_cuda,
        "sees_cuda": machine.sees_cuda, "context_mib": CONTEXT_MIB, "wsl": str(tools) if machine.wsl else "",
    }  # fmt: skip
    places = {f"EDGELM_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("EDGELM_", "CUDA_", "HF_"))}
    environment |= places | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "EDGELM_FAKED": json.dumps(facts),
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{Path(__file__).resolve().parent.parent}", "COLUMNS": "160",
        "HF_HUB_CACHE": str(folder / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # fmt: skip
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    return python, environment


def _installed(folder: Path, machine: Machine) -> Path:
    """Make an environment as pipx does, of links to the packages of this one."""
    venv.create(folder, symlinks=True)
    here = next(folder.glob("lib/python*/site-packages"))
    left_out = ("edgelm_llama", "__editable__", *(name for name in PARTS_OF_TORCH if name not in machine.packages))
    for entry in Path(site.getsitepackages()[0]).iterdir():
        if not entry.name.startswith(left_out) and entry.suffix != ".pth" and not (here / entry.name).exists():
            (here / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def _tool(machine: Machine) -> str:
    """Return an nvidia-smi: a script that knows edgelm's four questions."""
    if machine.says:
        return f"#!/bin/sh\necho '{machine.says}'\nexit 9\n"
    sizes, names, capabilities, listing = [], [], [], []
    for index, card in enumerate(machine.cards):
        mig = "Enabled" if card.parts else "[N/A]"
        row = dict(zip(FIELDS, (card.name, machine.driver, card.total_mib, card.free_mib, card.uuid, mig), strict=True))
        listing.append(", ".join(map(str, row.values())))
        capabilities.append(f"{card.uuid}, {card.capability}")
        names.append(f"GPU {index}: {card.name} (UUID: {card.uuid})")
        names += [f"  MIG 2g.20gb     Device  {part}: (UUID: MIG-{part})" for part in range(len(card.parts))]
        devices = "".join(
            f"<mig_device><index>{part}</index><fb_memory_usage><total>{total} MiB</total><free>{free} MiB</free>"
            "</fb_memory_usage></mig_device>"
            for part, (total, free) in enumerate(card.parts)
        )
        sizes.append(f'<gpu id="0000000{index}:01:00.0"><uuid>{card.uuid}</uuid>{devices}</gpu>')
    answers = {"*compute_cap*": capabilities, '"-L"': names, '"-q -x"': sizes, "*": listing}
    cases = "".join(
        f"{pattern}) cat <<'END'\n" + "\n".join(lines) + "\nEND\n;;\n" for pattern, lines in answers.items()
    )
    return f'#!/bin/sh\ncase "$*" in\n{cases}esac\n'
