"""The trial of both engines on this GPU: a model of random weights, and the speed of a prompt and of an answer.

Owns the model and what is measured. Each engine runs in a worker, since a GPU may hang. backends/kept_trials.py keeps
the result. Knows nothing of when a trial is due.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from edgelm.backends.kept_trials import DECODE, PROMPT, MakeTrial, Speed, Trial, TrialEnded, keep_trial, kept_trial
from edgelm.backends.questions import ask_cuda, ask_llama_build, ask_random_model
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, GpuLoadError
from edgelm.base.workers.child import Child, run_job
from edgelm.base.workers.messages import Loading, Note, Result, Status
from edgelm.base.workers.parent import Worker
from edgelm.jobs.speed import BenchJob, SpeedTest

WORKER = "edgelm.jobs.worker"
LIMIT_S = 900.0  # for one engine: the first one compiles and checks its kernels
POLL_S = 0.5
TESTS = (SpeedTest(PROMPT, 0, 1), SpeedTest(0, DECODE, 1))
ENGINES = {
    "torch": Settings(engine="torch", device="cuda", ctx=2048, kv="f16", parallel=1),
    "llama": Settings(engine="llama", device="gpu", ctx=2048, kv="f16", parallel=1),
}
Notify = Callable[[str], None]


class NotWantedError(EdgeLMError):
    """The trial was ended: the GPU is needed."""


def trial_is_due(cache: Path) -> bool:
    """Return whether both engines can use a GPU here, and no trial of them is kept. Raises EdgeLMError."""
    if kept_trial(cache) is not None:
        return False
    return not ask_cuda().problem and any(not device.shared for device in ask_llama_build().devices)


def make_trial(
    cache: Path,
    notify: Notify = lambda _: None,
    is_wanted: Callable[[], bool] = lambda: True,
    *,
    command: tuple[str, ...] = (),
) -> Trial:
    """Measure both engines and keep the result. Raises NotWantedError once `is_wanted` says so, and EdgeLMError where
    the model cannot be written.
    """
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix="trial-", dir=cache) as folder:
            path = Path(folder) / "trial.gguf"
            ask_random_model(path)
            speeds = {
                name: _speed(path, settings, partial(_tell, notify, name), is_wanted, command)
                for name, settings in ENGINES.items()
            }
    except OSError as error:
        raise EdgeLMError(f"the trial of the engines cannot be made: {error.strerror}", "free some space") from None
    trial = Trial(**speeds)
    keep_trial(cache, trial)
    return trial


def _tell(notify: Notify, engine: str, text: str) -> None:
    notify(f"{engine}: {text}")


def _speed(
    path: Path, settings: Settings, notify: Notify, is_wanted: Callable[[], bool], command: tuple[str, ...]
) -> Speed:
    """Measure one engine; what fails is the problem of its speed. Raises NotWantedError."""
    job = BenchJob(model=path, settings=settings, tests=TESTS, repetitions=3)
    ends_at = time.monotonic() + LIMIT_S
    with Worker(WORKER, replies=(Loading, Note, Result, Status), errors=(GpuLoadError,), command=command) as worker:
        worker.send(job)
        try:
            while time.monotonic() < ends_at:
                if not is_wanted():
                    worker.kill_group()
                    raise NotWantedError("the trial of the engines was ended: the GPU is needed")
                try:
                    reply = worker.receive(POLL_S)
                except TimeoutError:
                    continue
                if isinstance(reply, Result):
                    prompt, decode = (row["tokens_per_second"] for row in reply.document["results"])
                    return Speed(prompt, decode)
                if reply is None:
                    return Speed(problem=f"its process {worker.exit().how}")
                if isinstance(reply, Status | Note):
                    notify(reply.text)
        except NotWantedError:
            raise
        except EdgeLMError as error:
            return Speed(problem=error.message)
        worker.kill_group()
        return Speed(problem=f"it is not done after {LIMIT_S:.0f} s")


def _answer(request: MakeTrial, child: Child) -> None:
    due = trial_is_due(request.cache)
    child.send(TrialEnded(make_trial(request.cache).line if due else ""))


if __name__ == "__main__":
    sys.exit(run_job({MakeTrial: _answer}))
