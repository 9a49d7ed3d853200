"""Simulation: runs a workload on scheduler, bookkeeper and fake executor, and checks invariants after each step.

Owns the invariants of the engine's integers. Each AssertionError names the seed of its workload.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace

from edgelm.base.errors import EngineError, SnapshotError
from edgelm.engine.clock import StepClock
from edgelm.engine.core import LAST, Chunk, Event, Matcher, Sequence, Step
from edgelm.engine.kv_paged import PagedKV
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.pipeline import grammar_masks
from edgelm.engine.prefixes import common_prefix_len
from edgelm.engine.sampling.budget import BudgetMatcher
from edgelm.engine.scheduler import Scheduler
from tests.engine.fake import (
    THOUGHT_END,
    FakeExecutor,
    FakeFiles,
    FakeMatcher,
    FakePendingSamples,
    InjectedError,
    PagedMemory,
    SlotMemory,
)
from tests.engine.workloads import FakeDrafter, Request, Workload, make_workload

BOOKKEEPERS = ("slots", "paged")
SIMULATED = (*BOOKKEEPERS, "states")  # beside the KV of blocks


@dataclass(frozen=True, slots=True)
class _Before:
    """The state before a step was planned."""

    running: list[Sequence]
    oldest: Sequence | None
    ready: list[Sequence]


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
        self.refused: Sequence | None = None  # blocked on memory; None: a sequence ended since
        self.start()
        self.sequences: dict[int, Sequence] = {}
        self.answers: dict[int, list[int]] = {}
        self.finished: dict[int, Event] = {}
        self.num_preempted = 0
        self.num_overtaken = 0  # times that an editor took a slot
        self.num_cached = 0
        self.num_restarts = 0
        self.num_ahead = 0  # steps
        self.num_ahead_with_matcher = 0  # chunks
        self.num_dropped = 0  # tokens sampled after the end of a sequence
        self._admitted: set[int] = set()
        self._cached: dict[int, int] = {}  # at the first admission
        self._failed: set[int] = set()  # requests that an injected failure ended

    def start(self) -> None:
        """Start as a new process does: everything is new except the files."""
        workload = self.workload
        facts = replace(workload.info, runs_ahead=workload.runs_ahead and self.kind != "slots")
        if self.kind == "states":
            num_saved = 1 + workload.info.max_rows % 5
            facts = replace(facts, max_draft=3, num_states=facts.max_sequences + num_saved, can_trim=True)
        self.flight: tuple[Step, FakePendingSamples] | None = None  # launched before the last step was read
        if self.kind == "slots":
            size = workload.snapshot_bytes
            self.memory = memory = SlotMemory(facts, size, self.files, workload.refused_saves)
            memory.read_steps = workload.seed % 4
            self.kv = SlotKV(facts, size, memory, min_stored_len=32)
        else:
            self.memory = blocks = PagedMemory(facts, workload.block_len, self.files, workload.refused_saves)
            store = None if self.kind == "states" else blocks
            self.kv = PagedKV(facts, workload.block_len, store, min_stored_len=32)
        spoiled = {request.id: request.spoiled_at for request in workload.requests if request.spoiled_at is not None}
        self.executor = FakeExecutor(facts, self.memory, workload.faults, spoiled, workload.all_rows)
        self.scheduler = Scheduler(facts, self.kv, self.clock, self.drafter)

    def run(self) -> None:
        now, limit = 0, self._max_steps()
        while len(self.finished) < len(self.workload.requests):
            assert now < limit, "no progress"
            self._arrive_and_leave(now)
            if not self.step():
                self._flush_idle()
                future = [request.arrival for request in self.workload.requests if request.arrival > now]
                now = min(future, default=now)
            else:
                now += 1
            self.check_state()
        assert self.scheduler.plan() is None
        self.check_end()

    def add(self, request: Request) -> None:
        matcher: Matcher | None = None
        if request.grammar is not None:
            matcher = FakeMatcher(request.grammar, self.workload.info.num_vocab, request.grammar_raises_at)
        elif request.budget is not None:
            matcher = BudgetMatcher(None, request.budget, is_open=True, end_ids=THOUGHT_END, piece=lambda _: b"")
        self.scheduler.check(request.prompt, request.params)
        prompt = list(request.prompt)
        seq = Sequence(
            request.id, prompt, len(prompt), request.params, matcher=matcher, cache_namespace=request.cache_namespace
        )
        seq.client, seq.interactive = f"client {request.id % 3}", request.interactive
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
                self.refused = self.scheduler.next_up(self.scheduler.running)
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
            failed = [chunk.seq for chunk in step.chunks] if step else [*self.scheduler.running]
            self._failed.update(seq.id for seq in failed if seq.id not in self.finished)
            self.executor.lenient = True
            events = self.scheduler.fail(step, EngineError("injected"))
            assert sorted(event.seq_id for event in events) == sorted(seq.id for seq in failed)
            assert all(event.error for event in events)
            events = [event for event in events if event.seq_id not in self.finished]
        self.take(events)
        return True

    def _launch(self, step: Step) -> tuple[Step, FakePendingSamples]:
        self.executor.forward(step)
        self._check_memory()
        return step, self.executor.sample(step, grammar_masks(step, self.workload.info.num_vocab))

    def _launch_ahead(self, step: Step) -> tuple[Step, FakePendingSamples] | None:
        try:
            return self._launch(step)
        except EngineError:
            if self.kind == "states":
                raise
            return None

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.seq_id not in self.finished
            self.answers[event.seq_id] += [sample.id for sample in event.sampled]
            if event.finish_reason:
                self.refused = None
                self.finished[event.seq_id] = event
                self._check_finished(self.workload.requests[event.seq_id], event)

    # -- invariants -----------------------------------------------------------------------------------------------

    def check_step(self, step: Step, before: _Before) -> None:
        """Check the promises of a plan that the executor does not check itself."""
        running, chunks = self.scheduler.running, {chunk.seq: chunk for chunk in step.chunks}
        assert len(chunks) == len(step.chunks)
        assert chunks.keys() <= set(running)
        editors = any(seq.interactive for seq in self.sequences.values())
        overtaken = any(seq.interactive and seq not in before.running for seq in running)
        self.num_overtaken += overtaken and before.oldest not in chunks
        assert before.oldest in chunks or editors, "the one admitted first makes progress in each step"
        for chunk in step.chunks:
            seq = chunk.seq
            assert chunk.start == seq.computed
            assert chunk.tokens == (seq.tokens + seq.draft)[chunk.start : chunk.end]
            assert chunk.rows == (len(seq.draft) + 1 if chunk.end == len(seq.tokens + seq.draft) else 0)
            assert (self.drafter and seq.params.drafts) or not seq.draft, "without speculation, no token is drafted"
            if seq.matcher:
                assert seq.matcher.allowed(seq.draft) == len(seq.draft), "a draft ends before a forbidden token"
        preempted = [seq for seq in before.running if seq not in running]
        self.num_preempted += len(preempted)
        assert all(seq in chunks or seq in preempted for seq in before.ready), "running sequences come first"
        if preempted and not editors:
            assert not set(running) - set(before.running), "none is admitted in a step that preempts"
        prefill = sum(len(chunk.tokens) for chunk in step.chunks if len(chunk.seq.tokens) - chunk.start > 1)
        decoding = sum(len(chunk.seq.tokens) - chunk.start == 1 for chunk in step.chunks)
        if decoding and before.ready and not (preempted and editors):
            # One that makes way for an editor's, which finds no memory, may be admitted again in the same step.
            bound = max(self.clock.prefill_tokens(rows) for rows in (len(before.ready), decoding))
            assert prefill <= bound + editors, "prefill beside decoding is bounded in time"
        for seq in running:
            if seq not in before.running:
                self.num_cached += seq.computed
                assert seq.computed <= self._most_shared(seq), "a prefix serves its own cache namespace only"

    def check_ahead(self, step: Step, ahead: Step) -> None:
        """Check that a step ahead needs no samples of the step before it."""
        self.num_ahead += 1
        scheduler, chunks = self.scheduler, {chunk.seq: chunk for chunk in step.chunks}
        assert ahead.chunks
        assert not ahead.ops or self.kind == "states"
        assert all(chunk.rows == 1 for chunk in step.chunks), "the length of a verified draft is not known"
        assert {chunk.seq for chunk in ahead.chunks} <= set(scheduler.running) <= chunks.keys()
        for chunk in ahead.chunks:
            seq, params = chunk.seq, chunk.seq.params
            assert (chunk.tokens, chunk.rows, chunk.start) == ([LAST], 1, chunks[seq].end)
            assert seq.matcher is None or seq.matcher.unrestricted, "a mask needs the token"
            self.num_ahead_with_matcher += seq.matcher is not None
            assert params.max_tokens is None or seq.completion_len + 1 < params.max_tokens, "it ends for certain"
        if head := scheduler.next_up([chunk.seq for chunk in ahead.chunks]):
            assert head is self.refused, "a waiting sequence could be admitted instead"

    def check_state(self) -> None:
        """Check the state between steps."""
        waiting, running = list(self.scheduler.waiting), self.scheduler.running
        ids = [seq.id for seq in [*running, *waiting]]
        assert len(ids) == len(set(ids)) == self.scheduler.num_unfinished
        assert set(ids) == self.sequences.keys() - self.finished.keys()
        turns = [seq.turn for seq in [*running, *waiting] if seq.turn is not None]
        assert len(turns) == len(set(turns))
        editors = [seq for seq in self.sequences.values() if seq.interactive]
        of_others = [seq.turn for seq in [*running, *waiting] if seq.turn is not None and not seq.interactive]
        for turn, behind in itertools.pairwise(of_others):
            # A sequence that makes way for an editor's, which may find no memory, need not be the youngest: only one
            # whose state can be kept does.
            made_way = any(editor.turn is None or editor.turn > behind for editor in editors)
            assert turn < behind or made_way, "the first ones that were admitted run, but for editors"
        assert [seq.turn for seq in waiting[len(turns) - len(running) :]] == [None] * (len(ids) - len(turns))
        if len(turns) > len(running):
            assert self.scheduler.waiting.head() is waiting[0], "a preempted sequence comes before new ones"
        assert len(running) <= self.workload.info.max_sequences
        for seq in running:
            assert 0 <= seq.computed < len(seq.tokens)
            assert seq.draft == []
            assert seq.kv is not None
        prompts = [seq for seq in running if len(seq.tokens) - seq.computed > 1]
        for interactive in (False, True):
            assert sum(seq.interactive is interactive for seq in prompts) <= 1, "one prompt at a time"
        assert not prompts or prompts[0] is running[-1] or any(seq.interactive for seq in self.sequences.values())
        for seq in [*waiting, *(self.sequences[seq_id] for seq_id in self.finished)]:
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
            assert self.memory.snapshots.keys() == {snapshot.key for snapshot in self.kv._snapshots}
        else:
            assert not any(self.kv._refs)
            assert isinstance(self.memory, PagedMemory)
            for op in self.kv.take_ops():
                self.memory.apply(op, lenient=True)
            assert not self.memory.snapshots
        if self.drafter:
            assert not self.drafter.begun
            unfailed = [seq for seq in self.sequences.values() if seq.id not in self._failed]
            assert sum(seq.drafted for seq in unfailed) <= self.drafter.drafted
            assert sum(seq.accepted for seq in unfailed) <= self.drafter.accepted

    def _check_committed(self, chunks: list[Chunk], events: list[Event]) -> None:
        """Check the sequences of a committed step that had not ended before it."""
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
        assert sorted(slot.seq.id for slot in kv._slots if slot.seq) == sorted(seq.id for seq in running)
        for slot in kv._slots:
            draft_len = kv._cells.length(slot.id) - slot.length  # of a rejected draft that an idle slot keeps
            assert 0 <= draft_len <= (self.executor.info.rollback_len if slot.idle_tokens else 0)
        assert sum(snapshot.nbytes for snapshot in kv._snapshots) <= self.workload.snapshot_bytes
        assert all(slot.idle_tokens or not kv._cells.length(slot.id) for slot in kv._slots if not slot.seq)

    def _check_blocks(self, kv: PagedKV) -> None:
        assert isinstance(self.memory, PagedMemory)
        size = self.workload.block_len
        tables = [kv.kv_location(seq) for seq in self.scheduler.running]
        refs = Counter(block for table in tables for block in table)
        assert all(kv._refs[block] == refs[block] for block in range(len(kv._refs)))
        free = [*kv._empty, *kv._idle, *kv._idle_last]
        assert sorted(free) == [block for block in range(len(kv._refs)) if refs[block] == 0], (
            "a block is free if no sequence holds it"
        )
        assert kv._reusable == {digest: block for block, digest in enumerate(kv._digests) if digest is not None}
        assert all(kv._digests[block] is None for block in kv._empty)
        assert all(kv._digests[block] is not None for block in (*kv._idle, *kv._idle_last))
        assert kv._links.keys() == kv._reusable.keys()
        assert kv._num_next == Counter(link.previous for link in kv._links.values())
        for block in kv._empty:
            self.memory.poison(block)
        ends = {chunk.seq: chunk.end for chunk in self.flight[0].chunks} if self.flight else {}
        for seq, table in zip(self.scheduler.running, tables, strict=True):
            assert len(table) * size <= seq.computed + size, "a sequence holds only what the next token needs"
            written = ends.get(seq, seq.computed)
            for index in range(written // size, len(table)):
                self.memory.poison(table[index], max(written - index * size, 0))

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _before(self) -> _Before:
        running = list(self.scheduler.running)
        ready = [seq for seq in running if len(seq.tokens) - seq.computed == 1]
        oldest = running[0] if running else self.scheduler.waiting.head()
        return _Before(running, oldest, ready)

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
                    self.refused = refused  # a waiting sequence frees no memory
                    self.check_state()

    def _flush_idle(self) -> None:
        """Act as an idle engine; perhaps damage a file, perhaps continue as a new process."""
        rng = self.workload.rng
        restarts = rng.random() < self.workload.restart_rate
        step = self.scheduler.flush_idle(ends=restarts)
        if step:
            try:
                self.executor.forward(step)
            except (EngineError, InjectedError):
                self.scheduler.recompute()
        if self.files and self.files.found and rng.random() < 0.3:
            self.files.spoiled.add(rng.choice(self.files.found).name)
        if restarts:
            self.num_restarts += 1
            self.start()

    def _most_shared(self, seq: Sequence) -> int:
        """Return the longest prefix that a sequence shares with others of its cache namespace."""
        again = seq.id in self._admitted
        self._admitted.add(seq.id)
        others = [
            other
            for other in self.sequences.values()
            if other.cache_namespace == seq.cache_namespace and (again or other is not seq)
        ]
        return max((common_prefix_len(other.tokens, seq.tokens) for other in others), default=0)

    def _seconds(self, step: Step) -> float:
        prefill = step.num_tokens - step.num_rows
        noise = self.workload.rng.uniform(0.9, 1.1)
        return noise * (self.workload.decode_s + self.workload.prefill_s * prefill)

    def _max_steps(self) -> int:
        requests = self.workload.requests
        work = sum(len(request.prompt) + 2 * len(request.answer) + 10 for request in requests)
        return max(request.arrival for request in requests) + 20 * work


def run_workload(seed: int, kind: str) -> Simulation:
    """Run the workload of a seed. An AssertionError has a note with the call that repeats it."""
    simulation = Simulation(make_workload(seed), kind)
    try:
        simulation.run()
    except BaseException as error:
        error.add_note(f"to repeat it: run_workload({seed}, {kind!r}) of tests.engine.simulation")
        raise
    return simulation


def fresh_seed() -> int:
    return random.SystemRandom().randrange(2**48)
