"""What users get, beside what llama.cpp can: all doors to a model in one alternating run.

    python -m tests.bench.bench_door [MODEL …] [--llama-server PROGRAM] [--rounds 3] [--firsts 6]
        [--beside nothing|chat|browser|compiler]

A MODEL is a file, or smollm2 (the default), gemma3-270m or random-1b of tests/real_models.py. PROGRAM is a file, or
package: that of tests/real_models.py, whose instructions need an Intel processor with AMX. The sides:

- `serve`: `edgelm serve --spec off`, asked with streamed chat completions;
- `chat`: the chat on a pseudo-terminal, with the server that it starts itself. Its figures are those that it saves
  with the answer, which come from the engine's clock; a line below has them from Enter to the saved answer;
- `run`: `edgelm run`, a process for each answer, by the timings that it prints;
- `bare 1`, `bare 2`: a greedy loop over the same llama.cpp with so many threads, in processes of their own;
- `server 1`, `server 2`: with --llama-server, llama.cpp's own with -t 1 and -t 2.

All are greedy and draft nothing. Each prompt is new, random words, with the same number of tokens on all sides: a side
that counts another number has failed. A model without a chat template gets plain texts, and has no row of the chat.
Sides that wait are stopped (SIGSTOP), so that none disturbs another; SIGKILL for this program would leave them so.
Speeds of prompts are from the request to the first token. If a side fails, nothing is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx2

from edgelm import __version__
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.llama_build import find_build
from edgelm.base.runtime import FrontRecord
from edgelm.client.local import OwnFront
from tests.bench.bench_tui import Terminal
from tests.real_models import llama_server, random_1b, real_model

DECODED, SHORT, PROMPTS = 128, 50, (512, 2048)
LEAST_DECODED = 100  # a model may end its answer before
CONTEXT = 4096
LIMIT_S = 180.0
TITLE_S = 5.0
LOOK_S = 0.5  # between two looks into the database of a chat whose screen does not say that it is ready
SETTLE_S = 0.15  # behind SIGCONT
LLAMA_PORT = 18_690
ASK = "Write a very long story. It has many chapters. It is about"
WORDS = (
    "the a dog model answer code list of in and to write story table name price number day red blue once house tree "
    "water light night hand world city road friend letter music paper glass stone river field garden winter summer"
).split()


class DoorError(Exception):
    """A side failed; there is no report."""


class Answer(NamedTuple):
    """One answer of one side. Zero where a side does not tell."""

    prompt: int  # tokens
    tokens: int
    first_s: float  # to the first token
    decode_s: float  # from the first token to the last

    @property
    def speed(self) -> float:
        return (self.tokens - 1) / self.decode_s


class Side(Protocol):
    """A door to the model."""

    name: str

    def pids(self) -> list[int]:
        """Return the processes that wait while another side is measured."""

    def ask(self, text: str, tokens: int) -> Answer: ...


def descendants(pid: int) -> list[int]:
    """Return a process and all that it started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it is gone
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def running(side: Side, stopped: set[int]) -> Iterator[None]:
    """Let a side run while the block runs, and stop it behind; add its processes to `stopped`."""
    signal_all(side.pids(), signal.SIGCONT)
    time.sleep(SETTLE_S if side.pids() else 0)
    try:
        yield
    finally:
        stopped.update(pids := side.pids())
        signal_all(pids, signal.SIGSTOP)


# -- sides -------------------------------------------------------------------------------------------------------------


class HttpSide:
    """A server that is asked with OpenAI's streamed completions."""

    def __init__(self, name: str, address: str, headers: Mapping[str, str], body: dict[str, Any], pid: int) -> None:
        self.name = name
        self.body = body
        self._pid = pid
        self._client = httpx2.Client(base_url=address, headers=headers, timeout=LIMIT_S, trust_env=False)

    def pids(self) -> list[int]:
        return descendants(self._pid)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._client.post(path, json=self.body | body)
        if response.status_code != 200:
            raise DoorError(f"{self.name}: {path} answers {response.status_code}: {response.text[:300]}")
        answer: dict[str, Any] = response.json()
        return answer

    def ask(self, text: str, tokens: int) -> Answer:
        is_chat = self.body.get("is_chat")
        asked = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        options = {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body = {name: value for name, value in self.body.items() if name != "is_chat"} | asked | options
        began, times, usage = time.perf_counter(), [], {}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        with self._client.stream("POST", path, json=body) as response:
            lines = [(time.perf_counter(), line) for line in response.iter_lines()]
        for at, line in lines:
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            if any(map(_has_token, event.get("choices", ()))):
                times.append(at)
        if response.status_code != 200 or not times or not usage:
            raise DoorError(f"{self.name}: status {response.status_code}: {str(lines[-1:])[:300]}")
        return Answer(usage["prompt_tokens"], usage["completion_tokens"], times[0] - began, times[-1] - times[0])


def _has_token(choice: dict[str, Any]) -> bool:
    """Return whether a part of a stream is more than a role."""
    return bool((choice.get("delta") or {}).get("content") or choice.get("text") or choice.get("finish_reason"))


class BareSide:
    """tests/bench/door_bare.py."""

    def __init__(self, model: Path, threads: int, render: Callable[[str], str]) -> None:
        self.name = f"bare {threads}"
        self._render = render
        command = [sys.executable, "-m", "tests.bench.door_bare", str(model), str(threads), str(CONTEXT)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise DoorError(f"{self.name}: the process ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def pids(self) -> list[int]:
        return [self.process.pid]

    def _send(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def count(self, text: str) -> int:
        return int(self._send({"text": self._render(text)})["prompt"])

    def ask(self, text: str, tokens: int) -> Answer:
        return Answer(**self._send({"text": self._render(text), "tokens": tokens}))


class RunSide:
    """`edgelm run`, whose process loads the model and ends."""

    name = "run"

    def __init__(self, model: Path, environment: Mapping[str, str], *, is_chat: bool) -> None:
        self._command = [sys.executable, "-m", "edgelm", "run", str(model), "--json", "--spec=off"]
        self._command += ["--temperature=0", f"--ctx={CONTEXT}", *([] if is_chat else ["--raw"])]
        self._environment = environment

    def pids(self) -> list[int]:
        return []

    def ask(self, text: str, tokens: int) -> Answer:
        command = [*self._command, f"--max-tokens={tokens}"]
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env=self._environment, timeout=LIMIT_S, check=False
        )
        if done.returncode != 0:
            raise DoorError(f"run: {done.stderr.strip()}")
        result = json.loads(done.stdout)
        usage, timings = result["usage"], result["timings"]
        return Answer(
            usage["prompt_tokens"],
            usage["completion_tokens"],
            timings["first_token_ms"] / 1000,
            (usage["completion_tokens"] - 1) / max(timings["decode_tokens_per_second"], 1e-9),
        )


class ChatSide:
    """The chat on a pseudo-terminal; its answers are read from its own database."""

    name = "chat"

    def __init__(self, model: Path, environment: Mapping[str, str]) -> None:
        own = {"EDGELM_TEMPERATURE": "0", "EDGELM_MAX_TOKENS": str(DECODED), "TERM": "xterm-256color"}
        command = [sys.executable, "-m", "edgelm", f"--model={model}", "--spec=off", f"--ctx={CONTEXT}"]
        self.by_the_clock: list[float] = []  # tokens per second from Enter to the saved answer, without the prompt
        self.terminal = Terminal(command, {**environment, **own})
        self._database = Path(environment["EDGELM_DATA_DIR"]) / "chats.db"
        self.terminal.wait_for("· ready", LIMIT_S)

    def pids(self) -> list[int]:
        return descendants(self.terminal.process.pid)

    def ask(self, text: str, tokens: int) -> Answer:
        assert tokens == DECODED, "that is in its environment"
        self.terminal.type(b"\x0e")  # Ctrl+N: a new chat
        self._pass(0.5)
        self.terminal.type(text.encode())
        self._pass(0.5)
        last = self._rows("SELECT max(id) FROM message")[0][0] or 0
        began = time.perf_counter()
        self.terminal.type(b"\r")
        query = f"SELECT stats FROM message WHERE id > {last} AND role = 'assistant' AND stats != ''"
        rows = self._wait(query)
        wall_s = time.perf_counter() - began
        stats = json.loads(rows[0][0])
        count, first_s = stats["completion_tokens"], stats["first_token_ms"] / 1000
        self.by_the_clock.append((count - 1) / (wall_s - first_s))
        titled = "SELECT id FROM chat WHERE id = (SELECT max(id) FROM chat) AND summarized"
        until = time.monotonic() + TITLE_S  # the chat asks for a title, which the next answer must not meet
        while time.monotonic() < until and not self._rows(titled):
            self._pass(0.1)
        return Answer(stats["prompt_tokens"], count, first_s, (count - 1) / stats["tokens_per_second"])

    def _wait(self, query: str) -> list[tuple[Any, ...]]:
        """Return rows as soon as there are any. A look takes the cores on which the model decodes: few are taken."""
        deadline = time.monotonic() + LIMIT_S
        while not (rows := self._rows(query)):
            self.terminal.output, until = b"", time.monotonic() + LOOK_S
            while b"ready" not in self.terminal.output and time.monotonic() < until:
                self._pass(0.02)
            if time.monotonic() > deadline or self.terminal.process.poll() is not None:
                raise DoorError("the chat does not answer")
        return rows

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        database = sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)
        try:
            return database.execute(query).fetchall()
        finally:
            database.close()

    def _pass(self, seconds: float) -> None:
        """Let time pass while the screen is read: a program whose terminal is full waits."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            self.terminal.read(left)
        self.terminal.output = self.terminal.output[-100_000:]


# -- the sides of a model, and the loads beside them -------------------------------------------------------------------


def environment_in(folder: Path) -> dict[str, str]:
    """Return an environment with folders of its own; the facts of the machine are measured in the shared cache."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDGELM_")}
    places = {f"EDGELM_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    return clean | places | {"EDGELM_CACHE_DIR": str(folder.parent / "cache")}


def open_front(stack: ExitStack, model: Path, folder: Path) -> FrontRecord:
    """Start `edgelm serve` until the stack is left."""
    arguments = ["--spec=off", f"--ctx={CONTEXT}", str(model)]
    front = OwnFront(arguments, folder / "serve.log", environment_in(folder))
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    stack.callback(lambda: loop.run_until_complete(front.stop()))
    return loop.run_until_complete(front.start())


def open_llama_server(
    stack: ExitStack, program: Path, environment: Mapping[str, str], model: Path, threads: int, *, is_chat: bool
) -> HttpSide:
    options = ["-m", str(model), "--host", "127.0.0.1", "--port", str(LLAMA_PORT + threads), "-t", str(threads)]
    options += ["-c", str(CONTEXT), "-np", "1", "--jinja"]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen([str(program), *options], stdout=nowhere, stderr=nowhere, env=os.environ | environment)
    stack.callback(end, process)
    address = f"http://127.0.0.1:{LLAMA_PORT + threads}"
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            if httpx2.get(f"{address}/health", trust_env=False).status_code == 200:
                break
        except httpx2.TransportError:
            pass
        if time.monotonic() > deadline or process.poll() is not None:
            raise DoorError(f"llama-server -t {threads} does not start (exit code {process.poll()})")
        time.sleep(0.1)
    body = {"cache_prompt": False, "is_chat": is_chat}
    return HttpSide(f"server {threads}", address, {}, body, process.pid)


def end(process: subprocess.Popen[Any]) -> None:
    signal_all([process.pid], signal.SIGCONT)
    process.kill()
    process.wait()


BUSY = "while True: pass"
BURSTS = """
import time
while True:
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until: pass
    time.sleep(0.15)
"""


@contextmanager
def load_beside(kind: str, model: Path, folder: Path) -> Iterator[None]:
    """Load the machine: an idle chat, bursts of 50 ms five times a second, or a core that is always busy."""
    if kind == "nothing":
        yield
    elif kind == "chat":
        chat = ChatSide(model, environment_in(folder / "beside"))
        try:
            yield
        finally:
            chat.terminal.close()
    else:
        process = subprocess.Popen([sys.executable, "-c", BURSTS if kind == "browser" else BUSY])
        try:
            yield
        finally:
            end(process)


@dataclass
class Door:
    """The open sides of one model, and what was measured."""

    sides: list[Side]
    counter: BareSide
    stopped: set[int]  # processes, also those whose parents are gone
    rng: random.Random
    answers: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)  # by kind and side

    def text(self, num_tokens: int) -> str:
        """Return a new random text whose prompt has so many tokens."""
        words: list[str] = []
        with running(self.counter, self.stopped):
            for _ in range(200):
                missing = num_tokens - self.counter.count(" ".join([ASK, *words]))
                if missing == 0:
                    return " ".join([ASK, *words])
                if missing < 0 and not words:
                    break
                words = words + self.rng.choices(WORDS, k=missing) if missing > 0 else words[:missing]
        raise DoorError(f"there is no text for a prompt of {num_tokens} tokens")

    def measure(self, kind: str, num_tokens: int, decoded: int, sides: list[Side]) -> None:
        """Ask each of the sides once."""
        for side in sides:
            for _ in range(4):
                text = self.text(num_tokens)
                with running(side, self.stopped):
                    answer = side.ask(text, decoded)
                if answer.prompt != num_tokens:
                    raise DoorError(f"{side.name} counts {answer.prompt} tokens of a prompt of {num_tokens}")
                if answer.tokens >= min(decoded, LEAST_DECODED):
                    break
            else:
                raise DoorError(f"{side.name} ends its answers after {answer.tokens} tokens")
            self.answers.setdefault((kind, side.name), []).append(answer)
            print(f"{kind}, {side.name}: {answer.first_s:.3f} s, {answer.decode_s:.3f} s", file=sys.stderr, flush=True)


def measure(model: Path, args: argparse.Namespace, folder: Path) -> Door:
    """Open all doors to a model and measure them. Raises DoorError."""
    with ExitStack() as stack:
        front = open_front(stack, model, folder / "serve")
        serve = HttpSide("serve", front.address, front.headers, {"model": str(model)}, front.pid)
        mark = rendered = "MARK"
        is_chat = LlamaTokenizer.from_file(model).chat_template is not None
        if is_chat:
            rendered = str(serve.post("/apply-template", {"messages": [{"role": "user", "content": mark}]})["prompt"])
        before, _, after = rendered.partition(mark)
        serve.body["is_chat"] = is_chat
        bare = [BareSide(model, threads, lambda text: before + text + after) for threads in (1, 2)]
        for side in bare:
            stack.callback(end, side.process)
        sides: list[Side] = [serve, *bare, RunSide(model, environment_in(folder / "run"), is_chat=is_chat)]
        if is_chat:
            chat = ChatSide(model, environment_in(folder / "chat"))
            stack.callback(chat.terminal.close)
            sides.append(chat)
        if args.llama_server:
            package = args.llama_server == "package"
            program, environment = llama_server() if package else (Path(args.llama_server), {})
            sides += [
                open_llama_server(stack, program, environment, model, threads, is_chat=is_chat) for threads in (1, 2)
            ]
        stopped: set[int] = set()
        stack.callback(lambda: signal_all(list(stopped), signal.SIGCONT))  # a stopped process cannot end
        for side in sides:
            with running(side, stopped):
                pass
        stack.enter_context(load_beside(args.beside, model, folder))
        door = Door(sides, bare[0], stopped, random.Random())
        door.measure("warm-up", SHORT, DECODED, sides)
        for number in range(args.rounds):
            order = [*sides[number % len(sides) :], *sides[: number % len(sides)]]
            door.measure("decode", SHORT, DECODED, order)
            for length in PROMPTS:
                door.measure(f"prompt {length}", length, 1, [side for side in order if side.name != "chat"])
            for _ in range(args.firsts):
                door.measure("first", SHORT, 4, [side for side in order if side.name not in ("chat", "run")])
        return door


# -- report ------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    title: str
    kind: str
    value: Callable[[Answer], float]
    is_better: Callable[[float, float], bool]


def prompt_speed(answer: Answer) -> float:
    return answer.prompt / answer.first_s


ROWS = (
    Row(f"decode, {DECODED} tokens, tok/s", "decode", lambda answer: answer.speed, float.__gt__),
    *(Row(f"prompt of {length}, tok/s", f"prompt {length}", prompt_speed, float.__gt__) for length in PROMPTS),
    Row(f"first token of a prompt of {SHORT}, ms", "first", lambda answer: 1000 * answer.first_s, float.__lt__),
)


def report(model: Path, door: Door) -> None:
    """Print medians, the ratio to the better of the two bare loops, and the least and most."""
    size_mb = model.stat().st_size / 1e6
    print(f"\n{model.stem}, {size_mb:.0f} MB")
    for row in ROWS:
        kinds = {row.kind, "decode"} if row.kind == "first" else {row.kind}
        values = {
            side.name: [row.value(answer) for kind in kinds for answer in door.answers.get((kind, side.name), ())]
            for side in door.sides
        }
        medians = {name: statistics.median(runs) for name, runs in values.items() if runs}
        first, second = medians["bare 1"], medians["bare 2"]
        best = first if row.is_better(first, second) else second
        print(f"\n  {row.title}")
        for name, median in medians.items():
            least, most = min(values[name]), max(values[name])
            beside = f"{median - best:+8.1f} ms" if row.kind == "first" else f"{median / best:8.2f}"
            print(f"    {name:<10}{median:9.1f}{beside}   {least:.1f} to {most:.1f}, of {len(values[name])}")
    for side in door.sides:
        if isinstance(side, ChatSide):
            print(f"\n  chat from Enter to the saved answer: {statistics.median(side.by_the_clock):.1f} tok/s")


def header(args: argparse.Namespace, load: float, seconds: float) -> str:
    """Return what was measured with what, on which machine."""
    build = find_build()
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    processor = next((line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")), "")
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), [])
    own = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if name in flags]
    machine, cores = processor or platform.machine(), usable_cores().physical
    return "\n".join(
        (
            f"{datetime.now(UTC).date()}, edgelm {__version__}, {build.package} {build.version}",
            f"{machine} ({', '.join(own)}), {cores} cores; load before {load:.2f}; beside it: {args.beside}",
            f"{args.rounds} rounds, alternating, {seconds:.0f} s; greedy, no drafts; run and chat: their own figures",
            "ratios and differences are to the better bare loop",
        )
    )


MODELS: Mapping[str, Callable[[], Path]] = {
    "smollm2": lambda: real_model("smollm2"),
    "gemma3-270m": lambda: real_model("gemma3-270m"),
    "random-1b": random_1b,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["smollm2"])
    parser.add_argument("--llama-server", metavar="PROGRAM", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--firsts", type=int, default=6, help="more prompts of 50 tokens in each round")
    parser.add_argument("--beside", choices=("nothing", "chat", "browser", "compiler"), default="nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the sides are ended: a stopped process never ends
    load = os.getloadavg()[0]
    began = time.monotonic()
    done: list[tuple[Path, Door]] = []
    with tempfile.TemporaryDirectory(prefix="edgelm-door-", ignore_cleanup_errors=True) as name:
        for number, asked in enumerate(args.models):
            model = MODELS[asked]() if asked in MODELS else Path(asked).resolve()
            try:
                done.append((model, measure(model, args, Path(name, str(number)))))
            except (DoorError, TimeoutError, httpx2.HTTPError, subprocess.TimeoutExpired) as error:
                print(f"no report: {model.name}: {error}", file=sys.stderr)
                return 1
    print(header(args, load, time.monotonic() - began))
    for model, door in done:
        report(model, door)
    return 0


if __name__ == "__main__":
    sys.exit(main())
