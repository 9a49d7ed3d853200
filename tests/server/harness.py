"""Real fronts for tests: `edgelm serve` as a process, asked over HTTP; every wait has a limit.

Knows addresses and process ids. Knows nothing of what a test wants to see.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx2

LIMIT_S = 60.0
ENDLESS = {"logit_bias": {"2": -100}, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # 2: tests.tiny's EOS


class Front:
    """A running `edgelm serve`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.process = process
        self.address = address
        self.log = log
        self.picture_host = ""  # that it may fetch from, where a test has one
        self.http = httpx2.Client(base_url=address, timeout=LIMIT_S, trust_env=False)

    def chat(self, model: str = "tiny", text: str = "hello", **fields: Any) -> httpx2.Response:
        headers = {"prefer": "wait"} | fields.pop("headers", {})
        return self.http.post("/v1/chat/completions", json=body(model, text, **fields), headers=headers)

    def events(self, model: str = "tiny", text: str = "hello", **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer; leaving the iterator closes the connection."""
        wanted = body(model, text, **fields) | {"stream": True}
        with self.http.stream("POST", "/v1/chat/completions", json=wanted, headers={"prefer": "wait"}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    def ps(self, name: str | None = None) -> Any:
        """Return /edgelm/ps, or what it says of one model: None where it is not there."""
        state = self.http.get("/edgelm/ps").json()
        return state if name is None else next((each for each in state["models"] if each["model"] == name), None)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


def body(model: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8} | fields


@contextmanager
def serving(environment: dict[str, str], *arguments: str | Path, log: Path, module: str = "edgelm") -> Iterator[Front]:
    """Run `edgelm serve` on a free port while the block runs."""
    command = [sys.executable, "-m", module, "serve", "--port", "0", "--json", *map(str, arguments)]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,  # a group of its own, so that a test can do as Ctrl-C does
        )
    try:
        front = Front(process, json.loads(read_line(process))["address"], log)
        with front.http:
            yield front
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for stream in (process.stdin, process.stdout):
            assert stream
            stream.close()


def read_line(process: subprocess.Popen[bytes]) -> bytes:
    """Return the first line of standard output."""
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    assert ready, "nothing was printed"
    line = process.stdout.readline()
    assert line, f"it ended with {process.wait(LIMIT_S)}"
    return line


def until(what: str, true: Callable[[], Any]) -> Any:
    """Wait until a condition holds, and return its value."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := true()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return value


@contextmanager
def watching(
    front: Front, headers: dict[str, str] | None = None, query: str = ""
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Collect the engine's events, by name, while the block runs."""
    seen: list[tuple[str, dict[str, Any]]] = []
    with httpx2.Client(base_url=front.address, timeout=LIMIT_S, trust_env=False) as http, ExitStack() as stack:
        answer = stack.enter_context(http.stream("GET", f"/edgelm/events{query}", headers=headers))
        assert answer.status_code == 200

        def read() -> None:
            name = ""
            with suppress(httpx2.HTTPError):
                for line in answer.iter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        seen.append((name, json.loads(value)))
            seen.append(("end", {}))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        yield seen
        http.close()


class Watch:
    """The slowest answer of /health while the block runs: by the clock, and in processor time of the front."""

    def __init__(self, front: Front) -> None:
        self._address = front.address
        self._pid = front.process.pid
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.slowest_s = self.slowest_cpu_s = 0.0

    def check(self, limit_s: float) -> None:
        """Check that the front never worked for so long before it answered. A busy machine is not a failure."""
        assert self.slowest_cpu_s < limit_s
        assert self.slowest_s < 20 * limit_s

    def _ask(self) -> None:
        with httpx2.Client(base_url=self._address, timeout=10 * LIMIT_S, trust_env=False) as client:
            while not self._over.wait(0.005):
                begin, used_s = time.monotonic(), cpu_s(self._pid)
                assert client.get("/health").status_code == 200
                self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
                self.slowest_cpu_s = max(self.slowest_cpu_s, cpu_s(self._pid) - used_s)
                self._begun.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._begun.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Figures(NamedTuple):
    """The memory and the open files of a front and of one of its engines."""

    front_bytes: int
    engine_bytes: int
    front_files: int
    engine_files: int

    def __str__(self) -> str:
        front, engine = self.front_bytes / 2**20, self.engine_bytes / 2**20
        return f"front {front:.0f} MiB, {self.front_files} files; engine {engine:.0f} MiB, {self.engine_files} files"


def figures(front: Front, model: str) -> Figures:
    """Return the figures of now. Linux only."""
    pids = front.process.pid, front.ps(model)["pid"]
    return Figures(*map(rss_bytes, pids), *map(num_open_files, pids))


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used; where the system does not tell it, a clock."""
    if sys.platform != "linux":
        return time.monotonic()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # of the program, and of the system for it


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def num_open_files(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def processes() -> dict[int, Path]:
    """Return the living processes, by id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it ended meanwhile
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found[int(folder.name)] = folder
    return found


def processes_of(environment: dict[str, str]) -> dict[int, str]:
    """Return the command lines of living processes that were started with a test's runtime folder, by id."""
    marker = f"EDGELM_RUNTIME_DIR={environment['EDGELM_RUNTIME_DIR']}".encode()
    found = {}
    for pid, folder in processes().items():
        with suppress(OSError):
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                found[pid] = (folder / "cmdline").read_text().replace("\0", " ")
    return found
