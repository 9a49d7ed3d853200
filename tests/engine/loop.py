"""The engine's loop without its thread, for tests that follow a scheduler step by step."""

from __future__ import annotations

import itertools
from typing import Any

from edgelm.base.errors import EngineError
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Drafter, Event, Matcher, Op, SamplingParams, Sequence, Step
from edgelm.engine.kv_paged import PagedKV
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.pipeline import grammar_masks
from edgelm.engine.prefixes import MIN_PREFIX_LEN
from edgelm.engine.scheduler import Scheduler
from tests.engine.fake import FakeExecutor, FakeFiles, PagedMemory, SlotMemory, complete_alone, info


class Loop:
    """Scheduler, bookkeeper and fake executor; each answer is compared with that of the request alone."""

    def __init__(
        self,
        kind: str = "slots",
        snapshot_bytes: int = 10**6,
        drafter: Drafter | None = None,
        block_len: int = 16,
        clock: StepClock | None = None,
        **facts: object,
    ) -> None:
        self.info = info(**facts)
        self.kv: SlotKV | PagedKV
        self.memory: SlotMemory | PagedMemory
        if kind == "slots":
            self.kv, self.memory = SlotKV(self.info, snapshot_bytes), SlotMemory(self.info, snapshot_bytes)
        else:
            self.kv, self.memory = PagedKV(self.info, block_len), PagedMemory(self.info, block_len)
        self.executor = FakeExecutor(self.info, self.memory)
        self.clock = clock or StepClock()
        self.scheduler = Scheduler(self.info, self.kv, self.clock, drafter)
        self.last: Step | None = None
        self.ops: list[Op] = []  # of all steps
        self._ids = itertools.count()

    def add(
        self,
        prompt: list[int],
        *,
        matcher: Matcher | None = None,
        client: str = "",
        interactive: bool = False,
        **params: object,
    ) -> Sequence:
        parsed = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))  # type: ignore[arg-type]
        seq = Sequence(next(self._ids), list(prompt), len(prompt), parsed, matcher=matcher)
        seq.client, seq.interactive = client, interactive
        self.scheduler.check(prompt, parsed)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Event]:
        step = self.last = self.scheduler.plan()
        if step is None:
            return []
        self.ops += step.ops
        try:
            self.executor.forward(step)
            sampled = self.executor.sample(step, grammar_masks(step, self.info.num_vocab)).read()
        except EngineError as error:
            return self.scheduler.fail(step, error)
        events = self.scheduler.commit(step, sampled)
        for chunk in step.chunks:
            seq = chunk.seq
            answer, _ = complete_alone(seq.tokens[: seq.prompt_len], seq.params, self.info)
            assert seq.matcher or seq.tokens[seq.prompt_len :] == answer[: seq.completion_len]
        return events

    def finish(self) -> list[Event]:
        """Run until all requests are finished; return all events."""
        events = []
        while self.scheduler.num_unfinished:
            events += self.step()
        return events

    def ask(self, prompt: list[int], **params: Any) -> Sequence:
        """Run one request to its end."""
        seq = self.add(prompt, **params)
        self.finish()
        return seq


class DiskLoop(Loop):
    """A loop whose prefixes reach files, and that can continue as a new process."""

    def __init__(self, kind: str, snapshot_bytes: int = 10**6, block_len: int = 16, **facts: object) -> None:
        self.files = FakeFiles()
        self.snapshot_bytes, self.block_len = snapshot_bytes, block_len
        super().__init__(kind, snapshot_bytes, block_len=block_len, **facts)
        self.start()

    def start(self) -> None:
        if isinstance(self.kv, SlotKV):
            self.memory = slots = SlotMemory(self.info, self.snapshot_bytes, self.files)
            self.kv = SlotKV(self.info, self.snapshot_bytes, slots, min_stored_len=MIN_PREFIX_LEN)
        else:
            self.memory = paged = PagedMemory(self.info, self.block_len, self.files)
            self.kv = PagedKV(self.info, self.block_len, paged, min_stored_len=MIN_PREFIX_LEN)
        self.executor = FakeExecutor(self.info, self.memory)
        self.scheduler = Scheduler(self.info, self.kv, self.clock)

    def flush_idle(self, ends: bool = True) -> list[Op]:
        step = self.scheduler.flush_idle(ends)
        if step:
            self.executor.forward(step)
        if isinstance(self.memory, PagedMemory):
            assert not self.memory.snapshots
        return list(step.ops) if step else []

    def restart(self) -> None:
        self.flush_idle()
        self.start()

    def lengths(self) -> list[int]:
        return sorted(len(file.tokens) for file in self.files.found)


def kinds(ops: list[Op]) -> list[type]:
    return [type(op) for op in ops]
