"""A pull without a hub: a worker with the messages of library/progress.py that does what its arguments say.

`python -m tests.tui.fake_pulling FOLDER [fail|die]` writes a megabyte a step into FOLDER/part, and continues where
it stopped; FOLDER/jobs gets each job, FOLDER/go is waited for before the last step, and FOLDER/ended says that it ended
because its standard input did.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.child import Child, run_job
from edgelm.library.progress import Checking, Fetched, Listed, ListedFile, Progress, Pulled, PullJob

STEPS, STEP_BYTES = 10, 1_000_000


def pull(folder: Path, how: str, job: PullJob, child: Child) -> None:
    child.at_end((folder / "ended").touch)
    with (folder / "jobs").open("a") as jobs:
        jobs.write(f"{job.model}\n")
    part = folder / "part"
    done = int(part.read_text()) if part.exists() else 0
    total = STEPS * STEP_BYTES
    child.send(Listed("o/n", "c", (ListedFile("a.gguf", total, done),)))
    while done < total:
        while done == total - STEP_BYTES and not (folder / "go").exists():
            time.sleep(0.01)
        if how == "fail" and done >= total // 2:
            raise EdgeLMError("the hub refuses o/n", "log in with `hf auth login`")
        if how == "die" and done >= total // 2:
            os._exit(3)
        done += STEP_BYTES
        part.write_text(str(done))
        child.send(Progress(done, total, 0, 1, STEP_BYTES, (total - done) / STEP_BYTES))
    child.send(Checking("a.gguf"))
    child.send(Fetched("a.gguf"))
    (folder / "pulled.gguf").touch()
    child.send(Pulled(folder / "pulled.gguf", total, total, 1.0))


if __name__ == "__main__":
    sys.exit(run_job({PullJob: partial(pull, Path(sys.argv[1]), " ".join(sys.argv[2:]))}))
