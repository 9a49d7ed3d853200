"""Memory of edgelm's engine against a bare loop over llama.cpp: the same weights and settings, each in a new process.

    python -m tests.bench.bench_memory MODEL.gguf [--ctx 2048]

Prints the peak resident memory, and what is resident after 64 decoded tokens, in MiB. Pages of the mapped file count
as resident; the kernel takes them back under pressure. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

TOKENS = 64
PROMPT = list(range(100, 400))


def resident() -> dict[str, float]:
    """Return peak and present resident memory of this process, and how much of it is not file pages, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) / 1024 for name, key in KEYS.items()}


KEYS = {"peak": "VmHWM", "after": "VmRSS", "anonymous": "RssAnon"}


def run_bare(path: Path, ctx: int) -> None:
    from edgelm.backends.llama.binding import L
    from tests.bare import BareLoop

    L.llama_backend_init()
    params = L.llama_model_default_params()
    params.load_mode = L.LLAMA_LOAD_MODE_MMAP
    model = L.llama_model_load_from_file(str(path).encode(), params)
    BareLoop(model, ctx, threads=2).greedy(PROMPT, TOKENS)


def run_engine(path: Path, ctx: int) -> None:
    from edgelm.backends.build import build
    from edgelm.base.config import Settings
    from edgelm.engine.core import SamplingParams

    loaded = build(path, Settings(ctx=ctx, threads=2))

    async def answer() -> None:
        async for _ in loaded.engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS)):
            pass

    asyncio.run(answer())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--side", choices=("bare", "engine"))
    args = parser.parse_args()
    if args.side:
        (run_bare if args.side == "bare" else run_engine)(args.model, args.ctx)
        print(json.dumps(resident()))
        return
    print(f"{args.model.stem}, {args.model.stat().st_size / 2**20:.0f} MiB, context {args.ctx}")
    for side in ("bare", "engine"):
        command = [sys.executable, "-m", "tests.bench.bench_memory", str(args.model), "--ctx", str(args.ctx)]
        done = subprocess.run([*command, "--side", side], stdout=subprocess.PIPE, check=True, timeout=300)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{side:>7}: " + ", ".join(f"{name} {size:7.0f} MiB" for name, size in found.items()), flush=True)


if __name__ == "__main__":
    main()
