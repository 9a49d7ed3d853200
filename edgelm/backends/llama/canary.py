"""The canary: a worker that tries llama.cpp on this machine, and that a crash of it may end.

Owns what is tried: every kernel family that llama.cpp chooses by the processor.
Does not know the consequences: base/machine/facts.py starts it and decides.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.api import Batch, logits_view, start_backend
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.devices import NativePlacement
from edgelm.backends.llama.placement import ON_CPU
from edgelm.backends.llama.random_gguf import ALL_QUANTS, NUM_TOKENS, write_random_gguf
from edgelm.base.machine.facts import Checked, CheckKernels
from edgelm.base.workers.child import run_job

Logits = NDArray[np.float32]

# Tokens in each batch, and all of them give logits: the last matrices of a model are computed for those tokens only.
# AMX has a way of its own for 32 rows, for 17 to 31, for 2 to 16, and for one.
BATCHES = (40, 20, 4, 1, 1)
LEAST_CORRELATION = 0.98  # of each row; correct kernels: above 0.999

GGML_F16, GGML_Q8_0 = 1, 8
LOG_ERROR = 4


class Mode(NamedTuple):
    """A combination of settings that the executor uses, each with kernels of its own."""

    flash_attention: bool
    type_k: int = GGML_F16
    type_v: int = GGML_F16


MODES = (Mode(False), Mode(False, GGML_Q8_0), Mode(True), Mode(True, GGML_Q8_0, GGML_Q8_0))


def check(folder: Path, threads: int, repack: bool) -> str:
    """Decode with every kernel family; return why the logits are wrong. `repack`: compare with plain weights."""
    path = folder / "check.gguf"
    if not path.exists():
        # 1 + 2 * 7 + 1 matrices: every type comes once, the first twice.
        write_random_gguf(path, layers=2, width=256, ffn=512, kv_heads=4, quants=ALL_QUANTS)
    for mode in MODES:
        logits = _all_logits(path, threads, repack, mode)
        if not np.isfinite(logits).all():
            return f"logits are not numbers with {mode}"
        if repack and _correlation(logits, _all_logits(path, threads, False, mode)) < LEAST_CORRELATION:
            return f"logits of repacked weights differ with {mode}"
    return ""


def _all_logits(path: Path, threads: int, repack: bool, mode: Mode) -> Logits:
    """Decode the batches of one sequence: [tokens, vocabulary]."""
    tokens = np.random.default_rng(1).integers(0, NUM_TOKENS, sum(BATCHES)).tolist()
    ends = accumulate(BATCHES)
    with _context(path, threads, repack, mode) as context:
        return np.concatenate(
            [_decode(context, tokens[end - count : end], end - count) for end, count in zip(ends, BATCHES, strict=True)]
        )


def _correlation(a: Logits, b: Logits) -> float:
    """Return the correlation of the two rows that differ most: [rows, vocabulary]."""
    return min(float(np.corrcoef(row, other)[0, 1]) for row, other in zip(a, b, strict=True))


@contextmanager
def _context(path: Path, threads: int, repack: bool, mode: Mode) -> Iterator[L.llama_context_p]:
    model_params = L.llama_model_default_params()
    model_params.use_extra_bufts = repack
    placement = NativePlacement(ON_CPU)  # a GPU would take over the prompt, and its kernels are not the ones to check
    placement.fill(model_params)
    model = L.llama_model_load_from_file(os.fsencode(path), model_params)
    if not model:
        raise SystemExit("llama.cpp refuses the canary's model")
    params = L.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 64, 64
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = int(mode.flash_attention)
    params.type_k, params.type_v = mode.type_k, mode.type_v
    context = L.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp refuses a context with {mode}")
    yield context
    L.llama_free(context)
    L.llama_model_free(model)


def _decode(context: L.llama_context_p, tokens: list[int], start: int) -> Logits:
    """Decode one batch and return a copy of its logits: [tokens, vocabulary]."""
    batch = Batch(len(tokens))
    batch.native.n_tokens = batch.set(0, tokens, start, 0, rows=len(tokens))
    result = L.llama_decode(context, batch.native)
    if result != 0:
        raise SystemExit(f"llama_decode returned {result}")
    return logits_view(context, len(tokens), NUM_TOKENS).copy()


def _log_errors(level: int, text: bytes, _: object) -> None:
    if level == LOG_ERROR:
        sys.stderr.write(text.decode("utf-8", "replace"))


def main() -> int:
    """Answer one request; return the exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here: no core dump
    start_backend()
    log = L.llama_log_callback(_log_errors)  # llama.cpp calls it for as long as this function runs
    L.llama_log_set(log, ctypes.c_void_p())
    return run_job({CheckKernels: lambda job, child: child.send(Checked(check(job.folder, job.threads, job.repack)))})


if __name__ == "__main__":
    sys.exit(main())
