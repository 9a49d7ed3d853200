"""A coding agent's session, replayed: which part of each prompt is computed, and the time to the first token.

    python -m tests.bench.bench_agent_session [--server llama-server] [--turns 30] [--tokens 10000] [--shape smol-135m]

Each turn sends the whole conversation again: system prompt and tools of `--tokens` tokens, then recorded messages,
calls and results. Every tenth turn has a request for a title beside it. In the middle the server is restarted, as a
user would (SIGTERM, and a new process). After the session come a new one with the same system prompt and tools, two new
ones at once, and one whose system prompt ends with another date. The weights are random in the shape of a real model:
recorded answers stand in place of its own, so that every server gets the same prompts. `--server` is another server to
compare with: llama.cpp's, with its defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFReader

from edgelm.base.machine.cpu import usable_cores
from tests.bench.random_models import SHAPES, tokenizer_of, write_model
from tests.ending import end_server

STARTER = Path(__file__).resolve().parents[2] / "models" / "starter" / "starter.gguf"  # its tokenizer is used
CONTEXT = 32_768
PORT = 18_660
START_LIMIT_S = 120.0
TITLE_EVERY = 10
TEMPLATE = """{%- if tools %}<|system|>{{ messages[0].content }}
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
A call is: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|end|>{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
WORDS = "the model file test line change read write folder error result value list function call user answer".split()


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a server for one request."""

    sent: int  # tokens of the prompt
    computed: int
    first_s: float


class Session:
    """A recorded session: the same messages for every server."""

    def __init__(self, turns: int, scale: float, seed: int) -> None:
        self._rng = random.Random(seed)
        date = "The date is 2026-11-22."
        self.system = f"You are an agent that edits code.\n{self._text(round(2220 * scale))}\n{date}"
        self.tools = [self._tool(f"tool_{number}", round(222 * scale)) for number in range(10)]
        self.turns = [self._turn(number) for number in range(turns)]

    def request(self, turn: int, question: str = "Make the tests pass.", system: str = "") -> dict[str, Any]:
        """Return the body of a turn."""
        messages = [{"role": "system", "content": system or self.system}, {"role": "user", "content": question}]
        messages += [message for earlier in self.turns[:turn] for message in earlier]
        return {"messages": messages, "tools": self.tools}

    def title(self, turn: int) -> dict[str, Any]:
        """Return the body of a request that comes beside a turn."""
        system = f"You write titles of three words.\n{self._text(100)}"
        question = f"A title for conversation {turn}: {self._text(40)}"
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=max(words, 1)))

    def _tool(self, name: str, words: int) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
        function = {"name": name, "description": self._text(words), "parameters": parameters}
        return {"type": "function", "function": function}

    def _turn(self, number: int) -> list[dict[str, Any]]:
        """Return an assistant's message with a call, and the tool's result."""
        function = {"name": f"tool_{number % 10}", "arguments": json.dumps({"path": f"src/file_{number}.py"})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        answer = {"role": "assistant", "content": self._text(20), "tool_calls": [call]}
        return [answer, {"role": "tool", "tool_call_id": call["id"], "content": self._text(80)}]


class Server:
    """A server of one model that answers /v1/chat/completions."""

    def __init__(self, name: str, command: list[str], folder: Path, model: str = "agent") -> None:
        self.name = name
        self.model = model
        self._command = command
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        limits = httpx2.Limits(max_keepalive_connections=0)  # llama-server closes connections at any time
        self._client = httpx2.Client(timeout=1200, trust_env=False, limits=limits)
        self.address = ""

    def start(self) -> float:
        """Start the process; return the seconds until the model is loaded."""
        began = time.perf_counter()
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
        return time.perf_counter() - began

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
                    body = {"messages": [{"role": "user", "content": "hi"}]}
                    self.ask(body)
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.2)
        raise SystemExit(f"{self.name} does not start: {(self._folder / f'{self.name}.log').read_text()[-1500:]}")

    def ask(self, body: dict[str, Any]) -> Cost:
        """Send a request; return its cost."""
        more = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        more |= {"max_tokens": 8, "temperature": 0, "seed": 1}
        began, first = time.perf_counter(), 0.0
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        with self._client.stream("POST", f"{self.address}/v1/chat/completions", json=body | more) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"{self.name}: {reply.read().decode()[:500]}")
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                deltas = [choice["delta"] for choice in chunk["choices"]]
                if not first and any(value for delta in deltas for name, value in delta.items() if name != "role"):
                    first = time.perf_counter() - began
                usage, timings = chunk.get("usage") or usage, chunk.get("timings") or timings
        sent = usage["prompt_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        computed = timings["prompt_n"] if cached is None else sent - cached
        return Cost(sent, computed, first or time.perf_counter() - began)

    def ask_at_once(self, bodies: list[dict[str, Any]]) -> list[Cost]:
        """Send requests at the same time."""
        costs: dict[int, Cost] = {}

        def one(index: int) -> None:
            costs[index] = self.ask(bodies[index])

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [costs[index] for index in range(len(bodies))]

    def stop(self) -> float:
        """End the process as a user would; return the seconds until it has ended."""
        process, self._process = self._process, None
        if process is None:
            return 0.0
        began = time.perf_counter()
        end_server(process)
        return time.perf_counter() - began


Row = tuple[str, Cost]


def replay(server: Server, session: Session) -> Iterator[Row]:
    """Run the session and what follows it; yield a name and the cost of each request."""
    turns = len(session.turns)
    print(f"{server.name}: started in {server.start():.1f} s", flush=True)
    for turn in range(turns):
        if turn == turns // 2:
            stopped_s = server.stop()
            print(f"{server.name}: restarted; {stopped_s:.1f} s to end, {server.start():.1f} s to start", flush=True)
        if turn % TITLE_EVERY == 1:
            cost, title = server.ask_at_once([session.request(turn), session.title(turn)])
            yield f"turn {turn + 1}", cost
            yield f"  title beside turn {turn + 1}", title
        else:
            yield f"turn {turn + 1}", server.ask(session.request(turn))
    yield "a new session", server.ask(session.request(0, "Explain the last change."))
    both = [session.request(0, question) for question in ("Find the slow test.", "Write the changelog.")]
    for number, cost in enumerate(server.ask_at_once(both)):
        yield f"two at once: {'second' if number else 'first'}", cost
    tomorrow = session.system.replace("11-22", "11-23")
    yield "the date, last in the system prompt, changes", server.ask(session.request(0, "Go on.", tomorrow))


@contextmanager
def servers(args: argparse.Namespace, model: Path, folder: Path) -> Iterator[list[Server]]:
    threads = str(usable_cores().physical)
    command = [sys.executable, "-m", "edgelm", "serve", "--port", "0", "--json", "--ctx", str(CONTEXT)]
    command += ["--parallel", "4", "--kv", "f16", "--spec", "off", "--threads", threads, str(model)]
    made = [Server("edgelm", command, folder)]
    if args.server:
        command = [str(args.server), "-m", str(model), "--port", str(PORT), "-c", str(CONTEXT), "-t", threads]
        made.append(Server("llama-server", [*command, "--jinja"], folder))
    try:
        yield made
    finally:
        for server in made:
            server.stop()


def print_table(names: list[str], rows: dict[str, list[Row]]) -> None:
    """Print a line for each request, and the sums of the session."""
    print(f"\n{'':<46}" + "".join(f"{name:>30}" for name in names))
    print(f"{'request':<38}{'sent':>8}" + f"{'computed':>17}{'first token':>13}" * len(names))
    for index, (label, cost) in enumerate(rows[names[0]]):
        found = [rows[name][index][1] for name in names]
        shown = "".join(f"{one.computed:>17,}{one.first_s:>11.2f} s" for one in found)
        print(f"{label:<38.38}{cost.sent:>8,}{shown}")
    turns = {name: [cost for label, cost in rows[name] if label.startswith("turn ")] for name in names}
    sent = sum(cost.sent for cost in turns[names[0]])
    sums = [(sum(cost.computed for cost in turns[name]), sum(cost.first_s for cost in turns[name])) for name in names]
    shown = "".join(f"{computed:>17,}{first_s:>11.2f} s" for computed, first_s in sums)
    print(f"{'the turns together':<38}{sent:>8,}{shown}")
    shares = ", ".join(f"{name} {computed / sent:.1%}" for name, (computed, _) in zip(names, sums, strict=True))
    print(f"computed share of the tokens sent: {shares}")


def write_agent_model(path: Path, shape: str) -> None:
    """Write a model of random weights with the starter's tokenizer, filled up to the shape's vocabulary."""
    tokenizer = tokenizer_of(GGUFReader(STARTER))
    write_model(path, SHAPES[shape]._replace(context=CONTEXT), Quant.Q8_0, tokenizer, TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, help="llama.cpp's server")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=10_000, help="of system prompt and tools")
    parser.add_argument("--shape", choices=SHAPES, default="smol-135m")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgelm-bench-") as name:
        folder = Path(name)
        model = folder / "agent.gguf"
        write_agent_model(model, args.shape)
        rows: dict[str, list[Row]] = {}
        with servers(args, model, folder) as made:
            for server in made:
                rows[server.name] = []
                for label, cost in replay(server, Session(args.turns, args.tokens / 10_000, seed=1)):
                    print(f"{server.name}: {label}: {cost.sent:,} sent, {cost.computed:,} computed", flush=True)
                    rows[server.name].append((label, cost))
                server.stop()
        size_mb = model.stat().st_size / 1e6
        print(f"\n{args.shape}, {size_mb:.0f} MB, context {CONTEXT:,}, {usable_cores().physical} threads")
        print_table([server.name for server in made], rows)


if __name__ == "__main__":
    main()
