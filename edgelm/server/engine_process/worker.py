"""The worker of a front: loads one model and serves it over HTTP on a socket of its own, until its front is gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from functools import partial

from edgelm.backends.model import LoadedModel
from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.child import Child, run_job
from edgelm.base.workers.messages import Note, Ready, ServeJob
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.engine.engine import Engine
from edgelm.engine.sampling.grammar import GrammarCompiler
from edgelm.jobs.answer import Answerer
from edgelm.jobs.request import AnswerRequest
from edgelm.jobs.worker import work_with_engine
from edgelm.server.engine_process.app import EngineParts, engine_app
from edgelm.server.listener import Server, bind_tcp, bind_unix
from edgelm.server.protocol import raise_file_limit
from edgelm.server.request_id import current_request_id
from edgelm.text.template_runner import TemplateRunner

QUIET_S, NUM_QUIET = 0.25, 8  # between two looks whether a request is open, and how many find none
SWITCH_S = 0.001  # a step takes the interpreter dozens of times, and waits so long each time for another thread


class _BugsToFront(logging.Handler):
    """Sends logged exceptions, which are bugs, to the front, whose log is the one that is read."""

    def __init__(self, child: Child) -> None:
        super().__init__(logging.ERROR)
        self._child = child

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            request = current_request_id()
            place = f"request {request}: " if request else ""
            self._child.send(Note(place + self.format(record)))


async def _serve(loaded: LoadedModel, job: ServeJob, child: Child) -> None:
    listener = bind_tcp("127.0.0.1", 0) if job.socket is None else bind_unix(job.socket)
    info = loaded.engine.info
    port = listener.getsockname()[1] if job.socket is None else None
    grammars = GrammarCompiler(loaded.tokenizer, info.num_vocab) if loaded.kind == "text" else None
    logging.basicConfig(format="%(message)s")  # warnings stay in the log of this process
    logging.getLogger().addHandler(_BugsToFront(child))
    about = (loaded.name, info.engine, info.device, info.context)
    child.send(Ready(*about, port, loaded.footprint, loaded.unused_gpu))
    templates = TemplateRunner(loaded.tokenizer, loaded.prompt_tokens)
    if loaded.kind != "text":
        await templates.close()
    answerer = Answerer(loaded, templates, grammars, job.settings)
    gc.freeze()  # a full collection, which stops all threads, looks at what requests make only
    warming = asyncio.create_task(_warm_up(answerer, grammars, loaded.engine))
    try:
        await Server(engine_app(EngineParts(loaded, answerer), job.key)).serve(sockets=[listener])
    finally:
        warming.cancel()
        await templates.close()
        if grammars:
            await grammars.close()


async def _warm_up(answerer: Answerer, grammars: GrammarCompiler | None, engine: Engine) -> None:
    """Start the template's worker and probe the template before the first request needs them.

    A broken template is reported by that request. The vocabulary is read for grammars when nobody has asked for a
    while: the first answer does not wait for it, and the first grammar seldom.
    """
    with contextlib.suppress(EdgeLMError):
        await answerer.prepare(AnswerRequest(messages=[{"role": "user", "content": "Hello"}]))
    if grammars:
        quiet = 0
        while quiet < NUM_QUIET:
            await asyncio.sleep(QUIET_S)
            quiet = 0 if engine.num_requests else quiet + 1
        with contextlib.suppress(EdgeLMError):  # reported by the first grammar
            await in_daemon_thread(grammars.prepare)
        gc.freeze()


if __name__ == "__main__":
    os.umask(0o077)
    raise_file_limit()
    sys.setswitchinterval(SWITCH_S)
    sys.exit(run_job({ServeJob: partial(work_with_engine, _serve)}))
