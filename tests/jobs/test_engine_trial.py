"""The trial of both engines on a GPU: what is kept, what is no comparison, and that it leaves nothing behind.

The workers are fakes: no engine measures here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from edgelm.backends import kept_trials
from edgelm.backends.kept_trials import Speed, Trial, keep_trial, kept_trial
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine.gpu import Gpu
from edgelm.jobs import engine_trial
from edgelm.jobs.engine_trial import make_trial

WORKER = """
import json, os, sys, time
from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.child import run_job
from edgelm.base.workers.messages import Result, Status
from edgelm.jobs.speed import BenchJob

def answer(job, child):
    case = json.loads(sys.argv[1])[job.settings.engine]
    assert job.model.read_bytes() == b"a model"
    child.send(Status("measuring"))
    if "exit" in case:
        os._exit(case["exit"])
    if "error" in case:
        raise EdgeLMError(case["error"])
    if "device" not in case:
        time.sleep(600)
    results = [{"test": test.name, "tokens_per_second": speed} for test, speed in zip(job.tests, case["speeds"])]
    child.send(Result({"device": case["device"], "results": results}))

sys.exit(run_job({BenchJob: answer}))
"""
OURS: dict[str, Any] = {"device": "cuda", "speeds": [2000, 60]}
THEIRS: dict[str, Any] = {"device": "CUDA0", "speeds": [1500, 50]}
SLOW: dict[str, Any] = {"device": "CUDA0 + CUDA1", "speeds": [4000, 100]}
KEPT = Trial(torch=Speed(9, 9), llama=Speed(8, 8))


def write_model(path: Path) -> None:
    path.write_bytes(b"a model")


def trial(cache: Path, torch: dict[str, Any], llama: dict[str, Any]) -> Trial:
    """Make a trial in which each engine behaves as its case says."""
    worker = cache.parent / "worker.py"
    worker.write_text(WORKER)
    command = (sys.executable, str(worker), json.dumps({"torch": torch, "llama": llama}))
    said: list[str] = []
    made = make_trial(cache, said.append, write_model=write_model, command=command)
    assert said == ["torch: measuring", "llama: measuring"]
    assert not list(cache.glob("trial-*")), "the model stays in the cache"
    return made


@pytest.mark.parametrize(
    ("llama", "faster", "taken"), [(THEIRS, "torch", "our own kernels"), (SLOW, "llama", "llama.cpp")]
)
def test_a_trial_is_kept_with_the_faster_engine(tmp_path: Path, llama: dict[str, Any], faster: str, taken: str) -> None:
    cache = tmp_path / "cache"
    made = trial(cache, OURS, llama)
    assert made.line.startswith("our own kernels: 2,000 tokens/s of a prompt, 60 of an answer; llama.cpp: ")
    assert made.line.endswith(f"; --engine auto takes {taken}")
    kept = kept_trial(cache)
    assert kept == made
    assert kept
    assert kept.faster == faster


@pytest.mark.parametrize(
    ("torch", "llama", "problem"),
    [
        ({"error": "it needs 2 GiB"}, THEIRS, "our own kernels: it needs 2 GiB; llama.cpp: 1,500 tokens/s"),
        ({"exit": 3}, THEIRS, "our own kernels: its process ended with code 3; llama.cpp: 1,500 tokens/s"),
        (OURS, {"error": "no memory"}, "llama.cpp: no memory"),
        (
            OURS,
            {"device": "CUDA0, 5 of 9 layers", "speeds": [10, 2]},
            "llama.cpp: the GPU is in use: it had no room for the whole trial (CUDA0, 5 of 9 layers)",
        ),
        (OURS, {"device": "cpu", "speeds": [10, 2]}, "llama.cpp: the GPU is in use"),
    ],
    ids=["ours failed", "ours died", "theirs failed", "a part", "the processor"],
)
def test_a_failure_is_no_comparison_and_is_not_kept(
    tmp_path: Path, torch: dict[str, Any], llama: dict[str, Any], problem: str
) -> None:
    cache = tmp_path / "cache"
    assert problem in trial(cache, torch, llama).line
    assert kept_trial(cache) is None
    keep_trial(cache, KEPT)
    made = trial(cache, torch, llama)
    assert made.faster is None
    assert made.line.endswith("; that is no comparison, and --engine auto chooses as before")
    assert kept_trial(cache) == KEPT


def test_an_engine_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_trial, "LIMIT_S", 0.0)
    worker = tmp_path / "worker.py"
    worker.write_text("import time\ntime.sleep(600)")
    made = make_trial(tmp_path / "cache", write_model=write_model, command=(sys.executable, str(worker)))
    assert made.torch.problem == "it is not done after 0 s"
    assert kept_trial(tmp_path / "cache") is None


def test_a_model_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        path.write_bytes(b"half a model")
        raise OSError(28, "No space left on device")

    with pytest.raises(EdgeLMError, match=r"the trial of the engines cannot be made: No space left on device; free"):
        make_trial(tmp_path, write_model=full)
    assert not list(tmp_path.iterdir())


def test_another_gpu_has_no_trial_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_trial(tmp_path, KEPT)
    assert kept_trial(tmp_path) == KEPT
    monkeypatch.setattr(kept_trials, "nvidia_gpus", lambda: [Gpu("NVIDIA GeForce RTX 3060", 1, 1, "580.65")])
    assert kept_trial(tmp_path) is None
