"""The cost of watching: `python -m tests.bench.bench_watch [--model PATH|SHAPE] [--pairs N] [--tokens N]`.

Runs `edgelm serve` with a model, and the same answer with the inspector closed and open in turn; open means
`edgelm watch` in a pseudo-terminal of 120x40, and the probabilities of the five likeliest tokens in the request, as the
chat asks for them. Prints the median ratios of the pairs: of the tokens per second that the server measures, and of the
processor time of all processes for an answer; then the processor time of an open inspector while the engine is idle.
With one thread for the engine, both are steady; with all, processor time counts threads that wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Quant

from tests.bench.bench_tui import Terminal
from tests.bench.random_models import SHAPES, write_model
from tests.server.harness import Front, serving

IDLE_S = 20.0
QUESTION = "The quick brown fox jumps over the lazy dog. " * 4
KINDS = ("closed", "probabilities", "open")
PROBABILITIES = {"logprobs": True, "top_logprobs": 5}


def speed(front: Front, model: str, num_tokens: int, fields: dict[str, Any]) -> float:
    """Return the tokens per second of an answer, as the server measures them."""
    body = {
        "model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": num_tokens,
        "temperature": 0, "speculation": False, **fields,
    }  # fmt: skip
    answer = front.http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] > num_tokens // 2, answer
    return float(answer["edgelm"]["timings"]["decode_tokens_per_second"])


def timed(
    front: Front, model: str, num_tokens: int, fields: dict[str, Any], watchers: list[int]
) -> tuple[float, float]:
    """Return the speed of an answer, and the processor time of server, engine and watchers for it."""
    pids = [*family(front.process.pid), *watchers]
    before = sum(map(processor_s, pids))
    tokens_per_second = speed(front, model, num_tokens, fields)
    return tokens_per_second, sum(map(processor_s, pids)) - before


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """Return a process and all that it started (Linux)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


@contextmanager
def watching(front: Front, environment: dict[str, str]) -> Iterator[Terminal]:
    """Run the inspector in a pseudo-terminal that is read."""
    command = [sys.executable, "-m", "edgelm", "watch", "--endpoint", front.address]
    terminal = Terminal(command, environment | {"TERM": "xterm-256color", "COLORTERM": "truecolor"})
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set() and terminal.read(0.1):
            terminal.output = terminal.output[-100_000:]

    reader = threading.Thread(target=read)
    try:
        terminal.wait_for("slots")
        reader.start()
        time.sleep(1)
        yield terminal
    finally:
        ended.set()
        if reader.ident:
            reader.join()
        terminal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smol-135m", help="a GGUF, or a shape of tests/bench/random_models.py")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", default="1", help="of the engine; 0: as many as it takes by itself")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgelm-watch-", ignore_cleanup_errors=True) as folder:
        model = options.model
        if model in SHAPES:
            model = str(Path(folder) / f"{options.model}.gguf")
            write_model(Path(model), SHAPES[options.model], Quant.Q4_0)
        places = {f"EDGELM_{kind}_DIR": f"{folder}/{kind.lower()}" for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
        environment = {**os.environ, **places, "EDGELM_MEMORY": "0"}
        if options.threads != "0":
            environment["EDGELM_THREADS"] = options.threads
        with serving(environment, model, log=Path(folder) / "log") as front:
            _measure(front, model, environment, options.pairs, options.tokens)


def _measure(front: Front, model: str, environment: dict[str, str], pairs: int, num_tokens: int) -> None:
    for fields in ({}, PROBABILITIES):
        speed(front, model, num_tokens, fields)  # the first answers load the model
    rows: list[dict[str, tuple[float, float]]] = []
    for number in range(pairs):
        row: dict[str, tuple[float, float]] = {}
        for kind in KINDS if number % 2 else KINDS[::-1]:
            if kind == "open":
                with watching(front, environment) as terminal:
                    row[kind] = timed(front, model, num_tokens, PROBABILITIES, [terminal.process.pid])
            else:
                row[kind] = timed(front, model, num_tokens, {} if kind == "closed" else PROBABILITIES, [])
        rows.append(row)
        print(f"pair {number + 1}: " + ", ".join(f"{k} {v[0]:.1f} tok/s, {v[1]:.2f} s" for k, v in sorted(row.items())))
    for kind in KINDS[1:]:
        speeds = statistics.median(row[kind][0] / row["closed"][0] for row in rows)
        times = statistics.median(row[kind][1] / row["closed"][1] for row in rows)
        print(f"medians of {pairs} pairs, {kind} to closed: speed {speeds:.3f}, processor time {times:.3f}")
    with watching(front, environment) as terminal:
        groups = ([terminal.process.pid], family(front.process.pid))
        time.sleep(2)
        before = [sum(map(processor_s, pids)) for pids in groups]
        time.sleep(IDLE_S)
        after = [sum(map(processor_s, pids)) for pids in groups]
    shares = [100 * (end - begin) / IDLE_S for begin, end in zip(before, after, strict=True)]
    print(f"idle for {IDLE_S:.0f} s: inspector {shares[0]:.2f} %, server and engines {shares[1]:.2f} % of a core")


if __name__ == "__main__":
    main()
