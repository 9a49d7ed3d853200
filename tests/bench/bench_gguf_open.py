"""How long opening a GGUF takes, and how much memory: a vocabulary of 152k tokens and 1,000 tensors.

    python tests/bench/bench_gguf_open.py [FILE.gguf] [--vocab VOCAB.gguf] [--rounds 21]

Without a file, one is written with random tokens, or with those of `--vocab`. The file is in the page cache. Memory is
what Python allocates at most, and what the resident set of a fresh process grows by, pages of the file included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGUFValueType

from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.gguf_parse import Array
from edgelm.checkpoints.llama_checks import check_for_llama
from edgelm.checkpoints.summary import model_summary

NUM_TOKENS = 151_936
NUM_TENSORS = 1_001
LAYERS = 111  # of nine tensors each, and two more


def write_file(path: Path, vocab: Path | None) -> None:
    """Write a file of tiny tensors with a large vocabulary and its merges."""
    tokens, merges = texts(vocab)
    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(32768)
    writer.add_embedding_length(8)
    writer.add_head_count(1)
    writer.add_key_value("tokenizer.ggml.tokens", tokens, GGUFValueType.ARRAY, GGUFValueType.STRING)
    writer.add_key_value("tokenizer.ggml.token_type", [1] * len(tokens), GGUFValueType.ARRAY, GGUFValueType.INT32)
    writer.add_key_value("tokenizer.ggml.merges", merges, GGUFValueType.ARRAY, GGUFValueType.STRING)
    parts = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down".split()
    names = ["output_norm"] + [f"blk.{i}.{part}" for i in range(LAYERS) for part in parts]
    assert len(names) + 1 == NUM_TENSORS
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    for name in names:
        writer.add_tensor(f"{name}.weight", np.zeros(8 if "norm" in name else (8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def texts(vocab: Path | None) -> tuple[list[str], list[str]]:
    if vocab is None:
        rng = random.Random(0)
        tokens = [f"{i}{'x' * rng.randrange(8)}" for i in range(NUM_TOKENS)]
        return tokens, [f"{a} {b}" for a, b in pairwise(tokens)]
    with open_gguf(vocab) as gguf:
        found = [gguf.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges")]
        tokens, merges = ([str(text) for text in array] for array in found if isinstance(array, Array))
    return tokens, merges


def resident() -> int:
    """Return the resident set in bytes: that of now where the system says it, else the largest so far."""
    now = Path("/proc/self/statm")
    if now.exists():
        return int(now.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_memory(path: Path) -> dict[str, int]:
    """Open the file in this process, for the first time in it."""
    before = resident()
    with open_gguf(path) as gguf:
        grown = resident() - before
        check_for_llama(gguf)
        checked = resident() - before
    tracemalloc.start()
    open_gguf(path).close()
    return {"rss": grown, "checked": checked, "python": tracemalloc.get_traced_memory()[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--vocab", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--memory", action="store_true", help="measure only the memory, print JSON")
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(measure_memory(args.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "large.gguf"
        if args.file is None:
            write_file(path, args.vocab)
        report(path, args.rounds)


def report(path: Path, rounds: int) -> None:
    """Print what opening, and the two uses of an open file, cost."""
    times: dict[str, list[float]] = {"open": [], "summary": [], "checks": []}
    for _ in range(rounds):
        start = time.perf_counter()
        gguf = open_gguf(path)
        times["open"].append(time.perf_counter() - start)
        with gguf:
            start = time.perf_counter()
            model_summary(gguf)
            times["summary"].append(time.perf_counter() - start)
            start = time.perf_counter()
            check_for_llama(gguf)
            times["checks"].append(time.perf_counter() - start)
            tokens = gguf.metadata.get("tokenizer.ggml.tokens", "")
            size = f"{gguf.size:,} bytes, {len(gguf.tensors):,} tensors, "
            size += f"{len(tokens) if isinstance(tokens, Array) else 0:,} tokens"
    print(f"{path.name}: {size}")
    for what, taken in times.items():
        low, high = min(taken) * 1e3, max(taken) * 1e3
        print(f"{what:8} {statistics.median(taken) * 1e3:7.1f} ms (of {len(taken)}: {low:.1f} to {high:.1f})")
    command = [sys.executable, __file__, "--memory", str(path)]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    memory = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    allocated, grown, checked = (memory[name] / 2**20 for name in ("python", "rss", "checked"))
    print(
        f"memory   {allocated:.1f} MiB allocated, resident set grew by {grown:.1f} MiB, with the checks {checked:.1f}"
    )


if __name__ == "__main__":
    main()
