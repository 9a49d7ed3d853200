"""The parent's side of the protocol: start a worker, send requests, receive replies, know how it ended, end it.

Owns the process and its pipes. One class serves threads and asyncio tasks: daemon threads read the pipes, and every
wait has a blocking and an awaitable form. Knows nothing of what the worker does.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

from edgelm.base.config import API_KEYS
from edgelm.base.errors import EdgeLMError, EngineError
from edgelm.base.places import HUB_TOKENS
from edgelm.base.workers.wire import SAVING_S, Failed, Saving, decode, encode

if TYPE_CHECKING:  # half of the callers wait without it, and its import takes 20 ms
    import asyncio

T = TypeVar("T")

GRACE_S = 2.0  # for a worker to end by itself
MAX_LOG_LINES = 20
MAX_LOG_LINE = 65_536  # bytes
OUR_ERROR = re.compile(r"edgelm\.base\.errors\.\w+: (.+)")  # the last line of a traceback


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a worker process."""

    code: int  # negative: minus the signal's number
    last_lines: tuple[str, ...] = ()  # of its log

    @property
    def how(self) -> str:
        """The end as a predicate: "was killed by SIGSEGV", "ended with code 3"."""
        return f"was killed by {self.signal_name}" if self.code < 0 else f"ended with code {self.code}"

    @property
    def last_line(self) -> str:
        return self.last_lines[-1] if self.last_lines else ""

    @property
    def error(self) -> str:
        """The words of the EdgeLMError that ended the process while it imported its module; empty if none did."""
        match = OUR_ERROR.match(self.last_line)
        return match[1] if match else ""

    @property
    def signal_name(self) -> str:
        """The signal that killed the worker; empty if none did."""
        if self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:  # a real-time signal
            return f"signal {-self.code}"


class Worker:
    """A running worker: `python -m MODULE`. A context manager; leaving it ends the process.

    `replies` are the messages it may send besides `Failed`, which is raised as one of `errors` or as EdgeLMError.
    `environment` sets variables, None removes one; `defaults` are set unless they are inherited. Of the variables with
    a key, only those in `keys` are inherited. With `echo` the worker's log is printed on standard error, each line
    after that prefix; with `log` it goes into that file instead and is not kept here. `on_saving` is called while the
    worker saves conversations at its end, with how many are left. `command` replaces `python -m MODULE`. Raises
    EngineError where no process can be started.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        replies: tuple[type, ...],
        errors: tuple[type[EdgeLMError], ...] = (),
        environment: Mapping[str, str | None] | None = None,
        defaults: Mapping[str, str] | None = None,
        keys: Iterable[str] = (),
        echo: str | None = None,
        log: IO[bytes] | None = None,
        grace_s: float | None = None,
        on_saving: Callable[[int], None] = lambda _: None,
        command: tuple[str, ...] = (),
    ) -> None:
        self.num_saving = 0  # conversations that the worker still has to save at its end
        self._kinds = (*replies, Failed, Saving)
        self._errors = errors
        self._echo = echo
        self._grace_s = GRACE_S if grace_s is None else grace_s  # between closing standard input and SIGKILL
        self._on_saving = on_saving
        self._saved_at = 0.0  # the last progress in saving
        self._arrived: deque[Any] = deque()
        self._log: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._exit: Exit | None = None  # the process is gone, and its last replies are here
        self._changed = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        dropped = dict.fromkeys({*API_KEYS, *HUB_TOKENS}.difference(keys))
        variables = {"GGML_NO_BACKTRACE": "1", **(defaults or {}), **os.environ, **dropped, **(environment or {})}
        try:
            self._process = subprocess.Popen(
                command or (sys.executable, "-P", "-m", module, *arguments),  # -P: nothing of the current folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log or subprocess.PIPE,
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the worker
            )
        except OSError as error:
            raise EngineError(f"a process cannot be started: {error.strerror}") from None
        self.pid = self._process.pid
        self._threads = [self._start(self._read_replies)]
        if log is None:
            self._threads.append(self._start(self._read_log))
        self._start(self._watch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def exited(self) -> bool:
        return self._process.returncode is not None

    def send(self, request: object) -> None:
        """Send a request. If the worker has ended, this does nothing, and `receive` returns None."""
        self.send_line(encode(request))

    def send_line(self, line: bytes) -> None:
        """Send a request that is encoded already."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: closed meanwhile
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next reply; None: the worker has ended. Raises TimeoutError, and the error of a `Failed`."""
        if not self._wait(self._has_news, timeout_s):
            raise TimeoutError
        return self._take()

    async def areceive(self) -> Any:
        """Await the next reply; None: the worker has ended. Raises the error of a `Failed`."""
        await self._until(self._has_news)
        return self._take()

    def replies(self) -> Iterator[Any]:
        """Yield replies until the worker ends. Raises the error of a `Failed`."""
        while (reply := self.receive()) is not None:
            yield reply

    def exit(self) -> Exit:
        """Wait for the end of the worker."""
        self._wait(lambda: self._exit is not None)
        assert self._exit
        return self._exit

    async def aexit(self) -> Exit:
        """Await the end of the worker."""
        await self._until(lambda: self._exit is not None)
        assert self._exit
        return self._exit

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def kill_group(self) -> None:
        """Kill the worker and the programs that it started, such as a compiler; its own workers end by themselves."""
        with contextlib.suppress(ProcessLookupError):
            if not self.exited:
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the worker, and echo its log to the end.

        It leaves when its standard input closes, or is killed after its grace. While it saves conversations, each
        progress gives it another grace, for SAVING_S in all.
        """
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        closed = time.monotonic()
        try:
            while not self.exited:
                kill_at = min(max(closed, self._saved_at), closed + SAVING_S) + self._grace_s
                if time.monotonic() >= kill_at:
                    self.kill()
                    break
                self._wait(lambda: self.exited, kill_at - time.monotonic())
        except BaseException:  # Ctrl-C: the user does not wait
            self.kill()
            raise
        self._wait(lambda: self._exit is not None, GRACE_S)  # the kernel may hold a process; we do not wait for it

    async def aclose(self) -> None:
        """End the worker as `close` does, without blocking the event loop. It is ended also if this is cancelled."""
        await in_daemon_thread(self.close)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(ready, timeout_s)

    def _has_news(self) -> bool:
        return bool(self._arrived) or self._exit is not None

    def _take(self) -> Any:
        if not self._arrived:
            return None
        reply = self._arrived.popleft()
        if isinstance(reply, Failed):
            raise reply.error(self._errors)
        return reply

    async def _until(self, ready: Callable[[], bool]) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if ready():
                    return
                change = loop.create_future()
                self._waiting.append((loop, change))
            await change

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, change in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, change)

    # -- daemon threads --------------------------------------------------------------------------------------------

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        return thread

    def _read_replies(self) -> None:
        assert self._process.stdout
        try:
            with self._process.stdout as stdout:
                for line in stdout:
                    if line.endswith(b"\n"):  # or else it was killed
                        self._arrive(self._decode(line))
        finally:  # a worker without standard output cannot reply any more
            if not self._wait(lambda: self.exited, GRACE_S):
                self.kill()

    def _arrive(self, reply: Any) -> None:
        if isinstance(reply, Saving):
            self.num_saving, self._saved_at = reply.num_left, time.monotonic()
            self._on_saving(reply.num_left)
        else:
            self._arrived.append(reply)
            self._notify()

    def _decode(self, line: bytes) -> Any:
        try:
            return decode(line, self._kinds)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            return Failed(f"a worker's reply cannot be read: {type(error).__name__}: {error}")

    def _read_log(self) -> None:
        assert self._process.stderr
        with self._process.stderr as stderr:
            while raw := stderr.readline(MAX_LOG_LINE):
                line = raw.decode("utf-8", "replace").rstrip()
                if line:
                    self._log.append(line)
                    if self._echo is not None:
                        with contextlib.suppress(OSError, ValueError):  # the reader of our standard error has left
                            sys.stderr.write(f"{self._echo}{line}\n")

    def _watch(self) -> None:
        """Wait for the end of the process, then for its last replies: a grandchild may still hold the pipes."""
        code = self._process.wait()
        self._notify()
        for thread in self._threads:
            thread.join(GRACE_S)
        self._exit = Exit(code, tuple(self._log))
        self._notify()


class WorkerDiedError(EngineError):
    """A worker ended without a reply."""

    def __init__(self, end: Exit) -> None:
        last = f" ({end.last_line})" if end.last_line else ""
        super().__init__(end.error or f"the process {end.how}{last}")
        self.end = end


def ask(worker: Worker, request: object, timeout_s: float) -> Any:
    """Send one request to a new worker, return its reply and end it.

    Raises TimeoutError, WorkerDiedError, and the error of a `Failed`.
    """
    with worker:
        worker.send(request)
        try:
            reply = worker.receive(timeout_s)
        except TimeoutError:
            worker.kill()
            raise
        if reply is None:
            raise WorkerDiedError(worker.exit())
        return reply


def _settle(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_result(None)


def _in_new_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, daemon=True).start()


def in_daemon_thread(
    work: Callable[[], T], start: Callable[[Callable[[], None]], None] = _in_new_thread
) -> asyncio.Future[T]:
    """Run `work`, which may raise EdgeLMError, in a thread that does not delay the end of this process.

    `start` gives it to another thread than a new one.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(deliver: Callable[[Any], None], outcome: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else deliver(outcome))

    def run() -> None:
        try:
            result = work()
        except EdgeLMError as error:
            tell(done.set_exception, error)
        except BaseException as error:  # a bug: show its trace here, and end the wait
            tell(done.set_exception, error)
            raise
        else:
            tell(done.set_result, result)

    start(run)
    return done
