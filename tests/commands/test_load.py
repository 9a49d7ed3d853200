"""`edgelm load` and `edgelm unload` without a real server: several servers, names of no file, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import FrontRecord, announced
from edgelm.commands.load import load_model, unload_models

LIMIT_S = 60.0


class FakeFront:
    """A server that has models loaded, and refuses to unload others. `are_gone`: it finds no file of any model.

    Other servers run the models of `remote`.
    """

    def __init__(self, loaded: list[str], *, are_gone: bool = False, remote: tuple[str, ...] = ()) -> None:
        self.loaded = loaded
        self.remote = remote
        self.are_gone = are_gone
        self.unloaded: list[str] = []  # as the clients named them

    def asked(self, method: str, path: str, name: str) -> tuple[int, dict[str, Any]]:
        if path == "/edgelm/ps":
            own = {"state": "ready", "engine": "llama"}
            models = [own | {"model": loaded, "path": f"/models/{loaded}.gguf"} for loaded in self.loaded]
            models += [{"model": name, "state": "ready", "engine": "remote", "path": None} for name in self.remote]
            return 200, {"models": models}
        if method == "GET" and self.are_gone:
            return 404, {"error": {"message": "the file is gone"}}
        if method == "GET":
            return 200, {
                "status": {"value": "loaded" if unquote(path).split("/", 3)[-1] in self.loaded else "unloaded"}
            }
        if self.are_gone:
            self.unloaded.append(name)
            return 200, {"success": True}
        if name not in self.loaded:
            return 400, {"error": {"message": f"{name} is not loaded"}}
        self.loaded.remove(name)
        return 200, {"success": True}

    @contextmanager
    def serve(self, runtime: Path) -> Iterator[None]:
        front = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, document = front.asked(self.command, self.path, json.loads(body)["model"] if body else "")
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(document).encode())

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with announced(runtime, FrontRecord(os.getpid(), f"http://127.0.0.1:{server.server_port}")):
                yield
            server.shutdown()


def test_the_server_that_has_the_model_unloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path))
    first, second = FakeFront(["a", "b"]), FakeFront(["a", "c", "own/m:Q8_0"])
    with first.serve(tmp_path), second.serve(tmp_path):
        for name in ("c", "own/m:Q8_0", "a"):
            unload_models(name, every=False)
        assert (first.loaded, second.loaded) == (["b"], ["a"])
        with pytest.raises(EdgeLMError, match="c is not loaded"):
            unload_models("c", every=False)
        capsys.readouterr()
        unload_models(every=True)
        assert capsys.readouterr().out == "b is unloaded\na is unloaded\n"
        unload_models(every=True)
        assert capsys.readouterr().out == "no model is loaded\n"


def test_a_model_that_another_server_runs_is_not_unloaded_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path))
    with FakeFront(["a"], remote=("big",)).serve(tmp_path):
        unload_models(every=True)
        unload_models(every=True)
    assert capsys.readouterr().out == "a is unloaded\nno model is loaded\n"


@pytest.mark.parametrize("name", ["m", "M", "m:latest", "/models/m.gguf", "mine", "Mine:latest"])
def test_the_server_that_has_a_model_without_its_file_unloads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path))
    (tmp_path / "config.toml").write_text('[models.m]\nalias = "mine"\n')
    first, second = FakeFront(["a"], are_gone=True), FakeFront(["b", "m"], are_gone=True)
    with first.serve(tmp_path), second.serve(tmp_path):
        unload_models(name, every=False)
    assert (first.unloaded, second.unloaded) == ([], [name])


NAMES = {"of nobody": "~nobody-of-that-name/x.gguf", "long": "x" * 5000 + ".gguf", "long path": "/" + "x" * 5000}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_that_no_file_can_have(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path))
    with pytest.raises(EdgeLMError, match="no edgelm server is running"):
        load_model(name, None, as_json=False)


def test_ctrl_c_ends_the_command_while_the_model_loads(tmp_path: Path) -> None:
    environment = os.environ | {f"EDGELM_{kind}_DIR": str(tmp_path) for kind in ("CONFIG", "RUNTIME")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "edgelm", "load", "model"]
        with announced(tmp_path, FrontRecord(os.getpid(), address)):
            process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            try:
                server.settimeout(LIMIT_S)
                with server.accept()[0] as connection:
                    assert connection.recv(100).startswith(b"POST /models/load")
                    process.send_signal(signal.SIGINT)
                    _, log = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
                process.wait()
    assert process.returncode == 130
    assert "Traceback" not in log
