"""The sampler against a slow one that sorts everything in float64, against exact distributions; and its generator."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.engine.core import NOT_A_TOKEN, SamplingParams
from edgelm.engine.sampling.history import History
from edgelm.engine.sampling.reference import Floats, Words, Workspace, philox, sample, uniform
from tests.counts import Count
from tests.engine.sampling.slow import FLOAT32_MAX, Exact, exact, packed

pytestmark = pytest.mark.filterwarnings("error")

EXAMPLES = Count(test=150, soak=6_000)  # of hypothesis
DRAWS = 8  # of each
BIG_DRAWS = Count(test=400, soak=5_000)
CHI_SQUARE_DRAWS = Count(test=50_000, soak=500_000)
NUM_UNIFORM = Count(test=20_000, soak=1_000_000)
ONES = 0xFFFFFFFF
NEAR = 1e-5  # a draw so near to a boundary may fall on either side


@dataclass
class Tally:
    """The number of draws, and of those that fell on the other side of a boundary."""

    total: int = 0
    other: int = 0

    def done(self) -> None:
        print(f"{self.other} of {self.total} draws differ, all near a boundary")
        assert self.total > 0
        assert self.other * 1000 < max(self.total, 1000)


def expect(tally: Tally, want: Exact, token: int, u: float) -> None:
    """Check a token drawn with u against the distribution."""
    tally.total += 1
    if token == want.ids[int(np.searchsorted(want.ends, u, side="right"))]:
        return
    distance = float(np.abs(want.ends - u).min())
    assert distance < NEAR or want.margin < 1e-6, (token, u, distance, want.margin)
    tally.other += 1


def read_only(values: object) -> Floats:
    row = np.array(values, dtype=np.float32)
    row.flags.writeable = False
    return row


def fresh_rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print("seed", seed)
    return np.random.default_rng(seed)


LOGITS = st.one_of(
    st.floats(-30, 30, width=32),
    st.integers(-3, 3).map(float),  # ties
    st.just(-math.inf),
    st.sampled_from([-1e4, 1e4, 9999.0, -FLOAT32_MAX, 0.0, -0.0]),
)


@st.composite
def rows(draw: st.DrawFn) -> Floats:
    size = draw(st.sampled_from([1, 2, 3, 31, 32, 33, 70]))
    kind = draw(st.sampled_from([LOGITS, st.floats(-8, 8, width=32), st.integers(-3, 3).map(float)]))
    return read_only(draw(st.lists(kind, min_size=size, max_size=size)))


@st.composite
def params_for(draw: st.DrawFn, num_vocab: int) -> SamplingParams:
    either = st.sampled_from
    tokens = st.integers(0, num_vocab - 1)
    bias = st.floats(-20, 20) | either([math.inf, -math.inf, 1e300, -1e300, 100.0, -100.0])
    return SamplingParams(
        temperature=draw(either([0, 1e-9, 0.1, 0.8, 1, 1.0, 1.7, 30, 1e300])),
        top_k=draw(either([0, 0, 1, 2, 5, 40])),
        top_p=draw(either([1.0, 1.0, 1e-9, 0.5, 0.95]) | st.floats(0.01, 1)),
        min_p=draw(either([0.0, 0.0, 0.05, 0.5]) | st.floats(0.0, 0.99)),
        repetition_penalty=draw(either([1.0, 1.0, 1.1, 2.0, 0.5, 1e-300, 1e300])),
        frequency_penalty=draw(either([0.0, 0.0, 0.5, -2.0, 1.0, 1e308])),
        presence_penalty=draw(either([0.0, 0.0, 0.3, 2.0, -1.0, -1e308])),
        logit_bias=draw(st.lists(st.tuples(tokens, bias), max_size=4).map(tuple)),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
    )


def test_equals_the_slow_sampler() -> None:
    tally = Tally()

    @settings(max_examples=EXAMPLES)
    @given(rows(), st.data())
    def check(logits: Floats, data: st.DataObject) -> None:
        params = data.draw(params_for(len(logits)))
        tokens = st.lists(st.integers(0, len(logits) - 1), max_size=12)
        prompt, answer, draft = data.draw(tokens), data.draw(tokens), data.draw(tokens)
        masked = data.draw(st.booleans())
        allowed = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits))) if masked else None
        history = History(prompt)
        history.extend(answer)
        work = Workspace(len(logits)) if data.draw(st.booleans()) else None
        for k in range(len(draft) + 1):  # as in verification: row k follows the first k draft tokens
            want = exact(logits, params, prompt, answer + draft[:k], allowed)
            for position in range(DRAWS):
                got = sample(logits, params, position, history, None if allowed is None else packed(allowed), work)
                if want is None:
                    assert got == (NOT_A_TOKEN, None, ())
                else:
                    expect(tally, want, got.id, uniform(params.seed, position, params.choice))
            history.push([*draft, 0][k])
        history.pop(len(draft) + 1)
        again = sample(logits, params, 0, history, None if allowed is None else packed(allowed), work)
        want = exact(logits, params, prompt, answer, allowed)
        assert (again.id == NOT_A_TOKEN) == (want is None)
        if want is not None:
            expect(tally, want, again.id, uniform(params.seed, 0, params.choice))

    check()
    tally.done()


TRUNCATIONS = [
    SamplingParams(),
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=0.95, temperature=0.8),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.99999, temperature=2),
    SamplingParams(top_k=40),
    SamplingParams(top_k=1000, top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=0.001, top_p=0.9, temperature=1.5),
    SamplingParams(top_k=40, min_p=0.05, top_p=0.95, temperature=0.8),
]


@pytest.mark.parametrize("num_vocab", [1000, 5003, 32_000, 128_256])
@pytest.mark.parametrize("deviation", [0.0, 1.0, 4.0, 30.0])
def test_equals_the_slow_sampler_on_large_vocabularies(num_vocab: int, deviation: float) -> None:
    rng = fresh_rng()
    work = Workspace(num_vocab)
    tally = Tally()
    for i in range(len(TRUNCATIONS)) if num_vocab < 10_000 else rng.choice(len(TRUNCATIONS), 3, replace=False):
        values = rng.standard_normal(num_vocab) * deviation
        if rng.random() < 0.5:
            values = values.round(1)  # ties
        values[rng.random(num_vocab) < 0.1] = -math.inf
        logits = read_only(values)
        params = replace(TRUNCATIONS[i], seed=int(rng.integers(2**63)))
        print(params)
        want = exact(logits, params)
        assert want is not None
        for position in range(BIG_DRAWS):
            token = sample(logits, params, position, work=work).id
            expect(tally, want, token, uniform(params.seed, position, params.choice))
    tally.done()


@pytest.mark.parametrize("num_vocab", [1, 2, 31, 33, 5000, 100_003])
def test_greedy_takes_the_first_of_the_greatest(num_vocab: int) -> None:
    rng = fresh_rng()
    for _ in range(50):
        values = rng.integers(-3, 4, num_vocab).astype(np.float32)
        logits = read_only(np.where(rng.random(num_vocab) < 0.2, -math.inf, values)) if num_vocab > 2 else values
        best = int(np.flatnonzero(logits == logits.max())[0])
        position = int(rng.integers(2**32))
        assert sample(logits, SamplingParams(temperature=0), position) == (best, None, ())
        assert sample(logits, SamplingParams(top_k=1, temperature=5), position).id == best
        assert sample(logits, SamplingParams(top_p=1e-9, temperature=5), position).id == best


def test_penalties_that_overflow_forbid_no_token() -> None:
    history = History([])
    history.extend([0, 0, 0, 1])
    params = SamplingParams(temperature=0, repetition_penalty=1e-300, frequency_penalty=1e308)
    assert sample(read_only([3e38, 1.0, -math.inf]), params, 0, history).id == 0  # both at the least; the lower id
    assert sample(read_only([3e38, 1.0, -1e38]), params, 0, history).id == 2
    assert sample(read_only([3e38, 1.0]), replace(params, frequency_penalty=-1e308), 0, history).id == 0


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("num_vocab", [1, 2, 33, 1001, 32_000])
def test_a_nan_or_infinite_logit_gives_no_token(num_vocab: int, bad: float) -> None:
    rng = fresh_rng()
    nothing = packed([True] * num_vocab)
    for _ in range(20):
        values = rng.standard_normal(num_vocab).astype(np.float32)
        at = int(rng.integers(num_vocab))
        values[at] = bad
        nothing[at // 32] &= ~np.int32(1 << (at % 32) if at % 32 < 31 else -(2**31))  # not even if it is forbidden
        for params in (
            SamplingParams(temperature=0),
            SamplingParams(),
            SamplingParams(top_k=1, num_logprobs=3),
            SamplingParams(logit_bias=((at, -math.inf),)),
        ):
            assert sample(values, params, 0, None, nothing) == (NOT_A_TOKEN, None, ())
            assert sample(values, params, 0) == (NOT_A_TOKEN, None, ())


def test_without_a_possible_token_there_is_no_token() -> None:
    logits = read_only([1.0, -math.inf, 2.0])
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5, num_logprobs=2)):
        assert sample(read_only([-math.inf] * 3), params, 0).id == NOT_A_TOKEN
        assert sample(logits, params, 0, None, packed([False, True, False])).id == NOT_A_TOKEN
        assert sample(logits, params, 0, None, packed([False, False, False])).id == NOT_A_TOKEN
        assert sample(logits, params, 0, None, packed([True, True, False])).id == 0


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        (SamplingParams(top_p=0.5), {0}),  # reached exactly by the first
        (SamplingParams(top_p=0.51), {0, 2}),  # the token that crosses is in; of equals the lower id
        (SamplingParams(min_p=0.5), {0, 2, 3}),  # exactly half of the greatest
        (SamplingParams(min_p=0.51), {0}),
        (SamplingParams(top_k=2), {0, 2}),
        (SamplingParams(top_k=2, top_p=0.67), {0, 2}),
        (SamplingParams(top_k=2, top_p=0.66), {0}),  # of what top_k left: two thirds
        (SamplingParams(min_p=0.5, top_p=0.5), {0}),
        (SamplingParams(min_p=0.4, temperature=2), {0, 2, 3}),  # of the weights after temperature
        (SamplingParams(top_k=3, top_p=0.75), {0, 2}),
        (SamplingParams(), {0, 2, 3}),
    ],
)
def test_bounds_that_are_met_exactly(params: SamplingParams, possible: set[int]) -> None:
    logits = read_only([math.log(0.5), -math.inf, math.log(0.25), math.log(0.25)])
    params = replace(params, seed=secrets.randbits(64))
    print(params)
    assert {sample(logits, params, i).id for i in range(300)} == possible


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9, temperature=1.3),
        SamplingParams(top_k=20, min_p=0.01, top_p=0.97),
    ],
)
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    rng = fresh_rng()
    logits = read_only(rng.standard_normal(60) * 1.5)
    params = replace(params, seed=int(rng.integers(2**63)))
    want = exact(logits, params)
    assert want is not None
    work = Workspace(len(logits))
    counts = Counter(sample(logits, params, i, work=work).id for i in range(CHI_SQUARE_DRAWS))
    assert set(counts) <= set(want.ids)
    expected = dict(zip(want.ids, np.diff(want.ends, prepend=0) * CHI_SQUARE_DRAWS, strict=True))
    rare = {i for i in want.ids if expected[i] < 10}
    cells = [(counts[i], expected[i]) for i in want.ids if i not in rare]
    if rare:
        cells.append((sum(counts[i] for i in rare), sum(expected[i] for i in rare)))
    freedom = len(cells) - 1
    statistic = sum((got - mean) ** 2 / mean for got, mean in cells)
    limit = freedom * (1 - 2 / (9 * freedom) + 6 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty, 6 sigma
    print(f"chi-square {statistic:.1f}, {freedom} degrees of freedom, limit {limit:.1f}")
    assert statistic < limit


def test_the_draw_depends_only_on_seed_position_and_choice() -> None:
    rng = fresh_rng()
    logits = read_only(rng.standard_normal(500))
    work = Workspace(500)

    def tokens(seed: int, choice: int) -> list[int]:
        params = SamplingParams(seed=seed, choice=choice)
        return [sample(logits, params, i, work=work).id for i in range(200)]

    first = tokens(1, 0)
    assert [sample(logits, SamplingParams(seed=1), i).id for i in reversed(range(200))] == first[::-1]
    assert len({tuple(first), *(tuple(tokens(*other)) for other in ((1, 1), (2, 0), (2**63, 0), (2**64 - 1, 7)))}) == 5


def test_the_row_is_never_written() -> None:
    rng = fresh_rng()
    logits = rng.standard_normal(3000).astype(np.float32)
    before = logits.tobytes()
    history = History([1, 2])
    history.extend([3])
    mask = packed((rng.random(3000) < 0.5).tolist())
    for params in TRUNCATIONS:
        sample(logits, replace(params, num_logprobs=2), 0)
        params = replace(params, repetition_penalty=1.3, logit_bias=((0, 1.0),), num_logprobs=5)
        sample(logits, params, 0, history, mask)
    assert logits.tobytes() == before


@settings(max_examples=EXAMPLES // 3)
@given(rows(), st.integers(0, 20), st.data())
def test_logprobs_are_those_of_the_model(logits: Floats, num: int, data: st.DataObject) -> None:
    tokens = st.integers(0, len(logits) - 1)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0, 0.5, 3])),
        num_logprobs=num,
        logit_bias=((data.draw(tokens), 3.0),),
        presence_penalty=1.0,
    )
    history = History([])
    history.extend(data.draw(st.lists(tokens, max_size=5)))
    got = sample(logits, params, 3, history)
    if np.isneginf(logits).all():
        assert got.id == NOT_A_TOKEN
        return
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    ids = [i for i in sorted(range(len(logits)), key=lambda i: (-logits[i], i)) if logits[i] > -math.inf][:num]
    assert got.logprob == pytest.approx(logprobs[got.id], rel=1e-6, abs=1e-6)
    assert [i for i, _ in got.top] == ids
    assert [logprob for _, logprob in got.top] == pytest.approx(logprobs[ids].tolist(), rel=1e-6, abs=1e-6)
    assert sample(logits, SamplingParams(temperature=0, num_logprobs=num), 0).top == got.top


def test_logprobs_of_a_large_row() -> None:
    logits = read_only(fresh_rng().standard_normal(128_256) * 4)
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    got = sample(logits, SamplingParams(num_logprobs=20), 0)
    assert [i for i, _ in got.top] == np.argsort(-wide, kind="stable")[:20].tolist()
    assert [x for _, x in got.top] == pytest.approx(np.sort(logprobs)[::-1][:20].tolist(), abs=1e-6)
    assert got.logprob == pytest.approx(logprobs[got.id], abs=1e-6)


# -- random numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: Words, key: tuple[int, int], words: Words) -> None:
    assert philox(counter, key) == words


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_uniform_is_the_upper_24_bits_of_word_0(seed: int, position: int, choice: int) -> None:
    word = philox((position, choice, 0, 0), (seed % 2**32, seed // 2**32))[0]
    u = uniform(seed, position, choice)
    assert 0 <= u < 1
    assert u * 2**24 == word // 256


def test_numbers_are_uniform_and_streams_are_independent() -> None:
    seed = secrets.randbits(64)
    print("seed", seed)
    streams = {
        "choice 0": [uniform(seed, i, 0) for i in range(NUM_UNIFORM)],
        "choice 1": [uniform(seed, i, 1) for i in range(NUM_UNIFORM)],
        "next position": [uniform(seed, i + 1, 0) for i in range(NUM_UNIFORM)],
        "next seed": [uniform((seed + 1) % 2**64, i, 0) for i in range(NUM_UNIFORM)],
        "upper half of the seed": [uniform(seed ^ 1 << 40, i, 0) for i in range(NUM_UNIFORM)],
    }
    for name, numbers in streams.items():
        counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
        statistic = float(((counts - NUM_UNIFORM / 64) ** 2).sum() / (NUM_UNIFORM / 64))
        assert statistic < 150, (name, statistic)  # 63 degrees of freedom: passed by chance once in 2e8
    correlations = np.corrcoef(list(streams.values()))
    assert np.abs(correlations - np.eye(len(streams))).max() < 6 / NUM_UNIFORM**0.5, correlations


@pytest.mark.parametrize("num_allowed", [1, 2, 30, 900, 20_000])
@pytest.mark.parametrize("params", TRUNCATIONS)
def test_a_mask_equals_impossible_logits(num_allowed: int, params: SamplingParams) -> None:
    """A mask with few tokens takes a shorter way, even if the bits that fill the last word are set."""
    num_vocab = 32_003
    rng = fresh_rng()
    logits = read_only(rng.normal(0, 3, num_vocab).astype(np.float32))
    allowed = np.zeros(-(-num_vocab // 32) * 32, np.bool_)
    allowed[rng.choice(num_vocab, num_allowed, replace=False)] = True
    allowed[num_vocab:] = True
    mask = np.packbits(allowed, bitorder="little").view(np.int32)
    impossible = np.where(allowed[:num_vocab], logits, np.float32(-math.inf))
    for position in range(30):
        assert sample(logits, params, position, mask=mask) == sample(impossible, params, position)
