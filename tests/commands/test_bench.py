"""`edgelm bench` as a user sees it: through the endpoint and in process, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.machine.conditions import Conditions, engine_build
from edgelm.commands.bench import _print
from tests.seeing import png, write_pair
from tests.tiny import write_tiny

TIMEOUT_S = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", context=512)


class Bench:
    def __init__(self, environment: dict[str, str], temporary: Path) -> None:
        self.environment = environment | {"TMPDIR": str(temporary)}

    def start(self, *arguments: str | Path, **more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "edgelm", "bench", *map(str, arguments)]
        environment = self.environment | more
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)

    def __call__(self, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[bytes]:
        with self.start(*arguments, **more) as process:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def result(self, *arguments: str | Path) -> dict[str, Any]:
        done = self(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def processes(self) -> list[str]:
        """Return the commands of the processes with this environment."""
        mark = f"TMPDIR={self.environment['TMPDIR']}".encode()
        running = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    running.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it is gone, or another user's
                continue
        return running

    def files(self) -> list[Path]:
        """Return what lies in the folder of temporary files."""
        return list(Path(self.environment["TMPDIR"]).iterdir())


@pytest.fixture
def bench(server_environment: dict[str, str], tmp_path: Path) -> Bench:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    return Bench(server_environment, temporary)


def error_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the one line on standard error of a failed command."""
    assert done.returncode == 1, done
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    return line


def test_each_test_is_measured_through_the_endpoint_and_alone_and_nothing_stays(bench: Bench, model: Path) -> None:
    result = bench.result(model, "-p", "32", "-n", "8", "-b", "1", "-b", "4", "-r", "2")
    assert (result["through"], result["drafts"], result["engine"]) == ("endpoint", False, "llama")
    assert [row["test"] for row in result["results"]] == ["pp32", "tg8", "pp32x4", "tg8x4"]
    for row in result["results"]:
        for side in (row, row["engine"]):
            assert len(side["runs"]) == 2
            assert 0 < min(side["runs"]) <= side["tokens_per_second"] <= max(side["runs"])
        assert row["runs"] != row["engine"]["runs"]
    assert bench.processes() == []
    assert bench.files() == []


def test_in_process_there_is_no_server(bench: Bench, model: Path) -> None:
    result = bench.result(model, "-p", "32", "-n", "8", "-r", "1", "--in-process")
    assert result["through"] == "engine"
    assert result["measured"]["build"] == engine_build("llama")
    assert [row["test"] for row in result["results"]] == ["pp32", "tg8"]
    assert all("engine" not in row for row in result["results"])
    assert not (Path(bench.environment["EDGELM_CACHE_DIR"]) / "bench.log").exists()


def test_a_model_that_repeats_and_would_end_is_measured_whole_and_without_drafts(bench: Bench, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "loop.gguf", vocab_size=300, context=512, script=(*range(299, 200, -1), 2))
    result = bench.result(path, "-p", "0", "-n", "200", "-r", "1")
    assert result["results"][0]["test"] == "tg200"


def test_a_short_context_shortens_the_default_tests_and_refuses_others_at_once(bench: Bench, model: Path) -> None:
    result = bench.result(model, "-r", "1")
    assert [row["test"] for row in result["results"]] == ["pp510", "tg128"]  # of 512
    cache = Path(bench.environment["EDGELM_CACHE_DIR"])
    assert not [path for path in (cache / "prefixes").rglob("*") if path.is_file()], "random prompts are not kept"
    assert "pp600 needs" in error_of(bench(model, "-p", "8", "-p", "600"))
    assert "nothing to measure" in error_of(bench(model, "-p", "0", "-n", "0"))


def test_a_server_that_does_not_start_is_one_line(bench: Bench, model: Path) -> None:
    error = error_of(bench(model, "-p", "8", "-n", "0", "-r", "1", EDGELM_TLS_CERT="/missing.pem"))
    assert error.startswith("error: the endpoint does not start: ")
    assert "missing.pem" in error
    assert bench.processes() == []
    assert bench.files() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_bench_that_is_ended_leaves_no_process(bench: Bench, model: Path, number: signal.Signals) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    with bench.start(model, "-p", "0", "-n", "400", "-r", "3") as process:  # the engine alone, too
        try:
            while not any("engine_process" in command for command in bench.processes()):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            fronts = list(Path(bench.environment["EDGELM_RUNTIME_DIR"]).glob("front*"))
            assert fronts == [], "a chat would use this server"
            os.kill(process.pid, number)
            process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    while bench.processes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_models_name_is_shown_as_it_is(bench: Bench, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    name = b"tiny llama f32"
    assert name in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(name, b"[/b]tiny[red]!"))
    done = bench(path, "-p", "8", "-n", "0", "-r", "1", "--in-process", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert b"[/b]tiny[red]!" in done.stdout


@pytest.mark.parametrize(("speed", "is_shown"), [(98.0, False), (60.0, True), (104.0, True)])
def test_both_figures_are_shown_where_they_differ_by_more_than_3_percent(
    speed: float, is_shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    engine = {"tokens_per_second": 100.0, "runs": [100.0]}
    rows = [{"test": "tg8", "tokens_per_second": speed, "runs": [speed, speed + 1], "engine": engine}]
    measured = Conditions("0.6", "edgelm-llama 0.3.36", "AMD EPYC", 2, 1.25)
    about = {"model": "m", "engine": "llama", "device": "cpu", "measured": asdict(measured)}
    _print({**about, "through": "endpoint", "drafts": False, "results": rows}, as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "through the endpoint, without drafts" in shown
    assert shown.endswith(str(measured))
    assert f"{speed:.1f}" in shown
    assert ("engine alone" in shown) is is_shown
    assert (f"{speed:.0f}%" in shown) is is_shown


def test_a_picture_is_measured_too(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write_pair(tmp_path / "seeing", "gemma3")
    picture = tmp_path / "cat.png"
    picture.write_bytes(png(96, 64))
    flags = (path, "--picture", picture, "-p", "8", "-n", "0", "-r", "2", "--ctx", "256", "--in-process")
    result = bench.result(*flags)
    measured = result["picture"]
    assert measured["tokens"] >= 16, "16, and those around them"
    assert 0 < measured["encode_ms"] < measured["first_token_ms"], "each time anew"
    assert 0 < measured["prepare_ms"] < measured["first_token_ms"]
    _print(result, as_json=False)
    assert f"the picture: {measured['tokens']} tokens, prepared in " in capsys.readouterr().out


def test_a_picture_that_cannot_be_measured_is_one_line(bench: Bench, model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(png(96, 64))
    flags = ("-p", "8", "-n", "0", "-r", "1", "--in-process")
    assert "reads no pictures; omit --picture" in error_of(bench(model, "--picture", picture, *flags))
    path, _ = write_pair(tmp_path / "seeing", "gemma3")
    assert "no.png" in error_of(bench(path, "--picture", tmp_path / "no.png", *flags, "--ctx", "256"))
    picture.write_bytes(b"no picture")
    assert "is not a picture" in error_of(bench(path, "--picture", picture, *flags, "--ctx", "256"))
