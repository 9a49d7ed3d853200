"""The device sampler against the numpy reference, in plain torch on the CPU. Its kernels: tests/kernels."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.backends.torch import sampler as device_module
from edgelm.backends.torch.sampler import IN_FLIGHT, DeviceSampler, Launch, RowRequest
from edgelm.engine.core import NOT_A_TOKEN, Sampled, SamplingParams
from edgelm.engine.sampling.history import History
from edgelm.engine.sampling.reference import Floats, sample, uniform
from edgelm.kernels.sampling import Batch
from tests.counts import Count
from tests.engine.sampling.slow import exact, packed
from tests.engine.sampling.test_reference import TRUNCATIONS, fresh_rng, params_for, rows

EXAMPLES = Count(test=40, soak=6_000)  # of hypothesis
BIG_DRAWS = Count(test=10, soak=16_000)  # of each row
NEAR = 1e-5  # so near to a boundary between tokens, or to a bound, implementations may differ


@dataclass
class Tally:
    """The number of draws, and of those that differ."""

    total: int = 0
    other: int = 0

    def expect(
        self,
        got: Sampled,
        want: Sampled,
        logits: Floats,
        request: RowRequest,
        prompt: list[int] | None = None,
        answer: list[int] | None = None,
        allowed: list[bool] | None = None,
    ) -> None:
        """Check one row; if the tokens differ, it must be a close call in float64."""
        self.total += 1
        params = request.params
        if got.id != want.id:
            close = exact(logits, params, prompt or [], (answer or []) + list(request.extra), allowed)
            assert close is not None, (got, want)
            u = uniform(params.seed, request.position, params.choice)
            distance = float(np.abs(close.ends - u).min())
            assert distance < NEAR or close.margin < NEAR, (got, want, request, distance, close.margin)
            self.other += 1
            return
        assert (got.logprob is None) == (want.logprob is None)
        if got.logprob is not None and want.logprob is not None:
            assert got.logprob == pytest.approx(want.logprob, rel=1e-6, abs=1e-6)
        assert [i for i, _ in got.top] == [i for i, _ in want.top]
        assert [x for _, x in got.top] == pytest.approx([x for _, x in want.top], rel=1e-6, abs=1e-6)

    def done(self) -> None:
        print(f"{self.other} of {self.total} draws differ, all near a boundary")
        assert self.total > 0
        assert self.other * 1000 < max(self.total, 1000)


def test_equals_the_reference() -> None:
    tally = Tally()

    @settings(max_examples=EXAMPLES)
    @given(rows(), st.data())
    def check(logits: Floats, data: st.DataObject) -> None:
        size = len(logits)
        tokens = st.lists(st.integers(0, size - 1), max_size=12)
        requests: list[tuple[RowRequest, list[int], list[int]]] = []
        for _ in range(data.draw(st.integers(1, 3))):  # sequences, each with a row for each draft token and one more
            params = replace(data.draw(params_for(size)), num_logprobs=data.draw(st.none() | st.integers(0, 20)))
            prompt, answer, draft = data.draw(tokens), data.draw(tokens), data.draw(tokens)[:3]
            history = History(prompt)
            history.extend(answer)
            position = data.draw(st.integers(0, 2**32 - 9))
            requests += [
                (RowRequest(params, position + k, history, draft[:k]), prompt, answer) for k in range(len(draft) + 1)
            ]
        masked = data.draw(st.booleans())
        allowed = [
            data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
            if data.draw(st.booleans())
            else [True] * size
            for _ in requests
        ]
        masks = np.stack([packed(tokens_allowed) for tokens_allowed in allowed]) if masked else None
        sampler = DeviceSampler(size, len(requests) + 1, "cpu", "reference")
        table = torch.from_numpy(np.tile(logits, (len(requests), 1)))
        got = sampler.sample(table, (request for request, _, _ in requests), masks)
        for i, (request, prompt, answer) in enumerate(requests):
            assert request.history is not None
            for token in request.extra:
                request.history.push(token)
            mask = None if masks is None else masks[i]
            want = sample(logits, request.params, request.position, request.history, mask)
            request.history.pop(len(request.extra))
            tally.expect(got[i], want, logits, request, prompt, answer, allowed[i] if masked else None)

    check()
    tally.done()


@pytest.mark.parametrize("num_vocab", [1000, 32_000, 128_256])
@pytest.mark.parametrize("deviation", [0.0, 1.0, 4.0, 30.0])
def test_equals_the_reference_on_large_vocabularies(num_vocab: int, deviation: float) -> None:
    rng = fresh_rng()
    values = rng.standard_normal(num_vocab) * deviation
    values = values.round(1) if rng.random() < 0.5 else values  # ties
    values[rng.random(num_vocab) < 0.1] = -math.inf
    logits = values.astype(np.float32)
    prompt = rng.integers(0, num_vocab, 30).tolist()
    answer = prompt[:9]
    history = History(prompt)
    history.extend(answer)
    bias = ((int(rng.integers(num_vocab)), 2.0),)
    tally = Tally()
    sampler = DeviceSampler(num_vocab, len(TRUNCATIONS), "cpu", "reference")
    table = torch.from_numpy(logits).expand(len(TRUNCATIONS), num_vocab)
    for turn in range(BIG_DRAWS if num_vocab < 10_000 else max(1, BIG_DRAWS // 80)):  # 0.1 s a draw of 128,256
        requests = []
        for number, params in enumerate(TRUNCATIONS):
            if (turn + number) % 2:  # each with penalties and a bias, too
                params = replace(
                    params, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.5, logit_bias=bias
                )
            params = replace(params, seed=int(rng.integers(2**63)))
            requests.append(RowRequest(params, int(rng.integers(2**32)), history))
        for got, request in zip(sampler.sample(table, requests, None), requests, strict=True):
            want = sample(logits, request.params, request.position, history)
            tally.expect(got, want, logits, request, prompt, answer)
    tally.done()


def test_rows_of_all_kinds_do_not_disturb_each_other() -> None:
    rng = fresh_rng()
    num_vocab = 333
    table = (rng.standard_normal((6, num_vocab)) * 3).astype(np.float32)
    table[1, 7] = math.nan
    table[2, 9] = math.inf
    table[3] = -math.inf
    history = History([1, 2])
    history.extend([3, 3])
    params = SamplingParams(repetition_penalty=1.3, logit_bias=((5, 2.0), (5, -1.0)), num_logprobs=4, seed=2**64 - 1)
    requests = [RowRequest(params, 4_000_000_000 + i, history) for i in range(6)]
    masks = np.full((6, 11), -1, np.int32)
    masks[4] = 0  # nothing is allowed
    masks[5, 1:] = 0
    sampler = DeviceSampler(num_vocab, 8, "cpu", "reference")
    got = sampler.sample(torch.from_numpy(table), requests, masks)
    assert got[1:5] == [Sampled(NOT_A_TOKEN)] * 4
    assert 0 <= got[5].id < 32
    for i in (0, 5):
        want = sample(table[i], params, requests[i].position, history, masks[i])
        assert got[i].id == want.id
        assert sampler.sample(torch.from_numpy(table[i : i + 1]), requests[i : i + 1], masks[i : i + 1]) == [got[i]]
    assert history.counts.tolist() == [0, 0, 2]


def test_launches_are_read_in_order() -> None:
    rng = fresh_rng()
    sampler = DeviceSampler(50, 4, "cpu", "reference")
    tables = [(rng.standard_normal((n, 50)) * 5).astype(np.float32) for n in (1, 4, 2, 3)]
    params = SamplingParams(temperature=0, num_logprobs=1)
    expected = [[sample(row, params, 0) for row in table] for table in tables]

    launches: list[Launch] = []
    for i, table in enumerate(tables):
        launch = sampler.launch(torch.from_numpy(table), [RowRequest(params, 0)] * len(table), None)
        assert sampler.tokens[: len(table)].tolist() == table.argmax(1).tolist()
        launches.append(launch)
        done = i - IN_FLIGHT + 1
        if done >= 0:
            assert [row.id for row in launches[done].read()] == [row.id for row in expected[done]]
    assert [row.top[0][0] for row in launches[3].read()] == [row.id for row in expected[3]]


class Recorded:
    """A graph on the CPU: it repeats the recorded work."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self._work()
        self.replays += 1


def test_a_graph_samples_the_same_as_no_graph() -> None:
    rng = fresh_rng()
    graphs: list[Recorded] = []

    def record(work: Callable[[], object]) -> Recorded:
        graphs.append(Recorded(work))
        return graphs[-1]

    graphed, plain = (DeviceSampler(70, 8, "cpu", "reference") for _ in range(2))
    address = graphed.tokens.data_ptr()
    places = [torch.zeros(size, 70) for size in (8, 3, 1)]
    for place in places:
        graphed.capture(place, record)
    expected_replays = 0
    for number in range(60):
        place = places[number % 3]
        place.copy_(torch.from_numpy(rng.standard_normal(place.shape) * 4))
        count = int(rng.integers(1, len(place) + 1))
        history = History(rng.integers(0, 70, 9).tolist())
        params = [
            SamplingParams(
                temperature=float(rng.choice([0, 0.7])),
                top_p=float(rng.choice([1, 0.8])),
                top_k=int(rng.choice([0, 5])),
                num_logprobs=rng.choice([None, 2]),
                seed=int(rng.integers(2**40)),
                repetition_penalty=1.3 if number % 5 == 0 else 1.0,
                logit_bias=((4, 3.0),) if number % 7 == 0 else (),
            )
            for _ in range(count)
        ]
        requests = [RowRequest(row_params, int(rng.integers(99)), history) for row_params in params]
        masks = rng.integers(-(2**31), 2**31, (count, 3), dtype=np.int32) | 1 if number % 2 else None
        expected_replays += number % 5 != 0 and number % 7 != 0
        got = graphed.sample(place[:count], requests, masks)
        assert got == plain.sample(place[:count], requests, masks)
        assert graphed.tokens[:count].tolist() == [row.id for row in got]
        assert graphed.tokens.data_ptr() == address, "the next forward pass reads the tokens there"
    assert sum(graph.replays for graph in graphs) == expected_replays > 30


def test_an_unread_launch_is_forgotten_and_not_mistaken_for_another() -> None:
    sampler = DeviceSampler(50, 4, "cpu", "reference")
    rows = [RowRequest(SamplingParams(temperature=0), 0)]
    launches = [sampler.launch(torch.eye(50)[i : i + 1], rows, None) for i in range(IN_FLIGHT + 1)]
    with pytest.raises(AssertionError, match="not read"):
        launches[0].read()
    assert [launch.read()[0].id for launch in launches[1:]] == list(range(1, IN_FLIGHT + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_histories_and_biases_of_any_length(dtype: torch.dtype) -> None:
    rng = fresh_rng()
    num_vocab = 20_000
    logits = torch.from_numpy(rng.standard_normal((3, num_vocab)).astype(np.float32)).to(dtype)
    sampler = DeviceSampler(num_vocab, 3, "cpu", "reference")
    for length in (10, 9_000, 100):
        histories = [History(rng.integers(0, num_vocab, length).tolist()) for _ in range(3)]
        for history in histories:
            history.extend(rng.integers(0, num_vocab, length).tolist())
        bias = tuple((int(i), float(rng.normal())) for i in rng.integers(0, num_vocab, length))
        params = SamplingParams(
            top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.1, logit_bias=bias, seed=length
        )
        requests = [RowRequest(params, i, history, [1, 2, 1][:i]) for i, history in enumerate(histories)]
        for i, got in enumerate(sampler.sample(logits, requests, None)):
            for token in requests[i].extra:
                histories[i].push(token)
            row = logits[i].float().numpy()
            want = sample(row, params, i, histories[i])
            if got.id != want.id:  # a draw at a boundary is so rare that it does not happen twice
                want = sample(row, replace(params, seed=0), i, histories[i])
                histories[i].pop(i)
                again = requests[i]._replace(params=replace(params, seed=0))
                assert sampler.sample(logits[i : i + 1], [again], None)[0].id == want.id


@pytest.mark.parametrize("max_entries", [40, 55, 100])
def test_rows_without_room_for_their_histories_and_biases_are_sampled_in_parts(
    max_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = fresh_rng()
    num_vocab, num_rows = 40, 7
    entries: list[int] = []
    real = device_module.sampling.sample

    def counted(logits: torch.Tensor, batch: Batch, **options: Any) -> torch.Tensor:
        entries.append(max(len(batch.bias_ids), len(batch.history_ids)))
        return real(logits, batch, **options)

    monkeypatch.setattr(device_module.sampling, "sample", counted)
    whole, few = (DeviceSampler(num_vocab, num_rows, "cpu", "reference", most) for most in (10_000, max_entries))
    for number in range(20):
        logits = torch.from_numpy(rng.standard_normal((num_rows, num_vocab)).astype(np.float32))
        history = History(rng.integers(0, num_vocab, 25).tolist())
        history.extend(rng.integers(0, num_vocab, 25).tolist())
        bias = tuple((token, float(rng.normal())) for token in range(int(rng.integers(1, num_vocab))))
        kinds = (
            SamplingParams(seed=number, repetition_penalty=1.3, num_logprobs=1),
            SamplingParams(seed=number, logit_bias=bias),
            SamplingParams(seed=number, top_p=0.9),
        )
        requests = [RowRequest(kinds[int(rng.integers(3))], i, history, [1, 2, 39][: i % 4]) for i in range(num_rows)]
        masks = rng.integers(-(2**31), 2**31, (num_rows, 2), dtype=np.int32) | 1 if number % 2 else None
        expected = whole.sample(logits, requests, masks)
        num_before = len(entries)
        assert few.sample(logits, requests, masks) == expected
        assert max(entries[num_before:]) <= max_entries
    assert len(entries) > 2 * 20


def test_staging_waits_for_no_launch_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight: deque[Event] = deque()

    class Event:
        """Fails if it is waited for before its launch is read; a real one would wait for a step."""

        passed = True

        def record(self) -> None:
            self.passed = False
            in_flight.append(self)

        def synchronize(self) -> None:
            assert self.passed

    def empty(size: int, *, dtype: torch.dtype, **_: object) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    fake = SimpleNamespace(empty=empty, cuda=SimpleNamespace(Event=Event))
    monkeypatch.setattr(device_module, "torch", fake)
    column = device_module._Column(torch.int32, 9, SimpleNamespace(type="cuda"))
    for step in range(8):
        column.clear()
        values = [step] * (3 + 2 * (step // 2))
        column.append(np.array(values, dtype=np.int32))
        assert column.send()[: len(values)].tolist() == values
        if len(in_flight) == IN_FLIGHT:
            in_flight.popleft().passed = True


def test_more_likely_tokens_requested_than_there_are() -> None:
    logits = np.array([[0.5, -math.inf, 2.0, 2.0]], dtype=np.float32)
    params = SamplingParams(temperature=0, num_logprobs=20)
    got = DeviceSampler(4, 1, "cpu", "reference").sample(torch.from_numpy(logits), [RowRequest(params, 0)], None)[0]
    assert [i for i, _ in got.top] == [2, 3, 0]
    assert sum(math.exp(x) for _, x in got.top) == pytest.approx(1, abs=1e-6)
