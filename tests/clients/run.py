"""Runs outside programs against `edgelm serve`, and prints one table. `make clients` installs them and starts this.

It must run in a network namespace that has loopback alone: no client can reach the internet, and none needs to. Owns
the list of clients, the failures that are known with their reasons, and the table. Exit code 1: an unexpected outcome.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from edgelm import __version__
from edgelm.commands.launch.agents import AGENTS
from tests.clients.agents import Outcome, Place, llm
from tests.clients.launched import checked
from tests.clients.pointed import POINTED
from tests.clients.pointed import checked as checked_pointed
from tests.clients.programs import run_program
from tests.clients.serve import ENCODER, MODEL, REAL, serving

HERE = Path(__file__).resolve().parent
NO_WIT = "the model knows nothing: its answer has the form that was asked for, and not the content"
NO_CALL = "SmolLM2 writes text where it is free to call a tool"
NO_JSON = "nothing but the prompt says what the JSON holds, and SmolLM2 does not heed it"
# client: check: reason. One that passes is reported too, so that the list stays true.
KNOWN = {
    "langchain": {
        f"{group}::{test}": NO_WIT
        for test in ("test_json_mode", "test_unicode_tool_call_integration")
        for group in ("TestChatCompletions", "TestResponses", "TestMessages", "TestOllama")
        if (group, test) != ("TestMessages", "test_json_mode")  # skipped there
    },
    "langchain, SmolLM2": {
        "TestChatCompletions::test_agent_loop[model0]": NO_CALL,
        "TestChatCompletions::test_agent_loop[model1]": NO_CALL,
        "TestChatCompletions::test_unicode_tool_call_integration": "SmolLM2 writes Japanese without an end",
        "TestOllama::test_tool_calling[model0]": NO_CALL,
        "TestOllama::test_tool_calling[model1]": NO_CALL,
        "TestOllama::test_tool_calling_async": NO_CALL,
        "TestOllama::test_bind_runnables_as_tools": NO_CALL,
        "TestOllama::test_tool_calling_with_no_arguments": NO_CALL,
        "TestOllama::test_agent_loop[model0]": NO_CALL,
        "TestOllama::test_agent_loop[model1]": NO_CALL,
        "TestOllama::test_unicode_tool_call_integration": NO_CALL,
    },
    "llama-index, SmolLM2": {"ollama_tools": NO_CALL, "openai_like_chat": NO_CALL},
    "instructor": {"mode_json": NO_WIT, "mode_md_json": NO_WIT},
    "instructor, SmolLM2": {"mode_parallel_tools": NO_CALL, "mode_json": NO_JSON, "mode_md_json": NO_JSON},
}
RAW_CHARACTERS = 300  # of a wrong answer, in the table
NOT_RUN = {
    "OpenResponses compliance": "no package of npm or PyPI has it",
    "llama.cpp's server tests": "they compare the words of models that they download",
    "Pi 1.5.2": "its dependency @earendil-works/pi-codemode has no version that it accepts; 0.73.1 is run",
    "Zed, VS Code": "no command line to run them by",
    "Open WebUI": "its package is far too large; open_webui.py sends its requests by hand",
}


@dataclass(frozen=True, slots=True)
class Client:
    """A client, and how its checks run: a script that prints lines of JSON, pytest, or a module beside this one."""

    name: str
    script: str = ""
    venv: str = "venv"  # of the build folder: some packages do not go together
    kind: str = ""  # "launched", "pointed": the module that runs it, with a model and a server of its own
    model: str = MODEL

    @property
    def title(self) -> str:
        return f"{self.name}, SmolLM2" if self.model == REAL else self.name


CLIENTS = (
    Client("openai-python", "openai_sdk.py"),
    Client("anthropic-python", "anthropic_sdk.py"),
    Client("langchain", "langchain_standard.py"),
    Client("langchain", "langchain_standard.py", model=REAL),
    Client("embeddings", "embeddings_checks.py"),
    Client("openai-node", "openai_sdk.mjs"),
    Client("anthropic-node", "anthropic_sdk.mjs"),
    Client("ai-sdk", "ai_sdk.mjs"),
    Client("llm"),
    Client("ollama-python", "ollama_sdk.py", "ollama"),
    Client("langchain-ollama", "langchain_with_ollama.py"),
    Client("llama-index", "llama_index_checks.py", "ollama"),
    Client("llama-index", "llama_index_checks.py", "ollama", model=REAL),
    Client("instructor", "instructor_checks.py", "ollama"),
    Client("instructor", "instructor_checks.py", "ollama", model=REAL),
    Client("frameworks", "frameworks_checks.py", "frameworks", model=REAL),
    Client("langchain-node", "langchain.mjs", model=REAL),
    Client("open-webui", "open_webui.py", "ollama"),
    Client("lm-eval", "lm_eval_checks.py", "lm_eval"),
    *(Client(name, kind="pointed") for name in POINTED),
    *(Client(agent.name, kind="launched") for agent in AGENTS if agent.name != "llm"),
)


@dataclass(slots=True)
class Report:
    """The outcomes of a client."""

    name: str
    version: str
    outcomes: list[Outcome]
    seconds: float = 0.0

    def count(self, outcome: str) -> int:
        return sum(one.outcome == outcome for one in self.outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help=f"some of: {', '.join(client.name for client in CLIENTS)}")
    parser.add_argument("--build", type=Path, required=True, help="folder with venv/ and node/")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    if unknown := set(arguments.clients) - {client.name for client in CLIENTS}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if not arguments.clients or client.name in arguments.clients]
    reports = []
    with tempfile.TemporaryDirectory(prefix="edgelm-clients-") as folder, serving(Path(folder)) as address:
        for client in chosen:
            begin = time.monotonic()
            report = run(client, build, Path(folder), address)
            report.seconds = time.monotonic() - begin
            reports.append(report)
            print(f"# {row(report)}", flush=True)
        reports.append(log_report((Path(folder) / "serve.log").read_text()))
    print()
    print_table(reports)
    return any(one.outcome in ("failed", "unexpected pass") for report in reports for one in report.outcomes)


def log_report(log: str) -> Report:
    """Return that no client made the server fail in a way that it did not foresee."""
    _, traceback, rest = log.partition("Traceback")
    outcome = Outcome("no traceback", "failed" if traceback else "passed", rest[:RAW_CHARACTERS])
    return Report("the server's log", __version__, [outcome])


def run(client: Client, build: Path, folder: Path, address: str) -> Report:
    """Run the checks of a client."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
    environment |= {
        "EDGELM_ADDRESS": address,
        "EDGELM_MODEL": client.model,
        "EDGELM_ENCODER": ENCODER,
        "OPENAI_API_KEY": "any",
        "ANTHROPIC_API_KEY": "any",
    }
    python = build / client.venv / "bin" / "python"
    try:
        if client.script == "langchain_standard.py":
            report = run_pytest(client, python, folder, environment)
        elif client.script.endswith(".py"):
            report = run_script(client, [python, HERE / "python" / client.script], build, environment)
        elif client.script:
            for script in (HERE / "node").glob("*.mjs"):
                shutil.copy(script, build / "node")  # modules are looked for beside the script
            report = run_script(client, ["node", client.script], build / "node", environment)
        elif client.kind == "pointed":
            report = run_pointed(client.name, build)
        elif client.kind == "launched":
            report = run_launched(client.name, build)
        else:
            place = Place(folder / client.name, build / "venv", address, MODEL)
            report = run_launched(client.name, build)
            report.outcomes = [*llm(place), *report.outcomes]
            if report.count("failed"):
                print(place.log.read_text()[-4000:])
    except (OSError, RuntimeError) as error:  # no server, a request without an end: the next client still runs
        report = Report(client.title, "?", [Outcome("all", "failed", f"{type(error).__name__}: {error}"[:400])])
    known = KNOWN.get(client.title, {})
    report.outcomes = [judged(one, known) for one in report.outcomes]
    return report


def judged(one: Outcome, known: dict[str, str]) -> Outcome:
    """Return an outcome in the light of the failures that are known."""
    if one.check not in known or one.outcome == "skipped":
        return one
    if one.outcome == "failed":  # the raw answer is in its reason
        return Outcome(one.check, "known", f"{known[one.check]} [{one.reason}]")
    return Outcome(one.check, "unexpected pass", known[one.check])


def run_script(client: Client, command: list[str | Path], cwd: Path, environment: dict[str, str]) -> Report:
    done = run_program(command, cwd, environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = next((line["version"] for line in lines if "version" in line), "?")
    outcomes = [Outcome(**line | {"reason": line["reason"][:RAW_CHARACTERS]}) for line in lines if "check" in line]
    if done.returncode or not outcomes or any(one.outcome == "failed" for one in outcomes):
        print(done.stderr[-4000:])
    if done.returncode or not outcomes:
        outcomes.append(Outcome("all", "failed", f"exit code {done.returncode}"))
    return Report(client.title, found, outcomes)


def run_pytest(client: Client, python: Path, folder: Path, environment: dict[str, str]) -> Report:
    """Run LangChain's standard tests; one event loop for all, because its clients are kept between tests."""
    found = folder / "junit.xml"
    scopes = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"]
    scopes += ["-o", "asyncio_default_fixture_loop_scope=session"]
    scripts = str(HERE / "python")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", scripts]
    command += ["--confcutdir", scripts, *scopes, "--timeout", "600", "--tb=short", f"--junitxml={found}"]
    if client.model == REAL:  # the tests of the other two take ten minutes, and differ in nothing but the API
        command += ["-k", "not TestResponses and not TestMessages"]
    done = run_program([*command, f"{scripts}/{client.script}"], folder, environment)
    if not found.exists():
        print(done.stdout[-4000:], done.stderr[-4000:])
        return Report(client.title, "?", [Outcome("all", "failed", f"pytest ended with {done.returncode}")])
    package = "langchain-openai"
    query = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    number = subprocess.run(query, text=True, capture_output=True, check=True).stdout.strip()
    return Report(client.title, number, list(_cases(found)))


def _cases(junit: Path) -> Iterator[Outcome]:
    for case in ET.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, reason = "failed", child.get("message", "")
            elif child.tag == "skipped":
                outcome, reason = "skipped", child.get("message", "")
        yield Outcome(name, outcome, " ".join(reason.split())[:RAW_CHARACTERS])


def run_launched(name: str, build: Path) -> Report:
    """Run an agent by `edgelm launch`; its transcript goes to the build folder."""
    outcomes = list(checked(name, programs(build), build / "agents"))
    transcript = build / "agents" / f"{name}.txt"
    skipped = outcomes[0].outcome == "skipped"
    return Report(name, "" if skipped else transcript.read_text().split(" by ")[0].split()[-1], outcomes)


def run_pointed(name: str, build: Path) -> Report:
    """Run an agent that a user has pointed at the server."""
    found = list(checked_pointed(name, programs(build)))
    version = next((one for one in found if isinstance(one, str)), "")
    return Report(name, version, [one for one in found if isinstance(one, Outcome)])


def programs(build: Path) -> list[Path]:
    """Return the folders of the agents' programs."""
    return [build / "node" / "node_modules" / ".bin", build / "venv" / "bin", build / "aider" / "bin"]


def row(report: Report) -> str:
    counts = [report.count(outcome) for outcome in ("passed", "known", "skipped", "failed")]
    seconds = f"{report.seconds:6.1f} s"
    return f"{report.name:<20} {report.version:<10} " + " ".join(f"{count:>7}" for count in counts) + f"  {seconds}"


def print_table(reports: list[Report]) -> None:
    """Print the table, and below it the reason of each outcome that is not a pass."""
    print(f"edgelm {__version__}\n")
    print(f"{'client':<20} {'version':<10} {'passed':>7} {'known':>7} {'skipped':>7} {'failed':>7}")
    for report in reports:
        print(row(report))
    for outcome in ("failed", "unexpected pass", "known", "skipped"):
        rest = [(report.name, one) for report in reports for one in report.outcomes if one.outcome == outcome]
        if rest:
            print(f"\n{outcome}:")
        for name, one in rest:
            print(f"  {name}: {one.check}: {' '.join(one.reason.split())}")
    print("\nnot run:")
    for name, reason in NOT_RUN.items():
        print(f"  {name}: {reason}")


if __name__ == "__main__":
    raise SystemExit(main())
