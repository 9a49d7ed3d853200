"""The compilations of kernels that a start needs: found without a GPU, and done without one.

    python -m tests.backends.torch.compilations [--processes N] [MODEL] [KERNEL ..]

compiles the kernels of a model of shape_models.py for sm_90, all or those of some names, as a start does on a GPU, and
prints how many were in Triton's cache on disk; with several processes, how many are there at the end. test_warm_up.py
runs it twice. Knows nothing of models and processes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from unittest.mock import patch

import torch
from triton import knobs

from edgelm.backends.torch.compilation import recording
from edgelm.backends.torch.compiling import compile_kernels
from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from tests.backends.torch.fake_gpu import FakeGpu
from tests.backends.torch.shape_models import MODELS


def main(model: str, kernels: list[str], processes: int) -> None:
    """Compile the kernels of a model, and print what was found in the cache."""
    hits: list[bool] = []

    def count(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    with FakeGpu(), torch.inference_mode(), recording() as found:
        TorchExecutor(MODELS[model](), TorchOptions(context=8192, capacity=65536, max_tokens=1024)).close()
    some = [compilation for compilation in found if not kernels or compilation.name in kernels]
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    if processes > 1:
        compile_kernels(some, lambda _done, _total: None, processes)
        some, hits = [], [compilation.is_done for compilation in some]
    with patch.object(knobs.compilation, "listener", count):
        for compilation in some:
            compilation.run()
    result = {
        "model": model, "kernels": len(found), "compiled": hits.count(False), "in_cache": hits.count(True),
        "seconds": round(time.perf_counter() - start, 1), "cpu_seconds": round(sum(os.times()[:4]) - cpu_start, 1),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("model", nargs="?", default="llama_8b")
    parser.add_argument("kernels", nargs="*")
    arguments = parser.parse_args()
    main(arguments.model, arguments.kernels, arguments.processes)
