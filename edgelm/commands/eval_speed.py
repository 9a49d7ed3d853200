"""The speed of the models that `edgelm eval` compares, measured shortly by the worker of `edgelm bench`.

Owns the order of the measurements: all models one after the other, and once more in reverse, so that a machine that
becomes warmer or busier meanwhile slows all of them alike. The median of all runs counts. Knows no tables.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from edgelm.base.config import Config, Settings
from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.messages import Result
from edgelm.commands.job import run_job
from edgelm.evaluation.kept import KeptSpeed
from edgelm.jobs.speed import BenchJob, SpeedTest
from edgelm.library.scan import LocalModel

TESTS = (SpeedTest(256, 0, 1), SpeedTest(0, 32, 1))
REPETITIONS = 3  # in each of the two rounds


@dataclass(frozen=True, slots=True)
class Timed:
    """A model whose speed is to be measured."""

    local: LocalModel
    settings: Settings
    key: str


def speed_key(settings: Settings, versions: Sequence[str]) -> str:
    """Return a key of all that a speed depends on besides the model, as far as the user chooses it."""
    chosen = {name: str(value) for name, value in vars_of(settings).items()}
    return hashlib.sha256(json.dumps([list(versions), chosen], sort_keys=True).encode()).hexdigest()


def vars_of(settings: Settings) -> dict[str, Any]:
    """Return the settings on which the speed of one sequence depends."""
    names = ("ctx", "kv", "engine", "device", "gpu_layers", "n_cpu_moe", "override_tensor", "quantize", "threads")
    return {name: getattr(settings, name) for name in names}


def measure_speeds(
    models: Sequence[Timed], config: Config, *, verbose: bool, on_done: Callable[[Timed, KeptSpeed], None]
) -> None:
    """Measure models forth and back; `on_done` is called with each that is done. A failure is a note, no error."""
    runs: dict[int, list[dict[str, Any]]] = {i: [] for i in range(len(models))}
    failed: set[int] = set()
    order = [*range(len(models)), *reversed(range(len(models)))]
    for i in order:
        if i in failed:
            continue
        try:
            runs[i].append(_measure(models[i], config, verbose=verbose))
        except EdgeLMError as error:
            print(f"note: the speed of {models[i].local.name} is not known: {error}", file=sys.stderr)
            failed.add(i)
            continue
        if len(runs[i]) == 2:
            on_done(models[i], _joined(models[i], runs[i]))


def _measure(model: Timed, config: Config, *, verbose: bool) -> dict[str, Any]:
    settings = replace(model.settings, parallel=1)
    job = BenchJob(model=model.local.path, settings=settings, tests=TESTS, shorten=True, repetitions=REPETITIONS)
    with run_job(job, config.places, verbose) as replies:
        for reply in replies:
            if isinstance(reply, Result):
                return reply.document
    raise AssertionError("a worker ends with a result or an error")


def _joined(model: Timed, documents: Sequence[dict[str, Any]]) -> KeptSpeed:
    prompts, decodes = (
        tuple(run for document in documents for run in document["results"][test]["runs"]) for test in range(2)
    )
    return KeptSpeed(
        key=model.key,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        engine=documents[0]["engine"],
        device=documents[0]["device"],
        kv=model.settings.kv,
        prompts=prompts,
        decodes=decodes,
    )
