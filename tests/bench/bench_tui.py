"""What the terminal chat costs: the time to its first picture, and how long its event loop is held while text streams.

`python -m tests.bench.bench_tui` runs the chat in a pseudo-terminal of 120x40 against an endpoint that streams 200
tokens per second into a chat of 1,000 blocks, with the inspector closed and open. Limits of the issue: first paint
0.5 s, p99 of the gaps 50 ms, below 0.5 % of a core while nothing happens.

`python -m tests.bench.bench_tui keys [CHECKOUT]` types while nothing happens and at 50 tokens per second, in 20 s, also
into the chat of another checkout: the time to the character on the screen, processor and memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from edgelm.chats.history import Chat, Message
from edgelm.chats.store import Store
from tests.tui.fake_endpoint import ANSWER

BLOCKS, BLOCKS_EACH = 1000, 5  # ANSWER has five blocks
TOKENS_PER_SECOND = 200
STREAM_S = 20
NUM_TOKENS = TOKENS_PER_SECOND * STREAM_S
KEYS_TOKENS_PER_SECOND = 50
NUM_KEYS = 40
KEYS = "жщюыэ"  # no answer has them
STARTS = 5
IDLE_S = 20


def fill(path: Path) -> int:
    """Write a chat of many blocks; return its id."""
    store = Store(path)
    chat = Chat(title="A thousand blocks")
    parent = None
    with store.transaction():
        store.put_chat(chat)
        for i in range(BLOCKS // BLOCKS_EACH):
            for role, text in (("user", f"Question {i}"), ("assistant", ANSWER)):
                message = Message(chat=chat.id, parent=parent, role=role, text=text, model="starter")  # type: ignore[arg-type]
                store.put_message(message)
                parent = message.id
        chat.leaf = parent
        store.put_chat(chat)
    store.close()
    return chat.id


class Terminal:
    """A program in a pseudo-terminal whose output is read as it comes."""

    def __init__(self, command: list[str], environment: Mapping[str, str], columns: int = 120, rows: int = 40) -> None:
        self.started = time.perf_counter()
        self.output = b""
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        os.close(follower)
        self._leader = leader

    def wait_for(self, text: str, timeout: float = 30.0) -> float:
        """Return when a text had been written, in seconds since the start."""
        until = time.perf_counter() + timeout
        while text not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output.decode(errors="replace")):
            left = until - time.perf_counter()
            if left <= 0 or not self.read(left):
                raise TimeoutError(f"{text!r} did not appear: {self.output[-2000:]!r}")
        return time.perf_counter() - self.started

    def read(self, timeout: float) -> bool:
        """Take what comes; say whether the program is still there."""
        if select.select([self._leader], [], [], timeout)[0]:
            try:
                data = os.read(self._leader, 1 << 16)
            except OSError:
                return False
            self.output += data
            return bool(data)
        return True

    def type(self, keys: bytes) -> None:
        os.write(self._leader, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._leader)


def main() -> None:
    keys, rate = sys.argv[1:2] == ["keys"], KEYS_TOKENS_PER_SECOND if sys.argv[1:2] == ["keys"] else TOKENS_PER_SECOND
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "EDGELM_DATA_DIR": folder, "EDGELM_CACHE_DIR": folder, "EDGELM_RUNTIME_DIR": folder,
            "EDGELM_CONFIG_DIR": folder, "TERM": "xterm-256color", "COLORTERM": "truecolor",
        }  # fmt: skip
        chat_id = fill(Path(folder) / "chats.db")
        endpoint = subprocess.Popen(
            [sys.executable, "-m", "tests.tui.fake_endpoint", "0", str(rate), str(NUM_TOKENS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert endpoint.stdout is not None
            address = endpoint.stdout.readline().strip()
            if keys:
                _measure_keys(address, {**environment, "PYTHONPATH": sys.argv[2] if sys.argv[2:] else str(Path.cwd())})
                return
            _measure_start(address, environment)
            for inspector in ("closed", "open"):
                _measure_gaps(address, environment, chat_id, Path(folder) / f"{inspector}.json", inspector)
        finally:
            endpoint.kill()
            endpoint.wait()


def _measure_start(address: str, environment: Mapping[str, str]) -> None:
    paints, readies = [], []
    for _ in range(STARTS):
        terminal = Terminal([sys.executable, "-m", "edgelm", "--endpoint", address], environment)
        try:
            paints.append(terminal.wait_for("Message: Enter sends"))
            readies.append(terminal.wait_for("· ready"))
        finally:
            terminal.close()
    print(f"start: first paint {statistics.median(paints):.2f} s (worst {max(paints):.2f}), "
          f"ready {statistics.median(readies):.2f} s (worst {max(readies):.2f}), {STARTS} starts")  # fmt: skip


def _measure_keys(address: str, environment: Mapping[str, str]) -> None:
    terminal = Terminal([sys.executable, "-P", "-m", "edgelm", "--endpoint", address], environment)
    try:
        ready = terminal.wait_for("· ready")
        idle = _type(terminal)
        terminal.type(b"\r")
        terminal.wait_for("Quicksort picks")
        process = Path("/proc") / str(terminal.process.pid)
        started, cpu = time.perf_counter(), _cpu_s(process)
        streaming = _type(terminal)
        cpu = (_cpu_s(process) - cpu) / (time.perf_counter() - started)
        sizes = dict(line.split(":") for line in (process / "smaps_rollup").read_text().splitlines()[1:])
        memory, own = (int(sizes[name].split()[0]) / 1024 for name in ("Rss", "Pss"))
    finally:
        terminal.close()
    print(
        f"keys: ready {ready:.2f} s; key to screen idle {_times(idle)}, "
        f"at {KEYS_TOKENS_PER_SECOND} tok/s {_times(streaming)}, then processor {100 * cpu:.0f} % of a core; "
        f"memory {memory:.0f} MB ({own:.0f} its own)"
    )


def _type(terminal: Terminal) -> list[float]:
    """Type characters; return how many milliseconds each took to the screen."""
    times = []
    for number in range(NUM_KEYS):
        key = KEYS[number % len(KEYS)].encode()
        terminal.output, started = b"", time.perf_counter()
        terminal.type(key)
        while key not in terminal.output:
            terminal.read(1)
        times.append(1000 * (time.perf_counter() - started))
        while time.perf_counter() < started + 0.13:  # no multiple of a frame
            terminal.read(0.01)
    return times


def _times(times: list[float]) -> str:
    return f"{statistics.median(times):.0f} ms (worst {max(times):.0f})"


def _cpu_s(process: Path) -> float:
    """Return the processor time of a process."""
    fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _measure_gaps(address: str, environment: Mapping[str, str], chat_id: int, result: Path, inspector: str) -> None:
    command = [sys.executable, "-m", "tests.bench.bench_tui", "child", address, str(chat_id), str(result), inspector]
    terminal = Terminal(command, environment)
    try:
        while terminal.read(STREAM_S + IDLE_S + 30):
            pass
    finally:
        terminal.close()
    if not result.exists():
        raise RuntimeError(terminal.output[-3000:].decode(errors="replace"))
    found = json.loads(result.read_text())
    gaps = sorted(found["gaps_ms"])

    def at(share: float) -> float:
        return gaps[min(len(gaps) - 1, int(share * len(gaps)))]

    print(
        f"stream, inspector {inspector}: {found['tokens']} tokens in {found['seconds']:.1f} s into {BLOCKS} blocks, "
        f"opened in {found['open_ms']:.0f} ms; event-loop gaps p50 {at(0.5):.1f} ms, p99 {at(0.99):.1f} ms, "
        f"p99.9 {at(0.999):.1f} ms, longest {gaps[-1]:.1f} ms; processor {100 * found['cpu']:.0f} %, "
        f"then idle {100 * found['idle']:.2f} %"
    )


def _child(address: str, chat_id: int, result: Path, inspector: str) -> None:
    from edgelm.base.config import load_config
    from edgelm.client.link import Link
    from edgelm.tui.app import ChatApp
    from edgelm.tui.screen import ChatScreen
    from edgelm.tui.workspace import ChatDefaults

    places = load_config({}).places
    link = Link(endpoint=address, api_key=None, runtime=places.runtime, log=places.cache / "log")

    found: dict[str, object] = {}

    async def drive(app: ChatApp) -> None:
        screen = app.screen
        assert isinstance(screen, ChatScreen)
        while link.connected is None:  # noqa: ASYNC110 - a measurement, from outside
            await asyncio.sleep(0.05)
        started = time.perf_counter()
        await screen.open_chat(chat_id).wait()
        open_ms = 1000 * (time.perf_counter() - started)
        if inspector == "open":
            screen.run_command("inspect", "")
        await asyncio.sleep(2)
        gaps: list[float] = []
        screen.send("Go on")
        answer = screen.workspace.answer
        assert answer is not None
        started, cpu = time.perf_counter(), time.process_time()
        while screen.workspace.answer is not None:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(1000 * (time.perf_counter() - before) - 1)
        seconds = time.perf_counter() - started
        cpu = (time.process_time() - cpu) / seconds
        await asyncio.sleep(3)  # it collects garbage, and saves
        idle = time.process_time()
        await asyncio.sleep(IDLE_S)
        idle = (time.process_time() - idle) / IDLE_S
        found.update(gaps_ms=gaps, tokens=answer.num_tokens, seconds=seconds, open_ms=open_ms, cpu=cpu, idle=idle)
        app.exit()

    class Driven(ChatApp):
        def on_ready(self) -> None:
            self._driving = asyncio.create_task(drive(self))

    Driven(places.data / "chats.db", link, ChatDefaults()).run()
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _child(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    else:
        main()
