"""The trial of both engines on this GPU: a model of random weights, and the speed of a prompt and of an answer.

Owns the model and what is measured. Each engine runs in a worker, since a GPU may hang. backends/kept_trials.py keeps
the result. Only `edgelm doctor --gpu` makes a trial: the GPU has to be free for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgelm.backends.choice import is_partial
from edgelm.backends.kept_trials import DECODE, PROMPT, Speed, Trial, keep_trial
from edgelm.backends.questions import ask_random_model
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, GpuLoadError
from edgelm.base.workers.messages import Loading, Note, Result, Status
from edgelm.base.workers.parent import Worker
from edgelm.jobs.speed import BenchJob, SpeedTest

WORKER = "edgelm.jobs.worker"
LIMIT_S = 900.0  # for one engine: the first one compiles and checks its kernels
TESTS = (SpeedTest(PROMPT, 0, 1), SpeedTest(0, DECODE, 1))
ENGINES = {
    "torch": Settings(engine="torch", device="cuda", ctx=2048, kv="f16", parallel=1),
    "llama": Settings(engine="llama", device="gpu", ctx=2048, kv="f16", parallel=1),
}
Notify = Callable[[str], None]


def make_trial(
    cache: Path,
    notify: Notify = lambda _: None,
    *,
    write_model: Callable[[Path], None] = ask_random_model,
    command: tuple[str, ...] = (),
) -> Trial:
    """Measure both engines and keep the result. Raises EdgeLMError where the model cannot be written.

    `command` replaces that of the worker.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="trial-", dir=cache) as folder:
            path = Path(folder) / "trial.gguf"
            write_model(path)
            speeds = {
                name: _speed(path, settings, partial(_tell, notify, name), command)
                for name, settings in ENGINES.items()
            }
    except OSError as error:
        raise EdgeLMError(f"the trial of the engines cannot be made: {error.strerror}", "free some space") from None
    trial = Trial(**speeds)
    keep_trial(cache, trial)
    return trial


def _tell(notify: Notify, engine: str, text: str) -> None:
    notify(f"{engine}: {text}")


def _speed(path: Path, settings: Settings, notify: Notify, command: tuple[str, ...]) -> Speed:
    """Measure one engine; what fails is the problem of its speed."""
    job = BenchJob(model=path, settings=settings, tests=TESTS, repetitions=3)
    ends_at = time.monotonic() + LIMIT_S
    with Worker(WORKER, replies=(Loading, Note, Result, Status), errors=(GpuLoadError,), command=command) as worker:
        worker.send(job)
        try:
            while (reply := worker.receive(max(ends_at - time.monotonic(), 0))) is not None:
                if isinstance(reply, Result):
                    return _result(reply.document)
                if isinstance(reply, Status | Note):
                    notify(reply.text)
            return Speed(problem=f"its process {worker.exit().how}")
        except TimeoutError:
            worker.kill_group()
            return Speed(problem=f"it is not done after {LIMIT_S:.0f} s")
        except EdgeLMError as error:
            return Speed(problem=error.message)


def _result(document: dict[str, Any]) -> Speed:
    """Return the speed of an engine that had the whole model on the GPU."""
    if is_partial(document["device"]):
        return Speed(problem=f"the GPU is in use: it had no room for the whole trial ({document['device']})")
    prompt, decode = (row["tokens_per_second"] for row in document["results"])
    return Speed(prompt, decode)
