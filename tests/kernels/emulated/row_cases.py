"""The emulated cases of the ops on rows, from norm to gated_delta, and of the bandwidth probe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from edgelm.backends.torch.sampler import DeviceSampler, RowRequest
from edgelm.engine.core import SamplingParams
from edgelm.engine.sampling.history import History
from edgelm.kernels import trial
from edgelm.kernels.activation import gated, softcap
from edgelm.kernels.attention.reference import VERIFY_LEN
from edgelm.kernels.head_gate import gate_heads
from edgelm.kernels.norm import add_rms_norm, rms_norm
from edgelm.kernels.route import route
from tests.kernels import bandwidth, test_activation, test_delta, test_norm, test_route, test_sampling
from tests.kernels.cases import activation as activation_cases
from tests.kernels.cases import bandwidth as bandwidth_cases
from tests.kernels.cases import delta as delta_cases
from tests.kernels.cases import norm as norm_cases
from tests.kernels.cases import route as route_cases
from tests.kernels.emulated.case import EmulatedCase
from tests.kernels.emulated.outcome import Outcome, equal, within, worst
from tests.kernels.seeds import generator

NUM_VOCAB = 5000  # three chunks, the last one not full
SEVERAL = (4, 5, 7, 8, 9)  # kinds of rows that are sampled beside each other: they need all kernels
DELTA_F32, DELTA_TF32 = 3e-6, 2.0**-9  # relative to the largest value


def cases() -> Iterator[EmulatedCase]:
    """Yield the cases of all ops on rows."""
    for case in norm_cases.CASES:
        if case.rows:
            main = (80,) if case.width == 8193 else ()
            dtype = str(case.dtype).removeprefix("torch.")
            yield EmulatedCase("norm", dtype, case.rows, f"width={case.width}", partial(_norm, case), main=main)
    for case in activation_cases.CASES:
        if case.rows:
            main = (120,) if case.width == 1040 else ()
            run = partial(_gated, case)
            detail = f"{case.gate.kind} limit={case.gate.limit:g} width={case.width}"
            yield EmulatedCase("activation", str(case.dtype)[6:], case.rows, detail, run, main=main)
    for cap in (0.5, 30.0):
        run = partial(_softcap, cap)
        yield EmulatedCase("activation", "float32", 2, f"softcap {cap:g}", run, main=(86,) if cap > 1 else ())
    for case in route_cases.CASES:
        if case.tokens:
            main = (89,) if case.experts == 60 else ()
            yield EmulatedCase("route", str(case.dtype)[6:], case.tokens, case.name, partial(_route, case), main=main)
    for norm in (False, True):
        run = partial(_gate_heads, norm)
        yield EmulatedCase("head_gate", "bfloat16", 3, "norm" if norm else "plain", run, main=(90,) if norm else ())
    yield EmulatedCase("head_gate", "float32", 5, "row", _gate_rows, main=(86,))
    for delta in delta_cases.CASES:
        rows, main = max(run.rows for run in delta.runs), (90,) if delta.name == "wide heads" else ()
        yield EmulatedCase("delta", str(delta.dtype)[6:], rows, delta.name, partial(_delta, delta), main=main)
    for kind in range(10):
        run = partial(_sample, kind)
        yield EmulatedCase("sampling", "logits", 1, f"kind {kind}", run)
    kinds = ", ".join(map(str, SEVERAL))
    yield EmulatedCase("sampling", "logits", len(SEVERAL), f"kinds {kinds}", _sample_several, main=(80,))
    yield EmulatedCase("sampling", "logits", 36, "one number", _sample_by_one_number)
    yield EmulatedCase("trial", "float16", trial.SIZE, "one product", _trial, main=(80,))
    yield EmulatedCase("trial", "int32", 4, "a chain of kernels", _chain, main=(90,))
    size = bandwidth_cases.SIZES[1]
    yield EmulatedCase("bandwidth", "int32", 1, f"{size} words", partial(_read, size))


def _trial(seed: int) -> Outcome:
    x, y = (torch.randint(-8, 8, (trial.SIZE, trial.SIZE), generator=generator(seed)) for _ in range(2))
    out = torch.full((trial.SIZE, trial.SIZE), torch.nan)
    trial.product(x.half(), y.half(), out)
    return equal(out, (x @ y).float())


def _chain(seed: int) -> Outcome:
    x = torch.randint(-(2**31), 2**31, (4, trial.PART), generator=generator(seed), dtype=torch.int32)
    out = x.clone()
    trial.chain(out, torch.zeros_like(x), 4, 3)
    return equal(out, trial.chained(x, 4, 3))


def _norm(case: norm_cases.Case, seed: int) -> Outcome:
    x, residual, weight, post_weight = norm_cases.make_inputs(case, generator(seed))

    def near(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> Outcome:
        return within(got, want, test_norm.bound_of(got.dtype, want, scale))

    want = test_norm.exact_rms(x, weight)
    outcomes = [near(rms_norm(x, weight, test_norm.EPS, implementation="triton"), want, want.abs())]
    rows = torch.arange(len(x)).flip(0).repeat(2)
    some = rms_norm(x, weight, test_norm.EPS, rows=rows, out_dtype=torch.float32, implementation="triton")
    outcomes.append(near(some, want[rows], want[rows].abs()))
    for post, scale in ((None, 1.0), (post_weight, 0.3)):
        options = {"post_weight": post, "scale": scale, "implementation": "triton"}
        normed, total = add_rms_norm(x, residual, weight, test_norm.EPS, **options)
        added = x.double() if post is None else test_norm.exact_rms(x, post)
        outcomes.append(near(total, (residual.double() + added) * scale, residual.double().abs() + added.abs()))
        want = test_norm.exact_rms(total, weight)
        outcomes.append(near(normed, want, want.abs()))
    return worst(outcomes)


def _gated(case: activation_cases.Case, seed: int) -> Outcome:
    x = activation_cases.make_input(case, generator(seed))
    gate, up = x.chunk(2, 1)
    want = test_activation.exact(gate, up, case.gate)
    got = gated(x, case.gate, implementation="triton")
    return within(got, want, test_activation.bound_of(gate, up, want, case.dtype))


def _softcap(cap: float, seed: int) -> Outcome:
    x = torch.randn(2, 1100, generator=generator(seed)) * cap
    want = cap * torch.tanh(x.double() / cap)
    got = softcap(x, cap, implementation="triton")
    softcap(x, cap, out=x, implementation="triton")
    return worst([within(got, want, 5e-7 * want.abs()), equal(x, got)])


def _route(case: route_cases.Case, seed: int) -> Outcome:
    logits = route_cases.make_logits(case, generator(seed))
    weights, ids = test_route.exact(logits, case)
    got, chosen = route(logits, case.k, kind=case.kind, normalise=case.normalise, implementation="triton")
    want = torch.from_numpy(weights)
    same = equal(chosen, torch.tensor(ids, dtype=torch.int32))
    return worst([within(got, want, route_cases.TOLERANCE * want.abs()), same])


def _gate_heads(norm: bool, seed: int) -> Outcome:
    """Gate heads that are slices of wider rows."""
    g = generator(seed)
    x = torch.randn(3, 4, 80, generator=g)
    gate = (3 * torch.randn(3, 6, 160, generator=g)).bfloat16()[:, 1:5, 80:]
    weight = torch.randn(80, generator=g) if norm else None
    want = x.double() * torch.sigmoid(gate.double())
    if weight is not None:
        want = want * gate * weight / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    got = gate_heads(x, gate, weight, 1e-6, out_dtype=torch.float32, implementation="triton")
    return within(got, want, 2e-6 * want.abs())


def _gate_rows(seed: int) -> Outcome:
    """Gate whole rows by one number each."""
    g = generator(seed)
    x, gate = torch.randn(5, 3, 32, generator=g), 3 * torch.randn(5, 2, generator=g)[:, 1:, None]
    want = x.double() * torch.sigmoid(gate.double())
    return within(gate_heads(x, gate, out_dtype=torch.float32, implementation="triton"), want, 2e-6 * want.abs())


def _delta(case: delta_cases.Case, seed: int) -> Outcome:
    """Compare results and states with plain torch; products of prompts are of TF32. Kept inputs equal each bit."""
    given = delta_cases.inputs(case, generator(seed))
    other = test_delta.copied(given)
    want, got = test_delta.run(given, "reference"), test_delta.run(other, "triton")
    prompts = torch.repeat_interleave(
        torch.tensor([run.rows > VERIFY_LEN for run in case.runs]), given.query_start_loc.diff()
    )
    bounds = torch.where(prompts, DELTA_TF32, DELTA_F32)[:, None, None] * (want.abs() + want.abs().amax())
    of_slot = torch.full((len(given.cache.states),), DELTA_F32)
    for run in case.runs:
        of_slot[run.slot] = DELTA_TF32 if run.rows > VERIFY_LEN else DELTA_F32
    states = given.cache.states
    return worst(
        [
            within(got, want, bounds),
            within(other.cache.states, states, of_slot[:, None, None, None] * (states.abs() + states.abs().amax())),
            equal(other.cache.inputs, given.cache.inputs),
        ]
    )


def _sample(kind: int, seed: int) -> Outcome:
    """Sample a row with and without a mask."""
    rng = np.random.default_rng(seed)
    outcomes = []
    for masked in (False, True):
        params = test_sampling.kinds(rng)[kind]
        table, requests = test_sampling.random_rows([params] * 3, NUM_VOCAB, rng)
        masks = _random_masks(1, rng) if masked else None
        outcomes.append(_sampled(table[kind % 3 :][:1], requests[kind % 3 :][:1], masks))
    return worst(outcomes)


def _sample_several(seed: int) -> Outcome:
    """Sample rows of several kinds in one step."""
    rng = np.random.default_rng(seed)
    kinds = test_sampling.kinds(rng)
    table, requests = test_sampling.random_rows([kinds[kind] for kind in SEVERAL], NUM_VOCAB, rng)
    return _sampled(table.float(), requests, _random_masks(len(SEVERAL), rng))


def _sample_by_one_number(seed: int) -> Outcome:
    """Sample rows whose token depends on one number: a logit, one that is infinite, a bias, or a count.

    Of 128 threads with 1, 2, 4 or 8 numbers side by side, another one has it from row to row, in another register.
    """
    rng = np.random.default_rng(seed)
    table = torch.from_numpy(rng.standard_normal((36, NUM_VOCAB)).astype(np.float32))
    masks = _random_masks(36, rng)
    requests = []
    for row in range(36):
        part = row % 16 if row < 16 else row % 8
        at = 128 * part + 8 * int(rng.integers(16)) + (part + part // 4) % 4 + 4 * (part % 2)
        token = next(at + 2048 * chunk for chunk in (2 - row % 3, row % 2) if at + 2048 * chunk < NUM_VOCAB)
        other, *ids = rng.permutation(NUM_VOCAB)[: 1024 + 1].tolist()
        # half of the rows draw from a list of two tokens, nearly always the first: without it, the second
        params = SamplingParams(temperature=float(row < 16), top_k=2 * (row < 16), num_logprobs=3)
        history = History(ids)
        if row < 20:
            table[row, token] = 60 if row < 16 else math.inf
        elif row < 28:
            bias = rng.standard_normal(1024)
            bias[at], token = 60, ids[at]
            params = replace(params, logit_bias=tuple(zip(ids, bias.tolist(), strict=True)))
        else:
            token = ids[at]
            history.extend([token] * 60)
            params = replace(params, frequency_penalty=-1.0)
        table[row, other] = 70  # the mask does not allow it
        bits = masks[row].view(np.uint32)
        bits[other // 32] &= ~np.uint32(1 << other % 32)
        bits[token // 32] |= np.uint32(1 << token % 32)
        if row < 16:
            table[row, ids[0]] = 52
            bits[ids[0] // 32] |= np.uint32(1 << ids[0] % 32)
        requests.append(RowRequest(params, 0, history))
    return _sampled(table, requests, masks)


def _random_masks(num_rows: int, rng: np.random.Generator) -> NDArray[np.int32]:
    return rng.integers(-(2**31), 2**31, (num_rows, -(-NUM_VOCAB // 32))).astype(np.int32)


def _sampled(table: torch.Tensor, requests: list[RowRequest], masks: NDArray[np.int32] | None) -> Outcome:
    """Sample rows: their tokens and their likeliest tokens are those of plain torch."""
    samplers = [DeviceSampler(NUM_VOCAB, len(requests), "cpu", name) for name in ("triton", "reference")]
    try:
        rows = [sampler.sample(table, requests, masks) for sampler in samplers]
    except (ValueError, OverflowError) as error:
        return Outcome(math.inf, 0.0, f"an answer has numbers that cannot be: {error}")
    ids = [torch.tensor([token for row in of for token in (row.id, *(id_ for id_, _ in row.top))]) for of in rows]
    numbers = [torch.tensor([x for row in of for x in (row.logprob or 0.0, *(x for _, x in row.top))]) for of in rows]
    same = equal(*ids)
    return same if same.fault else worst([same, within(*numbers, 1e-6)])


def _read(size: int, seed: int) -> Outcome:
    words = torch.randint(-(2**31), 2**31, (size,), generator=generator(seed), dtype=torch.int32)
    sums = bandwidth.read(words, implementation="triton")
    return equal(sums.sum() % 2**32, words.sum(dtype=torch.int64) % 2**32)
