"""`edgelm serve` and `edgelm ps` as processes: start, addresses, files, signals, idle models, ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgelm.base.config import load_config
from edgelm.base.runtime import find_fronts
from tests.commands.test_run import Edgelm
from tests.server.harness import ENDLESS, LIMIT_S, Front, processes_of, serving, until
from tests.server.impatient_front import KEPT_S


def edgelm(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this process; one that would serve in a process of its own."""
    edgelm = Edgelm(environment)
    done = (edgelm.process if arguments[0] in ("serve", "share") else edgelm)(*arguments)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_the_front_loads_nothing_native() -> None:
    heavy = "{'llama_cpp', 'torch', 'numpy', 'gguf', 'jinja2'}"
    modules = "edgelm.server.serving, edgelm.server.front, edgelm.commands.serve, edgelm.commands.ps"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == "[]"


def test_a_running_front_has_loaded_nothing_native(front: Front) -> None:
    front.chat()
    maps = Path(f"/proc/{front.process.pid}/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    assert not [line for line in maps.read_text().splitlines() if "llama" in line or "numpy" in line]


def test_a_front_is_found_by_its_file(front: Front, environment: dict[str, str]) -> None:
    runtime = Path(environment["EDGELM_RUNTIME_DIR"])
    file = runtime / "front.json"
    library = load_config({}, environment).library
    written = {"pid": front.process.pid, "address": front.address, "library": library}
    assert json.loads(file.read_text()) == written
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_sockets_are_private_and_short(front: Front, environment: dict[str, str]) -> None:
    front.chat()
    sockets = [*Path(environment["EDGELM_RUNTIME_DIR"]).glob("engines-*/*.sock")]
    assert sockets
    for path in sockets:
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(os.fsencode(path)) <= 100


def test_an_engine_is_out_of_reach_of_the_terminals_signals(front: Front) -> None:
    front.chat()
    engine = front.ps("tiny")["pid"]
    assert os.getsid(engine) == engine


def test_ps_shows_a_loaded_model(front: Front, environment: dict[str, str]) -> None:
    front.chat()
    shown = edgelm(environment, "ps")
    assert shown.returncode == 0, shown.stderr
    assert str(front.process.pid) in shown.stdout
    row = next(line for line in shown.stdout.splitlines() if line.startswith("tiny"))
    assert "ready" in row
    assert str(front.ps("tiny")["pid"]) in row
    state = json.loads(edgelm(environment, "ps", "--json").stdout)
    assert state["models"][0].keys() == {
        *("model", "path", "state", "progress", "pid", "context", "engine", "device", "requests", "rss_bytes"),
        *("idle_s", "error", "cuda_problem", "keep_alive_s", "expires_in_s", "pinned", "waits_for", "silent_s"),
        *("memory_bytes", "predicted_bytes", "gpu_bytes", "predicted", "promised_bytes", "unused_gpu", "doing"),
    }
    assert state["models"][0]["rss_bytes"] > 2**20


def test_a_second_front_on_the_port_says_who_has_it(front: Front, environment: dict[str, str]) -> None:
    port = front.address.rpartition(":")[2]
    done = edgelm(environment, "serve", "--port", port)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"pid {front.process.pid}" in done.stderr
    assert port in done.stderr


def test_another_front_leaves_the_first_to_be_found(front: Front, environment: dict[str, str], tmp_path: Path) -> None:
    file = Path(environment["EDGELM_RUNTIME_DIR"]) / "front.json"
    with serving(environment, log=tmp_path / "log") as second:
        assert second.address != front.address
        assert json.loads(file.read_text())["pid"] == front.process.pid
        shown = edgelm(environment, "ps").stdout
        assert f"at {front.address} (pid {front.process.pid})" in shown
        assert f"another edgelm is at {second.address} (pid {second.process.pid})" in shown
        again = edgelm(environment, "serve", "--port", second.address.rpartition(":")[2])
        assert f"in use by edgelm serve (pid {second.process.pid})" in again.stderr
        assert second.end() == 0
    assert json.loads(file.read_text())["pid"] == front.process.pid


def test_the_second_front_is_found_when_the_first_ended(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with (
        serving(own, models / "tiny.gguf", log=tmp_path / "log") as first,
        serving(own, models / "tiny.gguf", log=tmp_path / "log2") as second,
    ):
        assert first.end() == 0
        assert f"at {second.address} (pid {second.process.pid})" in edgelm(own, "ps").stdout
        assert second.end() == 0
    assert not list(Path(own["EDGELM_RUNTIME_DIR"]).glob("front*"))


def test_ignored_fields_are_logged_once(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(own, models / "tiny.gguf", "--verbose", log=tmp_path / "log") as front:
        assert front.chat(of_no_list=1, user="me").status_code == 200
        answer = front.http.post(
            "/v1/responses", json={"model": "tiny", "input": "hi", "max_output_tokens": 2, "x\x1b": 1}
        )
        assert answer.status_code == 200
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "ignored unknown" in line]
    assert lines == [
        "POST /v1/chat/completions: ignored unknown fields: 'of_no_list'",
        r"POST /v1/responses: ignored unknown fields: 'x\x1b'",
    ]


def test_other_machines_need_a_key(environment: dict[str, str]) -> None:
    done = edgelm(environment, "serve", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "--api-key-file" in done.stderr


def test_a_key_is_asked_for_where_one_is_set(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    arguments = ("--host", "0.0.0.0", "--api-key", "a secret", models / "tiny.gguf")
    with serving(own, *arguments, log=tmp_path / "log") as front:
        for path in ("/v1/models", "/edgelm/ps"):
            answer = front.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert front.chat().status_code == 401
        assert front.http.get("/health").status_code == 200
        front.http.headers["authorization"] = "Bearer a secret"
        assert front.chat().status_code == 200
        assert front.chat(model=str(models / "long.gguf")).status_code == 404, "not one of those that are served"
        assert "tiny" in edgelm(own, "ps").stdout, "our own commands find their key beside the address"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_front_and_engines(
    own: dict[str, str], models: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with serving(own, models / "long.gguf", log=tmp_path / "log") as front:
        events = front.events("long", max_tokens=100_000, **ENDLESS)
        next(events)
        if number == signal.SIGINT:  # a terminal sends it to the whole group
            os.killpg(front.process.pid, number)
        else:
            front.process.send_signal(number)
        assert list(events)[-1]["error"]["code"] == "engine_died"
        assert front.process.wait(LIMIT_S) == code
    assert (tmp_path / "log").read_text() == ""
    assert [*Path(own["EDGELM_RUNTIME_DIR"]).iterdir()] == []
    if sys.platform == "linux":
        assert not processes_of(own)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_interrupt_that_a_script_ignores_stays_ignored(own: dict[str, str], tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as behind `&`
    try:
        with serving(own, "starter", log=tmp_path / "log") as front:
            status = Path(f"/proc/{front.process.pid}/status").read_text()
            ignored = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn"))
            assert ignored >> (signal.SIGINT - 1) & 1
            front.process.send_signal(signal.SIGTERM)
            assert front.process.wait(LIMIT_S) == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_front_ends_when_its_standard_input_closes(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(own, models / "tiny.gguf", "--until-stdin-closes", log=tmp_path / "log") as front:
        assert front.chat().status_code == 200
        assert front.process.stdin
        front.process.stdin.close()
        assert front.process.wait(LIMIT_S) == 0
    if sys.platform == "linux":
        assert not processes_of(own)


def test_a_model_that_is_not_used_is_unloaded(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    def used_engine(front: Front) -> int:
        """Return the process that answers; it is in use meanwhile."""
        events = front.events("long", max_tokens=30_000, **ENDLESS)
        assert "choices" in next(events)
        pid: int = front.ps("long")["pid"]
        events.close()  # type: ignore[attr-defined]
        return pid

    with serving(own, models / "long.gguf", "--idle-timeout", "0.5", log=tmp_path / "log") as front:
        first = used_engine(front)
        until("the engine is gone", lambda: front.ps("long") is None)
        if sys.platform == "linux":
            assert first not in processes_of(own)
        assert used_engine(front) != first


def test_a_request_during_the_start_waits_unless_it_says_otherwise(
    environment: dict[str, str], models: Path, tmp_path: Path
) -> None:
    with serving(environment, models / "tiny.gguf", log=tmp_path / "log") as front:
        answer = front.chat(headers={"prefer": "wait=0"})
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "model_loading"
        assert error["progress"] is None or 0 <= error["progress"] <= 1
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert front.ps("tiny")["state"] in ("starting", "ready")
        assert front.chat(headers={"prefer": ""}).status_code == 200
        assert front.ps("tiny")["progress"] == 1


def test_a_damaged_model_is_one_clear_error(environment: dict[str, str], models: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes((models / "tiny.gguf").read_bytes())
    with serving(environment, damaged, models / "tiny.gguf", log=tmp_path / "log") as front:
        os.truncate(damaged, 100_000)
        answer = front.chat("damaged")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_failed"
        assert "damaged.gguf" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert front.ps("damaged")["state"] == "failed"
        assert "damaged.gguf" in front.ps("damaged")["error"]
        listed = {each["id"]: each["edgelm"] for each in front.http.get("/v1/models").json()["data"]}
        assert "error" in listed["damaged"]
        assert listed["tiny"]["architecture"] == "llama"
        damaged.write_bytes((models / "tiny.gguf").read_bytes())
        until("the repaired file is loaded", lambda: front.chat("damaged").status_code == 200)
        damaged.unlink()
        assert front.chat("damaged").json()["error"]["code"] == "model_not_found"


def test_a_runtime_folder_with_a_long_name(environment: dict[str, str], models: Path, tmp_path: Path) -> None:
    own = environment | {"EDGELM_RUNTIME_DIR": str(tmp_path / ("long" * 30))}
    with serving(own, models / "tiny.gguf", log=tmp_path / "log") as front:
        assert front.chat().status_code == 200


def test_ps_without_a_server_is_one_line(own: dict[str, str]) -> None:
    done = edgelm(own, "ps")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    runtime = Path(own["EDGELM_RUNTIME_DIR"])
    runtime.mkdir()
    (runtime / "front.json").write_text('{"pid": 999999999, "address": "http://127.0.0.1:1"}')
    assert edgelm(own, "ps").stderr == done.stderr


def test_a_front_whose_runtime_folder_was_removed_serves_and_is_found(
    own: dict[str, str], models: Path, tmp_path: Path
) -> None:
    """A cleaner of temporary folders may do so, or a log-out and another log-in. Its engine is replaced."""
    runtime = Path(own["EDGELM_RUNTIME_DIR"])
    with serving(own, models / "tiny.gguf", log=tmp_path / "log", module="tests.server.impatient_front") as front:
        front.chat()
        before = front.ps("tiny")["pid"]
        runtime.rename(tmp_path / "removed")  # at once: the front may write into it meanwhile
        time.sleep(2 * KEPT_S)  # until then a kept connection reaches it
        assert front.chat().status_code == 200
        assert front.ps("tiny")["pid"] != before
        (record,) = until("the front is found again", lambda: find_fronts(runtime))
        assert (record.pid, record.address) == (front.process.pid, front.address)
        assert front.end() == 0
        assert find_fronts(runtime) == []
        assert not (runtime / "front.json").exists()


def test_a_context_for_every_model_is_shortened_for_one_that_has_less(
    own: dict[str, str], models: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.toml").write_text("[models.strict]\nctx = 4096\n")
    strict = tmp_path / "strict.gguf"
    strict.symlink_to(models / "tiny.gguf")
    environment = own | {"EDGELM_CONFIG_DIR": str(config)}
    with serving(environment, models / "tiny.gguf", "--ctx", "4096", log=tmp_path / "log") as front:
        assert front.chat().status_code == 200
        note = "the context is 512 tokens, not the 4,096 of ctx: the model was made for no more"
        assert (front.ps("tiny")["context"], front.ps("tiny")["predicted"]["note"]) == (512, note)
        assert f"tiny: {note}" in edgelm(environment, "ps").stdout
    assert note in (tmp_path / "log").read_text()
    with serving(environment, strict, log=tmp_path / "log") as front:
        refused = front.chat("strict")
        assert (refused.status_code, "more than the 512 tokens" in refused.text) == (503, True)
