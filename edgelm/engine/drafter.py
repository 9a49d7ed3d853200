"""NgramDrafter: proposes what followed the same words before, in this conversation or in past answers.

Owns the choice of a draft's length, and the conversations that it counts. Knows nothing of devices, files and samplers:
counts are in `ngrams`, probabilities in `acceptance`, past answers in `memory`.

A draft grows as long as its next token is worth more than it costs. In tokens: the chance that all of it up to there
is accepted, against the cost of the row times the rate at which tokens come at present.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

from edgelm.core import Sequence
from edgelm.engine.acceptance import DEPTHS, MAX_DRAFT, Acceptance, Guess
from edgelm.engine.memory import Answers, Memory
from edgelm.engine.ngrams import NOTHING, NgramCounts, look_up
from edgelm.engine.stakes import Stakes

CAUTION = 1.2  # a token must be worth so much more than its row costs: estimates err, and we take the best of them
RATE_STEPS = 30  # over which tokens per time are averaged
PAST_FADE = 0.998  # of the rate of all conversations, a step
FIRST_STEPS = 10  # what the rate of past conversations weighs in a new one
CATCH_UP = 48  # tokens that `propose` counts at most; more are left to `work`
SLICE = 32  # tokens between two looks at the clock

MAX_TOKENS = 60_000  # counted of all conversations together: 14 to 27 MB
SAVE_EVERY = 32  # answers
MAX_IDLE = 4  # finished conversations that are kept for their next message

BIAS_RATE = 0.05
MAX_BIAS = 1.0
HABIT_RATE = 0.1
NUM_HABITS = 4096
MAX_OWNERS = 32


class _Habits:
    """What is particular to the texts of one owner: after which tokens guesses are right, and which tokens they are."""

    def __init__(self) -> None:
        self.after = array("f", bytes(4 * NUM_HABITS))  # log-odds, by token modulo NUM_HABITS
        self.onto = array("f", bytes(4 * NUM_HABITS))


class _Conversation:
    """All that was said, its counts, and what is expected of the tokens that come next."""

    def __init__(self, owner: str, habits: _Habits, text: list[int], skipped: int) -> None:
        self.owner = owner
        self.habits = habits
        self.answers: Answers | None = None
        self.text = text
        self.counts = NgramCounts()
        self.skipped = skipped  # tokens at the beginning that are not counted
        self.counted = skipped
        self.taken = 0  # tokens of the sequence that are in `text`
        self.guesses: list[Guess] = []  # for the places from the end of `text` on
        self.expected: list[float] = []  # chance that the draft is accepted up to each of its tokens
        self.level = 0  # of the evidence for the first one
        self.bias = 0.0  # log-odds by which guesses do better in this text
        self.tokens, self.time = 0.0, 0.0  # decayed; the time in steps
        self.step = 1.0  # what the step under way costs
        self.gain = 0.0  # of the best draft, in tokens
        self.staked: int | None = None  # the kind of what was guessed of the next token, where that was asked for

    @property
    def size(self) -> int:
        return len(self.text) - self.skipped

    def count(self, num_tokens: int) -> None:
        """Count so many tokens more."""
        stop = min(self.counted + num_tokens, len(self.text))
        self.counts.add(self.text, self.counted, stop)
        self.counted = stop


class NgramDrafter:
    """A `Drafter`. `memory`: None remembers no answers. `save`: called with what was learnt, now and then."""

    def __init__(
        self,
        memory: Memory | None = None,
        acceptance: Acceptance | None = None,
        save: Callable[[Acceptance], None] | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._memory = memory
        self._acceptance = acceptance or Acceptance()
        self._save = save
        self._max_tokens = max_tokens
        self._running: dict[int, _Conversation] = {}
        self._idle: list[_Conversation] = []  # least recently used first
        self._habits: OrderedDict[str, _Habits] = OrderedDict()  # by owner, least recently used first
        self._unsaved = 0  # answers
        self._costs: Seq[float] = ()
        self._floors: list[float] = []
        self._tokens, self._time = 13.0, 10.0  # of all conversations, decayed
        self._stakes = Stakes()

    # -- conversations -------------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence) -> None:
        if seq.id in self._running:  # it was preempted
            return
        text = [*seq.past, *seq.tokens]
        conversation = self._resume(seq.owner, text)
        conversation.taken = len(seq.tokens)
        conversation.tokens, conversation.time = FIRST_STEPS * self._tokens / self._time, FIRST_STEPS
        self._running[seq.id] = conversation
        if self._memory:
            conversation.answers = self._memory.of(seq.owner)

    def end(self, seq: Sequence) -> None:
        conversation = self._running.pop(seq.id, None)
        if conversation is None:  # it never ran
            return
        self._follow(conversation, seq)
        conversation.guesses, conversation.staked = [], None
        self._idle.append(conversation)
        del self._idle[:-MAX_IDLE]
        self._unsaved += 1
        if self._memory:
            self._memory.add(seq.owner, seq.tokens[seq.prompt_len :])

    def _resume(self, owner: str, text: list[int]) -> _Conversation:
        """Return the conversation that `text` continues, or a new one that may count as much as is left."""
        for known in reversed(self._idle):
            if known.owner == owner and text[: len(known.text)] == known.text:
                self._idle.remove(known)
                if len(text) - known.skipped > self._max_tokens:  # the older half is counted no more
                    counted = min(self._max_tokens // 2, self._room())
                    return _Conversation(owner, known.habits, text, len(text) - counted)
                known.text = text
                known.bias = 0.0
                return known
        while self._idle and self._room() < len(text):
            del self._idle[0]
        habits = self._habits.setdefault(owner, _Habits())
        self._habits.move_to_end(owner)
        if len(self._habits) > MAX_OWNERS:
            self._habits.popitem(last=False)
        return _Conversation(owner, habits, text, max(len(text) - self._room(), 0))

    def _room(self) -> int:
        return max(self._max_tokens - sum(each.size for each in (*self._idle, *self._running.values())), 0)

    # -- steps -----------------------------------------------------------------------------------------------------

    def propose(self, seq: Sequence, marginal_cost: Seq[float]) -> list[int]:
        conversation = self._running[seq.id]
        num_new = self._follow(conversation, seq)
        if num_new:
            self._keep_rate(conversation, num_new)
        costs = marginal_cost[:MAX_DRAFT]
        if costs != self._costs:
            self._costs, self._floors = costs, floors(costs)
        length = self._guess(conversation)
        conversation.step = 1 + sum(self._costs[:length])
        if conversation.staked is not None and num_new == 1:
            self._stakes.learn(conversation.staked, conversation.gain)
        conversation.staked = None
        return [guess[0] for guess in conversation.guesses[:length]]

    def stake(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        conversation = self._running[seq.id]
        draft = self.propose(seq, marginal_cost)
        conversation.step = 1.0  # the one under way has no draft
        chance = conversation.guesses[0][1] if conversation.guesses else None
        conversation.staked = self._stakes.kind(chance, bool(draft))
        return self._stakes.of(conversation.staked)

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        conversation = self._running[seq.id]
        self._acceptance.reach.learn(conversation.level, conversation.expected[:drafted], accepted)

    def _follow(self, conversation: _Conversation, seq: Sequence) -> int:
        """Take in the tokens that came since, learning from those that were guessed; return how many came."""
        text, guesses = conversation.text, conversation.guesses
        at = len(text)
        text += seq.tokens[conversation.taken :]
        conversation.taken = len(seq.tokens)
        num_new = len(text) - at
        if guesses and num_new:
            after, onto, bias = conversation.habits.after, conversation.habits.onto, conversation.bias
            for guess, error in zip(guesses, self._acceptance.learn(guesses, text[at:]), strict=False):
                after[text[at - 1] % NUM_HABITS] += HABIT_RATE * error
                onto[guess[0] % NUM_HABITS] += HABIT_RATE * error
                bias += BIAS_RATE * error
                at += 1
            conversation.bias = min(max(bias, -MAX_BIAS), MAX_BIAS)
        conversation.guesses = []
        conversation.count(CATCH_UP)
        return num_new

    def _keep_rate(self, conversation: _Conversation, num_new: int) -> None:
        """Note the tokens and the time since the last call; tokens that no draft can have brought took plain steps."""
        spent = conversation.step + max(num_new - 1 - len(conversation.expected), 0)
        fade = 1 - 1 / RATE_STEPS
        conversation.tokens = conversation.tokens * fade + num_new
        conversation.time = conversation.time * fade + spent
        self._tokens = self._tokens * PAST_FADE + num_new
        self._time = self._time * PAST_FADE + spent

    def _guess(self, conversation: _Conversation) -> int:
        """Guess tokens as long as one more may pay; return how many of them are the best draft."""
        text, counts, guesses = conversation.text, conversation.counts, conversation.guesses
        memory = conversation.answers.counts if conversation.answers else NOTHING
        after, onto, bias = conversation.habits.after, conversation.habits.onto, conversation.bias
        judge, exp = self._acceptance.judge, math.exp
        worth = CAUTION * conversation.tokens / conversation.time
        expected = conversation.expected = []
        shares: list[float] = []
        len_before = len(text)
        product = chance = 1.0
        gain = best = 0.0
        length = 0
        for depth, cost, floor in zip(DEPTHS, self._costs, self._floors, strict=False):
            spoken, remembered = look_up(text, counts, memory)
            if spoken is None and remembered is None:
                break
            token, odds, slot, level = judge(spoken, remembered)
            if not guesses:
                conversation.level = level
                shares = self._acceptance.reach.shares(level)
            odds += bias + after[text[-1] % NUM_HABITS] + onto[token % NUM_HABITS]
            right = 1 / (1 + exp(-odds))
            guesses.append((token, right, slot, spoken, remembered))
            product *= right
            chance = min(chance, product * shares[depth])
            if chance <= worth * floor:
                break
            expected.append(product)
            text.append(token)
            gain += chance - worth * cost
            if gain > best:
                best, length = gain, len(guesses)
        del text[len_before:]
        conversation.gain = best
        return length

    # -- beside the steps ------------------------------------------------------------------------------------------

    def work(self, seconds: float) -> bool:
        deadline = time.perf_counter() + seconds
        while self._work():
            if time.perf_counter() >= deadline:
                return True
        return False

    def _work(self) -> bool:
        """Do one slice of what waits; True: there may be more."""
        for conversation in self._running.values():
            if conversation.counted < len(conversation.text):
                conversation.count(SLICE)
                return True
        if self._memory and self._memory.work(SLICE):
            return True
        if self._save and self._unsaved >= SAVE_EVERY:
            self._unsaved = 0
            self._save(self._acceptance)
        return False

    def close(self) -> None:
        if self._memory:
            self._memory.close()
        if self._save and self._unsaved:
            self._unsaved = 0
            self._save(self._acceptance)


def floors(costs: Seq[float]) -> list[float]:
    """Return, for each row, the least average cost of it and any number of rows behind it.

    While the chance of a token is below that, neither it nor any longer draft can pay: costs may be a staircase, where
    three rows are cheaper than two.
    """
    blocks: list[tuple[float, int]] = []  # total cost, rows; averages fall towards the end
    averages = []
    for cost in reversed(costs):
        total, rows = cost, 1
        while blocks and blocks[-1][0] * rows < total * blocks[-1][1]:
            more, behind = blocks.pop()
            total, rows = total + more, rows + behind
        blocks.append((total, rows))
        averages.append(total / rows)
    return averages[::-1]
