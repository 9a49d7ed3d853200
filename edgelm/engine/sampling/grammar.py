"""Grammars on llguidance: the vocabulary, the cache of compiled grammars, and the state of one answer.

Owns the masks of rows and the tokens that a grammar forces. Knows nothing of chat, tools, and where a mask is applied.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from edgelm.base.errors import ModelError, RequestError
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.engine.core import Masks, Matcher
from edgelm.engine.sampling.grammar_checker import MAX_WORKERS, GrammarChecker
from edgelm.engine.sampling.grammar_limits import first_line, parser_limits
from edgelm.engine.sampling.unique_lists import Lists

if TYPE_CHECKING:
    from edgelm.engine.sampling.unique import Pieces

MAX_GRAMMARS = 64  # compiled or refused ones that are kept, least recently used out first; each takes 0.2 MB or more
MAX_TOKEN_BYTES = 1000  # llguidance panics at a token of 1,024
MAX_REBUILD_S = 0.05  # of processor time, in the engine's thread
MAX_FILL_S = 0.02  # of all masks of a step for one answer: a draft that would take longer is cut
SHORTEST_S = 1e-6
MAX_REBUILDS = 20  # of the state of one answer
COMPILE_LIMIT_S = 20.0  # on a busy machine; the trial took less than 2 s of processor time
_SENTINEL = "\x02"  # a character that no vocabulary joins with another

log = logging.getLogger(__name__)


class Vocabulary(Protocol):
    """The part of a `Tokenizer` (text/tokenizer.py) that grammars need."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...

    def text_of(self, token: int) -> str: ...


class _Tokens:
    """A vocabulary as llguidance takes it. Control tokens are special: only a grammar that names one allows it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, num_vocab: int) -> None:
        self._vocabulary = vocabulary
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for token in range(min(vocabulary.num_tokens, num_vocab)):
            piece = vocabulary.piece(token)
            if not piece and (name := vocabulary.text_of(token)):
                piece = name.encode()
                self.special_token_ids.append(token)
            self.tokens.append(piece if len(piece) <= MAX_TOKEN_BYTES else b"")  # no answer needs such a token
        self.tokens += [b""] * (num_vocab - len(self.tokens))  # padding of the logits
        # Without any stop token, an answer ends only where its grammar does; llguidance wants an id nevertheless.
        self.eos_token_ids = sorted(token for token in vocabulary.stop_ids if token < num_vocab) or [self._unused_id()]
        self.eos_token_id = self.eos_token_ids[0]
        self.greedy: LLTokenizer | None = None  # for text that the vocabulary's own rules change

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text in the middle of an answer. Raises TypeError for bytes, as llguidance expects."""
        if not isinstance(text, str):
            raise TypeError
        try:
            ids = self._vocabulary.encode(text, special=False, bos=False)
            if self._spells(ids, text):
                return ids
            # Some vocabularies put a space before a text: it goes to the sentinel.
            ids = self._vocabulary.encode(_SENTINEL + text, special=False, bos=False)
            for start in range(1, len(ids)):
                if self._spells(ids[start:], text):
                    return ids[start:]
        except RequestError:  # the vocabulary cannot write it
            pass
        return self.greedy.greedy_tokenize(text) if self.greedy else []

    def _spells(self, ids: list[int], text: str) -> bool:
        return b"".join(map(self._vocabulary.piece, ids)) == text.encode()

    def _unused_id(self) -> int:
        return next((token for token, piece in enumerate(self.tokens) if not piece), len(self.tokens) - 1)


class Grammar:
    """A compiled grammar. `relaxed` are the keywords of its schemas that it does not enforce.

    `unique` has the lists whose items must differ, if there are any.
    """

    def __init__(
        self,
        build: Callable[[], LLMatcher],
        executor: LLExecutor,
        relaxed: tuple[str, ...],
        unique: tuple[Lists, Pieces] | None = None,
    ) -> None:
        """Compile. Raises RequestError."""
        began = time.thread_time()
        self._build = build
        self._initial = build()  # nothing advances it
        self.executor = executor
        self.relaxed = relaxed
        self._unique = unique
        self.spoiled = False  # the lexer, which all copies share, has reached a limit
        probe = self._initial.deep_copy()
        probe.compute_bitmask()  # of large grammars, the first mask is the slowest
        probe.compute_ff_tokens()
        if probe.is_error():
            raise RequestError(f"the grammar cannot be used: {first_line(probe.get_error())}", "simplify it")
        self._cheap = time.thread_time() - began < MAX_REBUILD_S

    def matcher(self) -> Matcher:
        """Return the state of a new answer."""
        if not self._unique:
            return GrammarMatcher(self)
        from edgelm.engine.sampling.unique import UniqueMatcher  # few schemas say uniqueItems

        return UniqueMatcher(GrammarMatcher(self), *self._unique)

    def copy(self) -> LLMatcher:
        return self._initial.deep_copy()

    def rebuilt(self) -> LLMatcher | None:
        """Return an initial state with a lexer of its own; None: that would stall the engine."""
        self.spoiled = True
        return self._build() if self._cheap else None


class _Thread:
    """A thread that compiles, and stays: malloc has an arena for each thread.

    The gaps between its grammars are filled by the next ones. In the arenas of new threads, they grow for hours.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="grammars", daemon=True).start()

    def start(self, work: Callable[[], None]) -> None:
        self._works.put(work)

    def end(self) -> None:
        """End it after its work."""
        self._works.put(None)

    def _run(self) -> None:
        while work := self._works.get():
            try:
                work()
            except BaseException:  # a bug, of which the request is told: the thread goes on
                log.exception("a grammar could not be compiled")
            del work  # it has the compiler and the grammar, which an idle thread would keep


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps them. For one event loop; close it.

    `num_vocab` is the width of the logits.
    """

    def __init__(self, vocabulary: Vocabulary, num_vocab: int, checker: GrammarChecker | None = None) -> None:
        self._vocabulary = vocabulary
        self._num_vocab = num_vocab
        self._pieces: Pieces | None = None
        self._tokenizer: LLTokenizer | ModelError | None = None
        self._lock = threading.Lock()  # of the tokenizer
        self._executor = LLExecutor(1)
        self._checker = checker or GrammarChecker()
        self._slots = asyncio.Semaphore(MAX_WORKERS)
        self._idle: list[_Thread] = []
        self._is_closed = False
        self._results: OrderedDict[GrammarSpec, Grammar | RequestError] = OrderedDict()
        self._pending: dict[GrammarSpec, asyncio.Task[Grammar]] = {}

    def prepare(self) -> LLTokenizer:
        """Read the vocabulary, unless that is done.

        It takes up to two seconds, and for most of them no other Python thread runs: do it before the first grammar
        needs it, where nobody waits. Raises ModelError for a vocabulary that llguidance cannot take.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read()
            if isinstance(self._tokenizer, ModelError):
                raise ModelError(self._tokenizer.message, self._tokenizer.hint)
            return self._tokenizer

    def _read(self) -> LLTokenizer | ModelError:
        tokens = _Tokens(self._vocabulary, self._num_vocab)
        try:
            tokens.greedy = LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.eos_token_ids)
        except BaseException as error:  # the library's assertions raise a PanicException, which is no Exception
            if type(error).__name__ != "PanicException":
                raise
            return ModelError(
                "the model's vocabulary is not one that grammars can use", "ask without a format and tools"
            )
        tokens("a")  # some tokenizers read the whole vocabulary at the first text
        return tokens.greedy

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """Return the compiled grammar. Neither the event loop nor the engine waits for it, but for `prepare`.

        Raises RequestError for a grammar that is not valid, too large or too slow, ModelError as `prepare` does, and
        EngineError if the process that checks it cannot be started.
        """
        result = self._results.get(spec)
        if result is not None:
            self._results.move_to_end(spec)
            if isinstance(result, RequestError):
                raise RequestError(result.message, result.hint)
            if not result.spoiled:
                return result
        task = self._pending.get(spec)
        if task is None:
            task = self._pending[spec] = asyncio.create_task(self._compile(spec))
            task.add_done_callback(lambda done: self._keep(spec, done))
        return await asyncio.shield(task)

    async def check(self, spec: GrammarSpec) -> CheckedGrammar:
        """Try a grammar without the vocabulary. Raises as `compile` does."""
        return await self._checker.check(spec)

    async def close(self) -> None:
        """End the processes that check grammars, and the threads that compile them."""
        self._is_closed = True  # compiles that are under way end their threads
        while self._idle:
            self._idle.pop().end()
        await self._checker.close()

    async def _compile(self, spec: GrammarSpec) -> Grammar:
        checked = await self._checker.check(spec)
        if self._tokenizer is None:
            await in_daemon_thread(self.prepare)
        async with self._slots:
            thread = self._idle.pop() if self._idle else _Thread()
            work = in_daemon_thread(lambda: self._compiled(checked), thread.start)
            try:
                async with asyncio.timeout(COMPILE_LIMIT_S):
                    return await asyncio.shield(work)
            except TimeoutError:
                log.warning("a grammar that passed its trial does not compile in %g s", COMPILE_LIMIT_S)
                raise RequestError("the grammar takes too long to compile", "simplify it") from None
            finally:
                if work.done() and not self._is_closed:
                    self._idle.append(thread)
                else:
                    thread.end()

    def _compiled(self, checked: CheckedGrammar) -> Grammar:
        tokenizer = self.prepare()

        def build() -> LLMatcher:
            return LLMatcher(tokenizer, checked.grammar, log_level=0, limits=parser_limits())

        if not checked.unique:
            return Grammar(build, self._executor, checked.relaxed)
        if self._pieces is None:
            from edgelm.engine.sampling.unique import Pieces

            self._pieces = Pieces(self._vocabulary.num_tokens, self._vocabulary.piece)
        return Grammar(build, self._executor, checked.relaxed, (json.loads(checked.unique), self._pieces))

    def _keep(self, spec: GrammarSpec, done: asyncio.Task[Grammar]) -> None:
        del self._pending[spec]
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._results[spec] = done.result()
        elif isinstance(error, RequestError):
            self._results[spec] = RequestError(error.message, error.hint)  # without the frames that it was raised in
        while len(self._results) > MAX_GRAMMARS:
            self._results.popitem(last=False)


class GrammarMatcher:
    """A `Matcher` (core.py) on llguidance. For one thread at a time.

    An error of llguidance ends more than one answer: copies of a grammar share a lexer, and once that has reached a
    limit, it fails for all. Then the state is built anew, and the accepted tokens are replayed. So what counts in the
    end is whether a new lexer can compute the next mask, whatever drafts and other answers have done before.
    """

    unrestricted = False

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state = grammar.copy()
        self._accepted: list[int] = []
        self._looks_ahead = True
        self._num_rebuilt = 0
        self._row_s = SHORTEST_S  # recent time of a row's mask
        self.error: str | None = None

    @property
    def done(self) -> bool:
        return self.error is None and self._state.is_stopped()

    def allowed(self, draft: list[int]) -> int:
        if self.error or not draft or not self._looks_ahead:
            return 0
        allowed = self._state.validate_tokens(draft[: int(MAX_FILL_S / self._row_s)])
        return allowed if self._looked_ahead() else 0

    def forced(self, most: int) -> list[int]:
        if self.error or not self._looks_ahead:
            return []
        forced = self._state.compute_ff_tokens()[:most]
        return forced if self._looked_ahead() else []

    def fill(self, draft: list[int], rows: Masks) -> None:
        assert len(rows) == len(draft) + 1
        assert rows.flags.c_contiguous, "llguidance writes through a pointer"
        began = time.perf_counter()
        self._fill(draft, rows)
        self._row_s = max((time.perf_counter() - began) / len(rows), self._row_s / 2)

    def accept(self, token: int) -> None:
        self._accepted.append(token)
        if self.error is None and not self._state.consume_token(token) and not self._rebuilt():
            self._fail()

    def _fill(self, draft: list[int], rows: Masks) -> None:
        if self.error is None and draft:
            self._grammar.executor.unsafe_compute_mask_ptr_with_draft_token(
                [(self._state, 0, draft)], rows.ctypes.data, rows.strides[0], len(rows)
            )
            if self._looked_ahead():
                return
        rows[:] = 0
        if self.error is None and not self._filled(rows[:1]) and not (self._rebuilt() and self._filled(rows[:1])):
            rows[:] = 0
            self._fail()

    def _filled(self, row: Masks) -> bool:
        self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return not self._state.is_error()

    def _looked_ahead(self) -> bool:
        """Tell whether that succeeded. If not, there are no drafts any more: they lead where the answer may not go."""
        if not self._state.is_error():
            return True
        self._looks_ahead = False
        if not self._rebuilt():
            self._fail()
        return False

    def _rebuilt(self) -> bool:
        """Replace a state with an error by a new one that has accepted the same tokens; False: it has an error too."""
        new = self._grammar.rebuilt() if self._num_rebuilt < MAX_REBUILDS else None
        if new is None:
            return False
        self._num_rebuilt += 1
        self._state = new
        self._state.consume_tokens(self._accepted)
        return not self._state.is_error()

    def _fail(self) -> None:
        self.error = first_line(self._state.get_error())
