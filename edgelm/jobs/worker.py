"""The worker of `edgelm run`, `bench`, `embed` and `eval`: load a model and do one job with it.

Owns the life of a loaded model in a worker: from its job to the data that it leaves for the next process. Knows nothing
of terminals and flags. Only a worker imports this module: it loads native code.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from edgelm.backends.build import build
from edgelm.backends.model import LoadedModel
from edgelm.backends.reports import reports_to
from edgelm.base.errors import NotSeenError, RequestError
from edgelm.base.places import own_places
from edgelm.base.workers.child import Child, Handler, run_job
from edgelm.base.workers.messages import EngineJob, EvalJob, Result, RunJob, Status
from edgelm.jobs.embed_request import EmbedJob
from edgelm.jobs.speed import BenchJob, check, measure, measure_picture
from edgelm.text.template_runner import start_template_worker


def work_with_engine(
    work: Callable[[LoadedModel, Any, Child], Coroutine[Any, Any, None]], job: EngineJob, child: Child
) -> None:
    """Load the model of a job, await the work with its engine, and close it. Raises EdgeLMError.

    Loading measures steps, so it has a thread of its own, which ends: threads of OpenMP that wait for another thread's
    next step take cores from those of the engine (libgomp lets none of them spin then).
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as loading:
        loaded = loading.submit(_build, job, child).result()
    loaded.engine.when_lost = child.fail

    def save() -> None:
        loaded.prompt_tokens.save()
        loaded.engine.stop(child.saving)

    child.at_end(save)
    try:
        asyncio.run(work(loaded, job, child))
    finally:
        save()
        loaded.engine.close()


def _build(job: EngineJob, child: Child) -> LoadedModel:
    if job.model.is_dir():  # most models are GGUFs, and need none of this
        from edgelm.checkpoints.encoder import is_encoder_folder

        if is_encoder_folder(job.model):
            from edgelm.making.conversion.convert import kept_gguf

            job = replace(job, model=kept_gguf(job.model, own_places().cache))
    return build(job, reports_to(child))


def _run(job: RunJob, child: Child) -> None:
    template_worker = None if job.raw else start_template_worker()  # it starts while the model is loaded
    try:
        from edgelm.jobs.run import answer_prompt  # the other jobs do not need it

        work_with_engine(partial(answer_prompt, template_worker), job, child)
    finally:
        if template_worker:
            template_worker.kill()
            template_worker.close()


def _evaluate(job: EvalJob, child: Child) -> None:
    from edgelm.jobs.evaluate import evaluate_file  # the other jobs do not need it

    evaluate_file(job, child)


def _embed(job: EmbedJob, child: Child) -> None:
    from edgelm.jobs.embed import embed_texts  # the other jobs do not need it

    work_with_engine(embed_texts, job, child)


async def _bench(loaded: LoadedModel, job: BenchJob, child: Child) -> None:
    from edgelm.base.machine.conditions import Measurement

    loaded.require("text")
    info = loaded.engine.info
    tests = [test.shortened(info.context) for test in job.tests] if job.shorten else job.tests
    for test in tests:
        check(info, test)
    results, measurement = [], Measurement()
    for test in tests:
        child.send(Status(f"measuring {test.name}"))
        runs = await measure(loaded.engine, test, job.repetitions)
        results.append({"test": test.name, "tokens_per_second": sorted(runs)[len(runs) // 2], "runs": runs})
    picture = None
    if job.picture is not None:
        if loaded.pictures is None:
            raise NotSeenError(
                f"{loaded.name} reads no pictures", "omit --picture, or name its projector: --mmproj FILE"
            )
        child.send(Status("measuring the picture"))
        try:
            data = job.picture.read_bytes()
        except OSError as error:
            raise RequestError(f"{job.picture} cannot be read: {error.strerror}") from None
        picture = (await measure_picture(loaded.pictures, loaded.engine, data, job.repetitions))._asdict()
    about = {"model": loaded.name, "engine": info.engine, "device": info.device, "context": info.context}
    measured = asdict(measurement.conditions(info.engine))
    # How the same requests are sent to an endpoint.
    vocabulary = {"num_vocab": info.num_vocab, "stop_ids": sorted(loaded.tokenizer.stop_ids)}
    child.send(Result(about | vocabulary | {"results": results, "picture": picture, "measured": measured}))


if __name__ == "__main__":
    handlers: dict[type, Handler] = {
        RunJob: _run,
        BenchJob: partial(work_with_engine, _bench),
        EvalJob: _evaluate,
        EmbedJob: _embed,
    }
    sys.exit(run_job(handlers))
