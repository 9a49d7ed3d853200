"""A GPU that fails for good, or hangs, under a real front: one clear error, another engine, and at last none on CUDA.

The failures are injected into the real engine process, whose engine computes on the processor.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.server.harness import ENDLESS, Front, processes_of, serving, until

# In an engine process: the first engines, as many as FAILING, do ACT in their 8th step.
BROKEN_GPU = """
import os, sys
if "edgelm.server.engine_process" in sys.orig_argv:
    import time
    from pathlib import Path
    from edgelm.backends.llama import executor
    from edgelm.engine import engine
    from edgelm.errors import DeviceError
    import edgelm.jobs.worker as worker

    def fail():
        raise DeviceError("the GPU failed: CUDA error: an illegal memory access was encountered", "try again")

    def hang():
        time.sleep(3600)

    real_build = worker.build
    def build(path, settings, **given):
        with open(LOG, "a") as file:
            file.write(given["cuda_problem"] + "\\n")
        return real_build(path, settings, **given)
    worker.build = build

    real_init = engine.Engine.__init__
    def init(self, *args, **given):
        real_init(self, *args, **given | {"hang_s": 1.0})
    engine.Engine.__init__ = init

    number, steps = len(Path(LOG).read_text().splitlines()) if os.path.exists(LOG) else 0, [0]
    forward = executor.LlamaExecutor.forward
    def broken(self, step):
        steps[0] += bool(step.chunks)
        if number < FAILING and steps[0] == 8:
            ACT()
        forward(self, step)
    executor.LlamaExecutor.forward = broken
"""


def with_a_broken_gpu(environment: dict[str, str], folder: Path, act: str, failing: int) -> dict[str, str]:
    """Return an environment in which engine processes fail; folder/starts has a line for each of them."""
    folder.mkdir()
    program = BROKEN_GPU.replace("ACT()", f"{act}()").replace("FAILING", str(failing))
    (folder / "sitecustomize.py").write_text(f"LOG = {str(folder / 'starts')!r}\n{program}", encoding="utf-8")
    paths = filter(None, (str(folder), environment.get("PYTHONPATH")))
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


def error_of_a_stream(front: Front) -> tuple[int, dict[str, Any]]:
    """Return how many pieces of an endless answer came, and the error that ended it."""
    pieces = 0
    for event in front.events("long", **ENDLESS, max_tokens=2000):
        if "error" in event:
            return pieces, event["error"]
        pieces += bool(event["choices"] and event["choices"][0]["delta"].get("content"))
    raise AssertionError("no error")


def test_after_a_sticky_error_another_engine_answers_and_at_last_without_cuda(
    own: dict[str, str], models: Path, tmp_path: Path
) -> None:
    environment = with_a_broken_gpu(own, tmp_path / "gpu", "fail", failing=2)
    with serving(environment, models / "long.gguf", log=tmp_path / "log") as front:
        for _ in range(2):
            pieces, error = error_of_a_stream(front)
            assert pieces > 0, "it fails in the middle of an answer"
            assert "illegal memory access was encountered" in error["message"]
            assert error["type"] == "server_error"
            assert "Traceback" not in json.dumps(error)
        answer = front.chat("long")
        assert answer.status_code == 200, answer.text
        assert until("the model is loaded", lambda: front.ps("long")["state"] == "ready")
    starts = (tmp_path / "gpu" / "starts").read_text().splitlines()
    assert [bool(line) for line in starts] == [False, False, True]
    log = (tmp_path / "log").read_text()
    assert "long runs without CUDA until edgelm serve starts again: the GPU failed" in log
    assert "Traceback" not in log


def test_an_engine_that_hangs_ends_itself(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    environment = with_a_broken_gpu(own, tmp_path / "gpu", "hang", failing=1)
    with serving(environment, models / "long.gguf", log=tmp_path / "log") as front:
        pieces, error = error_of_a_stream(front)
        assert pieces > 0
        assert "the device did not finish a step" in error["message"]
        assert front.chat("long").status_code == 200
        engines = [line for line in processes_of(environment).values() if "engine_process" in line]
        assert len(engines) == 1, "the one that hung is gone"
    assert "Traceback" not in (tmp_path / "log").read_text()
