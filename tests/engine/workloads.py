"""Random workloads for the scheduler: arrivals, cancellations and failures.

Owns the choice of inputs. A workload is made from one integer and has the answer of each request in advance, because
a request that runs alone has the same answer. So follow-up turns and drafts are made of true answers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from edgelm.base.errors import EngineError
from edgelm.engine.core import ExecutorInfo, FinishReason, SamplingParams, Sequence
from tests.engine.fake import Fault, InjectedError, SimpleDrafter, complete_alone, info


@dataclass(eq=False, slots=True)
class Request:
    id: int
    prompt: list[int]
    params: SamplingParams
    arrival: int  # step number
    answer: list[int]
    reason: FinishReason
    grammar: int | None = None
    budget: int | None = None  # of a thought
    abort: int | None = None  # step number
    spoiled_at: int | None = None  # answer length at which the model computes NaN
    grammar_raises_at: int | None = None
    cache_namespace: str = ""
    interactive: bool = False  # of an editor


@dataclass(eq=False, slots=True)
class Workload:
    seed: int
    info: ExecutorInfo
    block_len: int
    snapshot_bytes: int
    requests: list[Request]
    faults: dict[int, Fault]
    draft_rate: float  # of the proposals that are not empty
    draft_fault: int | None  # number of the proposal that raises
    decode_s: float
    prefill_s: float
    all_rows: bool
    keeps_files: bool
    refused_saves: frozenset[int]  # by number
    restart_rate: float  # of the times when nothing runs
    runs_ahead: bool  # if the bookkeeper can
    rng: random.Random = field(repr=False)


def make_workload(seed: int) -> Workload:
    """Return the workload of a seed: everything in it is random, memory is mostly short."""
    rng = random.Random(seed)
    facts = replace(_facts(rng), keeps_all=random.Random(-seed - 1).random() < 0.8)
    block_len = rng.choice([1, 2, 4, 8, 16])
    capacity = facts.capacity + -facts.capacity % block_len
    of_editors = random.Random(-seed - 2)
    editor_rate = of_editors.choice([0.0, 0.3, 0.8])
    facts = replace(facts, capacity=capacity)
    calm = rng.random() < 0.5
    workload = Workload(
        seed=seed,
        info=facts,
        block_len=block_len,
        snapshot_bytes=facts.kv_bytes_per_token * rng.choice([0, 40, 150, 100_000]),
        requests=_requests(rng, facts, calm),
        faults={} if calm else {rng.randrange(120): _fault(rng) for _ in range(rng.choice([0, 0, 1, 3]))},
        draft_rate=rng.choice([0.0, 0.5, 1.0]),
        draft_fault=None if calm or rng.random() < 0.9 else rng.randrange(30),
        decode_s=rng.choice([0.0, 0.01, 0.1, 0.3]),
        prefill_s=rng.choice([0.0, 1e-6, 0.002, 0.004, 1.0]),
        all_rows=rng.random() < 0.3,
        keeps_files=rng.random() < 0.7,
        refused_saves=frozenset() if calm else frozenset(rng.sample(range(20), rng.choice([0, 0, 1, 3]))),
        restart_rate=rng.choice([0.0, 0.3, 0.8]),
        runs_ahead=rng.random() < 0.7,
        rng=rng,
    )
    for request in workload.requests:
        request.interactive = of_editors.random() < editor_rate
    return workload


def _facts(rng: random.Random) -> ExecutorInfo:
    context = rng.randint(40, 160)
    max_sequences = rng.choice([1, 2, 3, 4, 8])
    can_trim = rng.random() < 0.8
    return info(
        num_vocab=rng.choice([5, 13, 40]),
        context=context,
        capacity=int(context * rng.choice([1.0, 1.0, 1.0, 1.3, 2.0, 4.0])),
        max_tokens=max_sequences + rng.choice([0, 1, 5, 30, 200]),
        max_rows=max_sequences + rng.choice([0, 1, 3, 10]),
        max_sequences=max_sequences,
        can_trim=can_trim,
        rollback_len=0 if can_trim else rng.choice([0, 1, 3]),
        can_copy=rng.random() < 0.8,
    )


def _fault(rng: random.Random) -> Fault:
    where = rng.choice(["ops", "chunks", "sample", "read"])
    return Fault(where, rng.randrange(6), rng.choice([EngineError, InjectedError]))  # type: ignore[arg-type]


def _requests(rng: random.Random, facts: ExecutorInfo, calm: bool) -> list[Request]:
    tokens = range(facts.num_vocab)
    systems = [rng.choices(tokens, k=rng.randint(1, facts.context // 2)) for _ in range(2)]
    pace = rng.choice([0, 0, 3, 20, 80])  # steps between arrivals: all at once, overlapping, one after another
    requests: list[Request] = []
    arrival = 0
    short = rng.random() < 0.4  # short prompts, long answers: memory runs out in the middle
    for number in range(rng.randint(2, 12)):
        arrival += rng.randint(0, 2 * pace)
        new = rng.choices(tokens, k=rng.choice([1, 3, 10] if short else [1, 3, 10, 50]))
        kind = "fresh" if short and rng.random() < 0.6 else rng.choice(["system", "follow-up", "follow-up", "retry"])
        prompt = new
        params = _params(rng, facts, long=short)
        grammar = rng.randrange(1000) if rng.random() < 0.25 else None
        budget = rng.randrange(30) if grammar is None and rng.random() < 0.15 else None
        if kind == "system":
            prompt = rng.choice(systems) + new
        elif requests and kind == "follow-up":
            parent = rng.choice(requests[-2:])
            prompt = parent.prompt + parent.answer + new[:10]
        elif requests and kind == "retry":
            parent = rng.choice(requests[-2:])
            prompt, params = list(parent.prompt), parent.params
            grammar, budget = parent.grammar, parent.budget
        if len(prompt) >= facts.context:
            prompt = prompt[: rng.randint(1, facts.context - 1)]
        answer, reason = complete_alone(prompt, params, facts, grammar, budget)
        cache_namespace = rng.choice(["", "", "", "other"])
        request = Request(number, prompt, params, arrival, answer, reason, grammar, budget)
        request.cache_namespace = cache_namespace
        if rng.random() < 0.15:
            request.abort = arrival + rng.randrange(30)
        if not calm and rng.random() < 0.1:
            request.spoiled_at = rng.randrange(20)
        if not calm and grammar is not None and rng.random() < 0.1:
            request.grammar_raises_at = rng.randrange(10)
        requests.append(request)
    return requests


def _params(rng: random.Random, facts: ExecutorInfo, long: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([None, rng.randint(40, 120)] if long else [None, 1, 2, rng.randint(1, 60)]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(4),
        choice=rng.randrange(2),
        draft="auto" if rng.random() < 0.95 else "off",
        stop_ids=frozenset(rng.sample(range(facts.num_vocab), rng.choice([0, 0, 0, 1] if long else [0, 1, 1, 2]))),
    )


class FakeDrafter(SimpleDrafter):
    """Proposes drafts that are right, wrong, right at first, too long, or copied from earlier in the sequence."""

    def __init__(self, workload: Workload) -> None:
        self._rng = random.Random(workload.seed + 1)
        self._workload = workload
        self._num_proposals = 0
        self.drafted = 0
        self.accepted = 0
        self.begun: set[int] = set()

    def begin(self, seq: Sequence) -> None:
        assert seq.id not in self.begun
        self.begun.add(seq.id)

    def end(self, seq: Sequence) -> None:
        self.begun.remove(seq.id)

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        self._num_proposals += 1
        if self._num_proposals - 1 == self._workload.draft_fault:
            raise InjectedError
        assert seq.id in self.begun
        assert marginal_cost
        assert all(cost == cost for cost in marginal_cost)
        rng, most = self._rng, len(marginal_cost)
        if rng.random() >= self._workload.draft_rate:
            return []
        right = self._workload.requests[seq.id].answer[seq.completion_len :]
        wrong = rng.choices(range(self._workload.info.num_vocab), k=most + 5)
        match rng.choice(["right", "wrong", "half", "long", "copied"]):
            case "right":
                return right[:most]
            case "wrong":
                return wrong[: rng.randint(1, most)]
            case "half":
                return (right[: rng.randint(0, most)] + wrong)[:most]
            case "long":
                return right + wrong
            case _:
                return self._copied(seq.tokens)[:most]

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        assert seq.id in self.begun
        assert marginal_cost
        return self._rng.choice([0.0, 0.0, 0.0, math.inf])

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        assert drafted > 0
        assert 0 <= accepted <= drafted
        self.drafted += drafted
        self.accepted += accepted

    @staticmethod
    def _copied(tokens: list[int]) -> list[int]:
        for start in range(len(tokens) - 3, -1, -1):
            if tokens[start : start + 2] == tokens[-2:]:
                return tokens[start + 2 :]
        return []
