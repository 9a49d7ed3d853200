"""A worker of `edgelm run` whose GPU cannot load the model, fails in the middle of the answer, or is slow."""

from __future__ import annotations

import sys

from edgelm.base.errors import DeviceError, GpuLoadError
from edgelm.base.workers.child import Child, run_job
from edgelm.base.workers.messages import Loading, Note, Result, RunJob, Status, Text


def run(job: RunJob, child: Child) -> None:
    child.send(Loading(0.5))
    if job.prompt == "load" and not job.cuda_problem:
        raise GpuLoadError("the memory of the GPU is used up", "lower --ctx")
    if job.prompt == "note":
        child.send(Note("the KV mode is slow"))
        child.send(Status("a line that goes"))
    child.send(Text("half an "))
    if job.prompt == "crash":
        child.fail(DeviceError("the GPU failed: CUDA error: unspecified launch failure", "try again"))
    child.send(Text(f"answer after {job.cuda_problem}"))
    child.send(Result({}))


if __name__ == "__main__":
    sys.exit(run_job({RunJob: run}))
