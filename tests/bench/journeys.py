"""Counts the modules of edgelm that take part in a journey: those in which a function runs, in all its processes.

    python -m tests.bench.journeys [--tree CHECKOUT] [--names]

The journeys: `edgelm run` to its first token; a key in the chat (Enter behind a short message) to the answer; a POST to
the first token of a stream. For the last two, server and model are there already. --tree names another checkout, whose
code runs in this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2

LIMIT_S = 180.0
QUIET_S = 2.0  # without a new module, a journey is over
# Installed in every process by PYTHONPATH. A new epoch begins when the file changes; each module counts once an epoch.
HOOK = """
import os, sys, threading, time
folder, tree = os.environ["JOURNEY"], os.environ["JOURNEY_TREE"]
state = {"epoch": None, "at": 0.0}
seen = set()
modules = {}
def hook(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    name = modules.get(code.co_filename)
    if name is None:
        path = os.path.realpath(code.co_filename)
        ours = path.startswith(tree) and path.endswith(".py") and not path[len(tree):].startswith(("/tests", "/."))
        name = modules[code.co_filename] = path[len(tree) + 1:] if ours else ""
    if not name or code.co_name == "<module>":
        return
    now = time.monotonic()
    if now - state["at"] > 0.05:
        state["at"] = now
        epoch = os.stat(folder + "/epoch").st_mtime_ns
        if epoch != state["epoch"]:
            state["epoch"] = epoch
            seen.clear()
    if name not in seen:
        seen.add(name)
        with open(f"{folder}/{state['epoch']}-{os.getpid()}", "a") as file:
            file.write(name + "\\n")
if "JOURNEY" in os.environ:
    threading.setprofile(hook)
    sys.setprofile(hook)
"""


class Recording:
    """The modules that ran in one epoch, in every process."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self._folder = folder
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        places = {f"EDGELM_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
        path = os.pathsep.join([str(folder / "hook"), str(tree)])
        self.environment = os.environ | places | {"PYTHONPATH": path, "TERM": "xterm-256color"}
        self.environment |= {"JOURNEY": str(folder), "JOURNEY_TREE": str(tree.resolve()), "EDGELM_SEED": "1"}
        self.begin()

    def begin(self) -> None:
        """Begin a new epoch."""
        (self._folder / "epoch").write_text(str(time.time_ns()))
        time.sleep(0.2)

    def modules(self) -> set[str]:
        """Return the modules of this epoch, once no more appear."""
        names: set[str] = set()
        deadline = changed = time.monotonic()
        while time.monotonic() < deadline + LIMIT_S and time.monotonic() - changed < QUIET_S:
            epoch = (self._folder / "epoch").stat().st_mtime_ns
            now = {line for file in self._folder.glob(f"{epoch}-*") for line in file.read_text().splitlines()}
            if now != names:
                names, changed = now, time.monotonic()
            time.sleep(0.1)
        return names


def journey_of_run(recording: Recording) -> set[str]:
    command = [sys.executable, "-P", "-m", "edgelm", "run", "starter", "What is a GPU?", "--max-tokens", "2"]
    subprocess.run(command, env=recording.environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    recording.begin()  # the first run also checks the machine
    subprocess.run(command, env=recording.environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return recording.modules()


def journey_of_a_post(recording: Recording) -> set[str]:
    body = {"model": "starter", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    command = [sys.executable, "-P", "-m", "edgelm", "serve", "--port", "0", "--json"]
    server = subprocess.Popen(command, env=recording.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert server.stdout
        address = json.loads(server.stdout.readline())["address"]
        with httpx2.Client(base_url=address, timeout=LIMIT_S, trust_env=False) as client:
            client.post("/v1/chat/completions", json=body, headers={"prefer": "wait"})
            recording.modules()
            recording.begin()
            client.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": "hello"}]})
            return recording.modules()
    finally:
        server.terminate()
        server.wait()


def journey_of_a_key(recording: Recording) -> set[str]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-P", "-m", "edgelm"], recording.environment)
    os.set_blocking(terminal, False)
    try:
        for text in ("hi", "hello there"):  # the first message loads the model
            recording.modules()
            for char in text:
                os.write(terminal, char.encode())
            _drain(terminal, 1.0)
            recording.modules()
            recording.begin()
            os.write(terminal, b"\r")
            _drain(terminal, 12.0)
        return recording.modules()
    finally:
        os.kill(pid, 15)
        _drain(terminal, 3.0)
        os.close(terminal)
        os.waitpid(pid, 0)


def _drain(terminal: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.read(terminal, 65536)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--names", action="store_true", help="print the modules too")
    arguments = parser.parse_args()
    journeys = {
        "edgelm run": journey_of_run,
        "POST to first token": journey_of_a_post,
        "a key in the chat": journey_of_a_key,
    }
    for title, journey in journeys.items():
        with tempfile.TemporaryDirectory(prefix="j-") as folder:
            names = journey(Recording(Path(folder), arguments.tree))
        print(f"{title}: {len(names)} modules", flush=True)
        if arguments.names:
            print("\n".join(f"    {name}" for name in sorted(names)), flush=True)


if __name__ == "__main__":
    main()
