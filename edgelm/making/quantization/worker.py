"""The worker of `edgelm quantize`: the importance matrix, the quantization, and the check of the written file.

Owns the order of this work, and the unfinished file until it is renamed. Killing the worker cancels it at any time: the
file that counts appears only when it is whole. Only a worker imports this module: it loads native code.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgelm.base.atomic import sync
from edgelm.base.disk import require_space, unfinished
from edgelm.base.errors import BusyError, EdgeLMError, ModelError
from edgelm.base.workers.child import Child, run_job
from edgelm.base.workers.messages import Result, Status
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import require_model
from edgelm.checkpoints.summary import quantization
from edgelm.library.progress import time_text
from edgelm.making.quantization.calibration import built_in_chats, calibration_text
from edgelm.making.quantization.chosen_types import chosen_types
from edgelm.making.quantization.imatrix_file import Statistics, read_statistics, write_statistics
from edgelm.making.quantization.importance import NotMeasurableError, measure
from edgelm.making.quantization.job import QuantizeJob
from edgelm.making.quantization.native import (
    Options,
    PlannedTensor,
    Step,
    check_data,
    check_importance,
    check_sources,
    plan,
    quantize,
    without_data,
)
from edgelm.making.quantization.search import Progress

HEADER_BYTES = 2**20  # beside the tensors and the metadata of the source
STATUS_EVERY_S = 0.2


def quantize_file(job: QuantizeJob, child: Child) -> None:
    """Quantize the source of a job, and send the types that its file really has. Raises EdgeLMError."""
    remove_source = partial(job.source.unlink, missing_ok=True)
    if job.is_source_temporary:
        child.at_end(remove_source)
    try:
        _quantize(job, child)
    finally:
        if job.is_source_temporary:
            remove_source()


def _quantize(job: QuantizeJob, child: Child) -> None:
    started_at = time.monotonic()
    options = Options(
        output_type=job.output_type,
        embedding_type=job.embedding_type,
        allow_requantize=job.allow_requantize,
        threads=job.threads,
    )
    with open_gguf(job.source) as source:
        require_model(source)
        check_sources(plan(source, job.recipe, None, options), options)  # before the long run of the model
        statistics, reason = _statistics(job, child)
        importance = statistics.means() if statistics else None
        check_importance(source, importance)
        recipe, report = job.recipe, None
        if job.is_automatic:
            recipe, report = chosen_types(source, job, importance, _SearchProgress(child))
        recipe = without_data(source, recipe, importance, options)
        planned = plan(source, recipe, importance, options)
        check_data(planned, recipe, importance)
        nbytes = sum(tensor.nbytes for tensor in planned) + _metadata_bytes(source) + HEADER_BYTES
        options = replace(options, keys=_keys(job, statistics))
        with _unfinished(job.destination, child) as (part, opened):
            require_space(job.destination.parent, nbytes, job.destination.name)
            quantize(source, opened, recipe, importance, options, partial(_report, child))
            child.send(Status("checking the file"))
            _flush(part)
            written = _read_back(part, planned)
            part.replace(job.destination)
            sync(job.destination.parent)
        document = {
            "source": str(job.source),
            "path": str(job.destination),
            "source_bytes": source.size,
            **written,
            "importance": _importance_document(job, statistics),
            "no_importance": reason,
            "choice": report.document() if report else None,
            "seconds": round(time.monotonic() - started_at, 1),
        }
        child.send(Result(document))


def _statistics(job: QuantizeJob, child: Child) -> tuple[Statistics | None, str]:
    """Return the importance matrix that the job wants, or None and why there is none. Raises EdgeLMError."""
    if job.imatrix:
        return read_statistics(job.imatrix), ""
    if not job.measure_importance:
        return None, ""
    child.send(Status("loading the model for its importance matrix"))
    try:
        statistics = measure(
            job.source,
            calibration_text(job.calibration),
            chats=() if job.calibration else built_in_chats(),
            max_tokens=job.calibration_tokens,
            cache=job.cache,
            threads=job.threads,
            repack=job.repack,
            limit_s=job.importance_limit_s,
            progress=_CalibrationProgress(child, job.importance_limit_s),
        )
    except NotMeasurableError as error:
        if not job.may_do_without:
            raise
        return None, error.message
    if job.save_imatrix:
        statistics.texts = (_text_name(job),)
        write_statistics(statistics, job.save_imatrix)
    return statistics, ""


def _keys(job: QuantizeJob, statistics: Statistics | None) -> dict[str, str | int]:
    """Return the keys that tell of the importance matrix, named as llama.cpp's own tool names them."""
    if statistics is None:
        return {}
    file = job.imatrix or job.save_imatrix
    keys: dict[str, str | int] = {"quantize.imatrix.file": file.name} if file else {}
    text = statistics.texts[-1] if job.imatrix and statistics.texts else _text_name(job)
    return keys | {
        "quantize.imatrix.dataset": text,
        "quantize.imatrix.entries_count": len(statistics.sums),
        "quantize.imatrix.chunks_count": statistics.num_chunks,
    }


def _text_name(job: QuantizeJob) -> str:
    return job.calibration.name if job.calibration else "edgelm"


class _CalibrationProgress:
    """Reports the windows of the text that are done."""

    def __init__(self, child: Child, limit_s: float | None) -> None:
        self._child = child
        self._limit_s = limit_s
        self._first: tuple[float, int] | None = None  # the time and number of the first report
        self._reported_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._first = self._first or (now, done)
        if now - self._reported_at < STATUS_EVERY_S:
            return
        self._reported_at = now
        started_at, already = self._first
        left = (now - started_at) / (done - already) * (total - done) if done > already else None
        if left is not None and self._limit_s is not None:
            left = min(left, max(0.0, started_at + self._limit_s - now))
        self._child.send(Status(f"importance matrix: {done} of {total} windows of text{_left(left)}"))


class _SearchProgress:
    """Reports the measurements by which types are chosen."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._stage = ""
        self._started_at, self._already = 0.0, 0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._started_at, self._already = progress.stage, now, progress.done
        done = progress.done - self._already
        left = (now - self._started_at) / done * (progress.total - progress.done) if done else None
        part = f" {progress.done + 1} of {progress.total}" if progress.total > 1 else ""
        self._child.send(Status(f"choosing types: {progress.stage}{part}{_left(left)}"))


def _report(child: Child, step: Step) -> None:
    child.send(Status(f"quantizing {step.number} of {step.total}: {shown(step.name)}{_left(step.left_s)}"))


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", {time_text(seconds)} left"


def _metadata_bytes(source: GGUF) -> int:
    return max(source.size - sum(tensor.nbytes for tensor in source.tensors.values()), 0)


@contextmanager
def _unfinished(destination: Path, child: Child) -> Iterator[tuple[Path, Path]]:
    """Give the path of the unfinished file, and one for llama.cpp. Nobody else writes the file meanwhile.

    It is removed unless it is renamed. llama.cpp gets the open file, where the system can name that: by its path it
    would make the file again if it opened it just after the removal at the end of this process.

    Raises EdgeLMError where the folder cannot be written, BusyError where another process writes the same file.
    """
    part = unfinished(destination)
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise EdgeLMError(
            f"{shown(str(destination), 200)} cannot be written: {error.strerror}", "choose another folder"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(f"another process writes {shown(destination.name)}", "wait for it") from None
        child.at_end(partial(part.unlink, missing_ok=True))
        opened = Path(f"/proc/self/fd/{descriptor}")
        try:
            yield part, opened if opened.exists() else part
        finally:
            with suppress(OSError):
                if os.path.samestat(part.stat(), os.fstat(descriptor)):
                    part.unlink()
    finally:
        os.close(descriptor)


def _flush(part: Path) -> None:
    try:
        sync(part)
    except OSError as error:
        raise EdgeLMError(f"{part.name} cannot be written: {error.strerror}", "check the disk") from None


def _read_back(part: Path, planned: list[PlannedTensor]) -> dict[str, Any]:
    """Read the written file, and return its types. Raises ModelError if it is not as planned."""
    with open_gguf(part) as written:
        types = {name: tensor.type.name for name, tensor in written.tensors.items()}
        if types != {tensor.name: tensor.type for tensor in planned}:
            raise ModelError("the written file has other tensors than planned", "try again; check the disk")
        weights = sum(tensor.num_elements for tensor in written.tensors.values())
        nbytes = sum(tensor.nbytes for tensor in written.tensors.values())
        rows = []
        for kind in dict.fromkeys(types.values()):
            tensors = [tensor for tensor in written.tensors.values() if tensor.type.name == kind]
            size = sum(tensor.nbytes for tensor in tensors)
            rows.append({"type": kind, "tensors": len(tensors), "bytes": size, "share": size / nbytes})
        return {
            "bytes": written.size,
            "type": quantization(written),
            "bits_per_weight": 8 * nbytes / weights,
            "types": sorted(rows, key=lambda row: -int(row["bytes"])),
            "replaced": [
                {"tensor": tensor.name, "asked": tensor.asked, "type": tensor.type}
                for tensor in planned
                if tensor.asked
            ],
        }


def _importance_document(job: QuantizeJob, statistics: Statistics | None) -> dict[str, Any] | None:
    if statistics is None:
        return None
    if job.imatrix:
        return {"file": str(job.imatrix), "tensors": len(statistics.sums)}
    text = str(job.calibration) if job.calibration else "built-in"
    return {"text": text, "windows": statistics.num_chunks, "tensors": len(statistics.sums)}


if __name__ == "__main__":
    sys.exit(run_job({QuantizeJob: quantize_file}))
