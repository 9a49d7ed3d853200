"""The scheduler: which tokens of which sequences the next step runs, and how its samples change them.

Owns the list of running sequences, in the order of their admission, and asks the queue who is admitted next. There is
no prefill phase and no decode phase: a sequence has `tokens`, a `draft` and `computed`, and each step lets `computed`
catch up within the step's budget. Knows nothing of devices, text, threads or time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from edgelm.base.errors import EdgeLMError, EngineError, RequestError
from edgelm.base.sampling import SamplingParams
from edgelm.engine.admission import AdmissionQueue, is_interactive
from edgelm.engine.clock import StepClock
from edgelm.engine.core import (
    LAST,
    NOT_A_TOKEN,
    Chunk,
    Drafter,
    Event,
    ExecutorInfo,
    FinishReason,
    KVCache,
    KVRegion,
    OnSaving,
    PictureSpan,
    Sampled,
    Sequence,
    Step,
)

MANY_SLOTS = 4  # of so many or more, long answers leave one to short ones while others wait


@dataclass(slots=True)
class _Room:
    """The unused part of a step's budget."""

    tokens: int
    rows: int
    prefill: int  # tokens of sequences that lack more than one
    reserved: int  # running sequences not planned yet: a token and a row are kept for each
    decoding: int  # sequences that lack one token
    depth: int  # cached positions of the running sequences
    draft_len: int = 0  # of the drafts in the step, where all must have one length; 0: there is none yet
    num_drafts: int = 0  # of that length

    @property
    def admits(self) -> bool:
        return min(self.tokens - self.reserved, self.rows - self.reserved, self.prefill) > 0


class Scheduler:
    """Plans a step and commits its results, in turn; a step ahead is planned before the last one is committed."""

    def __init__(self, info: ExecutorInfo, kv: KVCache, clock: StepClock, drafter: Drafter | None = None) -> None:
        assert info.max_sequences <= min(info.max_tokens, info.max_rows)
        assert info.context <= info.capacity
        self._info = info
        self._max_draft = min(info.max_draft or info.max_rows, info.max_rows if info.can_trim else info.rollback_len)
        self._kv = kv
        self._clock = clock
        self._drafter = drafter if info.can_draft else None
        self._equal_drafts = not info.can_trim  # states can go back behind one pass only, which takes equal lengths
        self.waiting = AdmissionQueue()
        self.running: list[Sequence] = []  # the first one was admitted before the others
        self.num_preemptions = 0
        self._blocked: Sequence | None = None  # on memory; cleared when blocks are freed

    # -- requests --------------------------------------------------------------------------------------------------

    def check(self, tokens: list[int], params: SamplingParams, pictures: Seq[PictureSpan] = ()) -> None:
        """Raise RequestError for a request that can never run."""
        info = self._info
        if not tokens:
            raise RequestError("the prompt is empty", "give at least one token")
        if len(tokens) >= info.context:
            raise RequestError(
                f"the prompt has {len(tokens):,} tokens, the context holds {info.context:,} with the answer",
                "shorten it, or raise --ctx",
            )
        if (min(tokens) < 0 and not pictures) or max(tokens) >= info.num_vocab:
            raise RequestError(f"the prompt has a token id outside of the vocabulary of {info.num_vocab:,}")
        if any(token >= info.num_vocab for token, _ in params.logit_bias):
            raise RequestError(f"logit_bias has a token id outside of the vocabulary of {info.num_vocab:,}")

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that passed `check`. A later sequence has a greater id."""
        self.waiting.add(seq)

    def abort(self, seq_id: int) -> Event | None:
        """End a sequence between steps and free its memory at once. None: there is no such sequence."""
        for seq in self.waiting:
            if seq.id == seq_id:
                self._forget(seq)
                return Event(seq_id, finish_reason="abort")
        for seq in self.running:
            if seq.id == seq_id:
                return self._finish(seq, (), "abort")
        return None

    def work(self, seconds: float) -> bool:
        """Spend about `seconds` on the background work of the drafter; True: there is more."""
        return self._drafter.work(seconds) if self._drafter else False

    def flush_idle(self, ends: bool) -> Step | None:
        """Return a step of ops alone that stores idle prefixes beyond this process; None: there is nothing to store.

        As the engine `ends` it stores all of them, before that those worth it.
        """
        self._kv.flush_idle(ends)
        ops = self._kv.take_ops()
        return Step((), ops) if ops else None

    def close(self, on_saving: OnSaving = lambda _: None) -> None:
        """Save what the drafter learnt, and wait until prefixes are stored."""
        if self._drafter:
            self._drafter.close()
        self._kv.close(on_saving)

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache that running sequences hold, 0 to 1."""
        return self._kv.usage

    def kv_regions(self) -> tuple[KVRegion, ...]:
        """Return the regions of the KV cache and the saved states outside of it. For the engine's thread."""
        return self._kv.regions()

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    # -- steps -----------------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """Choose the chunks of the next step. None: there is nothing to do."""
        self._make_way()
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
        # An unfinished prompt ends the room for others, except for those of editors, which overtake it.
        prompts = [seq for seq in self.running if _missing(seq) > 1]
        editors = [seq for seq in prompts if seq.interactive]
        decoding = [seq for seq in self.running if seq not in prompts]
        fits = self._schedule_all([*decoding, *editors], chunks, room)
        fits = fits and self._admit_from(self._next_editor, chunks, room)
        others = self._schedule_all([seq for seq in prompts if seq not in editors], chunks, room)
        if fits and others:
            self._admit_from(self.next_up, chunks, room)
        assert chunks or not self.num_unfinished
        return self._step(chunks) if chunks else None  # ops alone wait for a request

    def plan_ahead(self, step: Step) -> Step | None:
        """Choose the step after one whose samples are not known; None: it depends on them.

        Each sequence then has one more token, which only the device knows: LAST. If a sequence ends with that token,
        the sample of the step ahead is dropped.
        """
        if not self._info.runs_ahead:
            return None
        chunks = [chunk for chunk in step.chunks if chunk.seq.kv is not None]  # None: aborted
        if not all(map(_is_foreseeable, chunks)):
            return None
        staying = [chunk for chunk in chunks if not self._ends_next(chunk.seq)]
        if not staying or self._may_admit_after(staying):
            return None
        if self._drafter and self._missed_draft_cost(staying, self._drafter) > self._clock.gap(
            len(staying), self._depth
        ):
            return None
        if not all(self._kv.grow(chunk.seq, chunk.end + 1) for chunk in staying):
            return None  # a sequence has to be preempted
        ahead = [Chunk(chunk.seq, chunk.end, [LAST], 1, self._kv.kv_location(chunk.seq)) for chunk in staying]
        return self._step(ahead)

    def commit(self, step: Step, sampled: list[list[Sampled]]) -> list[Event]:
        """Take the samples of a step; return an event for each sequence that has new tokens."""
        events = []
        if step.num_tokens > step.num_rows:
            self._blocked = None  # it may have waited for this part of a prompt
        for chunk, rows in zip(step.chunks, sampled, strict=True):
            if chunk.seq.kv is None:
                assert chunk.tokens == [LAST]  # it ended after this step was launched
            elif chunk.rows:
                events.append(self._advance(chunk, rows))
            else:
                chunk.seq.computed = chunk.end
                self._kv.commit(chunk.seq)
        return events

    def fail(self, step: Step | None, error: EdgeLMError) -> list[Event]:
        """End the sequences of a failed step, and compute all others again.

        If planning failed, there is no step: then all running sequences end, or else the next one in the queue.
        """
        if step:
            failed = [chunk.seq for chunk in step.chunks]
        else:
            failed = self.running or [head for head in [self.waiting.head()] if head]
        self._restart(failed)
        return [Event(seq.id, finish_reason="error", error=error) for seq in failed]

    def recompute(self) -> None:
        """Give up a step without a result: no sequence ends, all are computed again."""
        self._restart([])

    def _restart(self, failed: list[Sequence]) -> None:
        """Forget the cache, and queue all sequences again except the failed ones."""
        self._kv.reset()
        self._blocked = None
        for seq in self.running:
            self.waiting.put_back(seq)
        self.running = []
        for seq in self.waiting:
            seq.kv, seq.computed, seq.draft, seq.num_forced = None, 0, [], 0
            if seq in failed:
                self._forget(seq)

    # -- planning --------------------------------------------------------------------------------------------------

    def next_up(self, running: list[Sequence]) -> Sequence | None:
        """Return the sequence to admit beside these; None: there is none, or no slot for it.

        While several wait, long answers leave one of MANY_SLOTS free: a short one need not wait until one of them ends.
        """
        if len(running) == self._info.max_sequences:
            return None
        slots = self._info.max_sequences - (self._info.max_sequences >= MANY_SLOTS and len(self.waiting) > 1)
        return self.waiting.head(no_long=sum(not is_interactive(seq) for seq in running) >= slots)

    def _overtaking(self, running: list[Sequence]) -> Sequence | None:
        """Return an editor's request to admit beside these, or in place of one that can make way; None: none waits."""
        head = self.waiting.editor_head()
        if len(running) < self._info.max_sequences:
            return head
        return None if head is self._blocked or not self._displaceable(running) else head

    def _next_editor(self, running: list[Sequence]) -> Sequence | None:
        """Return an editor's request to admit beside these; None: there is none, or no slot for it."""
        return self._overtaking(running) if len(running) < self._info.max_sequences else None

    def _displaceable(self, running: list[Sequence]) -> Sequence | None:
        """Return the youngest sequence that can make way for an editor's and go on later; None: there is none."""
        return next((seq for seq in reversed(running) if not seq.interactive and self._kv.keeps(seq)), None)

    def _make_way(self) -> None:
        """Preempt a sequence for an editor's request that can be admitted at once.

        It cannot while the prompt of another editor's runs: none is admitted after an unfinished prompt, and a request
        with the same beginning waits for it.
        """
        if not self._is_full or not self.waiting or any(seq.interactive and _missing(seq) > 1 for seq in self.running):
            return
        if self._overtaking(self.running) and (youngest := self._displaceable(self.running)):
            self._preempt(youngest)

    @property
    def _is_full(self) -> bool:
        return len(self.running) == self._info.max_sequences

    @property
    def _depth(self) -> int:
        """Cached positions of the running sequences."""
        return sum(seq.computed for seq in self.running)

    def _may_admit_after(self, staying: list[Chunk]) -> bool:
        """Tell whether a waiting sequence may be admitted once the samples of a step are known."""
        running = [chunk.seq for chunk in staying]
        head = self._overtaking(running) or self.next_up(running)
        return head is not None and (head is not self._blocked or len(staying) < len(self.running))

    def _admit_from(
        self, next_of: Callable[[list[Sequence]], Sequence | None], chunks: list[Chunk], room: _Room
    ) -> bool:
        """Admit sequences while the step, the slots and the memory have room; return as `_schedule` does."""
        while self.waiting and room.admits and (head := next_of(self.running)):
            if not self._kv.attach(head):
                self._blocked = head
                break
            if not self._admit(head, chunks, room):
                return False
        return True

    def _admit(self, seq: Sequence, chunks: list[Chunk], room: _Room) -> bool:
        """Start or resume a sequence that the KV cache has room for; return as `_schedule` does."""
        is_new = seq.cached is None
        if is_new:
            seq.cached = seq.computed
        self.waiting.admit(seq)
        self.running.append(seq)
        if is_new and self._drafter:
            self._drafter.begin(seq)
        return self._schedule(seq, chunks, room)

    def _schedule_all(self, running: list[Sequence], chunks: list[Chunk], room: _Room) -> bool:
        """Plan chunks of sequences that ran before, except of those that an older one preempts meanwhile."""
        fits = True
        for seq in running:
            room.reserved -= 1
            if seq.kv is not None:
                fits = self._schedule(seq, chunks, room) and fits
        return fits

    def _schedule(self, seq: Sequence, chunks: list[Chunk], room: _Room) -> bool:
        """Plan a chunk of one sequence; False: memory was short, and the youngest sequences were preempted."""
        missing = _missing(seq)
        longest = self._info.max_chunk or missing
        length = 1 if missing == 1 else min(missing, max(room.prefill, 1), room.tokens - room.reserved, longest)
        assert length > 0
        end = self._kv.chunk_end(seq, seq.computed + length)
        length = (seq.chunk_end(end) if seq.pictures else end) - seq.computed
        if missing == 1 and self._drafter and seq.params.drafts:
            seq.draft = self._propose(seq, self._drafter, room)
        fits = True
        while not self._kv.grow(seq, seq.computed + length + len(seq.draft)):
            if seq.draft:
                seq.draft, seq.num_forced = [], 0
                continue
            fits = False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return False
            chunks[:] = [chunk for chunk in chunks if chunk.seq is not youngest]  # an editor's may be planned already
        first, last = seq.computed, seq.computed + length
        rows = 1 + len(seq.draft) if length == missing else 0
        tokens = seq.tokens[first:last] + seq.draft
        chunk = Chunk(seq, first, tokens, rows, self._kv.kv_location(seq))
        chunks.append(chunk)
        room.tokens -= 0 if chunk.is_picture else len(tokens)  # a picture runs in a batch of its own
        room.rows -= rows
        if self._equal_drafts and seq.draft:
            room.draft_len, room.num_drafts = len(seq.draft), room.num_drafts + 1
            self._cut_drafts(chunks, room)
        if missing > 1:
            room.prefill = room.prefill - length if length == missing else 0  # none is admitted after an unfinished one
        return fits

    def _cut_drafts(self, chunks: list[Chunk], room: _Room) -> None:
        """Cut the planned drafts to the length of the last one."""
        for place, chunk in enumerate(chunks):
            if (excess := len(chunk.draft) - room.draft_len) > 0:
                seq = chunk.seq
                chunks[place] = replace(chunk, tokens=chunk.tokens[:-excess], rows=chunk.rows - excess)
                self._kv.grow(seq, chunk.end - excess)
                seq.draft = seq.draft[: room.draft_len]
                seq.num_forced = min(seq.num_forced, room.draft_len)
                room.tokens += excess
                room.rows += excess

    def _step(self, chunks: list[Chunk]) -> Step:
        """Return the step of these chunks, none of which is given up any more: now states move."""
        for place, chunk in enumerate(chunks):
            if span := self._kv.state_span(chunk.seq, chunk.start, len(chunk.tokens), chunk.rows):
                chunks[place] = replace(chunk, state=span)
        return Step(tuple(chunks), self._kv.take_ops())

    def _propose(self, seq: Sequence, drafter: Drafter, room: _Room) -> list[int]:
        """Return a draft that fits the step, the context and the rest of the answer.

        First come the tokens that the grammar forces: they are accepted for certain, so they need no drafter's consent.
        """
        admissible = min(len(self.waiting), self._info.max_sequences - len(self.running))  # drafts leave them room
        max_len = min(room.tokens, room.rows) - room.reserved - admissible - 1
        max_len = min(max_len, self._max_draft, self._max_draft_len(seq))
        if room.draft_len:
            max_len = min(max_len, room.draft_len)
        if max_len <= 0:
            return []
        rows = self._info.max_rows - room.rows + room.reserved + 1
        costs = self._clock.marginal_cost(rows, room.depth, max(room.decoding, 1), max_len)
        draft = forced = seq.matcher.forced(max_len) if seq.matcher else []
        seq.num_forced = len(forced)
        if len(forced) < max_len:
            draft = (forced + drafter.propose(seq, costs[len(forced) :], forced))[:max_len]
        draft = draft[: seq.matcher.allowed(draft)] if seq.matcher else draft
        if len(draft) < room.draft_len and (room.num_drafts + 1) * len(draft) <= room.num_drafts * room.draft_len:
            seq.num_forced = 0  # the step would verify no more tokens if the other drafts were cut to this length
            return []
        return draft

    def _max_draft_len(self, seq: Sequence) -> int:
        """Return the length of the longest draft that fits in the context and in the rest of the answer."""
        max_len = self._info.context - len(seq.tokens) - 1
        if seq.params.max_tokens is not None:
            max_len = min(max_len, seq.params.max_tokens - seq.completion_len - 1)
        return max_len

    def _missed_draft_cost(self, chunks: list[Chunk], drafter: Drafter) -> float:
        """Return the expected cost, in steps, of launching the next step without drafts: the mean of all sequences."""
        rows, total = len(chunks), 0.0
        room = min(self._info.max_tokens, self._info.max_rows) - rows
        for chunk in chunks:
            max_len = min(room, self._max_draft, self._max_draft_len(chunk.seq))
            if max_len > 0 and chunk.seq.params.drafts:
                costs = self._clock.marginal_cost(rows, self._depth, rows, max_len)
                total += drafter.missed_draft_cost(chunk.seq, costs)
        return total / rows

    def _ends_next(self, seq: Sequence) -> bool:
        """Tell whether the next token is certainly the last."""
        return self._max_draft_len(seq) <= 0

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self._blocked = None
        seq.draft, seq.num_forced = [], 0
        self.running.remove(seq)
        self._kv.release(seq, resumes=True)
        self.waiting.put_back(seq)

    # -- results ---------------------------------------------------------------------------------------------------

    def _advance(self, chunk: Chunk, rows: list[Sampled]) -> Event:
        """Append the samples up to the first one that differs from the draft or ends the sequence."""
        seq, draft = chunk.seq, chunk.draft
        taken: list[Sampled] = []
        reason: FinishReason | None = None
        for row, sample in enumerate(rows):
            if sample.id == NOT_A_TOKEN:
                if row == 0 or seq.matcher is None:
                    reason = "error"
                break  # behind a draft token, the mask could not be computed: the next step tells why
            taken.append(sample)
            seq.tokens.append(sample.id)
            if seq.matcher:
                seq.matcher.accept(sample.id)
            reason = self._finish_reason(seq)
            if reason or row == len(draft) or sample.id != draft[row]:
                break
        accepted = sum(sample.id == token for sample, token in zip(taken, draft, strict=False))
        self._count(seq, len(draft), accepted)
        if reason == "error":
            seq.computed = 0  # its KV is invalid and must not be reused
            return self._finish(seq, tuple(taken), reason)
        seq.computed = len(seq.tokens) - 1
        self.waiting.charge(seq)
        if reason:
            return self._finish(seq, tuple(taken), reason, accepted)
        self._kv.commit(seq)
        return Event(seq.id, tuple(taken), accepted=accepted)

    def _count(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Count a verified draft. Its forced tokens say nothing about the drafter."""
        forced = min(seq.num_forced, drafted)
        seq.forced += min(forced, accepted)
        drafted, accepted = drafted - forced, max(accepted - forced, 0)
        seq.drafted += drafted
        seq.accepted += accepted
        if drafted and self._drafter:
            self._drafter.observe(seq, drafted, accepted)
        seq.draft, seq.num_forced = [], 0

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        if seq.matcher and seq.matcher.error:
            return "error"
        if seq.tokens[-1] in seq.params.stop_ids or (seq.matcher and seq.matcher.done):
            return "stop"
        if seq.completion_len == seq.params.max_tokens:
            return "length"
        return "context" if len(seq.tokens) >= self._info.context else None

    def _finish(self, seq: Sequence, taken: tuple[Sampled, ...], reason: FinishReason, accepted: int = 0) -> Event:
        self._blocked = None
        self.running.remove(seq)
        self._kv.release(seq)
        self._forget(seq)
        error = _why_it_failed(seq) if reason == "error" else None
        return Event(seq.id, taken, reason, error, accepted=accepted)

    def _forget(self, seq: Sequence) -> None:
        self.waiting.end(seq)
        if self._drafter and seq.cached is not None:
            self._drafter.end(seq)


def _is_foreseeable(chunk: Chunk) -> bool:
    """Tell whether the next step needs only the token that this chunk samples, which the device has."""
    matcher = chunk.seq.matcher
    return chunk.rows == 1 and not chunk.seq.params.penalized and (matcher is None or matcher.unrestricted)


def _why_it_failed(seq: Sequence) -> EdgeLMError:
    """Return the error of a sequence for whose next position there is no token."""
    if seq.matcher and seq.matcher.error:
        return RequestError(f"the answer cannot follow the grammar any further: {seq.matcher.error}", "simplify it")
    if seq.matcher and any(bias == -math.inf for _, bias in seq.params.logit_bias):
        return RequestError("logit_bias forbids every token that the grammar allows here", "allow one of them")
    return EngineError("the model computed values that are not numbers", "its file may be damaged")


def _missing(seq: Sequence) -> int:
    """Return how many tokens of a sequence have no KV yet; if it is one, the next step samples."""
    return len(seq.tokens) - seq.computed
