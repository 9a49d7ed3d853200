"""A pull through Ollama's route: its worker's events in Ollama's words, and an end that is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.server.models import ModelNames
from edgelm.server.routes import ollama as module

WORKER = """
import sys
from pathlib import Path
from edgelm.library.progress import Checking, Listed, ListedFile, Progress, Pulled, PullJob, Retrying
from edgelm.base.workers.child import run_job

def pull(job, child):
    child.send(Listed("a/b", "c", (ListedFile("m.gguf", 100, 20),)))
    child.send(Progress(60, 100, 0, 1, 5.0, 8.0))
    child.send(Retrying("m.gguf", "no answer", 2.0))
    child.send(Checking("m.gguf"))
    if job.model == "whole:1b":
        child.send(Pulled(Path("m.gguf"), 100, 80, 1.0))

sys.exit(run_job({PullJob: pull}))
"""


async def pulled(name: str, folder: Path) -> list[dict[str, Any]]:
    models = ModelNames(folder, [])
    return [line async for line in module._pull(models, name)]


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULL_COMMAND", (sys.executable, "-c", WORKER))


async def test_progress_has_a_digest_and_both_counts(tmp_path: Path) -> None:
    first, listed, progress, retry, check, last = await pulled("whole:1b", tmp_path)
    assert first == {"status": "pulling manifest"}
    assert (listed["total"], listed["completed"], progress["completed"]) == (100, 20, 60)
    assert listed["digest"] == progress["digest"]
    assert listed["status"] == f"pulling {listed['digest'][7:19]}"
    assert retry["status"] == "no answer; again in 2 s"
    assert (check["status"], last["status"]) == ("verifying sha256 digest", "success")


async def test_a_pull_that_breaks_off_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(EdgeLMError, match="pull"):
        await pulled("broken:1b", tmp_path)
