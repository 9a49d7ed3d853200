"""The mutations of `tests.engine.mutations`: one place each, as text that occurs once in its file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    file: str
    what: str
    old: str  # occurs exactly once
    new: str = ""
    equivalent: str = ""  # why no test can notice it

    def apply(self, package: Path) -> None:
        path = package / "engine" / f"{self.file}.py"
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            sys.exit(
                f"error: {self.old!r} occurs {text.count(self.old)} times in {path.name}; bring the list up to date"
            )
        text = text.replace(self.old, self.new)
        compile(text, path.name, "exec")
        path.write_text(text, encoding="utf-8")


MUTATIONS = [
    Mutation("cells", "a shared span grows", "if spans and spans[-1].holders == 1:", "if spans:"),
    Mutation("cells", "a cell is freed while one holds it", "if span.holders == 0:", "if span.holders <= 1:"),
    Mutation("cells", "trim does not split", "        self._cut(slot, length)\n        spans = ", "        spans = "),
    Mutation("cells", "sharing does not count holders", "span.holders += 1", "span.holders += 0"),
    Mutation(
        "cells",
        "a split is not seen by others",
        "for spans in self._spans:",
        "for spans in self._spans[slot : slot + 1]:",
    ),
    Mutation("cells", "spans of different holders are joined", "== span.holders == 1:", "== span.holders:"),
    Mutation("cells", "old borders pile up", "        self._merge(src)\n"),
    Mutation("slots", "a whole prompt may be cached", "most = len(tokens) - 1", "most = len(tokens)"),
    Mutation(
        "slots",
        "more is taken as cached than is",
        "seq.computed = slot, match.length",
        "seq.computed = slot, match.length + 1",
    ),
    Mutation("slots", "a rejected draft is not cut off", "if self._cells.length(slot.id) > seq.computed:", "if False:"),
    Mutation(
        "slots",
        "a released slot is not cut",
        "        self.commit(seq)\n        slot.owner, slot",
        "        slot.owner, slot",
    ),
    Mutation(
        "slots", "an idle slot stays beside running ones", "if any(other.owner for other in self._slots):", "if False:"
    ),
    Mutation("slots", "an idle slot stays when another comes", "if idle and idle is not match.source:", "if False:"),
    Mutation(
        "slots",
        "a match is not looked for again",
        "chosen = self._choose(seq, tokens)",
        "chosen = match if not isinstance(match.source, StoredPrefix) else self._choose(seq, tokens)",
    ),
    Mutation(
        "slots",
        "an idle slot goes without snapshot",
        "        self._save(slot)\n        self._trim(slot, 0)",
        "        self._trim(slot, 0)",
    ),
    Mutation(
        "slots",
        "an evicted slot keeps its cells",
        "        self._save(slot)\n        self._trim(slot, 0)",
        "        self._save(slot)",
    ),
    Mutation("slots", "a fork counts no cells", "            self._cells.share(source.id, slot.id, match.length)\n"),
    Mutation("slots", "a fork is not done", "            self._ops.append(Copy(source.id, slot.id, match.length))\n"),
    Mutation(
        "slots", "a loaded snapshot counts no cells", "            self._cells.extend(slot.id, len(source.tokens))\n"
    ),
    Mutation(
        "slots",
        "a loaded snapshot is not cut",
        "            self._trim(slot, match.length)\n        return slot",
        "        return slot",
    ),
    Mutation("slots", "a cut slot is not kept", "if source.length - match.length >= MIN_PREFIX_LEN:", "if False:"),
    Mutation(
        "slots",
        "snapshots take twice their room",
        "if kept + nbytes <= self._max_bytes",
        "if kept + nbytes <= 2 * self._max_bytes",
    ),
    Mutation(
        "slots",
        "the newest snapshot goes first",
        "for oldest in self._snapshots:",
        "for oldest in reversed(list(self._snapshots)):",
    ),
    Mutation("slots", "a dropped snapshot stays on the device", "        self._ops.append(Drop(snapshot.key))\n"),
    Mutation(
        "prefixes",
        "a used snapshot stays old",
        "        self.remove(prefix)\n        self.add(prefix)",
        "        return",
    ),
    Mutation(
        "slots",
        "a snapshot in use is evicted for the idle slot",
        "            if isinstance(match.source, Snapshot):\n                self._snapshots.touch(match.source)\n",
        "",
    ),
    Mutation(
        "slots",
        "snapshots of one conversation pile up",
        "common == length and (len(other.tokens) == length or self._divisible)",
        "common == length == len(other.tokens)",
    ),
    Mutation(
        "slots",
        "a covered snapshot is taken for equal without trim",
        "(len(other.tokens) == length or self._divisible)",
        "True",
    ),
    Mutation(
        "slots",
        "a small gain is worth a load",
        "if length >= best.length + MIN_PREFIX_LEN and",
        "if length >= MIN_PREFIX_LEN and",
    ),
    Mutation("slots", "short prefixes become snapshots", "if len(tokens) < MIN_PREFIX_LEN or nbytes", "if nbytes"),
    Mutation("slots", "snapshots survive a reset", "*(Drop(key) for key in keys)"),
    Mutation("slots", "a reset forgets the drops of the failed step", "(*self._taken, *self._ops)", "self._ops"),
    Mutation("slots", "a reset forgets the drops of the failed plan", "(*self._taken, *self._ops)", "self._taken"),
    Mutation("slots", "slots survive a reset", "*(Trim(slot.id, 0) for slot in self._slots), "),
    Mutation(
        "slots",
        "a reset leaves sequences bound",
        "                slot.owner.kv, slot.owner.computed = None, 0\n",
        "                pass\n",
    ),
    Mutation(
        "slots", "what others will compute is not counted", "return needed + promised + SPARE", "return needed + SPARE"
    ),
    Mutation("slots", "no room is spared", "SPARE_LEN * len(running) <=", "0 <="),
    Mutation(
        "slots",
        "the length of a snapshot is not counted",
        "needed = max(len(seq.tokens) + 1 - held, loaded)",
        "needed = len(seq.tokens) + 1 - held",
    ),
    Mutation(
        "slots",
        "what cannot be cut is cut",
        "return usable if self._divisible or usable == length else 0",
        "return usable",
    ),
    Mutation("slots", "what cannot be copied is copied", "(slot.owner is None or self._info.can_copy)", "True"),
    Mutation(
        "prefixes",
        "the prefix is too long by half a search",
        "            high = middle\n    return low",
        "            high = middle\n    return high",
    ),
    Mutation(
        "slots", "more is grown than is free", "if missing > self._cells.free:", "if missing > self._cells.free + 1:"
    ),
    Mutation(
        "slots",
        "nothing is ever found",
        "        best = _Match(0)\n        most",
        "        return _Match(0)\n        most",
    ),
    Mutation("slots", "prefixes serve every owner", "if slot.user == seq.owner and (slot.owner", "if (slot.owner"),
    Mutation(
        "prefixes",
        "kept prefixes serve every owner",
        "return owner, tokens[:MIN_PREFIX_LEN].tobytes()",
        'return "", tokens[:MIN_PREFIX_LEN].tobytes()',
    ),
    Mutation(
        "slots",
        "nobody waits for a common beginning",
        "                if common > slot.length and common",
        "                if False and common",
    ),
    Mutation("slots", "one waits for what is no gain", "common >= match.length + WORTH_WAITING_LEN:", "True:"),
    Mutation("slots", "what memory has no room for is lost", "            self._keep(oldest)\n", ""),
    Mutation("slots", "each rest writes all again", "        snapshot.stored = True\n", ""),
    Mutation(
        "slots",
        "the slot that rests is not kept",
        "        if idle:\n            self._save(idle)\n        for snapshot",
        "        for snapshot",
    ),
    Mutation(
        "slots",
        "what was fetched stays in memory",
        "                self._ops.append(Drop(source.key))\n            else",
        "                pass\n            else",
    ),
    Mutation(
        "slots",
        "a damaged file counts as read",
        "if self._store.fetch(source.name, key):",
        "if self._store.fetch(source.name, key) or True:",
    ),
    Mutation(
        "slots",
        "what found no room is counted on",
        "            if nbytes is None:\n                self._drop(snapshot)\n                continue\n",
        "            if nbytes is None:\n                continue\n",
    ),
    Mutation("slots", "sizes stay as expected", "            snapshot.nbytes = nbytes\n", ""),
    Mutation("slots", "a file longer than the cache is loaded", " and len(prefix.tokens) <= self._info.capacity", ""),
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
    Mutation("scheduler", "a preempted sequence is planned", "if seq.kv is not None:", "if True:"),
    Mutation(
        "scheduler",
        "one is admitted where another had to go",
        "while not preempted and self.waiting",
        "while self.waiting",
        equivalent="next in line is the sequence that had to go, and `attach` asks for more room than it gave back",
    ),
    Mutation(
        "scheduler", "more are admitted than there are slots", " and len(self.running) < self._info.max_sequences"
    ),
    Mutation(
        "scheduler",
        "the queue is not in order of age",
        "bisect.insort(queue, seq, key=lambda each: each.id)",
        "queue.append(seq)",
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
        "scheduler", "a verified draft stays", "        seq.draft = []\n        if reason ==", "        if reason =="
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
    Mutation("scheduler", "a draft is longer than its room", ")[:most]", ")"),
    Mutation("scheduler", "drafts keep others out", " - next_in_line - 1", " - 1"),
    Mutation("scheduler", "drafts where nothing can be cut", "drafter if info.can_trim else None", "drafter"),
    Mutation(
        "scheduler",
        "a draft preempts",
        "            if seq.draft:\n                seq.draft = []\n                continue\n",
    ),
    Mutation(
        "scheduler",
        "a preempted sequence keeps its memory",
        "        self._kv.release(seq)\n        self._enqueue",
        "        self._enqueue",
    ),
    Mutation(
        "scheduler",
        "a finished sequence keeps its memory",
        "        self._kv.release(seq)\n        self._forget(seq)",
        "        self._forget(seq)",
    ),
    Mutation("scheduler", "prefill is not counted", "        room.prefill -= length if missing > 1 else 0\n"),
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
    Mutation(
        "scheduler", "failed sequences run again", "            if seq in concerned:\n", "            if False:\n"
    ),
    Mutation("scheduler", "a failure loses the others", "            if seq in concerned:\n", "            if True:\n"),
    Mutation("scheduler", "a failure leaves the cache as it is", "        self._kv.reset()\n"),
    Mutation(
        "scheduler", "a failed plan concerns nobody in the queue", "self.running or self.waiting[:1]", "self.running"
    ),
    Mutation(
        "scheduler",
        "the second admission counts as the first",
        "            if seq.cached is None:\n                seq.cached = seq.computed\n",
        "            seq.cached = seq.computed\n            if True:\n",
    ),
    Mutation("scheduler", "accepted tokens are not counted", "seq.accepted += accepted", "seq.accepted += len(taken)"),
    Mutation(
        "paged",
        "a whole prompt may be cached",
        "(len(seq.tokens) - 1) // self._block_len):",
        "len(seq.tokens) // self._block_len):",
    ),
    Mutation("paged", "a used block stays in the idle list", "            self._idle.pop(block, None)\n"),
    Mutation("paged", "a shared block is not counted", "            self._refs[block] += 1\n"),
    Mutation(
        "paged",
        "a block is known before it is full",
        "num_full = seq.computed // self._block_len",
        "num_full = self._num_blocks(seq.computed)",
    ),
    Mutation("paged", "a digest covers its own block only", "key = chain[-1] if chain else", "key ="),
    Mutation("paged", "prefixes serve every owner", "blake2b(seq.owner.encode(), digest_size=16)", "blake2b()"),
    Mutation("paged", "a shared block is freed", "if self._refs[block] == 0:", "if self._refs[block] <= 1:"),
    Mutation("paged", "nothing stays known", "if self._digests[block] is None:", "if True:"),
    Mutation("paged", "nothing is ever registered", "if digest not in self._known:", "if False:"),
    Mutation("paged", "two blocks have one digest", "if digest not in self._known:", "if True:"),
    Mutation(
        "paged",
        "an evicted block stays known",
        "            self._forget(block)\n        self._refs",
        "        self._refs",
    ),
    Mutation(
        "paged", "the newest prefix goes first", "block = next(iter(self._idle))", "block = next(reversed(self._idle))"
    ),
    Mutation("paged", "known blocks go before empty ones", "if self._empty:", "if not self._idle:"),
    Mutation(
        "paged", "the head of a prefix goes first", "block = table.blocks.pop()", "block = table.blocks.pop(num_blocks)"
    ),
    Mutation(
        "paged",
        "idle hits count as free",
        "self._num_free - sum(block in self._idle for block in hits)",
        "self._num_free",
    ),
    Mutation(
        "paged", "what others will compute is not counted", "return needed + promised + spare", "return needed + spare"
    ),
    Mutation("paged", "no room is spared", "return needed + promised + spare", "return needed + promised"),
    Mutation(
        "paged",
        "what is no number stays known",
        "            self._forget(block)\n        table.num_full",
        "            pass\n        table.num_full",
    ),
    Mutation(
        "paged",
        "an old table is used after growing",
        "            table.place = ()\n        return True",
        "        return True",
    ),
    Mutation(
        "paged",
        "an old table is used after shrinking",
        "            table.place = ()\n        while",
        "            pass\n        while",
    ),
    Mutation("paged", "a reset leaves blocks known", "        self._known.clear()\n"),
    Mutation(
        "paged",
        "a reset leaves sequences bound",
        "        for seq in self._tables:\n            seq.kv, seq.computed = None, 0\n",
    ),
    Mutation(
        "paged",
        "the blocks of a rejected draft are kept",
        "        self._cut(table, self._num_blocks(seq.computed + 1))",
    ),
    Mutation("paged", "more is grown than is free", "if missing > self._num_free:", "if missing > self._num_free + 1:"),
    Mutation("scheduler", "a step ahead of several rows", "return chunk.rows == 1 and chunk", "return chunk"),
    Mutation("scheduler", "a step ahead of a grammar", " and chunk.seq.matcher is None", ""),
    Mutation("scheduler", "a step ahead of a penalty", " and not chunk.seq.params.penalized", ""),
    Mutation("scheduler", "a step ahead behind the end", "if not self._ends_next(chunk.seq)]", "]"),
    Mutation("scheduler", "nobody is admitted", "not staying or self._may_admit_after(staying)", "not staying"),
    Mutation(
        "scheduler", "one without memory holds all up", "self.waiting[0] is not self._refused or len", "True or len"
    ),
    Mutation(
        "scheduler",
        "one without memory waits for ever",
        "accepted: int = 0) -> Event:\n        self._refused = None\n",
        "accepted: int = 0) -> Event:\n",
    ),
    Mutation("clock", "a gap holds for ever", " or self._observed - self._gap_at > GAP_EVERY", ""),
    Mutation("clock", "one long gap counts", "statistics.median(self._gaps)", "max(self._gaps)"),
    Mutation(
        "engine",
        "a launch ahead that fails fails all",
        "        except EdgeLMError as error:  # the step before it",
        "        except BusyError as error:  # the step before it",
    ),
    Mutation("engine", "prefill without a wait is not counted", "now - began, self._unseen.tokens)", "now - began)"),
    Mutation("scheduler", "what is staked is not looked at", " > self._clock.gap(", " > 2 + self._clock.gap("),
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
    Mutation("stakes", "a stake is never learnt", "self._mean[kind] += weight", "self._mean[kind] += 0 * weight"),
    Mutation("stakes", "a stake has no bound", "min(gain, MOST)", "gain"),
    Mutation(
        "stakes",
        "a stake never forgets",
        "max(self._weight[kind] / (1 + self._weight[kind]), LEAST_WEIGHT)",
        "self._weight[kind] / (1 + self._weight[kind])",
    ),
    Mutation(
        "drafter", "a stake is a step's cost", "        conversation.step = 1.0  # the one under way has no draft\n"
    ),
    Mutation("drafter", "a stake is learnt twice", "        conversation.staked = None\n"),
    Mutation(
        "guard",
        "a stopped drafter holds steps up",
        "            return 0.0\n        return self._drafter.stake",
        "            pass\n        return self._drafter.stake",
    ),
    Mutation("engine", "a failed step is told to those that left", " if event.seq_id in self._open]", "]"),
    Mutation("engine", "a step ahead is lost", "        self._ahead = launched\n"),
    Mutation("stream", "a dropped stream goes on", "    def __del__(self) -> None:\n        self.close()\n"),
    Mutation("stream", "the cost is forgotten at the end", "            self._stats = event.stats\n"),
    Mutation("stream", "a closed stream goes on", "            self._cancel()\n"),
    Mutation("engine", "the queue has no bound", "if len(self._open) >= self._max_requests:", "if False:"),
    Mutation(
        "engine",
        "a closed loop is not noticed",
        "self._inbox.put(functools.partial(self._cancel, event.seq_id))",
        "pass",
    ),
    Mutation("engine", "the queue ends with the last step", "request.started or began", "began"),
    Mutation("engine", "the first token is the last", "request.first or now", "now"),
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
