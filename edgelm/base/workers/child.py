"""The worker's side of the protocol: requests come in, replies go out, and the worker never outlives its parent.

    standard input    one line a request; when it closes, the process ends at once, or when it has saved conversations
    standard output   one line a reply
    standard error    the log: what native code, Python and a dying process print

Owns the three streams of a worker process. Knows nothing of what the worker does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, NoReturn

from edgelm.base.errors import DeviceError, EdgeLMError, GpuLoadError
from edgelm.base.workers.wire import SAVING_S, Failed, Saving, decode, encode

ENDING_S = 1.8  # for the actions at the end, or from one progress in saving to the next; the parent waits 2 s


class Child:
    """This process as a worker."""

    def __init__(self, requests: tuple[type, ...]) -> None:
        self._kinds = requests
        self._at_end: list[Callable[[], None]] = []
        self._exit_at = self._last_exit_at = math.inf  # known once standard input is closed, by the monotonic clock
        self._requests: SimpleQueue[Any] = SimpleQueue()
        # Replies keep the real standard output; other output of this process goes to standard error.
        self._replies = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        # A file object of our own: Python fails at exit if a thread still reads sys.stdin.
        self._lines = os.fdopen(os.dup(0), "rb")
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> Any:
        """Wait for the next request."""
        return self._requests.get()

    def send(self, reply: object) -> None:
        try:
            self._replies.write(encode(reply))
            self._replies.flush()
        except BrokenPipeError:  # the parent is gone
            if self._at_end:  # standard input closes, too: `_read` does these actions and ends this process
                time.sleep(ENDING_S)
            os._exit(1)

    def fail(self, error: EdgeLMError) -> NoReturn:
        """Send an error and end this process at once: native code that has failed may hang at a usual end."""
        self.send(Failed.of(error))
        os._exit(1)

    def saving(self, num_left: int) -> None:
        """Note progress in saving conversations, of which some are left, so that this process may end later.

        If the parent is gone, they are for the next one all the same.
        """
        self._exit_at = min(time.monotonic() + ENDING_S, self._last_exit_at)
        with contextlib.suppress(OSError):
            self._replies.write(encode(Saving(num_left)))
            self._replies.flush()

    def at_end(self, action: Callable[[], None]) -> None:
        """Call `action` when the parent closes standard input, before this process ends."""
        self._at_end.append(action)

    def _read(self) -> None:
        """Queue requests; end this process when its parent is gone. No native call can delay that for long."""
        try:
            for line in self._lines:
                self._requests.put(decode(line, self._kinds))
        except Exception as error:  # noqa: BLE001 - without this thread the process would outlive its parent
            try:
                sys.stderr.write(f"edgelm: a request cannot be read: {type(error).__name__}: {error}\n")
            finally:
                os._exit(2)
        try:
            self._last_exit_at = time.monotonic() + SAVING_S
            self._exit_at = time.monotonic() + ENDING_S
            threading.Thread(target=self._limit_end, daemon=True).start()
            for action in self._at_end:
                action()
        finally:
            os._exit(1)

    def _limit_end(self) -> None:
        """End the process when its time is over, which may be prolonged meanwhile."""
        while (left_s := self._exit_at - time.monotonic()) > 0:
            time.sleep(left_s)
        os._exit(1)


def report_loading(child: Child, share: float) -> bool:
    """Send the progress of loading, 0 to 1; return True, so that loading continues."""
    from edgelm.base.workers.messages import Loading  # most workers need no message of this module

    child.send(Loading(round(share, 3)))
    return True


Handler = Callable[[Any, Child], None]  # handles one request, and sends its replies


def run_job(handlers: Mapping[type, Handler]) -> int:
    """Do the one job that comes on standard input; return the exit code."""
    code = 0 if _handle(handlers, _start(handlers)) else 1
    gc.freeze()  # at its end, Python would look through everything for garbage: 60 ms
    return code


def answer_requests(handlers: Mapping[type, Handler], at_end: Callable[[], None] | None = None) -> None:
    """Handle requests one after the other, until standard input closes; then call `at_end`."""
    child = _start(handlers)
    if at_end is not None:
        child.at_end(at_end)
    while True:
        _handle(handlers, child)


def limit_memory(nbytes: int) -> None:
    """Bound the memory of this process, where the system can, and let a crash, which is an answer here, dump none."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = nbytes if most == resource.RLIM_INFINITY else min(nbytes, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _start(handlers: Mapping[type, Handler]) -> Child:
    if "-v" in sys.argv[1:]:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    return Child(tuple(handlers))


def _handle(handlers: Mapping[type, Handler], child: Child) -> bool:
    """Handle one request; return whether it succeeded."""
    request = child.receive()
    try:
        handlers[type(request)](request, child)
        return True
    except (DeviceError, GpuLoadError) as error:
        child.fail(error)
    except EdgeLMError as error:
        child.send(Failed.of(error))
    except MemoryError:
        child.send(Failed("memory ran out", "lower --ctx, or take a smaller model"))
    except Exception as error:  # noqa: BLE001 - the edge of the process: its parent shows one line
        traceback.print_exc()
        child.send(Failed(f"edgelm failed: {type(error).__name__}: {error}", "-v shows where"))
    return False
