"""A model whose file is cut, rewritten, replaced or deleted while `edgelm run` answers with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import write_tiny

TIMEOUT_S = 60
NUM_TOKENS = 1000  # more than are decoded before the file changes
MANY_TOKENS = 4000  # more than the pipe to a command that is stopped can hold
CHANGED = b"error: model.gguf changed while it was in use; try again; replace a model that is in use by renaming"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems may deliver another signal")


def run_and(
    change: Callable[[Path], object], environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[bytes]:
    """Run the command, and change the model's file as soon as the answer begins."""
    # f16 is not repacked: llama.cpp reads all weights from the mapped file for each token
    model = write_tiny(folder / "model.gguf", quant="f16", context=4096, endless=True)
    # answers are compared, and drafts change the shape of batches and so the last bits of the logits
    num_tokens = MANY_TOKENS if change in (cut, cut_and_delete) else NUM_TOKENS
    flags = ["--max-tokens", str(num_tokens), "--temperature", "0", "--raw", "--spec", "off"]
    command = [sys.executable, "-m", "edgelm", "run", str(model), "hello", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout
        assert process.stdout.read(1)
        process.send_signal(signal.SIGSTOP)  # it does not end before the change
        change(model)
        process.send_signal(signal.SIGCONT)
        out, errors = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def cut_and_delete(path: Path) -> None:
    os.truncate(path, 0)
    path.unlink()


def write_into(path: Path) -> None:
    with path.open("r+b") as file:  # of the same size, so there is no signal
        file.seek(-5000, os.SEEK_END)
        file.write(os.urandom(5000))


def replace(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b"GGUF")
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("change", [cut, cut_and_delete, write_into])
def test_a_change_ends_the_answer_with_one_error_line(
    change: Callable[[Path], None], server_environment: dict[str, str], tmp_path: Path
) -> None:
    done = run_and(change, server_environment, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(CHANGED), done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_file_that_is_deleted_or_replaced_disturbs_nothing(
    server_environment: dict[str, str], tmp_path: Path
) -> None:
    undisturbed = run_and(lambda _: None, server_environment, tmp_path)
    for change in (Path.unlink, replace):
        done = run_and(change, server_environment, tmp_path)
        assert (done.returncode, done.stderr) == (0, undisturbed.stderr), change
        assert done.stdout == undisturbed.stdout, change
