"""The share of each client of one engine, in steps: `python -m tests.bench.bench_queue [--slots N] [--steps N]`.

Runs the scheduler without a device; beside it, as a comparison, a queue in the order of arrival without a kept slot.
Prints how long requests of four tokens wait behind a hundred long ones, also at the worst of many moments, and what
four clients receive if one floods.
"""

from __future__ import annotations

import argparse
import itertools
import random
import secrets
from dataclasses import dataclass

from edgelm.core import ExecutorInfo, Sampled, SamplingParams, Sequence
from edgelm.engine.admission import AdmissionQueue, _Kind
from edgelm.engine.clock import StepClock
from edgelm.engine.kv_paged import PagedKV
from edgelm.engine.scheduler import Scheduler

FLOOD = 100  # requests
ARRIVALS = 100  # of short requests


class ArrivalQueue(AdmissionQueue):
    """A queue in the order of arrival."""

    def head(self, *, no_long: bool = False) -> Sequence | None:
        return next(iter(self), None)


@dataclass(frozen=True, slots=True)
class Shape:
    """The tokens of a request."""

    prompt: int
    answer: int


class Engine:
    """A scheduler whose steps sample always the same token."""

    def __init__(self, queue: AdmissionQueue, slots: int) -> None:
        info = ExecutorInfo(
            engine="none",
            device="none",
            num_vocab=10_000,
            context=4096,
            capacity=4096 * slots,
            max_tokens=512,
            max_rows=64,
            max_sequences=slots,
            kv_bytes_per_token=1,
        )
        self.scheduler = Scheduler(info, PagedKV(info), StepClock())
        self.scheduler.waiting = queue
        self.tokens: dict[str, int] = {}  # of answers, by client
        self.now = 0  # steps
        self._ids = itertools.count()

    def add(self, client: str, shape: Shape) -> Sequence:
        number = next(self._ids)
        prompt = [number + 1] * shape.prompt  # no two requests share a prefix
        params = SamplingParams(temperature=0, max_tokens=shape.answer)
        seq = Sequence(number, prompt, len(prompt), params, client=client)
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        self.now += 1
        step = self.scheduler.plan()
        if step:
            for chunk in step.chunks:
                self.tokens[chunk.seq.client] = self.tokens.get(chunk.seq.client, 0) + chunk.rows
            self.scheduler.commit(step, [[Sampled(0)] * chunk.rows for chunk in step.chunks])

    def num_admitted(self) -> int:
        return self.scheduler.waiting._num_admitted


def behind_a_flood(queue: AdmissionQueue, slots: int, late: Shape) -> str:
    """Return the number of requests and steps before a late request of another client."""
    engine = Engine(queue, slots)
    for _ in range(FLOOD):
        engine.add("flood", Shape(200, 300))
    for _ in range(60 * slots):
        engine.step()
    admitted, began = engine.num_admitted(), engine.now
    seq = engine.add("late", late)
    first = 0
    while seq.completion_len < late.answer:
        engine.step()
        first = first or (engine.now if seq.completion_len else 0)
    assert seq.turn is not None
    others, last = seq.turn - admitted, engine.now - began
    return f"{others:4} others, first token after {first - began:6,} steps, last after {last:6,}"


def worst_moment(queue: AdmissionQueue, slots: int, num_clients: int, together: int, rng: random.Random) -> str:
    """Keep a hundred long requests waiting; again and again, new clients come together, each with one of four tokens.

    Return the most that any of these had to wait for: others that were admitted before it, and steps.
    """
    engine = Engine(queue, slots)
    flood: list[Sequence] = []
    most_others = most_steps = 0
    for number in range(ARRIVALS):
        admitted, began, left = engine.num_admitted(), engine.now, [0] * together
        late: list[Sequence] = []
        pause = rng.randrange(1, 60)
        while pause or not late or any(seq.turn is None for seq in late):
            flood = [seq for seq in flood if seq.turn is None]
            while len(flood) < FLOOD:
                flood.append(engine.add(f"flood {rng.randrange(num_clients)}", Shape(rng.randrange(20, 300), 200)))
            if pause:
                pause -= 1
            elif not late:
                admitted, began, left = engine.num_admitted(), engine.now, [0] * together
                late = [
                    engine.add(f"late {number} {index}", Shape(rng.randrange(1, 60), 4)) for index in range(together)
                ]
            engine.step()
            for index, seq in enumerate(late):
                left[index] = engine.now - began if seq.turn is None else left[index]
        most_others = max(most_others, *(seq.turn - admitted for seq in late if seq.turn is not None))
        most_steps = max(most_steps, *left)
    return f"at most {most_others:3} others are admitted before one, {most_steps:5,} whole steps"


def four_clients(queue: AdmissionQueue, slots: int, steps: int) -> str:
    """One client keeps a hundred requests open; three send the next when they have the answer to the last."""
    engine, shape = Engine(queue, slots), Shape(200, 200)
    flood = [engine.add("flood", shape) for _ in range(FLOOD)]
    polite = {client: (engine.add(client, shape), 0) for client in ("a", "b", "c")}
    waits: list[int] = []
    for _ in range(steps):
        engine.step()
        for index, seq in enumerate(flood):
            if seq.completion_len == shape.answer:
                flood[index] = engine.add("flood", shape)
        for client, (seq, sent) in polite.items():
            if seq.completion_len == shape.answer:
                waits.append(engine.now - sent)
                polite[client] = engine.add(client, shape), engine.now
    shares = ", ".join(f"{client} {engine.tokens.get(client, 0):6,}" for client in ("flood", *polite))
    mean = f"{sum(waits) / len(waits):,.0f}" if waits else "-"
    return f"tokens: {shares}; an answer of the three takes {mean} steps"


def all_flood(queue: AdmissionQueue, slots: int, steps: int) -> str:
    """Four clients keep as many requests open as they like, of different lengths."""
    engine = Engine(queue, slots)
    shapes = {"a": Shape(50, 800), "b": Shape(50, 100), "c": Shape(400, 100), "d": Shape(50, 400)}
    counts = {"a": 90, "b": 10, "c": 20, "d": 30}
    requests = [(client, engine.add(client, shapes[client])) for client in shapes for _ in range(counts[client])]
    for _ in range(steps):
        engine.step()
        for index, (client, seq) in enumerate(requests):
            if seq.completion_len == shapes[client].answer:
                requests[index] = client, engine.add(client, shapes[client])
    received = engine.scheduler.waiting._queues[_Kind.LONG]._received
    most, least = max(received.values()), min(received.values())
    ratio = f"the most is {most / least:.2f} of the least" if least else "some received nothing"
    answers = ", ".join(f"{client} {engine.tokens.get(client, 0):6,}" for client in shapes)
    return f"tokens of answers: {answers}; with prompts, {ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    for name, make in (("in order of arrival", ArrivalQueue), ("fair", AdmissionQueue)):
        print(f"{name}, {args.slots} slots")
        cases = itertools.product((1, 2, 4, 8), (1, 100), (1, 8)) if make is AdmissionQueue else ()
        for slots, num_clients, together in cases:
            worst = worst_moment(make(), slots, num_clients, together, random.Random(args.seed))
            print(f"  {together} of 4 tokens, {FLOOD} long ones of {num_clients:3} clients, {slots} slots: {worst}")
        print(f"  4 tokens behind {FLOOD} of 300:    {behind_a_flood(make(), args.slots, Shape(50, 4))}")
        print(f"  300 tokens behind {FLOOD} of 300:  {behind_a_flood(make(), args.slots, Shape(200, 300))}")
        print(f"  one of four floods:           {four_clients(make(), args.slots, args.steps)}")
        print(f"  all four flood:               {all_flood(make(), args.slots, args.steps)}")


if __name__ == "__main__":
    main()
