"""How llama.cpp's threads should wait, and how many there should be: ms a token, quiet and beside busy processes.

    python -m tests.bench.bench_threads [--rounds 4] [--python PYTHON]

Policies alternate, each measurement in a process of its own. "edgelm" is what users have (backends/llama/pace.py), the
others hold one policy. "others" is how many cores were busy before the measurements: where it differs from "busy",
foreign jobs shared the machine. A quiet measurement waits for a quiet machine, at most for --patience seconds.
With --python, the engine runs in that interpreter, over the build of llama.cpp that is installed there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WARM_UP_S, MEASURED_S = 1.2, 1.5
QUIET_CORES = 0.2


class Shape(NamedTuple):
    """A model to time; its matrices have the sizes of a real one's."""

    name: str
    layers: int
    width: int
    ffn: int
    kv_heads: int


class Policy(NamedTuple):
    """One way to wait: the user's own variables make edgelm keep it."""

    name: str
    environment: dict[str, str]
    one_thread: bool = False


SHAPES = (Shape("135M", 30, 512, 1536, 4), Shape("1B, eight layers", 8, 2048, 8192, 8))
POLICIES = (
    Policy("spin", {"OMP_WAIT_POLICY": "ACTIVE"}),
    Policy("sleep", {"OMP_WAIT_POLICY": "PASSIVE"}),
    Policy("one thread", {"OMP_WAIT_POLICY": "PASSIVE"}, one_thread=True),
    Policy("edgelm", {}),
)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep that many cores busy. The loops end with this process, however it ends."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1000))"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--patience", type=float, default=30)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "THREADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(decode_ms(Path(options.child[0]), int(options.child[1])))
        return

    from gguf import GGMLQuantizationType as Quant

    from edgelm.backends.llama.random_gguf import write_random_gguf
    from edgelm.base.machine.cpu import usable_cores

    threads = usable_cores().physical
    about = "from edgelm.backends.llama.binding import BUILD as b, cpu_library as c; print(b.package,b.version,c.name)"
    print(run(options.python, {}, "-c", about))
    print(f"{threads} threads; median ms a token (least, greatest)\n")
    names = [policy.name for policy in POLICIES]
    print(f"| model | busy | others | {' | '.join(names)} |\n|---|---|---|{'---|' * len(names)}")
    with tempfile.TemporaryDirectory(prefix="edgelm-bench-") as folder:
        for shape in SHAPES:
            model = Path(folder, f"{shape.layers}.gguf")
            write_random_gguf(
                model,
                layers=shape.layers,
                width=shape.width,
                ffn=shape.ffn,
                kv_heads=shape.kv_heads,
                quants=[Quant.Q4_0],
            )
            for busy in (0, 1, 2):
                times: dict[str, list[float]] = {name: [] for name in names}
                others: list[float] = []
                with busy_processes(busy):
                    for turn in range(options.rounds):
                        for policy in POLICIES if turn % 2 else reversed(POLICIES):
                            others.append(wait_for_quiet(options.patience) if not busy else busy_cores(0.2))
                            count = "1" if policy.one_thread else str(threads)
                            arguments = ("-m", "tests.bench.bench_threads", "--child", str(model), count)
                            times[policy.name].append(float(run(options.python, policy.environment, *arguments)))
                cells = " | ".join(map(cell, times.values()))
                print(f"| {shape.name} | {busy} | {statistics.mean(others):.1f} | {cells} |", flush=True)


def run(python: str, environment: dict[str, str], *arguments: str) -> str:
    """Run this interpreter with our sources, and return its last line."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    variables = kept | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run([python, *arguments], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def decode_ms(model: Path, threads: int) -> float:
    """Return the mean milliseconds of a step of one token, in the executor that users have."""
    from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
    from edgelm.backends.llama.model import LlamaModel
    from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step, Trim

    options = LlamaOptions(context=256, max_sequences=1, threads=threads)
    executor = LlamaExecutor(LlamaModel(model), options)
    sequence = Sequence(0, [1], 1, SamplingParams(temperature=0))
    start, measured, count, position = time.perf_counter(), 0.0, 0, 0
    while measured < MEASURED_S:
        began = time.perf_counter()
        ops = (Trim(0, 0),) if position == 0 else ()
        executor.forward(Step((Chunk(sequence, position, [1], 1, 0),), ops))
        ended = time.perf_counter()
        position = (position + 1) % 64  # a short context, so that the matrices are what is timed
        if began - start > WARM_UP_S:
            measured += ended - began
            count += 1
    executor.close()
    return 1000 * measured / count


def wait_for_quiet(patience_s: float) -> float:
    """Wait until the machine is quiet; return how many cores are busy then."""
    end = time.monotonic() + patience_s
    while (busy := busy_cores(0.2)) > QUIET_CORES and time.monotonic() < end:
        pass
    return busy


def busy_cores(seconds: float) -> float:
    """Return how many cores of the machine are busy just now."""

    def busy_ticks() -> int:
        user, nice, system = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:4])
        return user + nice + system

    before, start = busy_ticks(), time.perf_counter()
    time.sleep(seconds)
    return (busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - start)


def cell(times: list[float]) -> str:
    """Show a median, the least and the greatest."""
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


if __name__ == "__main__":
    main()
