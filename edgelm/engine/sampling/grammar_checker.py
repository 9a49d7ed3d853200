"""GrammarChecker: checks grammars in worker processes, away from the event loop and from the engine.

Owns the processes and the wait for them. The work itself is in grammar_worker.py; nothing here imports llguidance, so a
front without a model can refuse a grammar too.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal

from edgelm.base.errors import EdgeLMError, EngineError, RequestError
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec
from edgelm.base.workers.parent import Exit, Worker, in_daemon_thread
from edgelm.engine.sampling.schema import refuse_oversized

WORKER = "edgelm.engine.sampling.grammar_worker"
MAX_WORKERS = 2
LIMIT_S = (
    30.0  # to start a process and check one grammar on a busy machine; the worker limits its processor time itself
)


class GrammarChecker:
    """Checks a few grammars at a time, in processes that stay. For one event loop; close it.

    The first process starts at once: it takes 0.1 s, for which the first grammar would have to wait.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._slots = asyncio.Semaphore(MAX_WORKERS)
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._closed = False
        with contextlib.suppress(EngineError):  # then a check reports it
            self._idle.append(self._new_worker())

    async def check(self, spec: GrammarSpec) -> CheckedGrammar:
        """Translate a grammar for llguidance and compile it on trial.

        Raises RequestError, which names the reason, and EngineError if no process can be started or the machine is too
        busy. Cancelling it ends the process.
        """
        refuse_oversized(spec)
        async with self._slots:
            if self._closed:
                raise EngineError("the process is ending", "try again")
            worker = self._idle.pop() if self._idle else None
            if worker is not None and worker.exited:
                await self._end(worker)
                worker = None
            if worker is None:
                worker = await self._start_worker()
            answered = False
            try:
                async with asyncio.timeout(self._limit_s):
                    await in_daemon_thread(lambda: worker.send(spec))  # it may be more than a pipe holds
                    reply = await worker.areceive()
                answered = isinstance(reply, CheckedGrammar)
                if isinstance(reply, CheckedGrammar):
                    return reply
                raise _without_answer(await worker.aexit())
            except TimeoutError:
                raise EngineError("the grammar could not be checked in time", "try again") from None
            except RequestError:
                answered = not worker.exited
                raise
            finally:
                if answered and len(self._idle) < MAX_WORKERS and not self._closed:
                    self._idle.append(worker)
                else:
                    await self._end(worker)

    async def close(self) -> None:
        """End the processes. A check in progress fails."""
        self._closed = True
        self._idle.clear()
        for worker in list(self._workers):
            await self._end(worker)

    async def _start_worker(self) -> Worker:
        """Start a process. Cancelling it leaves the process to the next check."""
        starting = in_daemon_thread(self._new_worker)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._keep)
            raise

    def _keep(self, starting: asyncio.Future[Worker]) -> None:
        """Keep a process whose check was cancelled while it started, unless there are as many as can be used."""
        if starting.exception() is not None:
            return
        worker = starting.result()
        if self._closed or len(self._idle) >= MAX_WORKERS:
            self._workers.discard(worker)
            worker.kill()
            in_daemon_thread(worker.close)
        else:
            self._idle.append(worker)

    def _new_worker(self) -> Worker:
        worker = Worker(WORKER, replies=(CheckedGrammar,), errors=(RequestError,), echo="")
        self._workers.add(worker)
        return worker

    async def _end(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.kill()
        await worker.aclose()


def _without_answer(end: Exit) -> EdgeLMError:
    """Return the error for a grammar whose check ended the worker."""
    if end.code == -signal.SIGPROF:
        return RequestError("the grammar takes too long to compile", "simplify it")
    if end.code > 0 or end.code == -signal.SIGABRT:  # llguidance panicked, or had no more memory
        return RequestError(
            "the grammar cannot be compiled: it needs too much memory, or is not supported", "simplify it"
        )
    return EngineError(f"the process that checks grammars {end.how}", "try again")
