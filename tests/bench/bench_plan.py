"""Memory as edgelm predicts it, against what the engine's process then takes: each model, context and KV mode anew.

    python -m tests.bench.bench_plan MODEL.gguf … [--ctx 1024 4096 16384] [--kv f16 int8 k8v4]

`predicted` is the engine's own number before it loads (formulas over the header), `sizes` the same with llama.cpp's
own buffer sizes, as `edgelm plan` has it. Both are for a full context. `64` is what is resident after a prompt of 300
and 64 decoded tokens, `full` after the whole cache was filled and a last full chunk of a prompt computed in it, `peak`
the most at any time. The cache is filled by one part that is computed, and copies of it for the other sequences (8, or
one for each 512 cells), so that the last chunk attends to all cells; it samples as many rows as a step may have. In
MiB. Linux only. This process lacks what an engine that serves has beside: a tokenizer, and workers for templates and
grammars. Engines that serve are measured by tests/server/test_predicted_memory.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

MIB = 2**20
TOKENS = 64
TOLERANCE = 0.10
SLACK_MIB = 50


def status(name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(path: Path, ctx: int, kv: str) -> dict[str, float]:
    """Run one engine in this process; return predicted and measured MiB."""
    from edgelm.backends.build import build
    from edgelm.backends.llama.build import plan_context
    from edgelm.base.config import Settings
    from edgelm.base.workers.messages import EngineJob
    from edgelm.checkpoints.gguf import open_gguf
    from edgelm.checkpoints.summary import model_facts
    from edgelm.engine.core import SamplingParams

    settings = Settings(ctx=ctx, kv=kv, threads=2, parallel=max(8, ctx // 512))
    with open_gguf(path) as gguf:
        plan = plan_context(path, model_facts(gguf), settings)
    option = plan.require()
    loaded = build(EngineJob(model=path, settings=settings))
    engine = loaded.engine

    async def answer(length: int) -> None:
        prompt = [random.randrange(100, 30_000) for _ in range(length)]
        async for _ in engine.submit(prompt, SamplingParams(temperature=0.8, top_k=40, max_tokens=TOKENS)):
            pass

    asyncio.run(answer(300))
    found = {"64": status("VmRSS"), "peak": status("VmHWM")}
    fill_context(engine._executor, ctx)
    found["full"] = status("VmRSS")
    found["peak"] = max(found["peak"], status("VmHWM"))
    found["predicted"] = option.total_bytes / MIB
    found["predicted_peak"] = max(plan.weights.load_peak, option.total_bytes) / MIB
    engine.close()
    return found


def fill_context(executor, ctx: int) -> None:  # type: ignore[no-untyped-def]
    """Fill the cache with equal parts for all sequences, compute one more chunk, and leave it as the peak."""
    from edgelm.engine.core import Chunk, Drop, Load, SamplingParams, Save, Sequence, Step, Trim

    sequences = executor.info.max_sequences
    part = ctx // sequences

    def run(slot: int, start: int, count: int, rows: int = 1) -> None:
        tokens = [random.randrange(100, 30_000) for _ in range(count)]
        seq = Sequence(slot, tokens, count, SamplingParams(temperature=0))
        executor.forward(Step((Chunk(seq, start, tokens, rows, slot),)))

    last = sequences - 1
    executor.forward(Step((), tuple(Trim(slot, 0) for slot in range(sequences))))
    run(0, 0, part)
    executor.forward(Step((), (Save(0, 1), *(Load(1, slot) for slot in range(1, last)), Drop(1))))
    forget_peak()  # the copy was this benchmark's own
    run(last, 0, part, executor.info.max_rows)


def exact_sizes(path: Path, ctx: int, kv: str) -> float:
    """Return what `edgelm plan` says, in MiB."""
    command = [sys.executable, "-m", "edgelm", "plan", str(path), "--ctx", str(ctx), "--kv", kv, "--json"]
    said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
    assert said["sizes"] == "llama.cpp", said
    return float(said["chosen"]["total_bytes"]) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--ctx", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--kv", nargs="+", default=["f16", "int8", "k8v4"])
    parser.add_argument("--one", action="store_true", help="measure in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.models[0], args.ctx[0], args.kv[0])))
        return
    columns = ("predicted", "sizes", "64", "full", "off", "pred. peak", "peak", "off")
    print(f"{'model':<22}{'ctx':>7} {'kv':<6}" + "".join(f"{name:>11}" for name in columns))
    failed = 0
    for model in args.models:
        for ctx in args.ctx:
            for kv in args.kv:
                command = [sys.executable, "-m", "tests.bench.bench_plan", str(model), "--ctx", str(ctx), "--kv", kv]
                done = subprocess.run([*command, "--one"], stdout=subprocess.PIPE, check=True, timeout=900)
                found = json.loads(done.stdout.splitlines()[-1])
                exact = exact_sizes(model, ctx, kv)
                pairs = [(found["predicted"], found["full"]), (exact, found["full"])]
                pairs.append((found["predicted_peak"], found["peak"]))
                bad = [abs(said - true) > TOLERANCE * true + SLACK_MIB for said, true in pairs]
                failed += any(bad)
                numbers = [found["predicted"], exact, found["64"], found["full"], found["predicted"] - found["full"]]
                numbers += [found["predicted_peak"], found["peak"], found["predicted_peak"] - found["peak"]]
                row = "".join(f"{number:>11,.0f}" for number in numbers)
                print(f"{model.stem:<22}{ctx:>7} {kv:<6}{row}{'  OUTSIDE' if any(bad) else ''}", flush=True)
    print(f"{failed} outside of 10 % + {SLACK_MIB} MiB")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
