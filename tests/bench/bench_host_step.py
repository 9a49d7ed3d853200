"""What a decode step of the torch engine takes on the host: `python -m tests.bench.bench_host_step [--context N]`.

All but the launches of kernels and the model: planning one step ahead, filling the step's buffers, staging what the
sampler needs, committing. Prints medians in microseconds for 1, 4 and 16 sequences. Runs on the CPU, where a copy to
the device is none.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator

import torch

from edgelm.backends.torch.batch import StepBuffers, bucket_of
from edgelm.core import ExecutorInfo, Sampled, SamplingParams, Sequence, Step
from edgelm.engine.clock import StepClock
from edgelm.engine.kv_paged import PagedKV
from edgelm.engine.scheduler import Scheduler
from edgelm.kernels.cache import BLOCK_LEN
from edgelm.sampling.device import DeviceSampler, RowRequest
from edgelm.sampling.host import first_position

VOCABULARY = 128_256
PROMPT = 500
STEPS = 400
MAX_SEQUENCES = 16
MAX_ROWS = 64
PARTS = "plan ahead", "fill", "stage", "commit"


def measure(batch: int, context: int) -> list[float]:
    """Return the median microseconds of each part."""
    info = ExecutorInfo(
        engine="torch",
        device="none",
        num_vocab=VOCABULARY,
        context=context,
        capacity=context * MAX_SEQUENCES,
        max_tokens=512,
        max_rows=MAX_ROWS,
        max_sequences=MAX_SEQUENCES,
        kv_bytes_per_token=1,
        block_len=BLOCK_LEN,
        runs_ahead=True,
    )
    scheduler = Scheduler(info, PagedKV(info, BLOCK_LEN), StepClock())
    buffers = StepBuffers(
        max_tokens=512,
        max_sequences=MAX_SEQUENCES,
        max_rows=MAX_ROWS,
        max_blocks=context // BLOCK_LEN,
        block_len=BLOCK_LEN,
        device=torch.device("cpu"),
    )
    sampler = DeviceSampler(VOCABULARY, MAX_ROWS, "cpu", "reference")
    for number in range(batch):
        prompt = list(range(PROMPT))
        scheduler.add(Sequence(number, prompt, PROMPT, SamplingParams(temperature=0.8, top_p=0.95, seed=number)))
    step = scheduler.plan()
    while step and step.num_rows < batch:
        scheduler.commit(step, _rows(step))
        step = scheduler.plan()
    assert step
    last_rows = {number: number for number in range(batch)}
    times: list[list[float]] = []
    for _ in range(STEPS):
        begun = [time.perf_counter()]
        ahead = scheduler.plan_ahead(step)
        assert ahead
        begun.append(time.perf_counter())
        with torch.inference_mode():
            buffers.fill(ahead, bucket_of(ahead), last_rows)
            begun.append(time.perf_counter())
            sampler._stage(list(_requests(ahead)), None, 0, ahead.num_rows)
        begun.append(time.perf_counter())
        scheduler.commit(step, _rows(step))
        begun.append(time.perf_counter())
        times.append([1e6 * (end - start) for start, end in itertools.pairwise(begun)])
        step = ahead
    return [statistics.median(each) for each in zip(*times, strict=True)]


def _rows(step: Step) -> list[list[Sampled]]:
    return [[Sampled(7)] * min(chunk.rows, 1) for chunk in step.chunks]


def _requests(step: Step) -> Iterator[RowRequest]:
    for chunk in step.chunks:
        for row in range(chunk.rows):
            yield RowRequest(chunk.seq.params, first_position(chunk) + row, None, chunk.draft[:row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--context", type=int, default=32_768)
    context = parser.parse_args().context
    print(f"{'sequences':>9}" + "".join(f"{part:>12}" for part in (*PARTS, "all")) + "   us, medians")
    for batch in (1, 4, 16):
        parts = measure(batch, context)
        print(f"{batch:>9}" + "".join(f"{each:>12.1f}" for each in (*parts, sum(parts))))


if __name__ == "__main__":
    main()
