"""A pull without a hub: it speaks the protocol of library/pulling.py and does what its arguments say.

`python -m tests.tui.fake_pulling FOLDER [fail|die]` writes a megabyte a step into FOLDER/part, and goes on where
it stopped; FOLDER/jobs gets each job, FOLDER/go is waited for before the last step, and
FOLDER/ended says that it ended because its standard input did.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

STEPS, STEP_BYTES = 10, 1_000_000


def main(folder: Path, how: str = "") -> None:
    job = json.loads(sys.stdin.readline())
    with (folder / "jobs").open("a") as jobs:
        jobs.write(f"{job['model']}\n")
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    part = folder / "part"
    done = int(part.read_text()) if part.exists() else 0
    total = STEPS * STEP_BYTES
    _emit(event="listed", repository="o/n", commit="c", files=[{"path": "a.gguf", "size": total, "here": done}])
    while done < total:
        while done == total - STEP_BYTES and not (folder / "go").exists():
            time.sleep(0.01)
        if how == "fail" and done >= total // 2:
            _emit(event="error", message="the hub refuses o/n", hint="log in with `hf auth login`")
            sys.exit(1)
        if how == "die" and done >= total // 2:
            os._exit(3)
        done += STEP_BYTES
        part.write_text(str(done))
        left = (total - done) / STEP_BYTES
        _emit(event="progress", done=done, total=total, files_done=0, files=1, rate=STEP_BYTES, seconds_left=left)
    _emit(event="checking", path="a.gguf")
    _emit(event="fetched", path="a.gguf")
    (folder / "pulled.gguf").touch()
    _emit(event="done", path=str(folder / "pulled.gguf"), bytes=total, fetched=total, seconds=1.0)


def _emit(**event: object) -> None:
    print(json.dumps(event), flush=True)


def _end_with_parent(folder: Path) -> None:
    while os.read(0, 4096):
        pass
    (folder / "ended").touch()
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
