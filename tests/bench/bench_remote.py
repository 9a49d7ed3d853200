"""What the way through the front to another server costs, and whether clients of every dialect find their way there.

    python -m tests.bench.bench_remote [--llama-server PROGRAM] [--ollama PYTHON] [--requests 200]

- the hop: time to the first token of a request, one at a time, at a server that answers at once, and the same through
  the front; processor time of the front for each chunk of a long stream.
- with --llama-server, llama.cpp's own with SmolLM2 behind the front: the checks of tests/clients/python with OpenAI's
  and Anthropic's packages, and with Ollama's where PYTHON has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.real_models import real_model
from tests.server.fake_remote import config_of
from tests.server.fast_remote import Counter, counting
from tests.server.harness import Front, serving

NUM_CHUNKS = 4000
CLIENTS = Path(__file__).parents[1] / "clients" / "python"
TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def front_of(tables: dict[str, dict[str, Any]]) -> Iterator[Front]:
    """Run a front with remote models."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.toml").write_text(config_of(tables))
        places = {f"EDGELM_{kind}_DIR": folder for kind in ("CONFIG", "DATA", "RUNTIME")}
        with serving(os.environ | places, log=Path(folder, "log")) as front:
            yield front


def first_token_ms(http: httpx2.Client, url: str) -> float:
    document = {"model": "counter", "messages": [{"role": "user", "content": "count"}], "stream": True, "max_tokens": 2}
    began = time.perf_counter()
    with http.stream("POST", url, json=document) as answer:
        text, took_ms = "", 0.0
        for part in answer.iter_text():
            text += part
            took_ms = took_ms or (1000 * (time.perf_counter() - began) if '"0 ' in text else 0.0)
    return took_ms


def processor_s(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def hop(num_requests: int) -> None:
    """Print the cost of the hop."""
    with counting() as counter:
        base = f"http://127.0.0.1:{counter.port}"
        with front_of({"counter": {"endpoint": f"{base}/v1"}}) as front, httpx2.Client(trust_env=False) as http:
            path = "/v1/chat/completions"
            times: dict[str, list[float]] = {base: [], front.address: []}
            for _ in range(num_requests):
                for address, taken in times.items():  # in turn: a busy moment meets both
                    taken.append(first_token_ms(http, address + path))
            direct, through = (statistics.median(taken) for taken in times.values())
            print(f"first token, median of {num_requests}: {direct:.2f} ms direct, {through:.2f} ms through the front")
            print(f"the hop: {through - direct:.2f} ms (at most 3)")
    for pause_s in (0.0, 0.002):  # several chunks in one read, and one at a time
        with counting(pause_s) as counter, front_of({"counter": {"endpoint": at(counter)}}) as front:
            user_ms, system_ms = chunk_ms(front)
            pause = f"{pause_s * 1000:.0f} ms between two"
            print(f"processor time of the front: {user_ms + system_ms:.3f} ms a chunk (at most 0.2), {pause}")


def at(counter: Counter) -> str:
    return f"http://127.0.0.1:{counter.port}/v1"


def chunk_ms(front: Front) -> tuple[float, float]:
    """Return the processor time of the front for each chunk of a stream: its own, and the system's for it."""
    document = {"model": "counter", "messages": [{"role": "user", "content": "count"}], "stream": True}
    before = processor_s(front.process.pid)
    with front.http.stream("POST", "/v1/chat/completions", json=document | {"max_tokens": NUM_CHUNKS}) as answer:
        count = sum(line.startswith("data: {") for line in answer.iter_lines())
    assert count >= NUM_CHUNKS
    after = processor_s(front.process.pid)
    return 1000 * (after[0] - before[0]) / NUM_CHUNKS, 1000 * (after[1] - before[1]) / NUM_CHUNKS


@contextmanager
def llama_server(program: Path, model: Path, port: int) -> Iterator[str]:
    """Run llama-server with SmolLM2 on the processor; give its address."""
    command = [program, "-m", model, "-c", "8192", "-np", "2", "--port", str(port), "--jinja"]
    command += ["--host", "127.0.0.1", "--device", "none", "--no-warmup", "--alias", "smol", "-fa", "off"]
    process = subprocess.Popen(
        list(map(str, command)),
        env=os.environ | {"LD_LIBRARY_PATH": str(program.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, "llama-server ended"
            try:
                if httpx2.get(f"{address}/health").status_code == 200:
                    break
            except httpx2.TransportError:
                pass
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def chain(program: Path, model: Path, port: int, ollama: str) -> None:
    """Print which checks of the outside clients pass."""
    scripts = {"openai_sdk.py": sys.executable, "anthropic_sdk.py": sys.executable}
    with llama_server(program, model, port) as address, front_of({"smol": {"endpoint": f"{address}/v1"}}) as front:
        for script, python in (scripts | ({"ollama_sdk.py": ollama} if ollama else {})).items():
            # An encoder is no model of this chain: what needs one fails, and is told.
            names = {"EDGELM_ADDRESS": front.address, "EDGELM_MODEL": "smol", "EDGELM_ENCODER": "none"}
            done = subprocess.run(
                [python, CLIENTS / script], env=os.environ | names, capture_output=True, text=True, check=False
            )
            outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            print(script, json.dumps(outcomes[0] if outcomes else done.stderr[-300:]))
            for outcome in outcomes[1:]:
                print("   ", json.dumps(outcome)[:200])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure the way to another server.")
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="in place of SmolLM2 in Q4_1")
    parser.add_argument("--ollama", default="", metavar="PYTHON")
    parser.add_argument("--port", type=int, default=21510)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    if options.requests:
        hop(options.requests)
    if options.llama_server:
        chain(options.llama_server, options.model or real_model("smollm2"), options.port, options.ollama)


if __name__ == "__main__":
    main()
