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


MUTATIONS = [
    Mutation("cells", "a shared span grows", "if spans and spans[-1].num_holders == 1:", "if spans:"),
    Mutation("cells", "a cell is freed while one holds it", "if span.num_holders == 0:", "if span.num_holders <= 1:"),
    Mutation("cells", "trim does not split", "        self._split(slot, length)\n        spans = ", "        spans = "),
    Mutation("cells", "sharing does not count holders", "span.num_holders += 1", "span.num_holders += 0"),
    Mutation(
        "cells",
        "a split is not seen by others",
        "for spans in self._spans:",
        "for spans in self._spans[slot : slot + 1]:",
    ),
    Mutation("cells", "spans of different holders are joined", "== span.num_holders == 1:", "== span.num_holders:"),
    Mutation("cells", "old borders pile up", "        self._merge(src)\n"),
    Mutation("kv_slots", "a whole prompt may be cached", "max_len = len(tokens) - 1", "max_len = len(tokens)"),
    Mutation(
        "kv_slots",
        "more is taken as cached than is",
        "seq.computed = slot, chosen.length",
        "seq.computed = slot, chosen.length + 1",
    ),
    Mutation(
        "kv_slots",
        "a rejected draft is not cut off",
        "        self._trim(slot, seq.computed, seq)\n        slot.final",
        "        slot.final",
    ),
    Mutation("kv_slots", "a state goes back to before its chunk", "max(slot.final + 1, end", "max(slot.final, end"),
    Mutation("kv_slots", "a state goes back further than it can", "end - self._info.rollback_len)", "0)"),
    Mutation("kv_slots", "a state goes back beside others", " if self._alone else end", ""),
    Mutation("scheduler", "drafts of a step differ in length", "            self._cut_drafts(chunks, room)\n"),
    Mutation("kv_slots", "a state goes back twice", "            slot.shortest = length\n"),
    Mutation("kv_slots", "a rejected draft is saved", "        self._trim(slot, slot.length, slot.seq)\n"),
    Mutation("kv_slots", "no state goes back for a prompt", " and usable >= shortest", " and False"),
    Mutation(
        "kv_slots",
        "a released slot is not cut",
        "if seq.pictures or not self._goes_back or seq.computed < slot.shortest:",
        "if False:",
    ),
    Mutation(
        "kv_slots", "an idle slot stays beside running ones", "if any(other.seq for other in self._slots):", "if False:"
    ),
    Mutation("kv_slots", "an idle slot stays when another comes", "if idle and idle is not match.source:", "if False:"),
    Mutation(
        "kv_slots",
        "a match is not looked for again",
        "chosen = self._choose(seq, tokens)",
        "chosen = match if not isinstance(match.source, StoredPrefix) else self._choose(seq, tokens)",
    ),
    Mutation(
        "kv_slots",
        "an idle slot goes without snapshot",
        "        self._save(slot, needed)\n        self._trim(slot, 0)",
        "        self._trim(slot, 0)",
    ),
    Mutation(
        "kv_slots",
        "an evicted slot keeps its cells",
        "        self._save(slot, needed)\n        self._trim(slot, 0)",
        "        self._save(slot, needed)",
    ),
    Mutation("kv_slots", "a fork counts no cells", "            self._cells.share(source.id, slot.id, match.length)\n"),
    Mutation(
        "kv_slots",
        "a fork is not done",
        "            self._ops.append(Copy(source.id, slot.id, seq.position(match.length)))\n",
    ),
    Mutation(
        "kv_slots", "a loaded snapshot counts no cells", "            self._cells.extend(slot.id, len(source.tokens))\n"
    ),
    Mutation(
        "kv_slots",
        "a loaded snapshot is not cut",
        "            self._trim(slot, match.length, seq)\n        slot.shortest",
        "        slot.shortest",
    ),
    Mutation("kv_slots", "a cut slot is not kept", "if source.length - match.length >= MIN_PREFIX_LEN:", "if False:"),
    Mutation(
        "kv_slots",
        "snapshots take twice their room",
        "if used + nbytes <= self._max_bytes",
        "if used + nbytes <= 2 * self._max_bytes",
    ),
    Mutation(
        "kv_slots",
        "the newest snapshot goes first",
        "for other in self._snapshots if other not in last",
        "for other in [*self._snapshots][::-1] if other not in last",
    ),
    Mutation("kv_slots", "the newest shared prefix goes first", "*self._snapshots))", "*[*self._snapshots][::-1]))"),
    Mutation("kv_slots", "a dropped snapshot stays on the device", "        self._ops.append(Drop(snapshot.key))\n"),
    Mutation(
        "prefixes",
        "a used snapshot stays old",
        "        self.remove(prefix)\n        self.add(prefix)",
        "        return",
    ),
    Mutation(
        "kv_slots",
        "a snapshot in use is evicted for the idle slot",
        "            if isinstance(match.source, Snapshot):\n                self._snapshots.touch(match.source)\n",
        "",
    ),
    Mutation(
        "kv_slots",
        "snapshots of one conversation pile up",
        "common == length and (len(other.tokens) == length or self._divisible)",
        "common == length == len(other.tokens)",
    ),
    Mutation(
        "kv_slots",
        "a covered snapshot is taken for equal without trim",
        "(len(other.tokens) == length or self._divisible)",
        "True",
    ),
    Mutation("kv_slots", "a small gain is worth a load", "if length < least or", "if length < MIN_PREFIX_LEN or"),
    Mutation("kv_slots", "short prefixes become snapshots", "if len(tokens) < MIN_PREFIX_LEN or nbytes", "if nbytes"),
    Mutation("kv_slots", "snapshots survive a reset", "*(Drop(key) for key in keys)"),
    Mutation("kv_slots", "a reset forgets the drops of the failed step", "(*self._taken, *self._ops)", "self._ops"),
    Mutation("kv_slots", "a reset forgets the drops of the failed plan", "(*self._taken, *self._ops)", "self._taken"),
    Mutation("kv_slots", "slots survive a reset", "*(Trim(slot.id, 0) for slot in self._slots), "),
    Mutation(
        "kv_slots",
        "a reset leaves sequences bound",
        "                slot.seq.kv, slot.seq.computed = None, 0\n",
        "                pass\n",
    ),
    Mutation(
        "kv_slots",
        "what others will compute is not counted",
        "return needed + promised + SPARE",
        "return needed + SPARE",
    ),
    Mutation("kv_slots", "no room is spared", "SPARE_LEN * len(running) <=", "0 <="),
    Mutation(
        "kv_slots",
        "the length of a snapshot is not counted",
        "needed = max(len(seq.tokens) + 1 - held, loaded)",
        "needed = len(seq.tokens) + 1 - held",
    ),
    Mutation(
        "kv_slots", "nothing is saved on the way", "[] if self._divisible else self._save_points(slot, tokens)", "[]"
    ),
    Mutation("kv_slots", "a chunk runs past a state to save", "if seq.computed < point < end", "if False"),
    Mutation("kv_slots", "states on the way replace others", "dict.fromkeys((*first, *(", "dict.fromkeys((*("),
    Mutation(
        "kv_slots", "shared prefixes are evicted as any other", " if other not in last), *self._snapshots))", "),))"
    ),
    Mutation(
        "kv_slots",
        "every prefix is shared",
        " and self._points.is_shared(seq.cache_namespace, tokens[: chosen.length])",
        "",
    ),
    Mutation("kv_slots", "every state on the way is stored", " or self._is_dispensable(snapshot)", ""),
    Mutation("kv_slots", "states on the way take all room", "* SAVED_SHARE <=", "<="),
    Mutation("kv_slots", "a needed state is dropped", " if other is not needed]", "]"),
    Mutation("save_points", "a branch is dropped", " and others[index][0] not in branches", ""),
    Mutation("save_points", "a state is dropped without a neighbour", "distance <= REACH * newer", "True"),
    Mutation(
        "scheduler",
        "another prompt is admitted beside one that is not finished",
        "prefill - length if length == missing else 0",
        "prefill - length",
    ),
    Mutation(
        "kv_slots",
        "what cannot be cut is cut",
        "return usable if self._divisible or usable == length or goes_back else 0",
        "return usable",
    ),
    Mutation("kv_slots", "what cannot be copied is copied", "(slot.seq is None or self._info.can_copy)", "True"),
    Mutation(
        "prefixes",
        "the prefix is too long by half a search",
        "            high = middle\n    return low",
        "            high = middle\n    return high",
    ),
    Mutation(
        "kv_slots", "more is grown than is free", "if missing > self._cells.free:", "if missing > self._cells.free + 1:"
    ),
    Mutation(
        "kv_slots",
        "nothing is ever found",
        "        best = _Match(0)\n        max_len",
        "        return _Match(0)\n        max_len",
    ),
    Mutation(
        "kv_slots",
        "prefixes serve every namespace",
        "if slot.cache_namespace == seq.cache_namespace and (slot.seq",
        "if (slot.seq",
    ),
    Mutation(
        "prefixes",
        "kept prefixes serve every namespace",
        "return cache_namespace, tokens[:MIN_PREFIX_LEN].tobytes()",
        'return "", tokens[:MIN_PREFIX_LEN].tobytes()',
    ),
    Mutation(
        "kv_slots",
        "no request waits for a common prefix",
        "                if common > slot.length and common",
        "                if False and common",
    ),
    Mutation("kv_slots", "one waits for what is no gain", "common >= match.length + WORTH_WAITING_LEN:", "True:"),
    Mutation("kv_slots", "what memory has no room for is lost", "            self._keep(other)\n", ""),
    Mutation("kv_slots", "each flush writes all again", "        snapshot.stored = True\n", ""),
    Mutation(
        "kv_slots",
        "the idle slot is not kept",
        "        if idle:\n            self._save(idle)\n        recent_first",
        "        recent_first",
    ),
    Mutation(
        "kv_slots",
        "what was fetched stays in memory",
        "                self._ops.append(Drop(source.key))\n            else",
        "                pass\n            else",
    ),
    Mutation(
        "kv_slots",
        "a damaged file counts as read",
        "if self._store.fetch(source.name, key):",
        "if self._store.fetch(source.name, key) or True:",
    ),
    Mutation(
        "kv_slots",
        "what found no room is counted on",
        "            if nbytes is None:\n                self._drop(snapshot)\n                continue\n",
        "            if nbytes is None:\n                continue\n",
    ),
    Mutation("kv_slots", "sizes stay as expected", "            snapshot.nbytes = nbytes\n", ""),
    Mutation("kv_slots", "a file longer than the cache is loaded", " or len(prefix.tokens) > self._info.capacity", ""),
    Mutation(
        "scheduler",
        "a lost snapshot ends its sequences",
        "        self._restart([])",
        "        self._restart(self.running)",
    ),
    Mutation(
        "scheduler",
        "an unfinished prompt is sampled",
        "rows = 1 + len(seq.draft) if length == missing else 0",
        "rows = 1 + len(seq.draft)",
    ),
    Mutation("scheduler", "the oldest is preempted", "youngest = self.running[-1]", "youngest = self.running[0]"),
    Mutation("scheduler", "no room is reserved for those behind", "reserved=len(self.running)", "reserved=0"),
    Mutation("scheduler", "reserved room is never given", "            room.reserved -= 1\n"),
    Mutation(
        "scheduler",
        "a preempted sequence is planned",
        "if seq.kv is not None:\n                fits = self._schedule(",
        "if True:\n                fits = self._schedule(",
    ),
    Mutation(
        "scheduler",
        "one is admitted where another had to go",
        "if fits and others:",
        "if True:",
        equivalent="next in line is the sequence that had to go, and `attach` asks for more room than it gave back",
    ),
    Mutation(
        "scheduler",
        "more are admitted than there are slots",
        "if len(running) == self._info.max_sequences:",
        "if False:",
    ),
    Mutation("scheduler", "no slot is kept for short answers", " >= MANY_SLOTS and", " > 99 and"),
    Mutation("scheduler", "one of few slots is kept", " >= MANY_SLOTS and", " >= 2 and"),
    Mutation("scheduler", "a slot is kept while no other waits", "len(self.waiting) > 1)", "len(self.waiting) > 0)"),
    Mutation(
        "scheduler", "short answers count as long", "sum(not is_interactive(seq) for seq in running)", "len(running)"
    ),
    Mutation("scheduler", "an answer is not charged while it runs", "        self.waiting.charge(seq)\n"),
    Mutation("scheduler", "what ended stays open", "        self.waiting.end(seq)\n"),
    Mutation(
        "admission",
        "preempted sequences come back in the order of their preemption",
        "bisect.insort(self._returned, seq, key=turn_of)",
        "self._returned.append(seq)",
    ),
    Mutation(
        "admission",
        "preempted sequences wait with the others",
        "        if self._returned:\n            return self._returned[0]\n",
        "        if self._returned and not self._queues[_Kind.LONG].lanes:\n            return self._returned[0]\n",
    ),
    Mutation(
        "admission",
        "clients do not take turns",
        "return self.start, self.waiting[0].id",
        "return self.waiting[0].id, 0",
    ),
    Mutation(
        "admission",
        "the youngest goes first",
        "return self.start, self.waiting[0].id",
        "return self.start, -self.waiting[0].id",
    ),
    Mutation("admission", "nobody is charged", "        self._received[seq.client] += cost\n"),
    Mutation(
        "admission",
        "a client saves up while it is away",
        "max(self._received.get(client, 0), self._clock)",
        "self._received.get(client, 0)",
    ),
    Mutation(
        "admission",
        "the clock stands still",
        "max(self._clock, start) + 1 + cost // CLOCK_SHARE",
        "max(self._clock, start)",
    ),
    Mutation(
        "admission", "long ones never have a turn", "if len(firsts) > 1 and self._num_passed >= TURNS:", "if False:"
    ),
    Mutation(
        "admission",
        "long ones have every turn",
        "if len(firsts) > 1 and self._num_passed >= TURNS:",
        "if len(firsts) > 1:",
    ),
    Mutation(
        "admission",
        "turns are counted while no longer one waits",
        "seq is firsts[0] and bool(len(firsts) > 1 or self._returned)",
        "seq is firsts[0] and is_interactive(seq)",
    ),
    Mutation(
        "admission", "turns are counted for ever", "self._num_passed + 1 if passes else 0", "self._num_passed + passes"
    ),
    Mutation("admission", "an answer is charged as expected", "        if beyond > 0:", "        if False:"),
    Mutation("admission", "an answer is charged twice", "            self._charged[seq] += beyond\n"),
    Mutation(
        "admission",
        "unused tokens are not given back",
        "_cost(seq) - self._charged.pop(seq))",
        "0 * self._charged.pop(seq))",
    ),
    Mutation("admission", "cached tokens are charged", "seq.prompt_len - (seq.cached or 0)", "seq.prompt_len"),
    Mutation("admission", "clients are remembered for ever", " or not but:", ":"),
    Mutation("admission", "too many clients are remembered", "len(but) + MAX_CLIENTS", "len(but) + 10 * MAX_CLIENTS"),
    Mutation("admission", "the next of a client has no start", "        elif was_first:\n", "        elif False:\n"),
    Mutation("admission", "a marked request is a long one", "    if seq.interactive:\n        return _Kind.EDITOR\n"),
    Mutation(
        "scheduler",
        "a sequence makes way and begins anew",
        "if not seq.interactive and self._kv.keeps(seq)), None)",
        "if not seq.interactive), None)",
    ),
    Mutation(
        "scheduler",
        "a draft survives its turn",
        "        seq.draft, seq.num_forced = [], 0\n        self.running",
        "        self.running",
    ),
    Mutation(
        "scheduler", "an editor waits for a slot", "return None if head is self._blocked or", "return None if True or"
    ),
    Mutation(
        "scheduler",
        "an editor waits for an unfinished prompt",
        "fits = fits and self._admit_from(self._next_editor, chunks, room)\n",
        "\n",
    ),
    Mutation(
        "scheduler", "an agent's prompt stands still beside an editor's", "max(room.prefill, 1)", "max(room.prefill, 0)"
    ),
    Mutation("kv_paged", "two prompts at once are computed twice", "self._comes_soon(seq, len(hits)) or ", ""),
    Mutation("engine", "one client takes all places", "if num_own >= free:", "if False:"),
    Mutation(
        "engine",
        "clients are not told apart",
        "cache_namespace, client, interactive\n",
        'cache_namespace, "", interactive\n',
    ),
    Mutation(
        "engine", "marks are ignored", "cache_namespace, client, interactive\n", "cache_namespace, client, False\n"
    ),
    Mutation("scheduler", "a chunk of a prompt is not committed", "                self._kv.commit(chunk.seq)\n"),
    Mutation("scheduler", "a chunk of a prompt is not counted", "                chunk.seq.computed = chunk.end\n"),
    Mutation("scheduler", "rows behind a rejected draft are taken", " or sample.id != draft[row]:", ":"),
    Mutation(
        "scheduler", "a bonus row is lost", "if reason or row == len(draft) or", "if reason or row >= len(draft) - 1 or"
    ),
    Mutation(
        "scheduler",
        "the last token counts as computed",
        "seq.computed = len(seq.tokens) - 1",
        "seq.computed = len(seq.tokens)",
    ),
    Mutation(
        "scheduler",
        "a verified draft stays",
        "        seq.draft, seq.num_forced = [], 0\n\n",
        "        seq.num_forced = 0\n\n",
    ),
    Mutation(
        "scheduler",
        "the length of the forced part stays",
        "        seq.draft, seq.num_forced = [], 0\n\n",
        "        seq.draft = []\n\n",
        equivalent="each draft of a sequence with a grammar sets it again, and without a draft nothing is counted",
    ),
    Mutation(
        "scheduler",
        "forced tokens are not drafted",
        "seq.matcher.forced(max_len) if seq.matcher else []",
        "list[int]()",
    ),
    Mutation(
        "scheduler",
        "a draft goes on behind a forbidden token",
        "draft = draft[: seq.matcher.allowed(draft)] if seq.matcher else draft",
        "draft = draft",
    ),
    Mutation("scheduler", "drafts for a request without", "self._drafter and seq.params.drafts:", "self._drafter:"),
    Mutation("scheduler", "forced tokens count as drafted", "forced = min(seq.num_forced, drafted)", "forced = 0"),
    Mutation("scheduler", "a finished grammar goes on", " or (seq.matcher and seq.matcher.done)", ""),
    Mutation(
        "scheduler",
        "an error of the grammar is overlooked",
        '        if seq.matcher and seq.matcher.error:\n            return "error"\n',
        "",
        equivalent="the next mask allows no token then, and the answer ends with the same error one step later",
    ),
    Mutation(
        "scheduler",
        "a mask that failed behind a draft ends the answer",
        "if row == 0 or seq.matcher is None:",
        "if True:",
    ),
    Mutation("pipeline", "a sequence with a grammar has no mask", "if chunk.seq.matcher and chunk.rows:", "if False:"),
    Mutation(
        "pipeline",
        "the rows of a mask are one late",
        "masks[first : first + chunk.rows])",
        "masks[first + 1 : first + 1 + chunk.rows])",
    ),
    Mutation(
        "pipeline",
        "the last row of a draft has no mask",
        "chunk.seq.matcher.fill(chunk.draft, masks[first : first + chunk.rows])",
        "chunk.seq.matcher.fill(chunk.draft[:-1], masks[first : first + max(chunk.rows - 1, 1)])",
    ),
    Mutation("scheduler", "what is no number can be used again", "            seq.computed = 0  # ", "            # "),
    Mutation("scheduler", "what is no number is a token", "if sample.id == NOT_A_TOKEN:", "if False:"),
    Mutation(
        "scheduler",
        "the grammar does not advance",
        "                seq.matcher.accept(sample.id)\n",
        "                pass\n",
    ),
    Mutation(
        "scheduler",
        "the context is one too long",
        "len(seq.tokens) >= self._info.context else",
        "len(seq.tokens) > self._info.context else",
    ),
    Mutation(
        "scheduler",
        "an answer is one too long",
        "if seq.completion_len == seq.params.max_tokens:",
        "if seq.completion_len - 1 == seq.params.max_tokens:",
    ),
    Mutation(
        "scheduler",
        "a draft outgrows the answer",
        "seq.params.max_tokens - seq.completion_len - 1",
        "seq.params.max_tokens - seq.completion_len",
    ),
    Mutation(
        "scheduler",
        "a draft outgrows the context",
        "self._info.context - len(seq.tokens) - 1",
        "self._info.context - len(seq.tokens) + 1",
    ),
    Mutation("scheduler", "a draft is longer than its room", ")[:max_len]", ")"),
    Mutation("scheduler", "drafts keep others out", " - admissible - 1", " - 1"),
    Mutation("scheduler", "drafts where nothing can be trimmed", "drafter if info.can_draft else None", "drafter"),
    Mutation(
        "scheduler",
        "a draft preempts",
        "            if seq.draft:\n                seq.draft, seq.num_forced = [], 0\n                continue\n",
    ),
    Mutation(
        "scheduler",
        "a preempted sequence keeps its memory",
        "        self._kv.release(seq, resumes=True)\n        self.waiting.put_back",
        "        self.waiting.put_back",
    ),
    Mutation(
        "scheduler",
        "a finished sequence keeps its memory",
        "        self._kv.release(seq)\n        self._forget(seq)",
        "        self._forget(seq)",
    ),
    Mutation(
        "scheduler",
        "prefill is not counted",
        "room.prefill = room.prefill - length if",
        "room.prefill = room.prefill if",
    ),
    Mutation(
        "scheduler",
        "prefill is not bounded in time",
        "self._clock.prefill_tokens(ready, depth) if ready else self._info.max_tokens",
        "self._info.max_tokens",
    ),
    Mutation(
        "scheduler",
        "prefill is always bounded",
        "self._clock.prefill_tokens(ready, depth) if ready else self._info.max_tokens",
        "self._clock.prefill_tokens(ready, depth)",
    ),
    Mutation("scheduler", "failed sequences run again", "            if seq in failed:\n", "            if False:\n"),
    Mutation("scheduler", "a failure loses the others", "            if seq in failed:\n", "            if True:\n"),
    Mutation("scheduler", "a failure leaves the cache as it is", "        self._kv.reset()\n"),
    Mutation(
        "scheduler",
        "a failed plan ends no waiting sequence",
        "self.running or [head for head in [self.waiting.head()] if head]",
        "self.running",
    ),
    Mutation(
        "scheduler",
        "the second admission counts as the first",
        "        if is_new:\n            seq.cached = seq.computed\n",
        "        seq.cached = seq.computed\n",
    ),
    Mutation("scheduler", "accepted tokens are not counted", "seq.accepted += accepted", "seq.accepted += len(taken)"),
    Mutation(
        "kv_paged",
        "a whole prompt may be cached",
        "(len(seq.tokens) - 1) // self._block_len):",
        "len(seq.tokens) // self._block_len):",
    ),
    Mutation("kv_paged", "a used block stays in the idle list", "            self._idle.pop(block, None)\n"),
    Mutation("kv_paged", "a shared block is not counted", "            self._refs[block] += 1\n"),
    Mutation(
        "kv_paged",
        "a block is known before it is full",
        "num_full = seq.computed // self._block_len",
        "num_full = self._num_blocks(seq.computed)",
    ),
    Mutation("kv_paged", "a digest covers its own block only", "key = chain[-1] if chain else", "key ="),
    Mutation(
        "kv_paged",
        "prefixes serve every namespace",
        "blake2b(seq.cache_namespace.encode(), digest_size=16)",
        "blake2b()",
    ),
    Mutation("kv_paged", "a shared block is freed", "if self._refs[block] == 0:", "if self._refs[block] <= 1:"),
    Mutation("kv_paged", "nothing stays known", "if self._digests[block] is None:", "if True:"),
    Mutation("kv_paged", "nothing is ever registered", "if digest not in self._reusable:", "if False:"),
    Mutation("kv_paged", "two blocks have one digest", "if digest not in self._reusable:", "if True:"),
    Mutation(
        "kv_paged",
        "an evicted block stays known",
        "            self._forget(block)\n        self._refs",
        "        self._refs",
    ),
    Mutation("kv_paged", "the newest prefix goes first", "block = next(iter(idle))", "block = next(reversed(idle))"),
    Mutation(
        "kv_paged", "shared blocks go as any other", "elif self._digests[block] in self._shared.last:", "elif False:"
    ),
    Mutation(
        "kv_paged",
        "every prefix that another leaves is shared",
        "if num_blocks >= (len(seq.tokens) - 1) // self._block_len:\n            return False\n        return",
        "if num_blocks < 0:\n            return False\n        return True or",
    ),
    Mutation(
        "engine", "an end without conversations fails", "itertools.pairwise([*starts, len(ops)])", "[(0, starts[0])]"
    ),
    Mutation("kv_paged", "known blocks go before empty ones", "if self._empty:", "if not self._idle:"),
    Mutation(
        "kv_paged",
        "the head of a prefix goes first",
        "block = table.blocks.pop()",
        "block = table.blocks.pop(num_blocks)",
    ),
    Mutation(
        "kv_paged",
        "idle hits count as free",
        "self._num_free - sum(self._refs[block] == 0 for block in hits)",
        "self._num_free",
    ),
    Mutation(
        "kv_paged",
        "what others will compute is not counted",
        "return needed + promised + spare",
        "return needed + spare",
    ),
    Mutation("kv_paged", "no room is spared", "return needed + promised + spare", "return needed + promised"),
    Mutation(
        "kv_paged",
        "what is no number stays known",
        "            self._forget(block)\n        table.num_full",
        "            pass\n        table.num_full",
    ),
    Mutation(
        "kv_paged",
        "an old table is used after growing",
        "            table.location = ()\n        return True",
        "        return True",
    ),
    Mutation(
        "kv_paged",
        "an old table is used after shrinking",
        "            table.location = ()\n        while",
        "            pass\n        while",
    ),
    Mutation("kv_paged", "a reset leaves blocks known", "        self._reusable.clear()\n"),
    Mutation(
        "kv_paged",
        "a reset leaves sequences bound",
        "        for seq in self._tables:\n            seq.kv, seq.computed = None, 0\n",
    ),
    Mutation(
        "kv_paged",
        "the blocks of a rejected draft are kept",
        "        self._cut(table, self._num_blocks(seq.computed + 1))",
    ),
    Mutation(
        "kv_paged", "more is grown than is free", "if missing > self._num_free:", "if missing > self._num_free + 1:"
    ),
    Mutation("scheduler", "a step ahead of several rows", "return chunk.rows == 1 and not", "return not"),
    Mutation("scheduler", "a step ahead of a grammar", " and (matcher is None or matcher.unrestricted)", ""),
    Mutation("scheduler", "a step ahead of a penalty", " and not chunk.seq.params.penalized", ""),
    Mutation("scheduler", "a step ahead behind the end", "if not self._ends_next(chunk.seq)]", "]"),
    Mutation(
        "scheduler", "a step ahead admits no sequence", "not staying or self._may_admit_after(staying)", "not staying"
    ),
    Mutation("scheduler", "one without memory holds all up", "(head is not self._blocked or len", "(True or len"),
    Mutation(
        "scheduler",
        "one without memory waits for ever",
        "accepted: int = 0) -> Event:\n        self._blocked = None\n",
        "accepted: int = 0) -> Event:\n",
    ),
    Mutation("clock", "a gap holds for ever", " or self._observed - self._gap_at > GAP_EVERY", ""),
    Mutation("clock", "one long gap counts", "statistics.median(self._gaps)", "max(self._gaps)"),
    Mutation(
        "pipeline",
        "a launch ahead that fails fails all",
        "        except EdgeLMError as error:  # `step` is",
        "        except ZeroDivisionError as error:  # `step` is",
    ),
    Mutation(
        "pipeline", "prefill without a wait is not counted", "now - began, self._unread_prefill.tokens)", "now - began)"
    ),
    Mutation("scheduler", "the cost of a missed draft is ignored", " > self._clock.gap(", " > 2 + self._clock.gap("),
    Mutation(
        "scheduler",
        "a step ahead has no room",
        "if not all(self._kv.grow(chunk.seq, chunk.end + 1) for",
        "if not all(True for",
    ),
    Mutation(
        "scheduler",
        "a step ahead writes where it read",
        "Chunk(chunk.seq, chunk.end, [LAST]",
        "Chunk(chunk.seq, chunk.start, [LAST]",
    ),
    Mutation("scheduler", "an aborted sequence goes on", "if chunk.seq.kv is not None]", "]"),
    Mutation("scheduler", "what is behind the end is taken", "if chunk.seq.kv is None:", "if False:"),
    Mutation("scheduler", "executors that cannot run ahead", "if not self._info.runs_ahead:", "if False:"),
    Mutation("ngram_drafter", "nothing is learnt", "self._mean[kind] += weight", "self._mean[kind] += 0 * weight"),
    Mutation("ngram_drafter", "the cost has no bound", "min(gain, MAX_COST)", "gain"),
    Mutation(
        "ngram_drafter",
        "the mean never forgets",
        "max(self._weight[kind] / (1 + self._weight[kind]), MIN_WEIGHT)",
        "self._weight[kind] / (1 + self._weight[kind])",
    ),
    Mutation(
        "ngram_drafter",
        "the cost is that of a step",
        "        conversation.step_cost = 1.0  # the step under way has no draft\n",
    ),
    Mutation("ngram_drafter", "a cost is learnt twice", "        conversation.missed_kind = None\n"),
    Mutation(
        "throttle",
        "a stopped drafter holds steps up",
        "            return 0.0\n        return self._drafter.missed_draft_cost",
        "            pass\n        return self._drafter.missed_draft_cost",
    ),
    Mutation("engine", "a failed step is told to those that left", " if event.seq_id in self._open]", "]"),
    Mutation("pipeline", "a step ahead is lost", "        self._ahead = ahead\n"),
    Mutation("stream", "a dropped stream goes on", "    def __del__(self) -> None:\n        self.close()\n"),
    Mutation("stream", "the cost is forgotten at the end", "            self._stats = event.stats\n"),
    Mutation("stream", "a closed stream goes on", "            self._cancel(reason)\n"),
    Mutation("engine", "the queue has no bound", "if free <= 0:", "if False:"),
    Mutation(
        "engine",
        "a closed loop is not noticed",
        'self._inbox.put(functools.partial(self._cancel, event.seq_id, "abort"))',
        "pass",
    ),
    Mutation("engine", "the queue ends with the last step", "if not request.started:", "if True:"),
    Mutation("engine", "the first token is the last", "        if request.first:\n", "        if False:\n"),
    Mutation(
        "engine", "a bug leaves all waiting", "            self._fail_open()\n\n    def", "            pass\n\n    def"
    ),
    Mutation("engine", "closing leaves the memory", "        self._executor.close()\n"),
    Mutation(
        "engine",
        "a bug in a step ends the thread",
        "        except Exception as error:",
        "        except EngineError as error:",
    ),
]
