"""Runs a workload on scheduler, bookkeeper and fake executor, and checks after each step what must always hold.

Owns the invariants of the engine's integers. An AssertionError from here names the seed of its workload.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from edgelm.core import LAST, Chunk, Event, Sequence, Step
from edgelm.engine.clock import StepClock
from edgelm.engine.masks import grammar_masks
from edgelm.engine.paged import PagedKV
from edgelm.engine.prefixes import common_prefix_len
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.slots import SlotKV
from edgelm.errors import EngineError, SnapshotError
from tests.engine.fake import (
    FakeExecutor,
    FakeFiles,
    FakeMatcher,
    FakeSamples,
    InjectedError,
    PagedMemory,
    SlotMemory,
)
from tests.engine.workloads import FakeDrafter, Request, Workload, make_workload

BOOKKEEPERS = ("slots", "paged")


@dataclass(frozen=True, slots=True)
class _Before:
    """What was true before a step was planned."""

    running: list[Sequence]
    oldest: int
    ready: list[Sequence]
    prefill: int


class Simulation:
    """One workload on one kind of bookkeeper."""

    def __init__(self, workload: Workload, kind: str) -> None:
        self.workload = workload
        self.clock = StepClock()
        self.kv: SlotKV | PagedKV
        self.memory: SlotMemory | PagedMemory
        self.kind = kind
        self.files = FakeFiles() if workload.keeps_files else None
        self.drafter = FakeDrafter(workload) if workload.draft_rate else None
        self.refused: Sequence | None = None  # who could not be admitted; None: somebody ended since
        self.start()
        self.sequences: dict[int, Sequence] = {}
        self.answers: dict[int, list[int]] = {}
        self.finished: dict[int, Event] = {}
        self.num_preempted = 0
        self.num_cached = 0
        self.num_restarts = 0
        self.num_ahead = 0  # steps
        self.num_dropped = 0  # tokens that were sampled behind the end
        self._admitted: set[int] = set()
        self._cached: dict[int, int] = {}  # at the first admission
        self._failed: set[int] = set()  # whom an injected failure concerns

    def start(self) -> None:
        """Make what a process has: all but the files are new."""
        workload = self.workload
        facts = replace(workload.info, runs_ahead=workload.runs_ahead and self.kind == "paged")
        self.flight: tuple[Step, FakeSamples] | None = None  # launched before the step before it was read
        if self.kind == "slots":
            size = workload.snapshot_bytes
            self.memory = memory = SlotMemory(facts, size, self.files, workload.refused_saves)
            self.kv = SlotKV(facts, size, memory, min_stored_len=32)
        else:
            self.kv, self.memory = PagedKV(facts, workload.block_len), PagedMemory(facts, workload.block_len)
        spoiled = {request.id: request.spoiled_at for request in workload.requests if request.spoiled_at is not None}
        self.executor = FakeExecutor(facts, self.memory, workload.faults, spoiled, workload.all_rows)
        self.scheduler = Scheduler(facts, self.kv, self.clock, self.drafter)

    def run(self) -> None:
        now, limit = 0, self._max_steps()
        while len(self.finished) < len(self.workload.requests):
            assert now < limit, "no progress"
            self._arrive_and_leave(now)
            if not self.step():
                self._rest()
                future = [request.arrival for request in self.workload.requests if request.arrival > now]
                now = min(future, default=now)
            else:
                now += 1
            self.check_state()
        assert self.scheduler.plan() is None
        self.check_end()

    def add(self, request: Request) -> None:
        matcher = None
        if request.grammar is not None:
            matcher = FakeMatcher(request.grammar, self.workload.info.num_vocab, request.grammar_raises_at)
        self.scheduler.check(request.prompt, request.params)
        prompt = list(request.prompt)
        seq = Sequence(request.id, prompt, len(prompt), request.params, matcher=matcher, owner=request.owner)
        self.sequences[request.id] = seq
        self.answers[request.id] = []
        self.scheduler.add(seq)

    def step(self) -> bool:
        """Run one step as the engine does; False: there was nothing to do."""
        flight, self.flight = self.flight, None
        step = flight[0] if flight else None
        before = self._before()
        try:
            if flight is None:
                step = self.scheduler.plan()
                if step is None:
                    assert not self.scheduler.num_unfinished
                    return False
                self.check_step(step, before)
                self.refused = self.scheduler.waiting[0] if self.scheduler.waiting else None
                flight = self._launch(step)
            step, samples = flight
            ahead = self.scheduler.plan_ahead(step)
            if ahead:
                self.check_ahead(step, ahead)
            launched = self._launch_ahead(ahead) if ahead else None
            sampled = samples.read()
            self.clock.observe(step, self._seconds(step))
            alive = [chunk for chunk in step.chunks if chunk.seq.kv is not None]
            self.num_dropped += len(step.chunks) - len(alive)
            events = self.scheduler.commit(step, sampled)
            self._check_committed(alive, events)
            self.flight = launched
        except SnapshotError:
            self.executor.lenient = True
            self.scheduler.recompute()
            events = []
        except (EngineError, InjectedError):
            concerned = [chunk.seq for chunk in step.chunks] if step else [*self.scheduler.running]
            self._failed.update(seq.id for seq in concerned if seq.id not in self.finished)
            self.executor.lenient = True
            events = self.scheduler.fail(step, EngineError("injected"))
            assert sorted(event.seq_id for event in events) == sorted(seq.id for seq in concerned)
            assert all(event.error for event in events)
            events = [event for event in events if event.seq_id not in self.finished]
        self.take(events)
        return True

    def _launch(self, step: Step) -> tuple[Step, FakeSamples]:
        self.executor.forward(step)
        self._check_memory()
        return step, self.executor.sample(step, grammar_masks(step, self.workload.info.num_vocab))

    def _launch_ahead(self, step: Step) -> tuple[Step, FakeSamples] | None:
        try:
            return self._launch(step)
        except EngineError:
            return None

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.seq_id not in self.finished
            self.answers[event.seq_id] += [sample.id for sample in event.sampled]
            if event.finish_reason:
                self.refused = None
                self.finished[event.seq_id] = event
                self._check_finished(self.workload.requests[event.seq_id], event)

    # -- what must hold --------------------------------------------------------------------------------------------

    def check_step(self, step: Step, before: _Before) -> None:
        """Check what a plan promises, beside what the executor checks itself."""
        running, chunks = self.scheduler.running, {chunk.seq: chunk for chunk in step.chunks}
        assert len(chunks) == len(step.chunks)
        assert chunks.keys() <= set(running)
        assert before.oldest in [seq.id for seq in chunks], "the oldest makes progress in each step"
        for chunk in step.chunks:
            seq = chunk.seq
            assert chunk.start == seq.computed
            assert chunk.tokens == (seq.tokens + seq.draft)[chunk.start : chunk.end]
            assert chunk.rows == (len(seq.draft) + 1 if chunk.end == len(seq.tokens + seq.draft) else 0)
        preempted = [seq for seq in before.running if seq not in running]
        self.num_preempted += len(preempted)
        assert all(seq in chunks or seq in preempted for seq in before.ready), "running sequences come first"
        if preempted:
            assert not set(running) - set(before.running), "none is admitted where another had to go"
        prefill = sum(len(chunk.tokens) for chunk in step.chunks if len(chunk.seq.tokens) - chunk.start > 1)
        if before.ready:
            assert prefill <= before.prefill, "prefill beside decoding is bounded in time"
        for seq in running:
            if seq not in before.running:
                self.num_cached += seq.computed
                assert seq.computed <= self._most_known(seq), "a prefix is its owner's"

    def check_ahead(self, step: Step, ahead: Step) -> None:
        """Check what a step may need that follows one whose samples are not known."""
        self.num_ahead += 1
        scheduler, chunks = self.scheduler, {chunk.seq: chunk for chunk in step.chunks}
        assert ahead.chunks
        assert not ahead.ops
        assert all(chunk.rows == 1 for chunk in step.chunks), "what is sampled in several rows is not known"
        assert {chunk.seq for chunk in ahead.chunks} <= set(scheduler.running) <= chunks.keys()
        for chunk in ahead.chunks:
            seq, params = chunk.seq, chunk.seq.params
            assert (chunk.tokens, chunk.rows, chunk.start) == ([LAST], 1, chunks[seq].end)
            assert seq.matcher is None, "a mask needs the token"
            assert params.max_tokens is None or seq.completion_len + 1 < params.max_tokens, "it ends for certain"
        if scheduler.waiting and len(ahead.chunks) < self.workload.info.max_sequences:
            assert scheduler.waiting[0] is self.refused, "somebody could be admitted instead"

    def check_state(self) -> None:
        """Check what holds between steps."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        ids = [seq.id for seq in [*running, *waiting]]
        assert ids == sorted(set(ids)), "the oldest run"
        assert set(ids) == self.sequences.keys() - self.finished.keys()
        assert len(running) <= self.workload.info.max_sequences
        for seq in running:
            assert 0 <= seq.computed < len(seq.tokens)
            assert seq.draft == []
            assert seq.kv is not None
        assert all(len(seq.tokens) - seq.computed == 1 for seq in running[:-1]), "one prompt at a time"
        for seq in [*waiting, *(self.sequences[each] for each in self.finished)]:
            assert seq.kv is None
            assert seq.computed == 0
        for seq in self.sequences.values():
            if seq.cached is not None:
                assert self._cached.setdefault(seq.id, seq.cached) == seq.cached < seq.prompt_len
        for seq_id, answer in self.answers.items():
            if seq_id not in self._failed:
                assert self.sequences[seq_id].tokens == self.workload.requests[seq_id].prompt + answer
        if isinstance(self.kv, SlotKV):
            self._check_slots(self.kv)
        else:
            self._check_blocks(self.kv)

    def check_end(self) -> None:
        """Check that nothing leaked, when all requests are done."""
        assert not self.scheduler.running
        if isinstance(self.kv, SlotKV):
            assert isinstance(self.memory, SlotMemory)
            for op in self.kv.take_ops():
                self.memory.apply(op, lenient=True)
            self.kv._measure()
            for op in self.kv.take_ops():
                self.memory.apply(op, lenient=True)
            self._check_memory()
            assert sum(bool(slot) for slot in self.memory.slots) <= 1
            assert self.memory.snapshots.keys() == {each.key for each in self.kv._snapshots}
        else:
            assert not any(self.kv._refs)
        if self.drafter:
            assert not self.drafter.begun
            unlost = [seq for seq in self.sequences.values() if seq.id not in self._failed]
            assert sum(seq.drafted for seq in unlost) <= self.drafter.drafted
            assert sum(seq.accepted for seq in unlost) <= self.drafter.accepted

    def _check_committed(self, chunks: list[Chunk], events: list[Event]) -> None:
        """Check what became of the chunks of sequences that had not ended before."""
        sampled = {chunk.seq.id for chunk in chunks if chunk.rows}
        assert [event.seq_id for event in events] == [chunk.seq.id for chunk in chunks if chunk.rows]
        for chunk in chunks:
            seq = chunk.seq
            if seq in self.scheduler.running:
                assert seq.computed == (len(seq.tokens) - 1 if seq.id in sampled else chunk.end)

    def _check_finished(self, request: Request, event: Event) -> None:
        answer, reason = self.answers[request.id], event.finish_reason
        seq = self.sequences[request.id]
        assert answer == request.answer[: len(answer)]
        assert 0 <= seq.accepted <= seq.drafted
        assert (event.error is not None) == (reason == "error")
        if request.id in self._failed:
            assert reason == "error"
        elif reason == "abort":
            assert request.abort is not None
        elif request.spoiled_at is not None and request.spoiled_at < len(request.answer):
            assert reason == "error"
            assert len(answer) == request.spoiled_at
        else:
            assert answer == request.answer
            assert reason == request.reason

    def _check_memory(self) -> None:
        """Check the bookkeeper's cells against those of the device."""
        if isinstance(self.kv, SlotKV):
            assert isinstance(self.memory, SlotMemory)
            lengths = [len(slot) for slot in self.memory.slots]
            assert lengths == [self.kv._cells.length(slot) for slot in range(len(lengths))]
            assert self.memory.num_used == self.workload.info.capacity - self.kv._cells.free

    def _check_slots(self, kv: SlotKV) -> None:
        running = self.scheduler.running
        idle = [slot for slot in kv._slots if slot.idle_tokens]
        assert len(idle) <= (0 if running else 1), "idle cells slow down every step"
        assert sorted(slot.owner.id for slot in kv._slots if slot.owner) == [seq.id for seq in running]
        for slot in kv._slots:
            assert kv._cells.length(slot.id) == slot.length
        assert sum(snapshot.nbytes for snapshot in kv._snapshots) <= self.workload.snapshot_bytes
        assert all(slot.idle_tokens or not kv._cells.length(slot.id) for slot in kv._slots if not slot.owner)

    def _check_blocks(self, kv: PagedKV) -> None:
        assert isinstance(self.memory, PagedMemory)
        size = self.workload.block_len
        tables = [kv.place(seq) for seq in self.scheduler.running]
        refs = Counter(block for table in tables for block in table)
        assert all(kv._refs[block] == refs[block] for block in range(len(kv._refs)))
        free = [*kv._empty, *kv._idle]
        assert sorted(free) == [block for block in range(len(kv._refs)) if refs[block] == 0], "free is what none holds"
        assert kv._known == {digest: block for block, digest in enumerate(kv._digests) if digest is not None}
        assert all(kv._digests[block] is None for block in kv._empty)
        assert all(kv._digests[block] is not None for block in kv._idle)
        for block in kv._empty:
            self.memory.poison(block)
        ends = {chunk.seq: chunk.end for chunk in self.flight[0].chunks} if self.flight else {}
        for seq, table in zip(self.scheduler.running, tables, strict=True):
            assert len(table) * size <= seq.computed + size, "no more is held than what the next token needs"
            written = ends.get(seq, seq.computed)
            for index in range(written // size, len(table)):
                self.memory.poison(table[index], max(written - index * size, 0))

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _before(self) -> _Before:
        running = list(self.scheduler.running)
        ready = [seq for seq in running if len(seq.tokens) - seq.computed == 1]
        oldest = min((seq.id for seq in [*running, *self.scheduler.waiting]), default=-1)
        return _Before(running, oldest, ready, self.clock.prefill_tokens(len(ready)))

    def _arrive_and_leave(self, now: int) -> None:
        for request in self.workload.requests:
            if request.arrival <= now and request.id not in self.sequences:
                self.add(request)
        for request in self.workload.requests:
            if request.abort is not None and request.abort <= now and request.id in self.sequences:
                refused = self.refused if self.sequences[request.id] in self.scheduler.waiting else None
                event = self.scheduler.abort(request.id)
                assert (event is None) == (request.id in self.finished)
                if event:
                    self.take([event])
                    self.refused = refused  # one that waited gives nothing back
                    self.check_state()

    def _rest(self) -> None:
        """Do what the engine does when nothing runs; perhaps a new process goes on, perhaps with a damaged file."""
        step = self.scheduler.rest()
        if step:
            try:
                self.executor.forward(step)
            except (EngineError, InjectedError):
                self.scheduler.recompute()
        rng = self.workload.rng
        if self.files and self.files.found and rng.random() < 0.3:
            self.files.spoiled.add(rng.choice(self.files.found).name)
        if rng.random() < self.workload.restart_rate:
            self.num_restarts += 1
            self.start()

    def _most_known(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence its owner's other sequences begin with."""
        again = seq.id in self._admitted
        self._admitted.add(seq.id)
        known = [each for each in self.sequences.values() if each.owner == seq.owner and (again or each is not seq)]
        return max((common_prefix_len(each.tokens, seq.tokens) for each in known), default=0)

    def _seconds(self, step: Step) -> float:
        prefill = step.num_tokens - step.num_rows
        noise = self.workload.rng.uniform(0.9, 1.1)
        return noise * (self.workload.decode_s + self.workload.prefill_s * prefill)

    def _max_steps(self) -> int:
        requests = self.workload.requests
        work = sum(len(request.prompt) + 2 * len(request.answer) + 10 for request in requests)
        return max(request.arrival for request in requests) + 20 * work


def run_workload(seed: int, kind: str) -> Simulation:
    """Run the workload of a seed. An AssertionError carries what repeats it."""
    simulation = Simulation(make_workload(seed), kind)
    try:
        simulation.run()
    except BaseException as error:
        error.add_note(f"to repeat it: run_workload({seed}, {kind!r}) of tests.engine.simulation")
        raise
    return simulation


def fresh_seed() -> int:
    return random.SystemRandom().randrange(2**48)
