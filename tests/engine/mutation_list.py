"""The mutations of `tests.engine.mutations`: each replaces a text that occurs once in its module."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    module: str  # of edgelm.engine, or of a package in it
    description: str
    old: str  # occurs exactly once
    new: str = ""
    equivalent: str = ""  # why no test can notice it

    @property
    def name(self) -> str:
        return f"{self.module}: {self.description}"

    def apply(self, package: Path) -> None:
        (path,) = (package / "engine").rglob(f"{self.module}.py")
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            sys.exit(
                f"error: {self.old!r} occurs {text.count(self.old)} times in {path.name}; bring the list up to date"
            )
        text = text.replace(self.old, self.new)
        compile(text, path.name, "exec")
        path.write_text(text, encoding="utf-8")


def _of(module: str, *mistakes: tuple[str, ...]) -> list[Mutation]:
    """Return the mutations of a module; a mistake is the other fields, in their order."""
    return [Mutation(module, *mistake) for mistake in mistakes]


MUTATIONS = [
    *_of(
        "cells",
        ("a shared span grows", "if spans and spans[-1].num_holders == 1:", "if spans:"),
        ("a cell is freed while one holds it", "if span.num_holders == 0:", "if span.num_holders <= 1:"),
        ("trim does not split", "        self._split(slot, length)\n        spans = ", "        spans = "),
        ("sharing does not count holders", "span.num_holders += 1", "span.num_holders += 0"),
        ("a split is not seen by others", "for spans in self._spans:", "for spans in self._spans[slot : slot + 1]:"),
        ("spans of different holders are joined", "== span.num_holders == 1:", "== span.num_holders:"),
        ("old borders pile up", "        self._merge(src)\n"),
    ),
    *_of(
        "kv_slots",
        ("a whole prompt may be cached", "max_len = len(tokens) - 1", "max_len = len(tokens)"),
        (
            "more is taken as cached than is",
            "seq.computed = slot, chosen.length",
            "seq.computed = slot, chosen.length + 1",
        ),
        (
            "a rejected draft is not cut off",
            "        self._trim(slot, seq.computed, seq)\n        slot.final",
            "        slot.final",
        ),
        ("a state goes back to before its chunk", "max(slot.final + 1, end", "max(slot.final, end"),
        ("a state goes back further than it can", "end - self._info.rollback_len)", "0)"),
        ("a state goes back beside others", " if self._alone else end", ""),
        ("a state goes back twice", "            slot.shortest = length\n"),
        ("a rejected draft is saved", "        self._trim(slot, slot.length, slot.seq)\n"),
        ("no state goes back for a prompt", " and usable >= shortest", " and False"),
        (
            "a released slot is not cut",
            "if seq.pictures or not self._goes_back or seq.computed < slot.shortest:",
            "if False:",
        ),
        ("an idle slot stays beside running ones", "if any(other.seq for other in self._slots):", "if False:"),
        ("an idle slot stays when another comes", "if idle and idle is not match.source:", "if False:"),
        (
            "a match is not looked for again",
            "chosen = self._choose(seq, tokens)",
            "chosen = match if not isinstance(match.source, StoredPrefix) else self._choose(seq, tokens)",
        ),
        (
            "an idle slot goes without snapshot",
            "        self._save(slot, needed)\n        self._trim(slot, 0)",
            "        self._trim(slot, 0)",
        ),
        (
            "an evicted slot keeps its cells",
            "        self._save(slot, needed)\n        self._trim(slot, 0)",
            "        self._save(slot, needed)",
        ),
        ("a fork counts no cells", "            self._cells.share(source.id, slot.id, match.length)\n"),
        ("a fork is not done", "            self._ops.append(Copy(source.id, slot.id, seq.position(match.length)))\n"),
        ("a loaded snapshot counts no cells", "            self._cells.extend(slot.id, len(source.tokens))\n"),
        (
            "a loaded snapshot is not cut",
            "            self._trim(slot, match.length, seq)\n        slot.shortest",
            "        slot.shortest",
        ),
        ("a cut slot is not kept", "if source.length - match.length >= MIN_PREFIX_LEN:", "if False:"),
        (
            "snapshots take twice their room",
            "if used + nbytes <= self._max_bytes",
            "if used + nbytes <= 2 * self._max_bytes",
        ),
        (
            "the newest snapshot goes first",
            "for other in self._snapshots if other not in last",
            "for other in [*self._snapshots][::-1] if other not in last",
        ),
        ("the newest shared prefix goes first", "*self._snapshots))", "*[*self._snapshots][::-1]))"),
        ("a dropped snapshot stays on the device", "        self._ops.append(Drop(snapshot.key))\n"),
        (
            "a snapshot in use is evicted for the idle slot",
            "            if isinstance(match.source, Snapshot):\n                self._snapshots.touch(match.source)\n",
            "",
        ),
        (
            "snapshots of one conversation pile up",
            "common == length and (len(other.tokens) == length or self._divisible)",
            "common == length == len(other.tokens)",
        ),
        (
            "a covered snapshot is taken for equal without trim",
            "(len(other.tokens) == length or self._divisible)",
            "True",
        ),
        ("a small gain is worth a load", "if length < least or", "if length < MIN_PREFIX_LEN or"),
        ("short prefixes become snapshots", "if len(tokens) < MIN_PREFIX_LEN or nbytes", "if nbytes"),
        ("snapshots survive a reset", "*(Drop(key) for key in keys)"),
        ("a reset forgets the drops of the failed step", "(*self._taken, *self._ops)", "self._ops"),
        ("a reset forgets the drops of the failed plan", "(*self._taken, *self._ops)", "self._taken"),
        ("slots survive a reset", "*(Trim(slot.id, 0) for slot in self._slots), "),
        (
            "a reset leaves sequences bound",
            "                slot.seq.kv, slot.seq.computed = None, 0\n",
            "                pass\n",
        ),
        ("what others will compute is not counted", "return needed + promised + SPARE", "return needed + SPARE"),
        ("no room is spared", "SPARE_LEN * len(running) <=", "0 <="),
        (
            "the length of a snapshot is not counted",
            "needed = max(len(seq.tokens) + 1 - held, loaded)",
            "needed = len(seq.tokens) + 1 - held",
        ),
        ("nothing is saved on the way", "[] if self._divisible else self._save_points(slot, tokens)", "[]"),
        ("a chunk runs past a state to save", "if seq.computed < point < end", "if False"),
        ("states on the way replace others", "dict.fromkeys((*first, *(", "dict.fromkeys((*("),
        ("shared prefixes are evicted as any other", " if other not in last), *self._snapshots))", "),))"),
        ("every prefix is shared", " and self._points.is_shared(seq.cache_namespace, tokens[: chosen.length])", ""),
        ("every state on the way is stored", " or self._is_dispensable(snapshot)", ""),
        ("states on the way take all room", "* SAVED_SHARE <=", "<="),
        ("a needed state is dropped", " if other is not needed]", "]"),
        (
            "what cannot be cut is cut",
            "return usable if self._divisible or usable == length or goes_back else 0",
            "return usable",
        ),
        ("what cannot be copied is copied", "(slot.seq is None or self._info.can_copy)", "True"),
        ("more is grown than is free", "if missing > self._cells.free:", "if missing > self._cells.free + 1:"),
        (
            "nothing is ever found",
            "        best = _Match(0)\n        max_len",
            "        return _Match(0)\n        max_len",
        ),
        (
            "prefixes serve every namespace",
            "if slot.cache_namespace == seq.cache_namespace and (slot.seq",
            "if (slot.seq",
        ),
        (
            "no request waits for a common prefix",
            "                if common > slot.length and common",
            "                if False and common",
        ),
        ("one waits for what is no gain", "common >= match.length + WORTH_WAITING_LEN:", "True:"),
        ("what memory has no room for is lost", "            self._keep(other, EVICTED_SHARE)\n", ""),
        ("a running answer waits for the disk", "not self._store.prefetch(source.name)", "False"),
        ("an editor waits for a file", "if others_run and not seq.interactive and", "if others_run and"),
        ("each flush writes all again", "        snapshot.stored = True\n        self._writes", "        self._writes"),
        ("a pause writes all", "grown = None if ends else GROWN_SHARE", "grown = None"),
        ("a prompt is a conversation", "            snapshot.went_on and ", "            "),
        ("a sequence that comes back is a conversation", "is_later = seq.cached is None and not", "is_later = not"),
        (
            "what served as a whole is not written",
            "            source.went_on |= is_later and",
            "            is_later and",
        ),
        (
            "the idle slot is not kept",
            "            self._save(idle)\n        recent_first",
            "            pass\n        recent_first",
        ),
        (
            "what was fetched stays in memory",
            "                self._ops.append(Drop(source.key))\n            else",
            "                pass\n            else",
        ),
        (
            "a damaged file counts as read",
            "if self._store.fetch(source.name, key):",
            "if self._store.fetch(source.name, key) or True:",
        ),
        (
            "what found no room is counted on",
            "            if nbytes is None:\n                self._drop(snapshot)\n                continue\n",
            "            if nbytes is None:\n                continue\n",
        ),
        ("sizes stay as expected", "            snapshot.nbytes = nbytes\n", ""),
        ("a file longer than the cache is loaded", " or len(prefix.tokens) > self._info.capacity", ""),
    ),
    *_of(
        "scheduler",
        ("drafts of a step differ in length", "            self._cut_drafts(chunks, room)\n"),
        (
            "another prompt is admitted beside one that is not finished",
            "prefill - length if length == missing else 0",
            "prefill - length",
        ),
        ("a lost snapshot ends its sequences", "        self._restart([])", "        self._restart(self.running)"),
        (
            "an unfinished prompt is sampled",
            "rows = 1 + len(seq.draft) if length == missing else 0",
            "rows = 1 + len(seq.draft)",
        ),
        ("the oldest is preempted", "youngest = self.running[-1]", "youngest = self.running[0]"),
        ("no room is reserved for those behind", "reserved=len(self.running)", "reserved=0"),
        ("reserved room is never given", "            room.reserved -= 1\n"),
        (
            "a preempted sequence is planned",
            "if seq.kv is not None:\n                fits = self._schedule(",
            "if True:\n                fits = self._schedule(",
        ),
        (
            "one is admitted where another had to go",
            "if fits and others:",
            "if True:",
            "next in line is the sequence that had to go, and `attach` asks for more room than it gave back",
        ),
        ("more are admitted than there are slots", "if len(running) == self._info.max_sequences:", "if False:"),
        ("no slot is kept for short answers", " >= MANY_SLOTS and", " > 99 and"),
        ("one of few slots is kept", " >= MANY_SLOTS and", " >= 2 and"),
        ("a slot is kept while no other waits", "len(self.waiting) > 1)", "len(self.waiting) > 0)"),
        ("short answers count as long", "sum(not is_interactive(seq) for seq in running)", "len(running)"),
        ("an answer is not charged while it runs", "        self.waiting.charge(seq)\n"),
        ("what ended stays open", "        self.waiting.end(seq)\n"),
        (
            "a sequence makes way and begins anew",
            "if not seq.interactive and self._kv.keeps(seq)), None)",
            "if not seq.interactive), None)",
        ),
        (
            "a draft survives its turn",
            "        seq.draft, seq.num_forced = [], 0\n        self.running",
            "        self.running",
        ),
        ("an editor waits for a slot", "return None if head is self._blocked or", "return None if True or"),
        (
            "an editor waits for an unfinished prompt",
            "fits = fits and self._admit_from(self._next_editor, chunks, room)\n",
            "\n",
        ),
        ("an agent's prompt stands still beside an editor's", "max(room.prefill, 1)", "max(room.prefill, 0)"),
        ("a chunk of a prompt is not committed", "                self._kv.commit(chunk.seq)\n"),
        ("a chunk of a prompt is not counted", "                chunk.seq.computed = chunk.end\n"),
        ("rows behind a rejected draft are taken", " or sample.id != draft[row]:", ":"),
        ("a bonus row is lost", "if reason or row == len(draft) or", "if reason or row >= len(draft) - 1 or"),
        ("the last token counts as computed", "seq.computed = len(seq.tokens) - 1", "seq.computed = len(seq.tokens)"),
        ("a verified draft stays", "        seq.draft, seq.num_forced = [], 0\n\n", "        seq.num_forced = 0\n\n"),
        (
            "the length of the forced part stays",
            "        seq.draft, seq.num_forced = [], 0\n\n",
            "        seq.draft = []\n\n",
            "each draft of a sequence with a grammar sets it again, and without a draft nothing is counted",
        ),
        ("forced tokens are not drafted", "seq.matcher.forced(max_len) if seq.matcher else []", "list[int]()"),
        (
            "a draft goes on behind a forbidden token",
            "draft = draft[: seq.matcher.allowed(draft)] if seq.matcher else draft",
            "draft = draft",
        ),
        ("drafts for a request without", "self._drafter and seq.params.drafts:", "self._drafter:"),
        ("forced tokens count as drafted", "forced = min(seq.num_forced, drafted)", "forced = 0"),
        ("a finished grammar goes on", " or (seq.matcher and seq.matcher.done)", ""),
        (
            "an error of the grammar is overlooked",
            '        if seq.matcher and seq.matcher.error:\n            return "error"\n',
            "",
            "the next mask allows no token then, and the answer ends with the same error one step later",
        ),
        ("a mask that failed behind a draft ends the answer", "if row == 0 or seq.matcher is None:", "if True:"),
        ("what is no number can be used again", "            seq.computed = 0  # ", "            # "),
        ("what is no number is a token", "if sample.id == NOT_A_TOKEN:", "if False:"),
        ("the grammar does not advance", "                seq.matcher.accept(sample.id)\n", "                pass\n"),
        (
            "the context is one too long",
            "len(seq.tokens) >= self._info.context else",
            "len(seq.tokens) > self._info.context else",
        ),
        (
            "an answer is one too long",
            "if seq.completion_len == seq.params.max_tokens:",
            "if seq.completion_len - 1 == seq.params.max_tokens:",
        ),
        (
            "a draft outgrows the answer",
            "seq.params.max_tokens - seq.completion_len - 1",
            "seq.params.max_tokens - seq.completion_len",
        ),
        (
            "a draft outgrows the context",
            "self._info.context - len(seq.tokens) - 1",
            "self._info.context - len(seq.tokens) + 1",
        ),
        ("a draft is longer than its room", ")[:max_len]", ")"),
        ("drafts keep others out", " - admissible - 1", " - 1"),
        ("drafts where nothing can be trimmed", "drafter if info.can_draft else None", "drafter"),
        (
            "a draft preempts",
            "            if seq.draft:\n                seq.draft, seq.num_forced = [], 0\n                continue\n",
        ),
        (
            "a preempted sequence keeps its memory",
            "        self._kv.release(seq, resumes=True)\n        self.waiting.put_back",
            "        self.waiting.put_back",
        ),
        (
            "a finished sequence keeps its memory",
            "        self._kv.release(seq)\n        self._forget(seq)",
            "        self._forget(seq)",
        ),
        ("prefill is not counted", "room.prefill = room.prefill - length if", "room.prefill = room.prefill if"),
        (
            "prefill is not bounded in time",
            "self._clock.prefill_tokens(ready, depth) if ready else self._info.max_tokens",
            "self._info.max_tokens",
        ),
        (
            "prefill is always bounded",
            "self._clock.prefill_tokens(ready, depth) if ready else self._info.max_tokens",
            "self._clock.prefill_tokens(ready, depth)",
        ),
        ("failed sequences run again", "            if seq in failed:\n", "            if False:\n"),
        ("a failure loses the others", "            if seq in failed:\n", "            if True:\n"),
        ("a failure leaves the cache as it is", "        self._kv.reset()\n"),
        (
            "a failed plan ends no waiting sequence",
            "self.running or [head for head in [self.waiting.head()] if head]",
            "self.running",
        ),
        (
            "the second admission counts as the first",
            "        if is_new:\n            seq.cached = seq.computed\n",
            "        seq.cached = seq.computed\n",
        ),
        ("accepted tokens are not counted", "seq.accepted += accepted", "seq.accepted += len(taken)"),
        ("a step ahead of several rows", "return chunk.rows == 1 and not", "return not"),
        ("a step ahead of a grammar", " and (matcher is None or matcher.unrestricted)", ""),
        ("a step ahead of a penalty", " and not chunk.seq.params.penalized", ""),
        ("a step ahead behind the end", "if not self._ends_next(chunk.seq)]", "]"),
        ("a step ahead admits no sequence", "not staying or self._may_admit_after(staying)", "not staying"),
        ("one without memory holds all up", "(head is not self._blocked or len", "(True or len"),
        (
            "one without memory waits for ever",
            "accepted: int = 0) -> Event:\n        self._blocked = None\n",
            "accepted: int = 0) -> Event:\n",
        ),
        ("the cost of a missed draft is ignored", " > self._clock.gap(", " > 2 + self._clock.gap("),
        ("a step ahead has no room", "if not all(self._kv.grow(chunk.seq, chunk.end + 1) for", "if not all(True for"),
        (
            "a step ahead writes where it read",
            "Chunk(chunk.seq, chunk.end, [LAST]",
            "Chunk(chunk.seq, chunk.start, [LAST]",
        ),
        ("an aborted sequence goes on", "if chunk.seq.kv is not None]", "]"),
        ("what is behind the end is taken", "if chunk.seq.kv is None:", "if False:"),
        ("executors that cannot run ahead", "if not self._info.runs_ahead:", "if False:"),
    ),
    *_of(
        "prefixes",
        ("a used snapshot stays old", "        self.remove(prefix)\n        self.add(prefix)", "        return"),
        (
            "the prefix is too long by half a search",
            "            high = middle\n    return low",
            "            high = middle\n    return high",
        ),
        (
            "kept prefixes serve every namespace",
            "return cache_namespace, tokens[:MIN_PREFIX_LEN].tobytes()",
            'return "", tokens[:MIN_PREFIX_LEN].tobytes()',
        ),
    ),
    *_of(
        "save_points",
        ("a branch is dropped", " and others[index][0] not in branches", ""),
        ("a state is dropped without a neighbour", "distance <= REACH * newer", "True"),
    ),
    *_of(
        "admission",
        (
            "preempted sequences come back in the order of their preemption",
            "bisect.insort(self._returned, seq, key=turn_of)",
            "self._returned.append(seq)",
        ),
        (
            "preempted sequences wait with the others",
            "        if self._returned:\n            return self._returned[0]\n",
            "        if self._returned and not self._queues[_Kind.LONG].lanes:\n            return self._returned[0]\n",
        ),
        ("clients do not take turns", "return self.start, self.waiting[0].id", "return self.waiting[0].id, 0"),
        ("the youngest goes first", "return self.start, self.waiting[0].id", "return self.start, -self.waiting[0].id"),
        ("nobody is charged", "        self._received[seq.client] += cost\n"),
        (
            "a client saves up while it is away",
            "max(self._received.get(client, 0), self._clock)",
            "self._received.get(client, 0)",
        ),
        ("the clock stands still", "max(self._clock, start) + 1 + cost // CLOCK_SHARE", "max(self._clock, start)"),
        ("long ones never have a turn", "if len(firsts) > 1 and self._num_passed >= TURNS:", "if False:"),
        ("long ones have every turn", "if len(firsts) > 1 and self._num_passed >= TURNS:", "if len(firsts) > 1:"),
        (
            "turns are counted while no longer one waits",
            "seq is firsts[0] and bool(len(firsts) > 1 or self._returned)",
            "seq is firsts[0] and is_interactive(seq)",
        ),
        ("turns are counted for ever", "self._num_passed + 1 if passes else 0", "self._num_passed + passes"),
        ("an answer is charged as expected", "        if beyond > 0:", "        if False:"),
        ("an answer is charged twice", "            self._charged[seq] += beyond\n"),
        ("unused tokens are not given back", "_cost(seq) - self._charged.pop(seq))", "0 * self._charged.pop(seq))"),
        ("cached tokens are charged", "seq.prompt_len - (seq.cached or 0)", "seq.prompt_len"),
        ("clients are remembered for ever", " or not but:", ":"),
        ("too many clients are remembered", "len(but) + MAX_CLIENTS", "len(but) + 10 * MAX_CLIENTS"),
        ("the next of a client has no start", "        elif was_first:\n", "        elif False:\n"),
        ("a marked request is a long one", "    if seq.interactive:\n        return _Kind.EDITOR\n"),
    ),
    *_of(
        "kv_paged",
        ("two prompts at once are computed twice", "self._comes_soon(seq, len(hits)) or ", ""),
        (
            "a whole prompt may be cached",
            "(len(seq.tokens) - 1) // self._block_len):",
            "len(seq.tokens) // self._block_len):",
        ),
        ("a used block stays in the idle list", "            self._idle.pop(block, None)\n"),
        ("a shared block is not counted", "            self._refs[block] += 1\n"),
        (
            "a block is known before it is full",
            "num_full = seq.computed // self._block_len",
            "num_full = self._num_blocks(seq.computed)",
        ),
        ("a digest covers its own block only", "key = chain[-1] if chain else", "key ="),
        ("prefixes serve every namespace", "blake2b(seq.cache_namespace.encode(), digest_size=16)", "blake2b()"),
        ("a shared block is freed", "if self._refs[block] == 0:", "if self._refs[block] <= 1:"),
        ("nothing stays known", "if self._digests[block] is None:", "if True:"),
        ("nothing is ever registered", "if digest not in self._reusable:", "if False:"),
        ("two blocks have one digest", "if digest not in self._reusable:", "if True:"),
        ("an evicted block stays known", "            self._forget(block)\n        self._refs", "        self._refs"),
        ("the newest prefix goes first", "block = next(iter(idle))", "block = next(reversed(idle))"),
        ("shared blocks go as any other", "elif self._digests[block] in self._shared.last:", "elif False:"),
        (
            "every prefix that another leaves is shared",
            "if num_blocks >= (len(seq.tokens) - 1) // self._block_len:\n            return False\n        return",
            "if num_blocks < 0:\n            return False\n        return True or",
        ),
        ("known blocks go before empty ones", "if self._empty:", "if not self._idle:"),
        ("the head of a prefix goes first", "block = table.blocks.pop()", "block = table.blocks.pop(num_blocks)"),
        ("idle hits count as free", "self._num_free - sum(self._refs[block] == 0 for block in hits)", "self._num_free"),
        ("what others will compute is not counted", "return needed + promised + spare", "return needed + spare"),
        ("no room is spared", "return needed + promised + spare", "return needed + promised"),
        (
            "what is no number stays known",
            "            self._forget(block)\n        table.num_full",
            "            pass\n        table.num_full",
        ),
        (
            "an old table is used after growing",
            "            table.location = ()\n        return True",
            "        return True",
        ),
        (
            "an old table is used after shrinking",
            "            table.location = ()\n        while",
            "            pass\n        while",
        ),
        ("a reset leaves blocks known", "        self._reusable.clear()\n"),
        (
            "a reset leaves sequences bound",
            "        for seq in self._tables:\n            seq.kv, seq.computed = None, 0\n",
        ),
        ("the blocks of a rejected draft are kept", "        self._cut(table, self._num_blocks(seq.computed + 1))"),
        ("more is grown than is free", "if missing > self._num_free:", "if missing > self._num_free + 1:"),
    ),
    *_of(
        "engine",
        ("one client takes all places", "if num_own >= free:", "if False:"),
        ("clients are not told apart", "cache_namespace, client, interactive\n", 'cache_namespace, "", interactive\n'),
        ("marks are ignored", "cache_namespace, client, interactive\n", "cache_namespace, client, False\n"),
        ("an end without conversations fails", "itertools.pairwise([*starts, len(ops)])", "[(0, starts[0])]"),
        ("a failed step is told to those that left", " if event.seq_id in self._open]", "]"),
        ("the queue has no bound", "if free <= 0:", "if False:"),
        (
            "a closed loop is not noticed",
            'self._inbox.put(functools.partial(self._cancel, event.seq_id, "abort"))',
            "pass",
        ),
        ("the queue ends with the last step", "if not request.started:", "if True:"),
        ("the first token is the last", "        elif request.first:\n", "        elif False:\n"),
        ("a bug leaves all waiting", "            self._fail_open()\n\n    def", "            pass\n\n    def"),
        ("closing leaves the memory", "        self._executor.close()\n"),
        (
            "a bug in a step ends the thread",
            "        except Exception as error:",
            "        except EngineError as error:",
        ),
    ),
    *_of(
        "pipeline",
        ("a sequence with a grammar has no mask", "if chunk.seq.matcher and chunk.rows:", "if False:"),
        (
            "the rows of a mask are one late",
            "masks[first : first + chunk.rows])",
            "masks[first + 1 : first + 1 + chunk.rows])",
        ),
        (
            "the last row of a draft has no mask",
            "chunk.seq.matcher.fill(chunk.draft, masks[first : first + chunk.rows])",
            "chunk.seq.matcher.fill(chunk.draft[:-1], masks[first : first + max(chunk.rows - 1, 1)])",
        ),
        (
            "a launch ahead that fails fails all",
            "        except EdgeLMError as error:  # `step` is",
            "        except ZeroDivisionError as error:  # `step` is",
        ),
        ("prefill without a wait is not counted", "now - began, self._unread_prefill.tokens)", "now - began)"),
        ("a step ahead is lost", "        self._ahead = ahead\n"),
    ),
    *_of(
        "clock",
        ("a gap holds for ever", " or self.num_steps - self._gap_at > GAP_EVERY", ""),
        ("one long gap counts", "statistics.median(self._gaps)", "max(self._gaps)"),
    ),
    *_of(
        "ngram_drafter",
        ("nothing is learnt", "self._mean[kind] += weight", "self._mean[kind] += 0 * weight"),
        ("the cost has no bound", "min(gain, MAX_COST)", "gain"),
        (
            "the mean never forgets",
            "max(self._weight[kind] / (1 + self._weight[kind]), MIN_WEIGHT)",
            "self._weight[kind] / (1 + self._weight[kind])",
        ),
        ("the cost is that of a step", "        conversation.step_cost = 1.0  # the step under way has no draft\n"),
        ("a cost is learnt twice", "        conversation.missed_kind = None\n"),
    ),
    *_of(
        "throttle",
        (
            "a stopped drafter holds steps up",
            "            return 0.0\n        return self._drafter.missed_draft_cost",
            "            pass\n        return self._drafter.missed_draft_cost",
        ),
    ),
    *_of(
        "stream",
        ("a dropped stream goes on", "    def __del__(self) -> None:\n        self.close()\n"),
        ("the cost is forgotten at the end", "            self._stats = event.stats\n"),
        ("a closed stream goes on", "            self._cancel(reason)\n"),
    ),
]
