"""`edgelm run` and its like on a GPU that fails: one line, and no traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.base.places import Places
from edgelm.base.workers.messages import Result, RunJob, Text
from edgelm.commands import job

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def places(server_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setattr(job, "WORKER", "tests.commands.failing_worker")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return Places(server_environment)


def replies(prompt: str, places: Places, tmp_path: Path) -> list[object]:
    (tmp_path / "m.gguf").touch()
    with job.run_job(RunJob(model=tmp_path / "m.gguf", settings=Settings(), prompt=prompt), places, False) as arriving:
        return list(arriving)


def test_what_the_gpu_cannot_load_is_answered_by_another_process(
    places: Places, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert replies("load", places, tmp_path) == [
        Text("half an "),
        Text("answer after the memory of the GPU is used up"),
        Result({}),
    ]
    assert capfd.readouterr().err == "note: CUDA is not used: the memory of the GPU is used up; lower --ctx\n"


def test_a_crash_in_the_middle_of_an_answer_is_one_error(
    places: Places, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EdgeLMError) as caught:
        replies("crash", places, tmp_path)
    assert str(caught.value) == "the GPU failed: CUDA error: unspecified launch failure; try again"
    assert capfd.readouterr().err == ""


def test_a_note_of_the_worker_stays_in_sight(places: Places, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert replies("note", places, tmp_path)[0] == Text("half an ")
    assert capfd.readouterr().err == "note: the KV mode is slow\n"
