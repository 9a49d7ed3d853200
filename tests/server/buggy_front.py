"""`edgelm serve` with bugs in its routes and in those of its engines: `python -m tests.server.buggy_front serve …`.

A chat whose first message is "bug" raises in the engine, a stream of it after its first event; /metrics in the front.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from edgelm.__main__ import main
from edgelm.base.workers.child import run_job
from edgelm.base.workers.messages import ServeJob
from edgelm.jobs.worker import work_with_engine
from edgelm.server import answers
from edgelm.server.engine_process import app as engine_app
from edgelm.server.engine_process.worker import _serve
from edgelm.server.engines import process as engine_process
from edgelm.server.routes.metrics import Metrics

_events, _prepare = answers._events, engine_app._prepare


async def buggy_events(*arguments: Any) -> AsyncIterator[bytes]:
    async for event in _events(*arguments):
        yield event
        raise RuntimeError("a bug in a stream")


async def buggy_prepare(parts: Any, request: Any, asked: Any, *rest: Any) -> Any:
    if not asked.streamed and asked.messages[0].content == "bug":
        raise RuntimeError("a bug in the engine")
    return await _prepare(parts, request, asked, *rest)


def buggy_answer(*_: Any) -> Any:
    raise RuntimeError("a bug in the front")


if __name__ == "__main__":
    if "serve" in sys.argv:
        engine_process.WORKER = "tests.server.buggy_front"
        Metrics.text = buggy_answer  # type: ignore[method-assign]
        main()
    else:
        answers._events, engine_app._prepare = buggy_events, buggy_prepare
        sys.exit(run_job({ServeJob: partial(work_with_engine, _serve)}))
