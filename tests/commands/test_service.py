"""`edgelm service` as a program, and a server that systemd's own tool starts for a connection."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from edgelm.commands.service import command
from edgelm.commands.service.systemd import Systemd
from tests.commands.service.test_systemd import Commands
from tests.ports import free_port

LIMIT_S = 60


def service(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgelm", "service", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.skipif(sys.platform == "darwin", reason="systemd's units")
def test_the_units_hold_absolute_paths_and_no_key(server_environment: dict[str, str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me secret-secret-secret-secret\n")
    keys.chmod(0o600)
    environment = server_environment | {"EDGELM_API_KEY": "x" * 40, "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    flags = ("install", "--print", "--host", "0.0.0.0", "--port", "11600", "--api-key-file", str(keys))
    done = service(environment, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ListenStream=0.0.0.0:11600" in done.stdout
    command = next(line for line in done.stdout.splitlines() if line.startswith("ExecStart="))
    assert command.removeprefix('ExecStart="').startswith("/")
    assert command.endswith(f'"serve" "--api-key-file" "{keys}"')
    assert "secret" not in done.stdout
    assert "xxxx" not in done.stdout
    assert not (tmp_path / "xdg").exists()


def test_a_service_that_could_not_listen_is_refused(server_environment: dict[str, str]) -> None:
    for flags, reason in (
        (("--host", "0.0.0.0"), "would have no key"),
        (("--host", "some.name"), "is a name"),
        (("--port", "0"), "port"),
    ):
        done = service(server_environment | {"EDGELM_API_KEY": "x" * 40}, "install", "--print", *flags)
        assert done.returncode == 1, flags
        assert done.stderr.startswith("error: ")
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "darwin", reason="systemd's units")
def test_a_file_of_keys_that_a_variable_names_is_in_the_unit(
    server_environment: dict[str, str], tmp_path: Path
) -> None:
    """The service does not see the variable, and would not start without a key."""
    keys = tmp_path / "keys"
    keys.write_text("me secret-secret-secret-secret\n")
    keys.chmod(0o600)
    environment = server_environment | {"EDGELM_API_KEY_FILE": str(keys), "EDGELM_PORT": "11600"}
    done = service(environment, "install", "--print", "--host", "0.0.0.0")
    assert f'"serve" "--api-key-file" "{keys}"' in done.stdout
    keys.unlink()
    done = service(environment, "install", "--print")
    assert (done.returncode, done.stdout) == (2, "")
    assert str(keys) in done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="systemd's units")
def test_a_certificate_of_a_variable_is_not_that_of_the_service(
    server_environment: dict[str, str], tmp_path: Path
) -> None:
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text("#!/bin/sh\n")
    systemctl.chmod(0o755)
    environment = server_environment | {
        "PATH": f"{systemctl.parent}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "xdg"),
        "EDGELM_TLS_CERT": str(tmp_path / "cert.pem"),
        "CUDA_VISIBLE_DEVICES": "1",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = service(environment, "install")
    assert done.returncode == 0, done.stderr
    assert "edgelm listens at http://127.0.0.1" in done.stdout
    note = next(line for line in done.stdout.splitlines() if line.startswith("note: the service does not see"))
    for name in ("EDGELM_TLS_CERT", "CUDA_VISIBLE_DEVICES", "https_proxy", "XDG_CONFIG_HOME"):
        assert name in note


def test_in_wsl_it_says_how_long_the_service_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever systemd runs: WSL looks at its terminals."""
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setattr(command, "_manager", lambda _: Systemd(tmp_path, Commands()))
    for release, is_told in (("6.6.87.2-microsoft-standard-WSL2", True), ("6.1.0-18-amd64", False)):
        monkeypatch.setattr(platform, "release", lambda release=release: release)
        command.install_service({}, linger=True)
        assert ("note: WSL ends some seconds after its last terminal closes" in capsys.readouterr().out) == is_told


def test_without_one_the_status_says_so(server_environment: dict[str, str], tmp_path: Path) -> None:
    environment = server_environment | {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "HOME": str(tmp_path)}
    done = service(environment, "status")
    assert (done.returncode, done.stderr) == (3, "")
    assert "not installed" in done.stdout
    assert service(environment, "remove").returncode == 0


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is not installed")
def test_a_connection_starts_the_server_on_the_socket_of_systemd(server_environment: dict[str, str]) -> None:
    port = free_port()
    assigned = [f"--setenv={name}={value}" for name, value in server_environment.items() if name.startswith("EDGELM_")]
    command = ["systemd-socket-activate", f"--listen=127.0.0.1:{port}", *assigned, "--setenv=PYTHONPATH"]
    serve = [sys.executable, "-m", "edgelm", "serve", "--port", "1"]  # a port that it could not bind
    started = subprocess.Popen(
        [*command, *serve],
        env=server_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        answer = _asked(f"http://127.0.0.1:{port}/health")
        assert answer["status"] == "ok"
        names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{started.pid}/environ").read_bytes().split(b"\0")}
        assert b"LISTEN_PID" in names, "systemd's tool has become the server"
        listed = httpx2.get(f"http://127.0.0.1:{port}/v1/models", timeout=LIMIT_S)  # a worker reads the models
        assert listed.status_code == 200
        assert not [pid for pid in _children(started.pid) if b"LISTEN_" in _environment(pid)]
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        output, errors = started.communicate(timeout=LIMIT_S)
    assert f"http://127.0.0.1:{port}/v1".encode() in output, errors


def test_a_socket_of_another_process_is_left_alone(server_environment: dict[str, str]) -> None:
    """LISTEN_PID names the process that it is for; these variables were inherited."""
    code = (
        "import os; from edgelm.server.listener import inherited_listener as f;"
        "print(f(), [name for name in os.environ if name.startswith('LISTEN_')])"
    )
    environment = server_environment | {"LISTEN_PID": "1", "LISTEN_FDS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == "None []\n"


def test_a_socket_that_is_none_of_tcp_is_refused(server_environment: dict[str, str]) -> None:
    code = (
        "import os, socket; os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1');"
        "one = socket.socket(socket.AF_UNIX); os.dup2(one.fileno(), 3);"
        "from edgelm.server.listener import inherited_listener; inherited_listener()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=server_environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "EdgeLMError: systemd passed a socket that listens at no TCP port" in done.stderr


def _asked(url: str) -> dict[str, str]:
    """Return the first answer; the tool needs a moment before it listens."""
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            answer: dict[str, str] = httpx2.get(url, timeout=LIMIT_S).json()
        except httpx2.ConnectError:
            assert time.monotonic() < end
            time.sleep(0.05)
        else:
            return answer


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
