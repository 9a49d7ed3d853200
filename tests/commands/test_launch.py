"""`edgelm launch`, with programs that stand for agents: what they are told, the server's life, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import pytest

from edgelm.base.places import Places
from edgelm.base.runtime import FrontRecord, find_fronts, is_alive
from edgelm.commands.cli import run_cli
from edgelm.commands.launch import server
from edgelm.commands.launch.server import Loaded, end_front, start_front
from tests.clients.model import write_model
from tests.commands.test_run import Edgelm
from tests.ports import free_port
from tests.tiny import write_tiny

LAUNCH = [sys.executable, "-P", "-m", "edgelm", "launch"]
LIMIT_S = 90
KEY = "a-key-of-this-test"
AGENT = """#!{python} -P
import json, os, sys, time
file, limit = {file!r}, time.monotonic() + 120
json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}}, open(file + "~", "w"))
os.rename(file + "~", file)
while "UNTIL" in os.environ and not os.path.exists(os.environ["UNTIL"]) and time.monotonic() < limit:
    time.sleep(0.05)
sys.exit(7)
"""


@pytest.fixture
def environment(server_environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """A home, one folder of programs, and one of models."""
    for name in ("home", "programs", "models"):
        (tmp_path / name).mkdir()
    own = {"HOME": tmp_path / "home", "PATH": tmp_path / "programs", "EDGELM_MODEL_DIRS": tmp_path / "models"}
    return server_environment | {name: str(path) for name, path in own.items()} | {"EDGELM_PORT": "0"}


@pytest.fixture
def model(tmp_path: Path, environment: dict[str, str]) -> str:
    """A model that takes tools, with a long context."""
    write_model(tmp_path / "models" / "clients.gguf")
    return "clients"


def install(tmp_path: Path, program: str) -> Path:
    """Install a program that writes down how it was started; return the file."""
    file = tmp_path / "programs" / program
    seen = tmp_path / f"{program}.json"
    file.write_text(AGENT.format(python=sys.executable, file=str(seen)))
    file.chmod(0o755)
    return seen


@dataclass(frozen=True)
class Done:
    """The end of `edgelm launch`: its exit code and output, or the agent's command and environment."""

    returncode: int
    stdout: str
    stderr: str
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


class BecameError(BaseException):
    """Stands for the agent that takes this process's place."""


Launch = Callable[..., Done]


@pytest.fixture
def launch(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """`edgelm launch` in this process, without the last step."""
    became: list[tuple[list[str], dict[str, str]]] = []

    def become(_: str, command: list[str], variables: dict[str, str]) -> NoReturn:
        became.append((command, variables))
        raise BecameError

    def run(*words: str, **variables: str) -> Done:
        became.clear()
        with monkeypatch.context() as patch, Path(os.devnull).open() as empty:
            for name in set(os.environ) - set(environment):
                patch.delenv(name)
            for name, value in (environment | variables).items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["edgelm", "launch", *words])
            patch.setattr(sys, "stdin", empty)
            patch.setattr(os, "execvpe", become)
            try:
                code = run_cli()
            except BecameError:
                code = 0
        output = capsys.readouterr()
        return Done(code, output.out, output.err, *(became[0] if became else ([], {})))

    return run


def front_pids(environment: dict[str, str]) -> list[int]:
    return [front.pid for front in find_fronts(Path(environment["EDGELM_RUNTIME_DIR"]))]


def start_agent(runtime: Path) -> subprocess.Popen[bytes]:
    """Start a process that counts as an agent."""
    code = "import sys, time; from pathlib import Path; from edgelm.base.runtime import note_agent; "
    code += "note_agent(Path(sys.argv[1])); print(flush=True); time.sleep(300)"
    agent = subprocess.Popen([sys.executable, "-c", code, str(runtime)], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    agent.stdout.readline()
    return agent


def wait_for_agents(agents: list[subprocess.Popen[Any]], seen: list[Path]) -> None:
    """Wait until each agent runs and has written down how it was started."""
    deadline = time.monotonic() + LIMIT_S
    while not all(file.exists() for file in seen):
        assert time.monotonic() < deadline
        for agent in agents:
            assert agent.poll() is None, agent.communicate()
        time.sleep(0.05)


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline, "the server still runs"
        time.sleep(0.1)


def test_the_list_shows_what_is_there(launch: Launch, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "programs" / "codex").write_text("#!/bin/sh\necho codex-cli 1.22.333\n")
    (tmp_path / "programs" / "codex").chmod(0o755)
    rows = {row["agent"]: row for row in json.loads(launch("--json").stdout)}
    assert (rows["codex"]["installed"], rows["codex"]["version"]) == (True, "1.22.333")
    assert (rows["claude"]["installed"], rows["claude"]["speaks"]) == (False, "messages")
    done = launch()
    assert "1.22.333" in done.stdout
    assert "npm install -g @anthropic-ai/claude-code" in done.stdout


def test_print_needs_neither_agent_nor_server(
    launch: Launch, environment: dict[str, str], model: str, tmp_path: Path
) -> None:
    done = launch("claude", "--model", model, "--print", "--", "-p", "it's")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "export ANTHROPIC_MODEL=clients" in lines
    assert "export CLAUDE_CODE_ATTRIBUTION_HEADER=0" in lines
    assert lines[-1] == "claude -p 'it'\"'\"'s'"
    assert front_pids(environment) == []
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(("agent", "form"), [("claude", []), ("cline", []), ("codex", ["--json"])])
def test_print_shows_no_key(launch: Launch, model: str, tmp_path: Path, agent: str, form: list[str]) -> None:
    done = launch(agent, "--model", model, "--print", *form, EDGELM_API_KEY=KEY)
    assert done.returncode == 0
    assert KEY not in done.stdout + done.stderr
    written = [file for file in (tmp_path / "data").rglob("*") if file.is_file()]
    assert bool(written) == (agent != "claude")
    assert not any(KEY in file.read_text() for file in written)


def test_print_warns_of_a_small_model(launch: Launch, environment: dict[str, str], tmp_path: Path) -> None:
    write_tiny(tmp_path / "models" / "tiny.gguf")
    done = launch("codex", "--model", "tiny", "--print", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["command"][0] == "codex"
    assert "takes no tools" in done.stderr
    assert "needs 16,384" in done.stderr


def test_what_is_refused_is_said_in_one_line(
    launch: Launch, environment: dict[str, str], model: str, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "models" / "tiny.gguf")
    assert launch("claude", "--model", model).stderr == (
        "error: Claude Code is not installed: there is no program `claude`; npm install -g @anthropic-ai/claude-code\n"
    )
    install(tmp_path, "claude")
    for words, says in (
        (["claude"], "there are several models; add --model: "),
        (["claude", "--model", "tiny"], "and Claude Code needs 32,768; use a model"),
        (["claude", "--model", "nothing-here"], "nothing-here"),
        (["emacs"], "the agents are claude, codex"),
        (["claude", "--print", "--config"], "exclude each other"),
        (["claude", "--restore"], "nothing is saved"),
    ):
        done = launch(*words)
        assert done.returncode in (1, 2)
        [line] = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert says in line
    assert front_pids(environment) == []


def test_the_server_lives_as_long_as_the_agent(environment: dict[str, str], model: str, tmp_path: Path) -> None:
    seen = install(tmp_path, "claude")
    limits = {"EDGELM_IDLE_TIMEOUT": "2", "EDGELM_API_KEY": KEY}  # a load is asked about before it is over
    command = [*LAUNCH, "claude", "--model", model, "--", "-p", "--model", "x"]
    variables = environment | limits | {"UNTIL": str(tmp_path / "end")}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as agent:
        wait_for_agents([agent], [seen])
        [pid] = front_pids(environment)
        time.sleep(5)
        assert is_alive(pid)  # although it is idle for much longer than its limit
        (tmp_path / "end").touch()
        assert agent.wait(LIMIT_S) == 7  # the agent's own exit code: it has taken this process's place
        assert agent.stderr is not None
        assert agent.stderr.read() == b""
    told = json.loads(seen.read_text())
    assert told["pid"] == agent.pid
    assert told["arguments"] == ["-p", "--model", "x"]
    variables = told["environment"]
    assert variables["ANTHROPIC_BASE_URL"].startswith("http://127.0.0.1:")
    assert variables["ANTHROPIC_AUTH_TOKEN"] not in ("", KEY, "none")  # the key of this user's own commands
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    wait_gone(pid)


def test_a_running_server_is_used(launch: Launch, environment: dict[str, str], model: str, tmp_path: Path) -> None:
    seen = install(tmp_path, "aider")
    serve = [sys.executable, "-P", "-m", "edgelm", "serve", "--port", "0", "--ctx", "8000", "--json"]
    with subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())["address"]
            done = launch("aider", "--model", model)
            assert done.returncode == 1
            assert "clients has 8,000 tokens of context here, and aider needs 16,384; end the server" in done.stderr
            assert not seen.exists()
            install(tmp_path, "llm")
            done = launch("llm")  # the model that is loaded
            folder = Path(done.environment["LLM_USER_PATH"])
            assert address in (folder / "extra-openai-models.yaml").read_text()
            assert done.environment["OPENAI_API_KEY"] == "none"
            assert front_pids(environment) == [server.pid]
        finally:
            server.terminate()


def test_a_file_that_the_server_was_given_has_its_name_everywhere(
    launch: Launch, environment: dict[str, str], tmp_path: Path
) -> None:
    install(tmp_path, "llm")
    write_model(tmp_path / "Elsewhere.gguf")
    serve = [sys.executable, "-P", "-m", "edgelm", "serve", "--port", "0", "--json", str(tmp_path / "Elsewhere.gguf")]
    with subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            done = launch("llm", "--model", "Elsewhere", "--print")
            assert "Elsewhere.gguf" in done.stdout, done.stderr
            assert launch("llm", "--model", "Elsewhere", "--config").returncode == 0
            [file] = (tmp_path / "home").rglob("extra-openai-models.yaml")
            assert "edgelm/Elsewhere\n" in file.read_text()
            for words in (
                ["run", "Elsewhere", "hello", "--max-tokens", "1", "--json"],
                ["show", "Elsewhere", "--json"],
                ["plan", "Elsewhere", "--json"],
                ["bench", "Elsewhere", "-p", "8", "-n", "0", "-r", "1", "--json"],
                ["quantize", "Elsewhere", str(tmp_path / "small.gguf"), "--to", "Q8_0", "--json"],
            ):
                done = Edgelm(environment)(*words)
                assert (done.returncode, b"Elsewhere" in done.stdout) == (0, True), done.stderr
            for words, message in (
                (["convert", "Elsewhere", str(tmp_path / "new.gguf")], b"error: Elsewhere is a GGUF already"),
                (["rm", "Elsewhere", "--yes"], b"error: Elsewhere is your own file"),
                ([*"doctor --gpu Elsewhere --out".split(), str(tmp_path)], f"error: {tmp_path} cannot be".encode()),
            ):
                done = Edgelm(environment)(*words)
                assert (done.returncode, done.stderr.startswith(message)) == (1, True), done.stderr
            chat = [sys.executable, "-P", "-m", "edgelm", "--plain", "--model"]
            shown = subprocess.run(
                [*chat, "Elsewhere"], env=environment, input="/exit\n", capture_output=True, text=True, check=False
            )
            assert (shown.returncode, shown.stderr) == (0, "")
            assert "Elsewhere" in shown.stdout
            shown = subprocess.run(
                [*chat, "Nowhere"], env=environment, input="", capture_output=True, text=True, check=False
            )
            assert shown.stderr.startswith("error: there is no model Nowhere")
        finally:
            server.terminate()


# The agent is the parent of the server, and here it is not started.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_of_an_earlier_launch_gets_more_context(
    launch: Launch, environment: dict[str, str], model: str, tmp_path: Path
) -> None:
    for program in ("llm", "claude"):
        install(tmp_path, program)
    done = launch("llm", "--model", model, "--ctx", "5000")
    assert done.stderr == "warning: llm works better with 16,384 tokens of context, and there are 5,000\n"
    [first] = front_pids(environment)
    try:
        other = start_agent(Path(environment["EDGELM_RUNTIME_DIR"]))
        assert "needs 32,768" in launch("claude").stderr  # the other agent uses the server
        other.terminate()
        other.wait()
        done = launch("claude", "--model", model)
        assert done.environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
        assert not is_alive(first)
        assert len(front_pids(environment)) == 1
        launch("claude", "--config", EDGELM_PORT="11777")  # the file is for a server that lasts
        file = tmp_path / "home" / ".claude" / "settings.json"
        assert json.loads(file.read_text())["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:11777"
    finally:
        for front in find_fronts(Path(environment["EDGELM_RUNTIME_DIR"])):
            end_front(front)


def test_config_and_restore(launch: Launch, environment: dict[str, str], model: str, tmp_path: Path) -> None:
    file = tmp_path / "home" / ".claude" / "settings.json"
    file.parent.mkdir()
    file.write_text('{"mine": 1}')
    done = launch("claude", "--model", model, "--config")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(file.read_text())
    assert document["mine"] == 1
    assert document["env"]["ANTHROPIC_MODEL"] == model
    assert "ANTHROPIC_AUTH_TOKEN" in done.stdout
    assert launch("claude", "--restore").returncode == 0
    assert file.read_text() == '{"mine": 1}'


def test_a_server_of_a_chat_is_not_used(
    launch: Launch, environment: dict[str, str], model: str, tmp_path: Path
) -> None:
    install(tmp_path, "llm")
    runtime = Path(environment["EDGELM_RUNTIME_DIR"])
    runtime.mkdir()
    # Nothing listens there: a front that were used would be asked.
    record = {"pid": os.getpid(), "address": "http://127.0.0.1:1", "of": "chat"}
    (runtime / "front.json").write_text(json.dumps(record))
    done = launch("llm", "--model", model, "--print")
    assert "127.0.0.1:1/" not in done.stdout
    assert done.returncode == 0


def test_an_agent_asks_this_machine_without_a_proxy(launch: Launch, model: str) -> None:
    words = ("codex", "--model", model, "--print", "--json")
    through = launch(*words, https_proxy="http://proxy:3128", no_proxy="intern")
    environment = json.loads(through.stdout)["environment"]
    assert environment["NO_PROXY"] == environment["no_proxy"] == "intern,127.0.0.1,localhost,::1"
    assert "NO_PROXY" not in json.loads(launch(*words).stdout)["environment"]


@pytest.mark.parametrize("agent", ["llm", "claude"])
def test_a_folder_that_cannot_be_written_is_said_in_one_line(
    launch: Launch, environment: dict[str, str], model: str, tmp_path: Path, agent: str
) -> None:
    (tmp_path / "file").touch()
    install(tmp_path, agent)
    places = dict.fromkeys(("EDGELM_DATA_DIR", "EDGELM_RUNTIME_DIR", "EDGELM_CACHE_DIR"), str(tmp_path / "file"))
    done = launch(agent, "--model", model, *(["--print"] if agent == "llm" else []), **places)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "file") in line


def test_names_of_any_length_and_script_have_folders_of_their_own(
    launch: Launch, environment: dict[str, str], tmp_path: Path
) -> None:
    folders = set()
    for name in ("a b", "a-b", "\u6a21" * 60, "long-" * 45):
        file = tmp_path / "models" / "deeper" / ("x" * 100) / f"{name}.gguf"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_model(file)
        done = launch("llm", "--model", str(file), "--print", "--json")
        assert done.returncode == 0, done.stderr
        folders.add(json.loads(done.stdout)["environment"]["LLM_USER_PATH"])
    assert len(folders) == 4


def test_two_launches_at_once_share_one_server(environment: dict[str, str], model: str, tmp_path: Path) -> None:
    seen = [install(tmp_path, program) for program in ("llm", "aider")]
    end = tmp_path / "end"
    variables = environment | {"EDGELM_IDLE_TIMEOUT": "2", "EDGELM_PORT": str(free_port()), "UNTIL": str(end)}
    agents = [
        subprocess.Popen([*LAUNCH, name, "--model", model], env=variables, stderr=subprocess.PIPE, text=True)
        for name in ("llm", "aider")
    ]
    wait_for_agents(agents, seen)
    [pid] = front_pids(environment)
    end.touch()
    assert [(agent.communicate(timeout=LIMIT_S)[1], agent.returncode) for agent in agents] == [("", 7), ("", 7)]
    wait_gone(pid)


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are text there")
def test_a_path_that_is_no_text_is_refused(launch: Launch, tmp_path: Path) -> None:
    write_model(tmp_path / "plain.gguf")
    file = (tmp_path / "plain.gguf").rename(tmp_path / os.fsdecode(b"\xff.gguf"))
    done = launch("llm", "--model", str(file), "--print")
    assert done.returncode == 1
    assert done.stderr.endswith("is not UTF-8; rename the file\n")


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is not installed")
def test_an_installed_service_is_woken(launch: Launch, environment: dict[str, str], model: str, tmp_path: Path) -> None:
    install(tmp_path, "llm")
    address = f"127.0.0.1:{free_port()}"
    unit = tmp_path / "xdg" / "systemd" / "user" / "edgelm.socket"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"[Socket]\nListenStream={address}\n")
    tool = str(shutil.which("systemd-socket-activate"))
    assigned = [f"--setenv={name}" for name in environment]
    serve = [sys.executable, "-P", "-m", "edgelm", "serve", "--ctx", "16384"]
    with subprocess.Popen(
        [tool, f"--listen={address}", *assigned, *serve], env=environment, stderr=subprocess.PIPE
    ) as service:
        try:
            assert service.stderr is not None
            service.stderr.readline()  # it listens
            done = launch("llm", "--model", model, XDG_CONFIG_HOME=str(tmp_path / "xdg"))
            assert (done.returncode, done.stderr) == (0, "")
            assert front_pids(environment) == [service.pid]
        finally:
            service.terminate()


def test_a_model_that_is_unloaded_while_it_is_asked_about_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its idle limit may end between two requests of a busy machine."""
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        ready = [{"state": "ready", "path": str(tmp_path), "context": 4096}] * (asked.count("/models/load") == 2)
        return httpx2.Response(200, json={"models": ready})

    front = FrontRecord(os.getpid(), "http://127.0.0.1")
    client = partial(httpx2.Client, base_url=front.address, transport=httpx2.MockTransport(answer))
    monkeypatch.setattr(server, "_client", lambda _: client())
    assert server.load(front, "m", tmp_path, lambda _: None) == Loaded(front, "m", 4096)
    assert asked == ["/models/load", "/edgelm/ps"] * 2


def test_an_interrupted_start_leaves_no_server(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)

    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("edgelm.commands.launch.server.subprocess.Popen", Popen)
    monkeypatch.setattr(server, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_front(Places(environment), 0, [])
    assert not is_alive(started[0])
