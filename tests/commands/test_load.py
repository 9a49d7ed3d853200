"""`edgelm load` without a real server: names of no file, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import FrontRecord, announced
from edgelm.commands.load import load_model

LIMIT_S = 60.0


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
