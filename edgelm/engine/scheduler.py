"""The scheduler: which tokens of which sequences the next step runs, and what its samples mean.

Owns the queue of waiting and the list of running sequences, both by age. There is no prefill and no decode: a
sequence has `tokens`, a `draft` and `computed`, and each step lets `computed` catch up within the step's budget.
Knows nothing of devices, text, threads or time.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from edgelm.core import (
    LAST,
    NOT_A_TOKEN,
    Chunk,
    Drafter,
    Event,
    ExecutorInfo,
    FinishReason,
    KVCache,
    Sampled,
    SamplingParams,
    Sequence,
    Step,
)
from edgelm.engine.clock import StepClock
from edgelm.errors import EdgeLMError, EngineError, RequestError


@dataclass(slots=True)
class _Room:
    """What is left of a step's budget."""

    tokens: int
    rows: int
    prefill: int  # tokens of sequences that miss more than one
    reserved: int  # running sequences that have not had their turn: each is left a token and a row
    decoding: int  # sequences that miss one token
    depth: int  # cached positions of the running sequences


class Scheduler:
    """Plans steps and commits their results, in turn; a step ahead is planned before the one before it is committed."""

    def __init__(
        self,
        info: ExecutorInfo,
        kv: KVCache,
        clock: StepClock,
        drafter: Drafter | None = None,
    ) -> None:
        assert info.max_sequences <= min(info.max_tokens, info.max_rows)
        assert info.context <= info.capacity
        self._info = info
        self._kv = kv
        self._clock = clock
        self._drafter = drafter if info.can_trim else None  # a rejected draft must be cut off
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._refused: Sequence | None = None  # for whom there was no memory, and none was given back since

    # -- requests --------------------------------------------------------------------------------------------------

    def check(self, tokens: list[int], params: SamplingParams) -> None:
        """Raise RequestError for a request that can never run."""
        info = self._info
        if not tokens:
            raise RequestError("the prompt is empty", "give at least one token")
        if len(tokens) >= info.context:
            raise RequestError(
                f"the prompt has {len(tokens):,} tokens, the context holds {info.context:,} with the answer",
                "shorten it, or raise --ctx",
            )
        if not 0 <= min(tokens) <= max(tokens) < info.num_vocab:
            raise RequestError(f"the prompt has a token id outside of the vocabulary of {info.num_vocab:,}")
        if any(token >= info.num_vocab for token, _ in params.logit_bias):
            raise RequestError(f"logit_bias has a token id outside of the vocabulary of {info.num_vocab:,}")

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that passed `check`. Ids grow with age."""
        self._enqueue(self.waiting, seq)

    def abort(self, seq_id: int) -> Event | None:
        """End a sequence between steps; its memory is free at once. None: there is no such sequence."""
        for seq in self.waiting:
            if seq.id == seq_id:
                self.waiting.remove(seq)
                self._forget(seq)
                return Event(seq_id, finish_reason="abort")
        for seq in self.running:
            if seq.id == seq_id:
                return self._finish(seq, (), "abort")
        return None

    def work(self, seconds: float) -> bool:
        """Spend at most about so many seconds on what the drafter put off; True: there is more."""
        return self._drafter.work(seconds) if self._drafter else False

    def rest(self) -> Step | None:
        """Return a step of ops alone that lets idle prefixes outlive the process, if there is something to do."""
        self._kv.rest()
        ops = self._kv.take_ops()
        return Step((), ops) if ops else None

    def close(self) -> None:
        """Save what the drafter learnt, and wait for prefixes that are being stored."""
        self._kv.close()
        if self._drafter:
            self._drafter.close()

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    # -- steps -----------------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """Choose the chunks of the next step. None: there is nothing to do."""
        ready = sum(_missing(seq) == 1 for seq in self.running)
        depth = self._depth
        room = _Room(
            tokens=self._info.max_tokens,
            rows=self._info.max_rows,
            prefill=self._clock.prefill_tokens(ready, depth) if ready else self._info.max_tokens,
            reserved=len(self.running),
            decoding=ready,
            depth=depth,
        )
        chunks: list[Chunk] = []
        preempted = False
        for seq in list(self.running):  # none is admitted behind an unfinished prompt, so only the last may have one
            room.reserved -= 1
            if seq.kv is not None:  # it was not preempted for one before it
                preempted |= not self._schedule(seq, chunks, room)
        while not preempted and self.waiting and self._may_admit(room):
            seq = self.waiting[0]
            if not self._kv.attach(seq):
                self._refused = seq
                break
            del self.waiting[0]
            self._enqueue(self.running, seq)
            if seq.cached is None:
                seq.cached = seq.computed
                if self._drafter:
                    self._drafter.begin(seq)
            preempted = not self._schedule(seq, chunks, room)
        assert chunks or not self.num_unfinished
        return Step(tuple(chunks), self._kv.take_ops()) if chunks else None  # ops alone wait for a request

    def plan_ahead(self, step: Step) -> Step | None:
        """Choose what follows a step whose samples are not known. None: they have to be, first.

        Each sequence then has one token more, which the device knows: LAST. What ends with that token is found out
        later, and what the step ahead samples behind it is dropped.
        """
        if not self._info.runs_ahead:
            return None
        chunks = [chunk for chunk in step.chunks if chunk.seq.kv is not None]  # not aborted since
        if not all(map(_is_foreseeable, chunks)):
            return None
        staying = [chunk for chunk in chunks if not self._ends_next(chunk.seq)]
        if not staying or self._may_admit_after(staying):
            return None
        if self._drafter and self._stake(staying, self._drafter) > self._clock.gap(len(staying), self._depth):
            return None
        if not all(self._kv.grow(chunk.seq, chunk.end + 1) for chunk in staying):
            return None  # somebody has to go
        ahead = [Chunk(chunk.seq, chunk.end, [LAST], 1, self._kv.place(chunk.seq)) for chunk in staying]
        ops = self._kv.take_ops()
        assert not ops
        return Step(tuple(ahead))

    def commit(self, step: Step, sampled: list[list[Sampled]]) -> list[Event]:
        """Take what a step sampled; return an event for each sequence that has new tokens."""
        events = []
        for chunk, rows in zip(step.chunks, sampled, strict=True):
            if chunk.seq.kv is None:
                assert chunk.tokens == [LAST]  # it ended while this step was on its way
            elif chunk.rows:
                events.append(self._advance(chunk, rows))
            else:
                chunk.seq.computed = chunk.end
                self._kv.commit(chunk.seq)
        return events

    def fail(self, step: Step | None, error: EdgeLMError) -> list[Event]:
        """End the sequences of a failed step (all, if none was planned); the others compute theirs again."""
        concerned = [chunk.seq for chunk in step.chunks] if step else self.running or self.waiting[:1]
        self._restart(concerned)
        return [Event(seq.id, finish_reason="error", error=error) for seq in concerned]

    def recompute(self) -> None:
        """Give up a step whose prefixes could not be brought back: no sequence ends, all are computed again."""
        self._restart([])

    def _restart(self, concerned: list[Sequence]) -> None:
        """Forget the cache and queue all sequences again, but for those that the failure concerns."""
        self._kv.reset()
        self._refused = None
        unfinished, self.waiting, self.running = [*self.running, *self.waiting], [], []
        for seq in unfinished:
            seq.kv, seq.computed, seq.draft = None, 0, []
            if seq in concerned:
                self._forget(seq)
            else:
                self._enqueue(self.waiting, seq)

    # -- planning --------------------------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        """Cached positions of the running sequences."""
        return sum(seq.computed for seq in self.running)

    def _may_admit(self, room: _Room) -> bool:
        return min(room.tokens, room.rows, room.prefill) > 0 and len(self.running) < self._info.max_sequences

    def _may_admit_after(self, staying: list[Chunk]) -> bool:
        """Whether one that waits may be admitted once it is known what a step samples."""
        if not self.waiting or len(staying) == self._info.max_sequences:
            return False
        return self.waiting[0] is not self._refused or len(staying) < len(self.running)

    def _schedule(self, seq: Sequence, chunks: list[Chunk], room: _Room) -> bool:
        """Plan a chunk of one sequence, preempting the youngest if memory is short; False: it did."""
        missing = _missing(seq)
        length = 1 if missing == 1 else min(missing, room.prefill, room.tokens - room.reserved)
        assert length > 0
        if missing == 1 and self._drafter:
            seq.draft = self._propose(seq, self._drafter, room)
        untouched = True
        while not self._kv.grow(seq, seq.computed + length + len(seq.draft)):
            if seq.draft:
                seq.draft = []
                continue
            untouched = False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return False
        first, last = seq.computed, seq.computed + length
        rows = 1 + len(seq.draft) if length == missing else 0
        tokens = seq.tokens[first:last] + seq.draft
        chunks.append(Chunk(seq, first, tokens, rows, self._kv.place(seq)))
        room.tokens -= len(tokens)
        room.rows -= rows
        room.prefill -= length if missing > 1 else 0
        return untouched

    def _propose(self, seq: Sequence, drafter: Drafter, room: _Room) -> list[int]:
        """Ask for a draft that fits the step, the context and what the request may still generate."""
        next_in_line = min(len(self.waiting), self._info.max_sequences - len(self.running))  # drafts let them in
        most = min(room.tokens, room.rows) - room.reserved - next_in_line - 1
        most = min(most, self._most_useful(seq))
        if most <= 0:
            return []
        rows = self._info.max_rows - room.rows + room.reserved + 1
        costs = self._clock.marginal_cost(rows, room.depth, max(room.decoding, 1), most)
        return drafter.propose(seq, costs)[:most]

    def _most_useful(self, seq: Sequence) -> int:
        """Return the longest draft that fits in the context and in what the request may still generate."""
        most = self._info.context - len(seq.tokens) - 1
        if seq.params.max_tokens is not None:
            most = min(most, seq.params.max_tokens - seq.completion_len - 1)
        return most

    def _stake(self, chunks: list[Chunk], drafter: Drafter) -> float:
        """Return what the sequences lose on average, in steps, where the step after a plain one has no drafts."""
        rows, total = len(chunks), 0.0
        room = min(self._info.max_tokens, self._info.max_rows) - rows
        for chunk in chunks:
            most = min(room, self._most_useful(chunk.seq))
            if most > 0:
                total += drafter.stake(chunk.seq, self._clock.marginal_cost(rows, self._depth, rows, most))
        return total / rows

    def _ends_next(self, seq: Sequence) -> bool:
        """Whether the next token is the last, whatever it is."""
        return self._most_useful(seq) <= 0

    def _preempt(self, seq: Sequence) -> None:
        self._refused = None
        self.running.remove(seq)
        self._kv.release(seq)
        self._enqueue(self.waiting, seq)

    @staticmethod
    def _enqueue(queue: list[Sequence], seq: Sequence) -> None:
        bisect.insort(queue, seq, key=lambda each: each.id)  # the oldest is served first

    # -- results ---------------------------------------------------------------------------------------------------

    def _advance(self, chunk: Chunk, rows: list[Sampled]) -> Event:
        """Keep the samples up to the first that differs from the draft, or that ends the sequence."""
        seq, draft = chunk.seq, chunk.draft
        taken: list[Sampled] = []
        reason: FinishReason | None = None
        for row, sample in enumerate(rows):
            if sample.id == NOT_A_TOKEN:
                reason = "error"
                break
            taken.append(sample)
            seq.tokens.append(sample.id)
            if seq.matcher:
                seq.matcher.accept(sample.id)
            reason = self._finish_reason(seq)
            if reason or row == len(draft) or sample.id != draft[row]:
                break
        accepted = sum(sample.id == token for sample, token in zip(taken, draft, strict=False))
        seq.drafted += len(draft)
        seq.accepted += accepted
        if draft and self._drafter:
            self._drafter.observe(seq, len(draft), accepted)
        seq.draft = []
        if reason == "error":
            seq.computed = 0  # what made no sense is not used again
            return self._finish(seq, tuple(taken), reason)
        seq.computed = len(seq.tokens) - 1
        if reason:
            return self._finish(seq, tuple(taken), reason, accepted)
        self._kv.commit(seq)
        return Event(seq.id, tuple(taken), accepted=accepted)

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        if seq.tokens[-1] in seq.params.stop_ids:
            return "stop"
        if seq.completion_len == seq.params.max_tokens:
            return "length"
        return "context" if len(seq.tokens) >= self._info.context else None

    def _finish(self, seq: Sequence, taken: tuple[Sampled, ...], reason: FinishReason, accepted: int = 0) -> Event:
        self._refused = None
        self.running.remove(seq)
        self._kv.release(seq)
        self._forget(seq)
        error = None
        if reason == "error":
            error = EngineError("the model computed values that are not numbers", "its file may be damaged")
        return Event(seq.id, taken, reason, error, accepted=accepted)

    def _forget(self, seq: Sequence) -> None:
        if self._drafter and seq.cached is not None:
            self._drafter.end(seq)


def _is_foreseeable(chunk: Chunk) -> bool:
    """Whether all that the next step needs of this one's samples is the token itself."""
    return chunk.rows == 1 and chunk.seq.matcher is None and not chunk.seq.params.penalized


def _missing(seq: Sequence) -> int:
    """Return how many tokens of a sequence have no KV yet; with one, the next step samples."""
    return len(seq.tokens) - seq.computed
