"""Several models on a memory budget for three: requests in random order from several clients, and the memory of all.

    python -m tests.bench.bench_models [--models 10] [--requests 200] [--clients 4] [--out docs/results]

Writes tiny models, serves them with --max-memory, and samples the memory of all engine processes with all that they
started. Prints the figures, and with --out also draws the memory as an SVG. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from edgelm.backends.build import predict
from edgelm.base.config import Settings
from edgelm.base.machine.memory import process_memory
from edgelm.server.engines.memory import SPARE
from tests.server.harness import Front, body, processes_of, serving
from tests.tiny import write_tiny

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


def svg(outcome: Outcome) -> str:
    """Return the memory over time as a picture, with the budget as a line."""
    width, height, left, low = 900, 300, 60, 30
    last, top = outcome.samples[-1][0], 1.1 * outcome.budget

    def point(seconds: float, nbytes: float) -> str:
        across, up = (width - left - 10) * seconds / last, (height - 2 * low) * nbytes / top
        return f"{left + across:.1f},{height - low - up:.1f}"

    line = " ".join(point(seconds, nbytes) for seconds, nbytes, _ in outcome.samples)
    (x1, y1), (x2, y2) = (point(at, outcome.budget).split(",") for at in (0, last))
    labels = [
        f'<text x="{left - 5}" y="{point(0, nbytes).split(",")[1]}" text-anchor="end">{nbytes / MIB:.0f}</text>'
        for nbytes in (0, outcome.budget / 3, 2 * outcome.budget / 3, outcome.budget)
    ]
    title = f"{len(outcome.answers)} requests: memory of all engines in MiB, over {last:.0f} seconds; budget in red"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="{left}" y="18">{title}</text>{"".join(labels)}'
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="red"/>'
        f'<polyline points="{line}" fill="none" stroke="steelblue"/></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--fit", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        kinds = ("CONFIG", "DATA", "RUNTIME", "CACHE")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
        environment |= {f"EDGELM_{kind}_DIR": str(place / kind.lower()) for kind in kinds}
        environment |= {"HF_HOME": str(place / "hf"), "EDGELM_SPEC": "off"}
        models = write_models(place, options.models, options.width)
        size = models[0].stat().st_size
        outcome = run(
            models,
            environment,
            requests=options.requests,
            clients=options.clients,
            fit=options.fit,
            log=place / "log",
            seed=options.seed,
        )
    lines = [
        f"python -m tests.bench.bench_models {' '.join(sys.argv[1:])}".rstrip(),
        f"{options.models} models of {size / 1e6:.0f} MB, {options.clients} clients, a budget for {options.fit}",
        outcome.text(),
        *outcome.errors,
    ]
    print("\n".join(lines))
    if options.out:
        name = f"models-{datetime.now(UTC):%Y-%m-%d}"
        (options.out / f"{name}.txt").write_text("\n".join(lines) + "\n")
        (options.out / f"{name}.svg").write_text(svg(outcome))


if __name__ == "__main__":
    main()
