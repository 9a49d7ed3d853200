"""The worker of `edgelm convert`: read a folder, write a GGUF, check it.

Only a worker imports this module: the check loads native code.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any, cast

from edgelm.base.workers.child import Child, run_job
from edgelm.base.workers.messages import Note, Result, Status
from edgelm.making.conversion.check import Outcome, check_gguf
from edgelm.making.conversion.convert import Report, Source, convert_folder
from edgelm.making.conversion.lora import open_merge
from edgelm.making.conversion.messages import ConvertJob, Written
from edgelm.making.conversion.number_types import Target

REPORT_EVERY_S = 0.1


class _Progress:
    """Sends the progress of the file at a bounded rate."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._sent_at = 0.0

    def written(self, done: int, total: int) -> None:
        if time.monotonic() - self._sent_at >= REPORT_EVERY_S or done == total:
            self._child.send(Written(done, total))
            self._sent_at = time.monotonic()

    def stage(self, text: str) -> None:
        self._child.send(Status(text))


def _convert(job: ConvertJob, child: Child) -> None:
    progress = _Progress(child)
    outcome = Outcome("none", {}, "--no-check was given")

    def check(source: Source, part: Any) -> None:
        nonlocal outcome
        outcome = check_gguf(source, part, threads=job.threads, stage=progress.stage)

    with ExitStack() as resources:
        merge = open_merge(job.lora, job.folder, resources) if job.lora else None
        source = convert_folder(
            job.folder,
            job.out,
            cast("Target", job.to),
            change=merge,
            change_key=merge.key if merge else "",
            accept=(lambda source: merge.require_used(source.used)) if merge else None,
            report=Report(progress.written, progress.stage),
            check=check if job.check else None,
        )
    notes = [*source.notes, *outcome.notes]
    for text in notes:
        child.send(Note(text))
    document = {
        "model": source.about.name,
        "file": str(job.out),
        "architecture": source.architecture,
        "to": job.to,
        "lora": list(job.lora),
        "tensors": len(source.layout.tensors),
        "bytes": job.out.stat().st_size,
        "types": source.layout.types,
        "check": outcome.document,
        "notes": notes,
    }
    child.send(Result(document))


if __name__ == "__main__":
    sys.exit(run_job({ConvertJob: _convert}))
