"""More models than fit, on real engines: no request is lost or refused, and their memory stays under the limit."""

from __future__ import annotations

import random
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edgelm.backends.build import predict
from edgelm.base.config import Settings
from edgelm.base.machine.memory import process_memory
from edgelm.server.engines.memory import SPARE
from tests.counts import Count
from tests.server.harness import Front, body, processes_of, serving
from tests.tiny import write_tiny

MODELS = Count(test=3, soak=10)
FIT = Count(test=2, soak=3)
REQUESTS = Count(test=8, soak=200)
CLIENTS = Count(test=2, soak=4)
WIDTH = Count(test=256, soak=1024)
MIB = 2**20
SAMPLE_S = 0.1
ROOM = 1.02  # times the promises: llama.cpp rounds
ENGINE = "edgelm.server.engine_process.worker"


@dataclass
class Outcome:
    """The outcome of a run."""

    seed: int
    budget: int  # bytes
    promise: int  # bytes of one model
    answers: list[tuple[int, float]] = field(default_factory=list)  # status, seconds
    samples: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, bytes, engines
    engines: set[int] = field(default_factory=set)  # process ids
    errors: list[str] = field(default_factory=list)

    @property
    def most(self) -> int:
        return max((nbytes for _, nbytes, _ in self.samples), default=0)

    def text(self) -> str:
        seconds = sorted(took for _, took in self.answers)
        counts = {status: sum(1 for own, _ in self.answers if own == status) for status in {s for s, _ in self.answers}}
        return (
            f"seed {self.seed}; {len(self.answers)} answers: {counts}; {len(self.engines)} loads in "
            f"{self.samples[-1][0]:.0f} s; half of the answers within {seconds[len(seconds) // 2]:.1f} s, "
            f"all within {seconds[-1]:.1f} s\n"
            f"memory of all engines: at most {self.most / MIB:.0f} MiB of a budget of {self.budget / MIB:.0f} MiB "
            f"({len(self.samples)} samples); a model is promised {self.promise / MIB:.0f} MiB; at most "
            f"{max(engines for *_, engines in self.samples)} engines at a time"
        )


def write_models(folder: Path, count: int, width: int) -> list[Path]:
    """Write models of the same size; a width of 1024 makes 55 MB."""
    return [
        write_tiny(folder / f"m{number}.gguf", width=width, ffn=2 * width, context=512, seed=number)
        for number in range(count)
    ]


def run(
    models: list[Path], environment: dict[str, str], *, requests: int, clients: int, fit: int, log: Path, seed: int = 0
) -> Outcome:
    """Serve the models in the memory that `fit` of them take, and send the requests."""
    seed = seed or secrets.randbelow(2**31)
    planned = predict(models[0], Settings(spec="off"))
    promise = max(planned.total_bytes + int(SPARE * planned.total_bytes), planned.load_peak_bytes)
    outcome = Outcome(seed, int(ROOM * fit * promise), promise)
    orders = [random.Random(seed + client) for client in range(clients)]
    done = threading.Event()
    with serving(environment, *models, "--max-memory", f"{outcome.budget / 2**30:.6f}", log=log) as front:
        watch = threading.Thread(target=_watch, args=(environment, outcome, done))
        watch.start()
        share = requests // clients
        threads = [threading.Thread(target=_ask, args=(front, models, order, share, outcome)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watch.join()
    return outcome


def _ask(front: Front, models: list[Path], order: random.Random, count: int, outcome: Outcome) -> None:
    first = order.sample(models, len(models))  # each once
    with httpx2.Client(base_url=front.address, timeout=600, trust_env=False) as http:
        for model in [*first, *order.choices(models, k=max(count - len(first), 0))][:count]:
            sent: dict[str, Any] = body(model.stem, "hello", max_tokens=4)
            began = time.monotonic()
            try:
                answer = http.post("/v1/chat/completions", json=sent)
            except httpx2.HTTPError as error:
                outcome.errors.append(repr(error))
                continue
            outcome.answers.append((answer.status_code, time.monotonic() - began))
            if answer.status_code != 200:
                outcome.errors.append(answer.text)


def _watch(environment: dict[str, str], outcome: Outcome, done: threading.Event) -> None:
    began = time.monotonic()
    while not done.wait(SAMPLE_S):
        engines = [pid for pid, command in processes_of(environment).items() if ENGINE in command]
        memory = [own for pid in engines if (own := process_memory(pid)) is not None]
        outcome.engines.update(engines)
        outcome.samples.append((time.monotonic() - began, sum(own.resident for own in memory), len(memory)))


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of processes is read from /proc")
@pytest.mark.timeout(Count(test=300, soak=3600))
def test_requests_in_random_order_on_a_budget(own: dict[str, str], tmp_path: Path) -> None:
    models = write_models(tmp_path, MODELS, WIDTH)
    outcome = run(models, own, requests=REQUESTS, clients=CLIENTS, fit=FIT, log=tmp_path / "log")
    print(outcome.text())
    assert not outcome.errors
    assert [status for status, _ in outcome.answers] == [200] * REQUESTS
    assert outcome.most <= outcome.budget
    assert len(outcome.engines) >= MODELS


def test_of_two_models_one_is_loaded_at_a_time(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(own, *write_models(tmp_path, 2, 64), "--max-models", "1", log=tmp_path / "log") as front:
        for name in ("m0", "m1"):
            assert front.chat(name).is_success
            assert [model["model"] for model in front.ps()["models"]] == [name]
