"""Draw a million tokens with the device's sampler and with the numpy reference, and compare every one.

    python -m tests.bench.bench_device_sampling [DRAWS] [--implementation reference|triton] [--device cpu|cuda]

Prints how many differ for each vocabulary, and fails where a difference is not at a boundary of the distribution, as
float64 has it, or where 1 draw in 1,000 or more differs.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import secrets
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from edgelm.backends.torch.sampler import DeviceSampler, RowRequest
from edgelm.engine.core import SamplingParams
from edgelm.engine.sampling.history import History
from edgelm.engine.sampling.reference import Workspace, sample, uniform
from edgelm.kernels.choice import interpreting
from tests.engine.sampling.slow import exact

VOCABULARIES = {200: 0.66, 1_000: 0.336, 32_000: 0.0035, 128_256: 0.0005}  # with its share of the draws
ROWS = 64  # of a launch
TURNS = 5  # launches with the same logits
NEAR = 1e-5

GRID = tuple(itertools.product((0.6, 1.0, 1.5), (0, 1, 40, 150), (1.0, 0.95, 0.5), (0.0, 0.05), (False, True)))


def params_of(rng: np.random.Generator, num_vocab: int) -> SamplingParams:
    """Return a point of the grid: temperature, top_k, top_p, min_p, and whether there are bias and penalties."""
    temperature, top_k, top_p, min_p, touched = GRID[rng.integers(len(GRID))]
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=1.2 if touched else 1.0,
        frequency_penalty=0.3 if touched else 0.0,
        presence_penalty=0.5 if touched else 0.0,
        logit_bias=((int(rng.integers(num_vocab)), 2.0),) if touched else (),
        seed=int(rng.integers(2**63)),
    )


def logits_of(rng: np.random.Generator, num_vocab: int) -> NDArray[np.float32]:
    """Return rows of three deviations, half of them with ties, with a tenth of their tokens impossible."""
    values = rng.standard_normal((ROWS, num_vocab), dtype=np.float32) * rng.choice([1.0, 4.0, 10.0], (ROWS, 1))
    values[::2] = values[::2].round(1)
    values[rng.random(values.shape) < 0.1] = -np.inf
    return values.astype(np.float32)


def batches(rng: np.random.Generator, num_vocab: int) -> Iterator[tuple[NDArray[np.float32], list[RowRequest]]]:
    """Yield logits and requests without end."""
    while True:
        logits = logits_of(rng, num_vocab)
        params = [params_of(rng, num_vocab) for _ in range(ROWS)]
        histories = [History(rng.integers(0, num_vocab, 30).tolist()) for _ in range(ROWS)]
        for history in histories:
            history.extend(history.ids[:9].tolist())
        for _ in range(TURNS):
            position = int(rng.integers(2**31))
            yield (logits, [RowRequest(each, position + i, histories[i]) for i, each in enumerate(params)])


def distance(logits: NDArray[np.float32], request: RowRequest) -> float:
    """Return how far the draw is from a boundary between tokens, or a sum or ratio from its bound, in float64."""
    params, history = request.params, request.history
    assert history is not None
    answer = [int(i) for i, n in zip(history.ids, history.counts, strict=True) for _ in range(n)]
    found = exact(logits, params, history.ids.tolist(), answer)
    assert found is not None
    u = uniform(params.seed, request.position, params.choice)
    return min(float(np.abs(found.ends - u).min()), found.margin)


def compare(
    num_vocab: int, draws: int, device: str, implementation: str, rng: np.random.Generator
) -> tuple[int, float]:
    """Return how many of the draws differ, and the greatest distance of one that does."""
    sampler = DeviceSampler(num_vocab, ROWS, device, implementation)
    work = Workspace(num_vocab)
    other, farthest, left = 0, 0.0, draws
    for logits, requests in batches(rng, num_vocab):
        got = sampler.sample(torch.from_numpy(logits).to(device), requests, None)
        for row, request, one in list(zip(logits, requests, got, strict=True))[:left]:
            want = sample(row, request.params, request.position, request.history, work=work)
            if one.id != want.id:
                other += 1
                farthest = max(farthest, distance(row, request))
        left -= min(left, ROWS)
        if not left:
            return other, farthest
    raise AssertionError


def main() -> int:
    """Print the table; return 1 where the samplers disagree."""
    parser = argparse.ArgumentParser(description="Compare the device's sampler with the numpy reference.")
    parser.add_argument("draws", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--implementation", default="reference")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    torch.set_num_threads(1)
    kind = "in its interpreter" if args.implementation == "triton" and interpreting() else f"on {args.device}"
    print(f"implementation: {args.implementation}, {kind}; torch {torch.__version__}, numpy {np.__version__}")
    print(f"machine: {platform.machine()}; seed {seed}; grid of {len(GRID)} parameters, {ROWS} rows a launch")
    print(f"{'vocabulary':>10} {'draws':>10} {'differ':>7} {'farthest':>9} {'seconds':>8}", flush=True)
    total = others = 0
    worst = 0.0
    for num_vocab, part in VOCABULARIES.items():
        draws = round(args.draws * part)
        start = time.perf_counter()
        other, farthest = compare(num_vocab, draws, args.device, args.implementation, rng)
        print(f"{num_vocab:10,} {draws:10,} {other:7} {farthest:9.1e} {time.perf_counter() - start:8.0f}", flush=True)
        total, others, worst = total + draws, others + other, max(worst, farthest)
    good = worst < NEAR and others * 1000 < max(total, 1000)
    print(f"{others} of {total:,} draws differ ({others / total:.1e}), the farthest from a boundary by {worst:.1e}")
    print("equal, but at boundaries" if good else "NOT EQUAL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
