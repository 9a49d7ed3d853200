"""Agents of the command line, each started by `edgelm launch` in a home of its own, against a scripted model.

Each runs twice: a task, for which the model reasons, calls two of the agent's own tools and answers; and a message
after which the model does not stop, so that the answer is cut off. A transcript of both is kept: the command, what the
agent printed, and the shape of what the server saw.

    python -m tests.clients.launched --bin FOLDER --out FOLDER [AGENT …]

Runs in a network namespace that has loopback alone (`make clients`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgelm import __version__
from edgelm.commands.launch.agents import AGENTS, find_agent
from tests.clients.agents import Outcome
from tests.clients.programs import LIMIT_S, run_program
from tests.clients.recorder import Exchange, Record, recording
from tests.clients.scripted import ANSWER, ASIDE, CONTEXT, ENDLESS, TALK, Call, write_scripted
from tests.clients.serve import serving_model

KEY = "a-key-of-the-tests"
MODEL = "scripted"
CUT = ("length", "max_tokens", "incomplete")  # ends of an answer, by dialect
PRINTED_LINES = 40
NOISE = re.compile(r"^ +at \S+ \(|DeprecationWarning|AI SDK Warning|PATH aliases|bubblewrap|^session id:")
TASK = "Read README.md and run `echo 42`; then tell what you saw."


@dataclass(frozen=True, slots=True)
class Script:
    """How an agent is run without a terminal: its arguments, and its own tools as the model calls them."""

    arguments: tuple[str, ...]  # PROMPT is the message
    first: Call
    second: Call
    num_tools: int = 2
    context: int = 32_768  # a quarter of it is the longest answer
    closed_text: bool = False  # its licence keeps its text: only the model's answer is in the transcript


def _shell(name: str, argument: str = "command", **more: object) -> Call:
    return Call(name, {argument: "echo 42", **more})


NO_CALLS = (Call("none", {}), Call("nothing", {}))  # of a program without tools
FUNCTIONS = """def read(path: str) -> str:
    'Read a file'
    return open(path).read()


def run(command: str) -> str:
    'Run a command'
    return '42'
"""
SCRIPTS = {
    "claude": Script(
        ("-p", "PROMPT", "--allowedTools", "Read,Bash"),
        Call("Read", {"file_path": "PROJECT/README.md"}),
        _shell("Bash"),
        closed_text=True,
        context=CONTEXT,
    ),
    "codex": Script(
        ("exec", "--skip-git-repo-check", "--sandbox", "read-only", "PROMPT"),
        _shell("exec_command", "cmd"),
        Call("exec_command", {"cmd": "cat README.md"}),
    ),
    "opencode": Script(
        ("run", "PROMPT"), Call("read", {"filePath": "PROJECT/README.md"}), _shell("bash"), context=65_536
    ),
    "pi": Script(("-p", "PROMPT"), Call("read", {"path": "README.md"}), _shell("bash")),
    "cline": Script(
        ("--timeout", f"{LIMIT_S:.0f}", "PROMPT"),
        Call("read_files", {"files": [{"path": "PROJECT/README.md"}]}),
        Call("run_commands", {"commands": ["echo 42"]}),
        context=65_536,
    ),
    "aider": Script(("--no-git", "--yes-always", "--no-stream", "--message", "PROMPT"), *NO_CALLS, num_tools=0),
    "continue": Script(("-p", "PROMPT", "--auto"), Call("Read", {"filepath": "PROJECT/README.md"}), _shell("Bash")),
    "llm": Script(("--td", "--functions", FUNCTIONS, "PROMPT"), Call("read", {"path": "README.md"}), _shell("run")),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Where an agent runs: a project of its own, and a server of its script's model behind a recorder."""

    root: Path  # of all folders
    project: Path
    record: Record

    @property
    def home(self) -> Path:
        return self.root / "home"

    def log(self) -> str:
        """Return the end of the server's log."""
        return (self.root / "server" / "serve.log").read_text()[-2000:]


@dataclass(slots=True)
class Run:
    """A run of an agent: its exit code, output, and what the server saw."""

    code: int
    output: str
    seen: list[Exchange]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agents", nargs="*", help="some of the agents")
    parser.add_argument("--bin", type=Path, action="append", default=[], help="folder with the agents' programs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the transcripts")
    arguments = parser.parse_args()
    failed = False
    for agent in AGENTS:
        if arguments.agents and agent.name not in arguments.agents:
            continue
        outcomes = list(checked(agent.name, arguments.bin, arguments.out))
        wrong = [f"{one.check}: {one.outcome}: {one.reason}" for one in outcomes if one.outcome != "passed"]
        failed = failed or any(one.outcome == "failed" for one in outcomes)
        print(f"{agent.name:<10} {'; '.join(wrong) or 'passed'}", flush=True)
    return failed


def checked(name: str, programs: Sequence[Path], out: Path) -> Iterator[Outcome]:
    """Run an agent twice, write its transcript into a folder, and yield the outcome of each check."""
    path = search_path(programs)
    if shutil.which(find_agent(name).command, path=path) is None:
        yield Outcome("all", "skipped", "not installed here")
        return
    script = SCRIPTS[name]
    with stage(script, {"EDGELM_API_KEY": KEY}) as place:
        environment = _environment(place, path)
        version = version_of(name, environment)
        task = _run(name, script, TASK, place, environment)
        cut = _run(name, script, f"{TALK} until you are cut off", place, environment)
        shown = _print(name, environment, place.project)
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.txt").write_text(_scrubbed(_transcript(name, version, script, shown, task, cut), place.root))
        outcomes = list(_outcomes(script, task, cut))
        if any(one.outcome == "failed" for one in outcomes):
            print(task.output[-3000:], "\n----", cut.output[-1500:])
            print(place.log())
    yield from outcomes


def search_path(programs: Sequence[Path]) -> str:
    """Return PATH with the folders of the agents' programs before it."""
    return os.pathsep.join([*(str(folder.resolve()) for folder in programs), os.environ["PATH"]])


@contextmanager
def stage(script: Script, settings: Mapping[str, str]) -> Iterator[Stage]:
    """Serve a script's model while the block runs, with a home and a project beside it."""
    with tempfile.TemporaryDirectory(prefix="edgelm-launched-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        (root / "home").mkdir()
        (project := root / "project").mkdir()
        (project / "README.md").write_text("hello\n")
        subprocess.run(["git", "init", "-q", "."], cwd=project, check=False)
        first, second = (Call(call.name, _placed(call.arguments, project)) for call in (script.first, script.second))
        (models := root / "models").mkdir()
        model = write_scripted(models / f"{MODEL}.gguf", first, second, ASIDE if script.num_tools else ANSWER)
        settings = {"EDGELM_MAX_TOKENS": "400", "EDGELM_CTX": str(script.context), **settings}
        with serving_model(root / "server", model, settings) as address, recording(address) as record:
            yield Stage(root, project, record)


def _outcomes(script: Script, task: Run, cut: Run) -> Iterator[Outcome]:
    with_tools = [exchange for exchange in task.seen if exchange.tools]
    checks = {
        "the task ends well": task.code == 0,
        "the answer arrives": ANSWER in " ".join(task.output.split()),
        "every request is accepted": all(exchange.status == 200 for exchange in task.seen + cut.seen),
        "every request has the key": all(exchange.keyed for exchange in task.seen + cut.seen),
        "two tools are called, after reasoning": not script.num_tools
        or (len(with_tools) >= 3 and with_tools[0].reasoned),
        "an answer is cut off": any(exchange.ended in CUT for exchange in cut.seen),
    }
    for check, passed in checks.items():
        shape = "; ".join(exchange.line() for exchange in task.seen + cut.seen)
        yield Outcome(check, "passed") if passed else Outcome(check, "failed", f"code {task.code}; {shape}"[:400])


def _placed(arguments: dict[str, object], project: Path) -> dict[str, Any]:
    placed: dict[str, Any] = json.loads(json.dumps(arguments).replace("PROJECT", str(project)))
    return placed


def user_environment(home: Path, path: str) -> dict[str, str]:
    """Return the environment of a user with a home of their own, without a terminal."""
    folders = {f"XDG_{kind}_HOME": str(home / f".{kind.lower()}") for kind in ("CONFIG", "DATA", "CACHE", "STATE")}
    return {"PATH": path, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", "NO_COLOR": "1", **folders}


def _environment(place: Stage, path: str) -> dict[str, str]:
    """Return the environment of a user whose front, by the record in the runtime folder, is the recorder."""
    root, runtime = place.root, place.root / "runtime"
    runtime.mkdir()
    front = {"pid": os.getpid(), "address": place.record.address, "key": KEY}
    (runtime / "front.json").write_text(json.dumps(front))
    return user_environment(place.home, path) | {
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "EDGELM_RUNTIME_DIR": str(runtime),
        "EDGELM_CACHE_DIR": str(root / "cache"),
        "EDGELM_DATA_DIR": str(root / "data"),
        "EDGELM_MODEL_DIRS": str(root / "models"),
    }


def _command(name: str, *words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "edgelm", "launch", name, "--model", MODEL, *words]


def _run(name: str, script: Script, prompt: str, place: Stage, environment: dict[str, str]) -> Run:
    arguments = [prompt if word == "PROMPT" else word for word in script.arguments]
    done = run_program(_command(name, "--", *arguments), place.project, environment, one_output=True)
    return Run(done.returncode, done.stdout, place.record.take())


def version_of(name: str, environment: dict[str, str]) -> str:
    """Return the version that an agent prints."""
    done = run_program([find_agent(name).command, "--version"], Path(environment["HOME"]), environment)
    match = re.search(r"\d+\.\d+[\w.+-]*", done.stdout + done.stderr)
    return match[0] if match else "?"


def _print(name: str, environment: dict[str, str], project: Path) -> str:
    done = run_program(_command(name, "--print"), project, environment)
    assert KEY not in done.stdout + done.stderr
    return done.stdout + done.stderr


def _transcript(name: str, version: str, script: Script, shown: str, task: Run, cut: Run) -> str:
    agent = find_agent(name)
    does = "reasons, calls two tools, and answers" if script.num_tools else "answers, since the program has no tools"
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    parts = [
        f"{agent.title} {version} by `edgelm launch {name}`, edgelm {__version__}; no network but loopback; {today}",
        f"the model is scripted: it {does}; told to talk, it does not end",
        f"\n$ edgelm launch {name} --model scripted --print\n{shown.rstrip()}",
    ]
    for title, run in ((TASK, task), (f"{TALK} until you are cut off", cut)):
        arguments = [json.dumps(title) if word == "PROMPT" else word for word in script.arguments]
        words = " ".join(word if "\n" not in word else "'...'" for word in arguments)
        parts.append(f"\n$ edgelm launch {name} --model scripted -- {words}\n{_shown_output(script, run)}")
        parts.append(f"exit code {run.code}; the server saw:")
        parts += [f"  {exchange.line()}" for exchange in run.seen]
    return "\n".join(parts) + "\n"


def _shown_output(script: Script, run: Run) -> str:
    """Return an agent's output, shortened; of a closed one, the lines that the model wrote."""
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run.output)
    words = r"\s+".join(ENDLESS.split())
    output = re.sub(
        rf"(?:\s+{words}){{4,}}(?:\s+and)?(?:\s+so)?", f"{ENDLESS * 3} [...]", output
    )  # a terminal wraps it
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and not NOISE.search(line)]
    if script.closed_text:
        lines = [line for line in lines if ANSWER in line or ENDLESS in line or line.startswith("warning:")]
    if len(lines) > PRINTED_LINES:
        lines = [*lines[: PRINTED_LINES // 2], "[...]", *lines[-PRINTED_LINES // 2 :]]
    return "\n".join(line[:300] for line in lines)


def _scrubbed(text: str, root: Path) -> str:
    text = text.replace(str(root), "")
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)
    return re.sub(r"(?:/[\w@.-]+)+/(node_modules|site-packages)/", r"\1/", text)


if __name__ == "__main__":
    raise SystemExit(main())
