"""Check compiling in several processes, with Triton's compiler and without a GPU.

test_compiling.py runs this as a child process, where kernels are not interpreted, with an empty folder for Triton's
cache: `python -m tests.backends.torch.compiling_checks CHECK`. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.runtime import driver

from edgelm.backends.torch import compiling
from edgelm.backends.torch.compilation import Compilation, recording
from edgelm.base.errors import DeviceError
from edgelm.base.workers.parent import Worker
from edgelm.kernels import gpu_target
from edgelm.kernels.activation import Gate
from edgelm.kernels.activation.kernel import gated, softcap
from edgelm.kernels.norm.kernel import rms_norm
from tests.backends.torch import bad_kernels
from tests.backends.torch.fake_gpu import FakeDriver

LIMIT_S = 1.0  # of a kernel


def needed() -> list[Compilation]:
    """Return the kernels of some ops, each of which is launched twice."""
    with recording() as found:
        for _ in range(2):
            for dtype in (torch.float16, torch.bfloat16):
                x = torch.zeros((2, 64), dtype=dtype)
                gated(x, Gate("silu"))
                softcap(x, 30.0)
                rms_norm(x, torch.zeros(64), 1e-5, None, dtype)
    return found


def run(compilations: list[Compilation], workers: int = 2, **options: bool) -> dict[str, Any]:
    progress: list[tuple[int, int]] = []
    error = None
    try:
        compiling.compile_kernels(compilations, lambda *numbers: progress.append(numbers), workers, **options)
    except DeviceError as caught:
        error = str(caught)
    return {"progress": progress, "error": error}


def good() -> dict[str, Any]:
    """Compile, then compile again, then launch each kernel as a start does."""
    found = needed()
    first = run(found)
    with patch.object(compiling, "Worker", side_effect=AssertionError("nothing is left to be compiled")):
        second = run(needed())
    hits: list[bool] = []
    with patch.object(knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)):
        for compilation in found:
            compilation.run()
    return {"names": [compilation.name for compilation in found], "first": first, "second": second, "hits": hits}


def damaged() -> dict[str, Any]:
    """Compile, damage each entry in one of four ways, and launch each kernel as a start does that leaves them to it."""
    found, folder = needed(), Path(os.environ["TRITON_CACHE_DIR"])
    for compilation in found:
        compilation.run()
    for file in folder.glob("*/gated_kernel.json"):
        file.write_bytes(b"")
    for file in folder.glob("*/softcap_kernel.json"):
        file.write_bytes(bytes(file.stat().st_size))
    deleted, emptied = folder.glob("*/rms_norm_kernel.cubin")
    deleted.unlink()
    emptied.write_bytes(b"")
    done = [compilation.is_done for compilation in found]
    for compilation in found:
        compilation.run()
    return {"done": done, "again": [compilation.is_done for compilation in found]}


def binaries() -> dict[str, Any]:
    """Read the probe of a dot where Triton stores binaries only, as it is compiled, and from the cache."""
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    plain = gpu_target.kwidth.__wrapped__
    widths = [plain(), plain()]
    return {"widths": widths, "stages": sorted(gpu_target._compiled_dot_probe().asm)}


def probe() -> dict[str, Any]:
    """Read the probe of a dot each time after one of its files was damaged, and once more."""
    plain, folder = gpu_target.kwidth.__wrapped__, Path(os.environ["TRITON_CACHE_DIR"])
    widths = [plain()]
    damages: dict[str, Callable[[Path], object]] = {
        "ttgir": lambda file: file.write_bytes(b""),
        "json": lambda file: file.write_bytes(b""),
        "cubin": Path.unlink,
    }
    for suffix, damage in damages.items():
        (file,) = folder.glob(f"*/dot_probe.{suffix}")
        damage(file)
        widths += [plain(), plain()]
    return {"widths": widths}


def bad() -> dict[str, Any]:
    """Compile kernels of which one has an error, then some of which one kills its process."""
    found = needed()
    with recording() as bad:
        bad_kernels.wrong_kernel[(1,)](torch.zeros(4))
    dead = replace(found[0], module=bad_kernels.__name__, name="deadly_kernel")
    wrong = run([*bad, *found])
    others = run([*bad, *found], must=False)
    num_done = sum(compilation.is_done for compilation in found)
    with patch.object(Compilation, "is_done", False):  # this process must not look at the kernel
        deadly = run([dead, *found])
    return {"wrong": wrong["error"], "deadly": deadly["error"], "others": (others["error"], num_done, len(found))}


def assembler(folder: Path) -> Path:
    """Let Triton take an assembler that never ends; return the file of the processes that it had."""
    pids, path = folder / "pids", folder / "ptxas"
    version = f'if [ "$1" = --version ]; then exec {knobs.nvidia.ptxas_blackwell.path} --version; fi'
    path.write_text(f"#!/bin/sh\n{version}\necho $$ >> {pids}\nexec sleep 1000\n")
    path.chmod(0o700)
    for name in ("PTXAS", "PTXAS_BLACKWELL"):  # that of sm_90, by the release of Triton
        os.environ[f"TRITON_{name}_PATH"] = str(path)
    return pids


def endless() -> dict[str, Any]:
    """Compile kernels with an assembler that never ends; return which of its processes are left."""
    pids = assembler(Path(os.environ["TRITON_CACHE_DIR"]))
    receive = Worker.receive

    def once_begun(worker: Worker, timeout_s: float | None = None) -> Any:
        wait_for(pids, 2)  # the start of a process is not to be counted here: it takes seconds
        return receive(worker, timeout_s)

    with patch.object(compiling, "LIMIT_S", LIMIT_S), patch.object(Worker, "receive", once_begun):
        return {**run(needed()), "pids": pids.read_text().split()}


def wait_for(pids: Path, number: int) -> None:
    """Wait until so many assemblers run."""
    while not pids.exists() or len(pids.read_text().split()) < number:
        time.sleep(0.05)


def abandoned() -> dict[str, Any]:
    """Do as `endless`, then end this process while such an assembler runs."""
    before = endless()
    pids = Path(os.environ["TRITON_CACHE_DIR"]) / "pids"

    def end() -> None:
        wait_for(pids, 4)
        print(json.dumps({**before, "pids": pids.read_text().split()}), flush=True)
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    return run(needed())


CHECKS = {"good": good, "damaged": damaged, "binaries": binaries, "probe": probe, "bad": bad, "abandoned": abandoned}

if __name__ == "__main__":
    driver.set_active(FakeDriver())
    print(json.dumps(CHECKS[sys.argv[1]]()))
