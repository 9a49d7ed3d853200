"""Drafts from heads and from texts, alone and together: recorded answers at simulated costs and agreements.

    python -m tests.bench.bench_mtp TRACE.npz ... [--requests 40] [--json FILE]
    python -m tests.bench.bench_mtp --clock MODEL.gguf [--repeats 20]
    python -m tests.bench.bench_mtp --write MODEL.gguf

The drafters, the throttle and the engine's clock are the product's. Steps and heads are not run: a step takes the time
that its rows cost, each token of the heads `cost` plain steps, and that time counts. The heads are right about a token
as often as they are sure of it, in the mean `agreement`; that of real heads depends on the model and the text. Prints
the tokens in the time of a plain step: 1 is the speed without drafts, below which the throttle lets it fall by 0.01.

`--clock` takes the times of a real model by the clock, and the memory of its states against the plan. `--write` writes
one of random weights in the shape of Qwen3.5-0.8B, with a vocabulary of 32,000.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from edgelm.backends.llama.buffers import LlamaBuffers
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.memory import LlamaMemory
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.machine.cpu import usable_cores
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import model_facts
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import Chunk, Drafter, Drop, Load, SamplingParams, Save, Step, Trim
from edgelm.engine.core import Sequence as Seq
from edgelm.engine.speculation import mtp_drafter, throttle
from edgelm.engine.speculation.acceptance import MAX_DRAFT
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from edgelm.engine.speculation.ngram_drafter import NgramDrafter
from edgelm.engine.speculation.past_answers import PastAnswers
from edgelm.engine.speculation.throttle import ChainDrafter, ThrottledDrafter
from tests import odd_models
from tests.backends.llama.test_speculation import quantized
from tests.bench.adversarial import Answer
from tests.bench.bench_ablation import STEP_S, TOLD_ROWS, Costs, linear, recorded, staircase
from tests.tiny import Tiny

AGREEMENTS = 0.0, 0.3, 0.6, 0.8
HEAD_COSTS = 0.05, 0.15, 0.4  # plain steps for a token of the heads
ROW_COSTS = (*(Costs(f"{cost} a row", linear(cost), linear(cost)) for cost in (0.03, 0.35)),)
STAIRCASE = Costs("1B on two cores", staircase, staircase)
WHO = ("ngram",), ("mtp",), ("ngram", "mtp")


class SimulatedHeads:
    """Heads that know the recorded answers; `spend` is told the time of each token."""

    def __init__(self, agreement: float, cost: float, seed: int = 0) -> None:
        self.now = 0.0  # seconds
        self.answers: dict[int, Sequence[int]] = {}  # by sequence
        self._agreement = agreement
        self._cost = cost
        self._rng = random.Random(seed)
        self._at = 0

    def begin(self, seq_id: int) -> None: ...

    def end(self, seq_id: int) -> None: ...

    def first(self, seq_id: int, tokens: list[int]) -> tuple[int, float]:
        self._at = len(tokens)
        return self._token(self.answers[seq_id])

    def next(self, seq_id: int, token: int) -> tuple[int, float]:
        self._at += 1
        return self._token(self.answers[seq_id])

    def _token(self, answer: Sequence[int]) -> tuple[int, float]:
        self.now += STEP_S * self._cost
        sure = self._rng.betavariate(2 * self._agreement, 2 * (1 - self._agreement)) if self._agreement else 0.05
        right = self._agreement > 0 and self._rng.random() < sure and self._at < len(answer)
        return (answer[self._at] if right else -5), sure


def speed(
    answers: Iterable[Answer],
    who: Sequence[str],
    costs: Costs,
    heads: SimulatedHeads,
    most: int,
    proof: Path | None,
    together: int = 1,
) -> float:
    """Return the tokens in the time of a plain step, over all answers; a draft has at most so many tokens.

    So many answers are decoded `together`; what is left when fewer are is not counted.
    """
    clock = StepClock(StepCosts(Measured(rows, 0, STEP_S * costs.told(rows)) for rows in TOLD_ROWS))
    watch = SimpleNamespace(perf_counter=lambda: heads.now)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(PastAnswers()), "mtp": MtpDrafter(heads, clock.token_s)}
    with patch.object(throttle, "time", watch), patch.object(mtp_drafter, "time", watch):
        proofs = {"mtp": proof}
        drafter = ChainDrafter(
            [ThrottledDrafter(drafters[name], clock, name=name, proof=proofs.get(name)) for name in who]
        )
        return _decode(list(answers), together, drafter, clock, costs, heads, most) * STEP_S / heads.now


def _decode(
    answers: list[Answer],
    together: int,
    drafter: Drafter,
    clock: StepClock,
    costs: Costs,
    heads: SimulatedHeads,
    most: int,
) -> int:
    """Decode answers as long as so many run `together`, and return the tokens after the first ones."""
    waiting, running, tokens = list(enumerate(answers)), list[Seq](), 0
    while len(waiting) + len(running) >= together:
        while len(running) < together:
            number, answer = waiting.pop(0)
            seq = Seq(number, [*answer.prompt, *answer.after(answer.prompt, [])], len(answer.prompt), SamplingParams())
            heads.answers[number] = _whole(answer, seq.tokens)
            drafter.begin(seq)
            running.append(seq)
        rows, chunks, added = len(running), [], {}
        for seq in running:
            draft = drafter.propose(seq, clock.marginal_cost(rows, 0, len(running), most))
            added[seq.id] = answers[seq.id].after(seq.tokens, draft)
            rows += len(draft)
            chunks.append(Chunk(seq, 0, [0, *draft], 1 + len(draft), seq.id))
        took = STEP_S * costs.true(rows)
        heads.now += took
        clock.observe(Step(tuple(chunks)), took)
        for chunk in chunks:
            seq, new = chunk.seq, added[chunk.seq.id]
            seq.tokens += new
            tokens += len(new)
            if chunk.draft:
                drafter.observe(seq, len(chunk.draft), len(new) - 1)
            if not answers[seq.id].after(seq.tokens, []):
                running.remove(seq)
                drafter.end(seq)
                _finish_work(drafter)
    return tokens


def _finish_work(drafter: Drafter) -> None:
    while drafter.work(1.0):
        pass


def _whole(answer: Answer, tokens: list[int]) -> list[int]:
    """Return an answer to its end, where nothing is drafted."""
    tokens = list(tokens)
    while more := answer.after(tokens, []):
        tokens += more
    return tokens


def write_shape(path: Path) -> None:
    """Write a model of Q8_0 in a real shape."""
    shape = {"WIDTH": 1024, "HEADS": 8, "KV_HEADS": 2, "HEAD": 256, "FFN": 3584, "VOCAB": 32_000, "DELTA_LAYERS": 24}
    shape |= {"DELTA_HEADS": 16, "DELTA_GROUPS": 16, "DELTA_HEAD": 128}
    with patch.multiple(odd_models, **shape):
        quantized(path.parent, "qwen35", 0, heads=1.0, tiny=Tiny(vocab_size=shape["VOCAB"])).rename(path)
    (path.parent / "qwen35-all.gguf").unlink()


class Clock:
    """The times of one model's steps, states and heads."""

    def __init__(self, path: Path, rollback: int, sequences: int) -> None:
        with open_gguf(path) as gguf:
            self.facts = model_facts(gguf)
        heads = self.facts.mtp_heads > 0
        self.options = LlamaOptions(
            context=2048,
            kv="int8",
            max_sequences=sequences,
            threads=usable_cores().physical,
            rollback=rollback,
            heads=heads,
        )
        model = LlamaModel(path, heads=heads)
        before = resident_bytes()
        self.executor = LlamaExecutor(model, self.options)
        self.rng = random.Random(0)
        self.seqs = [Seq(slot, [], 0, SamplingParams()) for slot in range(sequences)]
        for seq in self.seqs:
            if self.executor.heads:
                self.executor.heads.begin(seq.id)
            self.compute(seq, self.tokens(64), rows=1)
            self.compute(seq, self.tokens(4), rows=4)
        self.resident_bytes = resident_bytes() - before

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 300) for _ in range(count)]

    def compute(self, seq: Seq, tokens: list[int], rows: int, cut: int = 0) -> None:
        ops = (Trim(seq.id, cut),) if cut else ()
        self.executor.forward(Step((Chunk(seq, len(seq.tokens), tokens, rows, seq.id),), ops))
        seq.tokens += tokens

    def times(self, repeats: int) -> dict[str, float]:
        """Return medians in milliseconds."""
        seq, lists = self.seqs[0], dict[str, list[float]]()

        def timed(name: str, action: Callable[[], object]) -> None:
            began = time.perf_counter()
            action()
            lists.setdefault(name, []).append(1000 * (time.perf_counter() - began))

        for _ in range(repeats):
            timed("a plain step", lambda: self.compute(seq, self.tokens(1), 1))
            timed("a step of 4 rows", lambda: self.compute(seq, self.tokens(4), 4))
            del seq.tokens[-2:]
            timed("a rollback of 2", lambda: self.executor.forward(Step((), (Trim(seq.id, len(seq.tokens)),))))
            timed("a plain step after it", lambda: self.compute(seq, self.tokens(1), 1))
            timed("a state saved", lambda: self.executor.forward(Step((), (Save(seq.id, 1),))))
            timed(
                "a state loaded", lambda: self.executor.forward(Step((), (Trim(seq.id, 0), Load(1, seq.id), Drop(1))))
            )
            if heads := self.executor.heads:
                token = self.tokens(1)
                timed("a head's first token", partial(heads.first, seq.id, seq.tokens + token))
                timed("a head's next token", partial(heads.next, seq.id, token[0]))
        return {name: statistics.median(values) for name, values in lists.items()}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def clock(path: Path, repeats: int) -> None:
    """Print the times of a model, and the memory of its states."""
    sequences, measured, planned, own = 8, dict[int, int](), dict[int, int](), dict[int, int]()
    for rollback in (0, 3):
        one = Clock(path, rollback, sequences)
        measured[rollback] = one.resident_bytes
        facts = one.facts.with_rollback(rollback)
        planned[rollback] = LlamaMemory(facts, sequences=sequences, heads=one.options.heads).kv_bytes("int8", 2048)
        heads = path if one.options.heads else None
        with LlamaBuffers(path, facts.summary, sequences=sequences, rollback=rollback, heads=heads) as buffers:
            own[rollback] = buffers("int8", 2048).kv
        if rollback:
            for name, ms in one.times(repeats).items():
                print(f"{ms:8.2f} ms  {name}")
        one.executor.close()
    mib = {
        name: (sizes[3] - sizes[0]) / 2**20
        for name, sizes in (("plan", planned), ("llama.cpp", own), ("resident", measured))
    }
    print(
        "states to go back 3 tokens, 8 sequences: "
        + ", ".join(f"{size:.1f} MiB by {name}" for name, size in mib.items())
    )


def main() -> None:
    """Write a model, take its times, or simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="TRACE.npz")
    parser.add_argument("--clock", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--write", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.write:
        write_shape(args.write)
    if args.clock:
        clock(args.clock, args.repeats)
    if args.files:
        simulate(args.files, args.requests, args.json)


def simulate(files: Sequence[Path], num_requests: int, document: Path | None) -> None:
    """Print a table for each recorded set."""
    figures = {}
    for path in files:
        answers = recorded(path)[:num_requests]
        for costs in (*ROW_COSTS, STAIRCASE):
            for cost in HEAD_COSTS:
                for agreement in AGREEMENTS:
                    for who in WHO:
                        name = f"{path.stem}, {costs.name}, heads {cost}, agreement {agreement}, {'+'.join(who)}"
                        with tempfile.TemporaryDirectory() as folder:  # heads on trial, as in the first process
                            heads, proof = SimulatedHeads(agreement, cost), Path(folder, "proof")
                            figures[name] = speed(answers, who, costs, heads, min(MAX_DRAFT, 3), proof)
                        print(f"{figures[name]:.4f}  {name}", flush=True)
    least = min(figures, key=figures.__getitem__)
    print(f"least {figures[least]:.4f} ({least})")
    if document:
        document.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
