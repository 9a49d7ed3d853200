"""The sampling kernels against plain torch, and the parts that both share with the numpy reference.

tests/backends/torch/test_sampler.py tests plain torch against that reference, with many draws. The interpreter takes a
second per row, so the kernels get few rows, with chunks and lists so small that every path is taken.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import replace

import numpy as np
import pytest
import torch

from edgelm.backends.torch.sampler import DeviceSampler, RowRequest
from edgelm.engine.core import NOT_A_TOKEN, SamplingParams
from edgelm.engine.sampling.history import History
from edgelm.engine.sampling.reference import uniform
from edgelm.kernels import sampling
from edgelm.kernels.sampling import Answer, Batch, Word, reference
from tests.counts import Count

# The interpreter computes with numpy, which warns of values that a GPU passes on as inf or NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]

ROUNDS = Count(test=1, soak=25)
SHARE = Count(test=2, soak=1)  # every n-th kind; the other capacity gets other kinds
NUM_VOCAB = 150  # three chunks, the last one not full
TILE = 128  # no divisor of a list's length, or of the vocabulary


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print("seed", seed)
    return np.random.default_rng(seed)


def test_the_random_numbers_are_philox(rng: np.random.Generator) -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, *(int(x) for x in rng.integers(2**63, size=20))]
    positions = [int(x) for x in rng.integers(2**32, size=len(seeds))]
    choices = [0, 2**32 - 1, *(int(x) for x in rng.integers(2**32, size=len(seeds) - 2))]
    signed = torch.tensor([seed - (seed >> 63 << 64) for seed in seeds])
    got = reference.uniform(signed, torch.tensor(positions), torch.tensor(choices))
    assert [x * 2.0**-24 for x in got.tolist()] == list(map(uniform, seeds, positions, choices))


def test_a_share_is_exact(rng: np.random.Generator) -> None:
    totals = [2**43, 2**62, 2**62 - 1, *(int(x) for x in rng.integers(2**43, 2**62, size=50))]
    shares = [2**24 - 1, 2**24 - 1, 0, *(int(x) for x in rng.integers(2**24, size=50))]
    got = reference.share(torch.tensor(totals), torch.tensor(shares))
    assert got.tolist() == [total * u >> 24 for total, u in zip(totals, shares, strict=True)]


def test_composites_are_in_the_order_of_likelihood(rng: np.random.Generator) -> None:
    values = [-math.inf, -3.4e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, 2.0, 3.4e38, *rng.standard_normal(30).tolist()]
    values = rng.permutation(np.array(values, dtype=np.float32))
    order = reference.composites(torch.from_numpy(values[None]))[0].argsort(descending=True)
    assert order.tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))


def test_weights_of_the_largest_vocabulary_do_not_overflow() -> None:
    every = reference.weights(torch.zeros(sampling.MAX_VOCAB))
    assert int(every.sum()) == 2**62
    assert reference.weights(torch.tensor([-math.inf])).tolist() == [0]


def kinds(rng: np.random.Generator) -> list[SamplingParams]:
    """Return parameters of every kind."""
    bias = tuple((int(i), float(x)) for i, x in zip(rng.integers(0, NUM_VOCAB, 5), rng.normal(0, 3, 5), strict=True))
    params = [
        SamplingParams(temperature=0, num_logprobs=3),
        SamplingParams(temperature=0.7, num_logprobs=0),
        SamplingParams(min_p=0.1, temperature=2),
        SamplingParams(top_k=1, temperature=3),
        SamplingParams(top_k=30, temperature=4, num_logprobs=20),
        SamplingParams(top_k=120, top_p=0.9),
        SamplingParams(top_p=0.4),
        SamplingParams(top_p=0.99, temperature=4),
        SamplingParams(top_p=0.9, min_p=0.05, top_k=20, logit_bias=((3, math.inf), (4, -math.inf), *bias)),
        SamplingParams(repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=-0.7, logit_bias=bias),
    ]
    return [replace(kind, seed=int(rng.integers(2**63))) for kind in params]


def late_draw(request: RowRequest, rng: np.random.Generator) -> RowRequest:
    """Return the request with a seed whose random number is near 1."""
    params, position = request.params, request.position
    seeds = rng.integers(2**63, size=1000).tolist()
    seed = max(seeds, key=lambda seed: uniform(seed, position, params.choice))
    return request._replace(params=replace(params, seed=seed))


def random_rows(
    params: list[SamplingParams], num_vocab: int, rng: np.random.Generator
) -> tuple[torch.Tensor, list[RowRequest]]:
    """Return logits with ties and impossible tokens, and a request with a history for each row."""
    values = rng.standard_normal((len(params), num_vocab)) * rng.choice([1, 4, 12], (len(params), 1))
    values[::2] = values[::2].round()  # ties
    values[rng.random(values.shape) < 0.1] = -math.inf
    values[:, 0] = 0.0
    values[2:] = -np.sort(-values[2:])  # likeliest first, so that a late draw selects the last kept token
    table = torch.from_numpy(values.astype(np.float32))
    if rng.random() < 0.5:
        table = table.bfloat16()
    histories = [History(rng.integers(0, NUM_VOCAB, 30).tolist()) for _ in params]
    for history in histories:
        history.extend(rng.integers(0, NUM_VOCAB, 20).tolist())
    requests = [RowRequest(kind, int(rng.integers(2**32)), histories[i], [5, 6, 5]) for i, kind in enumerate(params)]
    requests[2:] = [late_draw(request, rng) for request in requests[2:]]
    return table, requests


@pytest.mark.timeout(Count(test=300, soak=7200))
@pytest.mark.parametrize(
    ("capacity", "few", "masked", "first"), [(8, 8, True, 1), (64, 16, False, 0), (64, 64, False, 1)]
)
def test_the_kernels_equal_plain_torch(
    capacity: int, few: int, masked: bool, first: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgelm.kernels.sampling import kernel as kernels

    for name, value in {"CHUNK": 64, "TILE": TILE, "CAPACITY": capacity, "FEW": few, "ENTRIES": 16}.items():
        monkeypatch.setattr(kernels, name, value)
    for _ in range(ROUNDS):
        table, requests = random_rows(kinds(rng)[first % SHARE :: SHARE], NUM_VOCAB, rng)
        masks = rng.integers(-(2**31), 2**31, (len(requests), 5)).astype(np.int32) if masked else None
        got, want = (
            DeviceSampler(NUM_VOCAB, 16, "cpu", name).sample(table, requests, masks) for name in ("triton", "reference")
        )
        for one, other, request in zip(got, want, requests, strict=True):
            assert one.id == other.id, request  # exp of numpy and of torch: they differ only for a draw within 1e-7
            assert [i for i, _ in one.top] == [i for i, _ in other.top]
            assert [one.logprob or 0.0, *(x for _, x in one.top)] == pytest.approx(
                [other.logprob or 0.0, *(x for _, x in other.top)], abs=1e-6
            )


@pytest.mark.parametrize("few", [64, 8])
def test_a_short_list_is_drawn_from_like_a_long_one(
    few: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgelm.kernels.sampling import kernel as kernels

    for name, value in {"CHUNK": 64, "CAPACITY": 64, "FEW": few}.items():
        monkeypatch.setattr(kernels, name, value)
    limits = ({"top_k": 30}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.8}, {"top_p": 1e-8})
    table = torch.from_numpy(rng.standard_normal((len(limits) * 4, NUM_VOCAB)).astype(np.float32) * 4)
    # eight equal tokens and a heavy tail: top_p is a share of those that top_k leaves, and may leave some
    tail = torch.where(torch.from_numpy(rng.permutation(NUM_VOCAB)) < 8, 0.0, -0.5).repeat(16, 1)
    table = torch.cat([table, tail])
    rows = [limit for limit in limits for _ in range(4)] + [{"top_k": 8, "top_p": 0.5}] * 8 + [{"top_k": 5}] * 8
    params = [SamplingParams(seed=int(rng.integers(2**63)), **limit) for limit in rows]
    requests = [RowRequest(row_params, row) for row, row_params in enumerate(params)]
    got, want = (
        DeviceSampler(NUM_VOCAB, len(table), "cpu", name).sample(table, requests, None)
        for name in ("triton", "reference")
    )
    assert [row.id for row in got] == [row.id for row in want]


def test_rows_without_a_token(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgelm.kernels.sampling import kernel as kernels

    for name, value in {"CHUNK": 64, "TILE": 64, "CAPACITY": 64}.items():
        monkeypatch.setattr(kernels, name, value)
    table = torch.from_numpy(rng.standard_normal((6, NUM_VOCAB)).astype(np.float32))
    table[0, 149] = math.nan
    table[1, 3] = math.inf
    table[2] = -math.inf
    masks = np.full((6, 5), -1, np.int32)
    masks[3] = 0
    masks[3, 4] = -(2**22)  # allows only bits beyond the vocabulary
    masks[5] = 0
    masks[5, 4] = 2**21  # allows the last token
    requests = [RowRequest(SamplingParams(top_k=2, num_logprobs=2), i) for i in range(6)]
    got = DeviceSampler(NUM_VOCAB, 6, "cpu", "triton").sample(table, requests, masks)
    assert [row.id for row in got[:4]] == [NOT_A_TOKEN] * 4
    assert got[5].id == NUM_VOCAB - 1
    best = table[4].topk(2)
    assert got[4].id in best.indices
    assert [i for i, _ in got[4].top] == best.indices.tolist()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_row_that_is_not_active_is_not_read(implementation: str) -> None:
    empty = torch.zeros(1, dtype=torch.int32)
    batch = Batch(
        rows=torch.zeros((2, len(Word)), dtype=torch.int64),
        bias_ids=empty,
        bias=empty.double(),
        history_ids=empty,
        history_counts=empty,
        masks=torch.zeros((2, 2), dtype=torch.int32),
    )
    answers = sampling.sample(torch.full((2, 40), math.nan), batch, implementation=implementation)
    assert answers[:, Answer.TOKEN].tolist() == [-1, -1]
