"""`edgelm serve` with files that are no models, and with keys: refused at the start, in one line."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from tests.tiny import write_tiny

LIMIT_S = 60


SERVE = [sys.executable, "-m", "edgelm", "serve", "--port", "0"]


def environment_of(home: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
    places = {f"EDGELM_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME", "CACHE")}
    return clean | places | {"HF_HOME": str(home / "hf")}


def serve(home: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*SERVE, "--until-stdin-closes", *map(str, arguments)]
    environment = environment_of(home) | variables
    return subprocess.run(
        command, env=environment, input="", capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def key_file(home: Path, text: str) -> Path:
    path = home / "keys"
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("notes.txt", b"no model at all", "notes.txt"),
        ("notes.gguf", b"no model at all", "notes.gguf"),
        ("empty.gguf", b"", "empty.gguf"),
        ("short.gguf", None, "short.gguf is cut short"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    good = write_tiny(tmp_path / "good.gguf")
    bad = tmp_path / name
    bad.write_bytes(good.read_bytes()[:100_000] if content is None else content)
    done = serve(tmp_path, good, bad)
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    done = serve(tmp_path, tmp_path / "folder")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def test_models_are_served(tmp_path: Path) -> None:
    done = serve(tmp_path, write_tiny(tmp_path / "good.gguf"), "starter")
    assert (done.returncode, done.stderr) == (0, "")
    assert "http://127.0.0.1:" in done.stdout


def test_a_key_on_the_command_line_is_a_warning(tmp_path: Path) -> None:
    done = serve(tmp_path, "--api-key", "my-secret-key")
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("warning: ")
    assert "my-secret-key" not in line


def test_a_key_from_elsewhere_is_no_warning(tmp_path: Path) -> None:
    assert serve(tmp_path, EDGELM_API_KEY="my-secret-key").stderr == ""
    assert serve(tmp_path, "--api-key-file", key_file(tmp_path, "me my-secret-key\n")).stderr == ""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("api_key = 'my-secret-key'\n")
    done = serve(tmp_path, "--host", "0.0.0.0")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_key_file_lets_other_machines_in(tmp_path: Path) -> None:
    done = serve(tmp_path, "--host", "0.0.0.0", "--api-key-file", key_file(tmp_path, "me my-secret-key\n"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "my-secret-key" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--api-key-file", "none"), "cannot be read"),
        (("--ask-key",), "terminal"),
        (("--origin", "*"), "origin is"),
        (("--origin", "null"), "origin is"),
        (("--origin", "https://a.example/page"), "origin is"),
        (("--origin", "local,https://"), "origin is"),
        (("--allowed-host", "*"), "allowed_host is"),
        (("--allowed-host", "box.lan:80"), "allowed_host is"),
    ],
)
def test_wrong_access_is_refused(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = serve(tmp_path, *arguments)
    assert done.returncode in (1, 2)
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_origins_and_hosts_are_lists(tmp_path: Path) -> None:
    origins = ("--origin", "local,https://A.example", "--origin", "app://b/")
    done = serve(tmp_path, *origins, "--allowed-host", "box.lan,10.0.0.1", EDGELM_ORIGIN="https://c.example")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_key_is_typed_and_not_shown(tmp_path: Path) -> None:
    terminal, line = pty.openpty()
    process = subprocess.Popen(
        [*SERVE, "--ask-key", "--json"],
        env=environment_of(tmp_path),
        stdin=line,
        stdout=subprocess.PIPE,
        stderr=line,
        start_new_session=True,
    )
    try:
        shown = b""
        deadline = time.monotonic() + LIMIT_S
        while b"must send: " not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 1000)
        os.write(terminal, b"typed-secret\n")
        assert process.stdout
        address = json.loads(process.stdout.readline())["address"]
        for key, status in (("typed-secret", 200), ("another-one", 401)):
            headers = {"x-api-key": key}
            assert httpx2.get(f"{address}/v1/models", headers=headers, trust_env=False).status_code == status
        assert b"typed-secret" not in shown
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
        os.close(terminal)
        os.close(line)
