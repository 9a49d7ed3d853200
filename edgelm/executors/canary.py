"""Tries llama.cpp on this machine, in a process that may die of it: `python -m edgelm.executors.canary MODE ...`.

Owns what is tried: every kernel family that llama.cpp chooses by the processor, and the speed of single tokens.
Prints one line of JSON. Does not know what follows from it: `machine` runs this and decides. Nothing imports it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import llama_cpp.llama_cpp as llama
import numpy as np
from gguf import GGMLQuantizationType as Quant
from numpy.typing import NDArray

from edgelm.executors.random_gguf import ALL_QUANTS, NUM_TOKENS, write_random_gguf

Logits = NDArray[np.float32]

NUM_PROMPT = 40  # more than one tile of rows of any kernel
NUM_SINGLE = 4
WARM_UP_S = 0.1
MEASURED_S = 0.4
LIFETIME_S = 90  # an orphan that hangs in native code ends as well
LEAST_CORRELATION = 0.98  # correct kernels: above 0.9999; any one matrix wrong: below 0.9

GGML_F16, GGML_Q8_0 = 1, 8
LOG_ERROR = 4


class Mode(NamedTuple):
    """A combination of settings that the executor uses, each with kernels of its own."""

    flash_attention: bool
    type_k: int = GGML_F16
    type_v: int = GGML_F16


MODES = (Mode(False), Mode(False, GGML_Q8_0), Mode(True), Mode(True, GGML_Q8_0, GGML_Q8_0))


def check(folder: Path, threads: int, repack: bool) -> dict[str, object]:
    """Decode with every kernel family: {"ok"} or {"ok", "reason"}. With `repack`, compare with not repacked."""
    path = folder / "check.gguf"
    if not path.exists():
        # 1 + 2 * 7 + 1 matrices: every type comes once, the first twice.
        write_random_gguf(path, layers=2, width=256, ffn=512, kv_heads=4, quants=ALL_QUANTS)
    for mode in MODES:
        logits = _all_logits(path, threads, repack, mode)
        if not np.isfinite(logits).all():
            return {"ok": False, "reason": f"logits are not numbers with {mode}"}
        if repack and _correlation(logits, _all_logits(path, threads, False, mode)) < LEAST_CORRELATION:
            return {"ok": False, "reason": f"logits of repacked weights differ with {mode}"}
    return {"ok": True}


def speed(folder: Path, threads: int, repack: bool) -> dict[str, object]:
    """Return the mean time of a single token in a model of a 1B model's matrices: {"token_ms"}."""
    path = folder / "speed.gguf"
    if not path.exists():
        write_random_gguf(path, layers=1, width=2048, ffn=8192, kv_heads=8, quants=[Quant.Q4_0])
    with _context(path, threads, repack, Mode(False)) as context:
        _decode_for(context, WARM_UP_S)
        count, seconds = _decode_for(context, MEASURED_S)
    return {"token_ms": 1000 * seconds / count}


def _decode_for(context: llama.llama_context_p, seconds: float) -> tuple[int, float]:
    """Decode single tokens for about that long: how many, and how long it took."""
    start = time.perf_counter()
    count, elapsed = 0, 0.0
    while elapsed < seconds:
        if count % 64 == 0:  # a short context, so that the matrices are what is timed
            llama.llama_memory_clear(llama.llama_get_memory(context), False)
        _decode(context, [count % NUM_TOKENS])
        count += 1
        elapsed = time.perf_counter() - start
    return count, elapsed


def _all_logits(path: Path, threads: int, repack: bool, mode: Mode) -> Logits:
    """Decode a prompt in one batch, then single tokens: [1 + singles, vocabulary]."""
    tokens = np.random.default_rng(1).integers(0, NUM_TOKENS, NUM_PROMPT + NUM_SINGLE).tolist()
    with _context(path, threads, repack, mode) as context:
        rows = [_decode(context, tokens[:NUM_PROMPT])]
        rows += [_decode(context, [token]) for token in tokens[NUM_PROMPT:]]
    return np.stack(rows)


def _correlation(a: Logits, b: Logits) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@contextmanager
def _context(path: Path, threads: int, repack: bool, mode: Mode) -> Iterator[llama.llama_context_p]:
    model_params = llama.llama_model_default_params()
    model_params.use_extra_bufts = repack
    model_params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(os.fsencode(path), model_params)
    if not model:
        raise SystemExit("llama.cpp refuses the canary's model")
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 64, 64
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = int(mode.flash_attention)
    params.type_k, params.type_v = mode.type_k, mode.type_v
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp refuses a context with {mode}")
    yield context
    llama.llama_free(context)
    llama.llama_model_free(model)


def _decode(context: llama.llama_context_p, tokens: list[int]) -> Logits:
    """Decode one batch and return a copy of its last token's logits."""
    array = (ctypes.c_int32 * len(tokens))(*tokens)
    result = llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens)))
    if result != 0:
        raise SystemExit(f"llama_decode returned {result}")
    return np.ctypeslib.as_array(llama.llama_get_logits(context), (NUM_TOKENS,)).copy()


def _log_errors(level: int, text: bytes, _: object) -> None:
    if level == LOG_ERROR:
        sys.stderr.write(text.decode("utf-8", "replace"))


def main() -> None:
    """Run one mode and print its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("check", "speed"))
    parser.add_argument("folder", type=Path, help="for the models; the caller removes it, since this process may die")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--no-repack", action="store_true", help="leave the weights in the file's layout")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is an answer, not a thing to report
    signal.alarm(LIFETIME_S)
    log = llama.llama_log_callback(_log_errors)  # llama.cpp calls it for as long as this function runs
    llama.llama_log_set(log, ctypes.c_void_p())
    llama.llama_backend_init()
    run = check if arguments.mode == "check" else speed
    print(json.dumps(run(arguments.folder, arguments.threads, repack=not arguments.no_repack)))


if __name__ == "__main__":
    main()
