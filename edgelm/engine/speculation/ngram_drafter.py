"""NgramDrafter: proposes the tokens that followed the same context before, in this conversation or in past answers.

Owns the length of a draft, the counted conversations, and the cost of a missed draft. Knows nothing of devices, files
and samplers: counts are in `ngram_counts`, probabilities in `acceptance`, past answers in `past_answers`.

A draft grows while its next token is worth more than it costs. In tokens: the probability that the draft is accepted up
to that token, against the cost of the row times the present rate of tokens per step.
"""

from __future__ import annotations

import bisect
import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

from edgelm.engine.core import Sequence
from edgelm.engine.speculation.acceptance import DEPTHS, MAX_DRAFT, Acceptance, Guess
from edgelm.engine.speculation.ngram_counts import NOTHING, NgramCounts, look_up
from edgelm.engine.speculation.past_answers import NamespaceAnswers, PastAnswers

SAFETY_MARGIN = 1.2  # a token must be worth this multiple of its cost: estimates err, and we take the best of them
RATE_STEPS = 30  # steps over which the rate of tokens is averaged
PAST_FADE = 0.998  # per step, of the rate of all conversations
FIRST_STEPS = 10  # weight of the rate of all conversations in a new one
CATCH_UP = 48  # tokens that `propose` counts at most; `work` counts the rest
SLICE = 32  # tokens between two looks at the clock

MAX_TOKENS = 60_000  # counted, of all conversations together: 14 to 27 MB
SAVE_EVERY = 32  # answers
MAX_IDLE = 4  # finished conversations that are kept for their next message

TEXT_BIAS_RATE = 0.05
MAX_TEXT_BIAS = 1.0
TOKEN_BIAS_RATE = 0.1
TOKEN_BUCKETS = 4096  # tokens share a bias by their id modulo this
MAX_NAMESPACES = 32

# Kinds of first guesses, for the cost of a missed draft: none, one by its probability, or enough for a draft.
NO_GUESS = 0
EDGES = (0.02, 0.05, 0.1, 0.2, 0.35)  # of the probability of a guess that is too low for a draft
DRAFTED = len(EDGES) + 2
FIRST_COST = 0.5  # steps, before any outcome
MIN_WEIGHT = 0.02  # of the newest outcome
MAX_COST = 1.0  # steps: the missed draft follows one token later


class MissedDraftCosts:
    """The average cost of running a step without a draft because its first token was not known yet.

    One average for each kind of first guess. Each outcome is seen, whether the step waited or not: the draft that would
    have followed is known as soon as the token is.
    """

    def __init__(self) -> None:
        self._mean = [FIRST_COST] * (DRAFTED + 1)
        self._weight = [1.0] * (DRAFTED + 1)

    def kind(self, chance: float | None, drafted: bool) -> int:
        """Return the kind of a first guess: none, one with that probability, or enough for a draft."""
        if drafted:
            return DRAFTED
        return NO_GUESS if chance is None else 1 + bisect.bisect(EDGES, chance)

    def of(self, kind: int) -> float:
        """Return the average cost, in steps."""
        return self._mean[kind]

    def learn(self, kind: int, gain: float) -> None:
        """Learn what the draft after such a guess was worth, in tokens; 0: there was none."""
        weight = self._weight[kind] = max(self._weight[kind] / (1 + self._weight[kind]), MIN_WEIGHT)
        self._mean[kind] += weight * (min(gain, MAX_COST) - self._mean[kind])


class _TokenBias:
    """Corrections of the log-odds in the texts of one cache namespace, by token bucket."""

    def __init__(self) -> None:
        self.after = array("f", bytes(4 * TOKEN_BUCKETS))  # of any guess after this token
        self.onto = array("f", bytes(4 * TOKEN_BUCKETS))  # of a guess of this token


class _Conversation:
    """The text of a conversation, its counts, and the guesses of its next tokens."""

    def __init__(self, cache_namespace: str, token_bias: _TokenBias, text: list[int], skipped: int) -> None:
        self.cache_namespace = cache_namespace
        self.token_bias = token_bias
        self.answers: NamespaceAnswers | None = None
        self.text = text
        self.counts = NgramCounts()
        self.skipped = skipped  # tokens at the beginning that are not counted
        self.counted = skipped
        self.taken = 0  # tokens of the sequence that are in `text`
        self.num_forced = 0  # tokens after `text` that a grammar forces
        self.guesses: list[Guess] = []  # for the positions after those
        self.expected: list[float] = []  # probability that the draft is accepted up to each of its tokens
        self.level = 0  # of the evidence for the first guess
        self.text_bias = 0.0  # correction of the log-odds in this text
        self.tokens, self.time = 0.0, 0.0  # decayed; the time in steps
        self.step_cost = 1.0  # of the step under way, in steps
        self.gain = 0.0  # of the best draft, in tokens
        self.missed_kind: int | None = None  # kind of the first guess, if its missed draft cost was asked for

    @property
    def size(self) -> int:
        return len(self.text) - self.skipped

    def count(self, num_tokens: int) -> None:
        """Count at most `num_tokens` more tokens."""
        stop = min(self.counted + num_tokens, len(self.text))
        self.counts.add(self.text, self.counted, stop)
        self.counted = stop


class NgramDrafter:
    """A `Drafter`. Without `past_answers` none are remembered. `save` is called now and then to keep the acceptance."""

    def __init__(
        self,
        past_answers: PastAnswers | None = None,
        acceptance: Acceptance | None = None,
        save: Callable[[Acceptance], None] | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._past_answers = past_answers
        self._acceptance = acceptance or Acceptance()
        self._save = save
        self._max_tokens = max_tokens
        self._running: dict[int, _Conversation] = {}
        self._idle: list[_Conversation] = []  # least recently used first
        # By cache namespace, least recently used first.
        self._token_biases: OrderedDict[str, _TokenBias] = OrderedDict()
        self._unsaved = 0  # answers
        self._costs: Seq[float] = ()
        self._floors: list[float] = []
        self._tokens, self._time = 13.0, 10.0  # of all conversations, decayed
        self._missed_draft_costs = MissedDraftCosts()

    # -- conversations -------------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence) -> None:
        if seq.id in self._running:  # it was preempted
            return
        text = [*seq.past, *seq.tokens]
        if seq.pictures:
            text = [token for token in text if token >= 0]
        conversation = self._resume(seq.cache_namespace, text)
        conversation.taken = len(seq.tokens)
        conversation.tokens, conversation.time = FIRST_STEPS * self._tokens / self._time, FIRST_STEPS
        self._running[seq.id] = conversation
        if self._past_answers:
            conversation.answers = self._past_answers.of(seq.cache_namespace)

    def end(self, seq: Sequence) -> None:
        conversation = self._running.pop(seq.id, None)
        if conversation is None:  # it never ran
            return
        self._follow(conversation, seq)
        conversation.guesses, conversation.missed_kind = [], None
        self._idle.append(conversation)
        del self._idle[:-MAX_IDLE]
        self._unsaved += 1
        if self._past_answers:
            self._past_answers.add(seq.cache_namespace, seq.tokens[seq.prompt_len :])

    def _resume(self, cache_namespace: str, text: list[int]) -> _Conversation:
        """Return the conversation that `text` continues, or a new one that counts as many tokens as there is room."""
        for idle in reversed(self._idle):
            if idle.cache_namespace == cache_namespace and text[: len(idle.text)] == idle.text:
                self._idle.remove(idle)
                if len(text) - idle.skipped > self._max_tokens:  # too long: count only the newer half
                    counted = min(self._max_tokens // 2, self._room())
                    return _Conversation(cache_namespace, idle.token_bias, text, len(text) - counted)
                idle.text = text
                idle.text_bias = 0.0
                return idle
        while self._idle and self._room() < len(text):
            del self._idle[0]
        token_bias = self._token_biases.setdefault(cache_namespace, _TokenBias())
        self._token_biases.move_to_end(cache_namespace)
        if len(self._token_biases) > MAX_NAMESPACES:
            self._token_biases.popitem(last=False)
        return _Conversation(cache_namespace, token_bias, text, max(len(text) - self._room(), 0))

    def _room(self) -> int:
        conversations = (*self._idle, *self._running.values())
        return max(self._max_tokens - sum(conversation.size for conversation in conversations), 0)

    # -- steps -----------------------------------------------------------------------------------------------------

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        conversation = self._running[seq.id]
        num_free = -conversation.num_forced
        num_new = self._follow(conversation, seq)
        if num_new:
            self._update_rate(conversation, max(num_free + num_new, 1))
        costs = marginal_cost[:MAX_DRAFT]
        if costs != self._costs:
            self._costs, self._floors = costs, floors(costs)
        draft_len = self._guess(conversation, forced)
        conversation.step_cost = 1 + sum(self._costs[:draft_len])
        if conversation.missed_kind is not None and num_new == 1:
            self._missed_draft_costs.learn(conversation.missed_kind, conversation.gain)
        conversation.missed_kind = None
        return [guess[0] for guess in conversation.guesses[:draft_len]]

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        conversation = self._running[seq.id]
        draft = self.propose(seq, marginal_cost)
        conversation.step_cost = 1.0  # the step under way has no draft
        chance = conversation.guesses[0][1] if conversation.guesses else None
        conversation.missed_kind = self._missed_draft_costs.kind(chance, bool(draft))
        return self._missed_draft_costs.of(conversation.missed_kind)

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        conversation = self._running[seq.id]
        self._acceptance.reach.learn(conversation.level, conversation.expected[:drafted], accepted)

    def _follow(self, conversation: _Conversation, seq: Sequence) -> int:
        """Add the sequence's new tokens to the text and learn from those that were guessed; return their number."""
        text, guesses = conversation.text, conversation.guesses
        num_before = len(text)
        at = num_before + conversation.num_forced
        text += seq.tokens[conversation.taken :]
        conversation.taken = len(seq.tokens)
        num_new = len(text) - num_before
        if guesses and len(text) > at:
            after, onto = conversation.token_bias.after, conversation.token_bias.onto
            text_bias = conversation.text_bias
            for guess, error in zip(guesses, self._acceptance.learn(guesses, text[at:]), strict=False):
                after[text[at - 1] % TOKEN_BUCKETS] += TOKEN_BIAS_RATE * error
                onto[guess[0] % TOKEN_BUCKETS] += TOKEN_BIAS_RATE * error
                text_bias += TEXT_BIAS_RATE * error
                at += 1
            conversation.text_bias = min(max(text_bias, -MAX_TEXT_BIAS), MAX_TEXT_BIAS)
        conversation.guesses, conversation.num_forced = [], 0
        conversation.count(CATCH_UP)
        return num_new

    def _update_rate(self, conversation: _Conversation, num_new: int) -> None:
        """Update the tokens and the time since the last call. Tokens beyond the draft's length took plain steps."""
        spent = conversation.step_cost + max(num_new - 1 - len(conversation.expected), 0)
        fade = 1 - 1 / RATE_STEPS
        conversation.tokens = conversation.tokens * fade + num_new
        conversation.time = conversation.time * fade + spent
        self._tokens = self._tokens * PAST_FADE + num_new
        self._time = self._time * PAST_FADE + spent

    def _guess(self, conversation: _Conversation, forced: Seq[int]) -> int:
        """Guess tokens after the forced ones while one more may pay; return the length of the best draft."""
        text, counts, guesses = conversation.text, conversation.counts, conversation.guesses
        past_counts = conversation.answers.counts if conversation.answers else NOTHING
        after, onto = conversation.token_bias.after, conversation.token_bias.onto
        text_bias = conversation.text_bias
        judge, exp = self._acceptance.judge, math.exp
        min_worth = SAFETY_MARGIN * conversation.tokens / conversation.time  # in tokens, of a row that costs one step
        expected = conversation.expected = []
        shares: list[float] = []
        len_before = len(text)
        text += forced
        conversation.num_forced = len(forced)
        product = chance = 1.0
        gain = best_gain = 0.0
        best_len = 0
        for depth, cost, floor in zip(DEPTHS, self._costs, self._floors, strict=False):
            current, past = look_up(text, counts, past_counts)
            if current is None and past is None:
                break
            token, odds, slot, level = judge(current, past)
            if not guesses:
                conversation.level = level
                shares = self._acceptance.reach.shares(level)
            odds += text_bias + after[text[-1] % TOKEN_BUCKETS] + onto[token % TOKEN_BUCKETS]
            right = 1 / (1 + exp(-odds))
            guesses.append((token, right, slot, current, past))
            product *= right
            chance = min(chance, product * shares[depth])
            if chance <= min_worth * floor:
                break
            expected.append(product)
            text.append(token)
            gain += chance - min_worth * cost
            if gain > best_gain:
                best_gain, best_len = gain, len(guesses)
        del text[len_before:]
        conversation.gain = best_gain
        return best_len

    # -- beside the steps ------------------------------------------------------------------------------------------

    def work(self, seconds: float) -> bool:
        deadline = time.perf_counter() + seconds
        while self._work_slice():
            if time.perf_counter() >= deadline:
                return True
        return False

    def _work_slice(self) -> bool:
        """Do one slice of the pending work; True: there may be more."""
        for conversation in self._running.values():
            if conversation.counted < len(conversation.text):
                conversation.count(SLICE)
                return True
        if self._past_answers and self._past_answers.work(SLICE):
            return True
        if self._save and self._unsaved >= SAVE_EVERY:
            self._unsaved = 0
            self._save(self._acceptance)
        return False

    def close(self) -> None:
        if self._past_answers:
            self._past_answers.close()
        if self._save and self._unsaved:
            self._unsaved = 0
            self._save(self._acceptance)


def floors(costs: Seq[float]) -> list[float]:
    """Return, for each row, the least average cost of it and any number of following rows.

    If the probability of a token is below that, neither its draft nor any longer one can pay. Costs may be a staircase,
    where three rows are cheaper than two.
    """
    blocks: list[tuple[float, int]] = []  # total cost, rows; averages fall towards the end
    averages = []
    for cost in reversed(costs):
        total, rows = cost, 1
        while blocks and blocks[-1][0] * rows < total * blocks[-1][1]:
            more_cost, more_rows = blocks.pop()
            total, rows = total + more_cost, rows + more_rows
        blocks.append((total, rows))
        averages.append(total / rows)
    return averages[::-1]
