"""A GPU that stands in the machine and is not used: all commands that run one say so in one line.

The GPU is a `nvidia-smi` that lists one, or a whole faked machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faked_machine import PARTS_OF_TORCH, Card, Machine, make
from tests.server.harness import LIMIT_S, serving, until
from tests.tiny import write_tiny

LINE = "NVIDIA GeForce RTX 3060 is not used: --engine llama, and this llama.cpp computes on the processor only; "
TOOL = """#!/bin/sh
echo asked >> {calls}
echo 'NVIDIA GeForce RTX 3060, 580.65.06, 12288, 11000, GPU-1a, [N/A]'
"""


@pytest.fixture
def environment(server_environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "driver"
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text(TOOL.format(calls=folder / "calls"))
    tool.chmod(0o755)
    server_environment.pop("CUDA_VISIBLE_DEVICES", None)
    path = f"{folder}{os.pathsep}{server_environment.get('PATH', '')}"
    return server_environment | {"PATH": path, "EDGELM_ENGINE": "llama", "EDGELM_RUNTIME_DIR": str(tmp_path / "run")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", context=512)


def edgelm(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgelm", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_the_log_of_serve_and_ps_say_it(environment: dict[str, str], model: Path, tmp_path: Path) -> None:
    log = tmp_path / "front.log"
    with serving(environment, model, log=log) as front:
        assert front.chat(max_tokens=2).status_code == 200
        assert front.ps("tiny")["unused_gpu"].startswith(LINE)
        shown = edgelm(environment, "ps")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.count(f"tiny: {LINE}") == 1
        state = json.loads(edgelm(environment, "ps", "--json").stdout)
        assert state["models"][0]["unused_gpu"].startswith(LINE)
        until("the log has the line", lambda: LINE in log.read_text())
        assert log.read_text().count(LINE) == 1


@pytest.mark.parametrize("asked", [[], ["--device", "cpu"]], ids=["auto", "the user's choice"])
def test_run_says_it_unless_the_user_asked_for_the_processor(
    environment: dict[str, str], model: Path, asked: list[str]
) -> None:
    done = edgelm(environment, "run", model, "hello", "--raw", "--max-tokens", "2", *asked)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == (not asked)
    if asked:
        assert not Path(environment["PATH"].split(os.pathsep)[0], "calls").exists(), "the driver's tool takes time"


def test_the_chat_says_it_once_of_a_file(environment: dict[str, str], model: Path) -> None:
    """It asks for the file by its path, and the engine has a name."""
    command = [sys.executable, "-m", "edgelm", "--plain", "--model", str(model)]
    typed = "hello\nagain\n/quit\n"
    done = subprocess.run(
        command, env=environment, input=typed, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(LINE) == 1, done.stdout


def test_bench_says_it(environment: dict[str, str], model: Path) -> None:
    done = edgelm(environment, "bench", model, "-p", "16", "-n", "2", "-r", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1


def test_eval_says_it(environment: dict[str, str], model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. " * 40)
    done = edgelm(environment, "eval", model, text)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1


RTX_3060 = Card("NVIDIA GeForce RTX 3060", 12288, 11300)
A100 = Card("NVIDIA A100-SXM4-80GB", 81920, 81000, "8.0", "GPU-2b", parts=((19968, 500), (9728, 9700)))
SEES = {"packages": PARTS_OF_TORCH, "sees_cuda": True}


@pytest.mark.parametrize(
    ("machine", "line"),
    [
        (Machine([RTX_3060], wsl=True), "NVIDIA GeForce RTX 3060 is not used: torch is not installed, and "),
        (
            Machine([RTX_3060], wsl=True, says="Failed to initialize NVML: GPU access blocked"),
            "GPU access blocked; update NVIDIA's driver in Windows, and type there: wsl --shutdown\n",
        ),
        (
            Machine([RTX_3060], driver_cuda=12040, **SEES),
            "NVIDIA GeForce RTX 3060 is not used: the NVIDIA driver is for CUDA 12.4, too old for torch 2.13.0, ",
        ),
        (Machine([A100], **SEES), "GiB are free on NVIDIA A100-SXM4-80GB MIG 2g.20gb, and "),
        (
            Machine([A100._replace(name="A", free_mib=240, parts=()), RTX_3060._replace(free_mib=500)], **SEES),
            "GiB are free on NVIDIA GeForce RTX 3060, and ",
        ),
    ],
    ids=["WSL, no torch", "WSL without a working driver", "an old driver", "a full part", "the freer of two"],
)
def test_run_says_it_in_this_machine(tmp_path: Path, model: Path, machine: Machine, line: str) -> None:
    python, environment = make(machine, tmp_path / "machine")
    command = [python, "-m", "edgelm", "run", model, "hello", "--raw", "--max-tokens", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(line) == 1, done.stderr


def test_doctor_says_why_our_kernels_do_not_use_it(tmp_path: Path) -> None:
    python, environment = make(Machine([RTX_3060]), tmp_path / "machine")
    for options, code, line in (
        ([], 0, "our own kernels do not use NVIDIA GeForce RTX 3060: torch is not installed"),
        (["--json"], 0, "our own kernels do not use NVIDIA GeForce RTX 3060: torch is not installed"),
        (["--gpu"], 1, "our kernels cannot be used here: torch is not installed"),
    ):
        command = [python, "-m", "edgelm", "doctor", *options]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert (done.stdout + done.stderr).count(line) == 1, done.stdout + done.stderr
