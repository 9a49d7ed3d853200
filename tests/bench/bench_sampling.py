"""Time the numpy sampler on one thread: `python tests/bench/bench_sampling.py [REPEATS]`, from the checkout.

Prints a table in microseconds a row: the median, and the 10th and 90th percentile.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgelm.engine.core import SamplingParams
from edgelm.engine.sampling.history import History
from edgelm.engine.sampling.reference import Workspace, sample, uniform

VOCABULARIES = 32_000, 128_256, 151_936
DEVIATION = 4.0  # of the logits
NUM_ROWS = 8  # distinct rows, taken in turn: together larger than most caches of one core, as after a forward pass
PROMPT_LEN, ANSWER_LEN = 2_000, 500
REPEATS = 300

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_k 40": SamplingParams(top_k=40),
    "top_p 0.95, t 1": SamplingParams(top_p=0.95),
    "top_p 0.95, t 0.8": SamplingParams(top_p=0.95, temperature=0.8),
    "top_p 0.95, t 2": SamplingParams(top_p=0.95, temperature=2),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "t 0.8, k 40, p 0.95, min_p": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=0.5),
    "greedy, mask": SamplingParams(temperature=0),
    "greedy, 5 logprobs": SamplingParams(temperature=0, num_logprobs=5),
    "all: mask, penalties, 5 lp": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1, num_logprobs=5
    ),
}


def cpu_name() -> str:
    """Return the processor's name, as well as the system tells it."""
    if sys.platform == "darwin":
        return subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True
        ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.partition(":")[::2] for line in lines if ":" in line)
    names = {name.strip(): value.strip() for name, value in fields.items()}
    kind = f"{names.get('vendor_id', '')} family {names.get('cpu family', '?')} model {names.get('model', '?')}"
    return f"{names.get('model name', platform.machine())} ({kind})"


def times_us(num_vocab: int, name: str, repeats: int) -> NDArray[np.float64]:
    """Return the time of each of `repeats` calls."""
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((NUM_ROWS, num_vocab)) * DEVIATION).astype(np.float32)
    masks = rng.integers(-(2**31), 2**31, -(-num_vocab // 32)).astype(np.int32)
    history = History(rng.integers(0, num_vocab, PROMPT_LEN).tolist())
    history.extend(rng.integers(0, num_vocab, ANSWER_LEN).tolist())
    work = Workspace(num_vocab)
    params = CASES[name]
    mask = masks if "mask" in name else None
    times = np.empty(repeats)
    for i in range(-NUM_ROWS, repeats):
        start = time.perf_counter_ns()
        sample(rows[i % NUM_ROWS], params, i + NUM_ROWS, history, mask, work)
        times[i] = (time.perf_counter_ns() - start) / 1000
    return times


def main() -> None:
    """Print the table."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    print(f"{cpu_name()}; Python {platform.python_version()}, numpy {np.__version__}; {repeats} calls each")
    start = time.perf_counter_ns()
    for position in range(1000):
        uniform(2**63, position, 0)
    print(f"uniform: {(time.perf_counter_ns() - start) / 1e6:.1f} us (contained in every case with a draw)")
    print(f"{'us a row: median (p10..p90)':28}" + "".join(f"{f'vocabulary {n}':>26}" for n in VOCABULARIES))
    for name in CASES:
        cells = []
        for num_vocab in VOCABULARIES:
            low, median, high = np.percentile(times_us(num_vocab, name, repeats), (10, 50, 90))
            cells.append(f"{median:.1f} ({low:.1f}..{high:.1f})")
        print(f"{name:28}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
