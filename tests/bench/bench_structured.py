"""Structured output through the endpoint: what a JSON schema adds to the first token and to each further one.

    python -m tests.bench.bench_structured MODEL.gguf [--server llama-server] [--rounds 3] [--tokens 64] [--threads 1]

40 schemas in real use (shared/data/jsonschema), asked of `edgelm serve` without drafts and, if a program is given, of
llama.cpp's server, in turns. Each schema is sent when it is new (a comment in it changes) and again when it is known,
beside the same request without a schema. Processor time is that of all processes of the server. Prints medians; the
time of a token is that of all tokens together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from tests.ending import end_server
from tests.real_data import data_file

NUM_SCHEMAS = 40
TAKEN = "llguidance_1_9_1"
CONTEXT = 4096
PORT = 18_660
START_LIMIT_S = 120.0
NOT_KEPT = httpx2.Limits(max_keepalive_connections=0)  # llama-server closes connections at any time
QUESTION = (
    "Here is a record of our system. Write one more, complete and plausible, with long texts in it, as JSON. The record"
    " was made on a Friday by a person who likes to describe things at length."
)


class Timed(NamedTuple):
    """One request."""

    first_ms: float
    rest_ms: float  # from the first token to the last
    tokens: int


@dataclass
class Figures:
    """What was measured of one server, in milliseconds. A new schema and a known one come beside none."""

    none: list[float] = field(default_factory=list)  # to the first token
    new: list[float] = field(default_factory=list)
    known: list[float] = field(default_factory=list)
    none_cpu: list[float] = field(default_factory=list)  # of a request for one token
    new_cpu: list[float] = field(default_factory=list)
    known_cpu: list[float] = field(default_factory=list)
    free: list[Timed] = field(default_factory=list)  # long answers
    bound: list[Timed] = field(default_factory=list)
    refused: int = 0
    first_ever: float = 0.0  # what the first schema of a new server adds to the first token


def schemas() -> list[dict[str, Any]]:
    """Return schemas that llguidance takes, in turns from three sources."""
    iglu, store = ([item["schema"] for item in _items(name) if item[TAKEN] == "ok"] for name in ("iglu", "schemastore"))
    tools = [item["tools"][0]["function"]["parameters"] for item in _items("tools_bfcl")]
    return [schema for turn in zip(iglu, store, tools, strict=False) for schema in turn][:NUM_SCHEMAS]


def _items(name: str) -> list[dict[str, Any]]:
    lines = data_file(f"jsonschema/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class Server:
    """A server of one model that answers /v1/chat/completions."""

    def __init__(self, name: str, command: list[str], folder: Path, model: str) -> None:
        self.name = name
        self.model = model
        self._command = command
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx2.Client(timeout=1200, trust_env=False, limits=NOT_KEPT)
        self.address = ""

    def start(self) -> None:
        """Start the process, and wait until the model is loaded."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
        places = {f"EDGELM_{kind}_DIR": str(self._folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
        if self.name == "llama-server":
            places["LD_LIBRARY_PATH"] = str(Path(self._command[0]).resolve().parent)  # where it was unpacked
        places |= {"EDGELM_CACHE_DIR": str(self._folder / "cache"), "HF_HOME": str(self._folder / "hf")}
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=clean | places
            )
        assert self._process.stdout
        if self.name == "edgelm":
            ready, _, _ = select.select([self._process.stdout], [], [], START_LIMIT_S)
            self.address = json.loads(self._process.stdout.readline())["address"] if ready else ""
        else:
            self.address = f"http://127.0.0.1:{PORT}"
            threading.Thread(target=self._process.stdout.read, daemon=True).start()
        self._wait()

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def _wait(self) -> None:
        """Wait until the model answers."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process and self._process.poll() is None:
            try:
                if self._client.get(f"{self.address}/health").status_code == 200:
                    body = {"model": self.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
                    self._client.post(f"{self.address}/v1/chat/completions", json=body).raise_for_status()
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.2)
        raise SystemExit(f"{self.name} does not start: {(self._folder / f'{self.name}.log').read_text()[-1500:]}")

    def stop(self) -> None:
        """End the process as a user would."""
        process, self._process = self._process, None
        if process is not None:
            end_server(process)


class Client:
    """Sends requests to one server, and measures them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._http = httpx2.Client(timeout=600, trust_env=False, limits=NOT_KEPT)

    def ask(self, schema: dict[str, Any] | None, tokens: int) -> Timed | None:
        """Return the times of one request; None: the schema is refused."""
        body: dict[str, Any] = {"model": self.server.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": tokens, "temperature": 0}
        if schema is not None:
            named = {"name": "record", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        began, first, last, count = time.perf_counter(), 0.0, 0.0, 0
        with self._http.stream("POST", f"{self.server.address}/v1/chat/completions", json=body) as reply:
            if reply.status_code == 400:
                reply.read()
                return None
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    last = time.perf_counter()
                    first = first or last
                count = (chunk.get("usage") or {}).get("completion_tokens", count)
        first = first or time.perf_counter()
        return Timed(1e3 * (first - began), 1e3 * max(last - first, 0.0), count)

    def first_ever(self) -> float:
        """Return what the first schema adds to the first token of a server that has just started."""
        without = [self.ask(None, 1) for _ in range(5)]
        with_ = self.ask(schemas()[0], 1)
        assert with_
        return with_.first_ms - statistics.median(one.first_ms for one in without if one)

    def cpu_ms(self) -> float:
        """Return the processor time of the server's processes so far."""
        return sum(map(_cpu_ms, _family(self.server.pid)))


def _family(pid: int) -> list[int]:
    """Return a process and all its children's children."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(one for task in tasks for child in task.read_text().split() for one in _family(int(child)))]


def _cpu_ms(pid: int) -> float:
    """Return the processor time of a process, its ended threads and children included."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return 1e3 * sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def measure(client: Client, forms: list[dict[str, Any]], number: int, tokens: int, figures: Figures) -> Iterator[None]:
    """Measure one round, and yield between its parts."""
    taken = []
    for index, form in enumerate(forms):
        new = form | {"$comment": f"round {number}"}
        none = client.ask(None, 1)
        times = [client.ask(new, 1), client.ask(new, 1)]
        assert none
        if times[0] is None or times[1] is None:
            figures.refused += 1
        else:
            taken.append(new)
            figures.none.append(none.first_ms)
            figures.new.append(times[0].first_ms)
            figures.known.append(times[1].first_ms)
        if index % 5 == 4:
            yield
    fresh = [form | {"$comment": f"round {number} again"} for form in taken]
    for part, cpu in (([None] * len(taken), figures.none_cpu), (fresh, figures.new_cpu), (fresh, figures.known_cpu)):
        before = client.cpu_ms()
        for one in part:
            client.ask(one, 1)
        cpu.append((client.cpu_ms() - before) / len(taken))
        yield
    for index, form in enumerate(taken):
        pair = [client.ask(schema, tokens) for schema in ((None, form) if index % 2 else (form, None))]
        free, bound = pair if index % 2 else reversed(pair)
        assert free
        assert bound
        figures.free.append(free)
        figures.bound.append(bound)
        if index % 5 == 4:
            yield


def token_ms(timed: list[Timed]) -> float:
    return sum(one.rest_ms for one in timed) / max(sum(one.tokens - 1 for one in timed), 1)


def rows(figures: Figures) -> Iterator[tuple[str, str]]:
    """Yield the figures of one server with their names."""
    new, known = (
        [with_ - without for with_, without in zip(side, figures.none, strict=True)]
        for side in (figures.new, figures.known)
    )
    none_cpu, new_cpu, known_cpu = map(statistics.median, (figures.none_cpu, figures.new_cpu, figures.known_cpu))
    free, bound = token_ms(figures.free), token_ms(figures.bound)
    yield "first token without a schema, ms", f"{statistics.median(figures.none):.1f}"
    yield "  the first schema of all adds", f"{figures.first_ever:+.1f}"
    yield "  a new schema adds, median", f"{statistics.median(new):+.1f}"
    yield "  a new schema adds, 90 % at most", f"{sorted(new)[int(0.9 * len(new))]:+.1f}"
    yield "  a known schema adds, median", f"{statistics.median(known):+.1f}"
    yield "processor time of such a request, ms", f"{none_cpu:.1f}"
    yield "  a new schema adds", f"{new_cpu - none_cpu:+.1f}"
    yield "  a known schema adds", f"{known_cpu - none_cpu:+.1f}"
    yield "a further token without a schema, ms", f"{free:.2f}"
    yield "  with a schema, ms", f"{bound:.2f}"
    yield "  with / without", f"{bound / free:.3f}"
    yield "tokens with a schema", f"{sum(one.tokens for one in figures.bound):,}"
    yield "requests with a refused schema", str(figures.refused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--server", type=Path, help="llama.cpp's server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of a long answer")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    threads, context = str(args.threads), str(CONTEXT)
    command = [sys.executable, "-m", "edgelm", "serve", "--port", "0", "--json", "--ctx", context, "--spec", "off"]
    with tempfile.TemporaryDirectory(prefix="edgelm-bench-") as name:
        servers = [
            Server("edgelm", [*command, "--threads", threads, str(args.model.resolve())], Path(name), args.model.stem)
        ]
        if args.server:
            command = [str(args.server), "-m", str(args.model), "--port", str(PORT), "-c", context, "-t", threads]
            servers.append(Server("llama-server", [*command, "-np", "1", "--jinja"], Path(name), args.model.stem))
        figures = {server.name: Figures() for server in servers}
        try:
            for server in servers:
                server.start()
            clients = [Client(server) for server in servers]
            for client in clients:
                figures[client.server.name].first_ever = client.first_ever()
            for number in range(args.rounds):
                parts = [
                    measure(client, schemas(), number, args.tokens, figures[client.server.name]) for client in clients
                ]
                for _ in itertools.zip_longest(*parts):  # in turns
                    pass
        finally:
            for server in servers:
                server.stop()
    print(
        f"{args.model.name}, {NUM_SCHEMAS} schemas, {args.rounds} rounds, {args.threads} threads, {platform.machine()}"
    )
    print(f"{'':40}" + "".join(f"{server.name:>14}" for server in servers))
    for row in zip(*(rows(figures[server.name]) for server in servers), strict=True):
        print(f"{row[0][0]:40}" + "".join(f"{value:>14}" for _, value in row))


if __name__ == "__main__":
    main()
