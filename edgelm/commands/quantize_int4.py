"""`edgelm quantize FOLDER OUT --to int4…`: a folder of safetensors as packed INT4 for the torch engine and for vLLM.

Owns the checks of the flags and the output. A worker does the work; the layers that it finished stay for the next run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgelm.base.config import load_config
from edgelm.base.disk import unfinished
from edgelm.base.errors import BusyError, EdgeLMError, EngineError, ModelError, RequestError, UsageError
from edgelm.base.machine.llama_build import extra_command
from edgelm.base.workers.exit_reason import ModelFiles, exit_reason
from edgelm.base.workers.messages import Note
from edgelm.base.workers.parent import Worker
from edgelm.commands.job import StatusLine
from edgelm.commands.running import model_or_served
from edgelm.library.local import installed_model
from edgelm.library.names import shown
from edgelm.library.progress import size_text, time_text
from edgelm.making.quantization.int4_job import (
    GROUPS,
    METHODS,
    SEQUENCE_LEN,
    SEQUENCES,
    Int4Done,
    Int4Job,
    Int4Progress,
)

WORKER = "edgelm.making.quantization.int4_worker"
PACKAGES = ("torch", "tokenizers")


def quantize_int4(
    source: str,
    destination: str,
    *,
    to: str,
    group: int = GROUPS[-1],
    zero_points: bool = False,
    calibration: str | None = None,
    calibration_tokens: int | None = None,
    threads: int = 0,
    as_json: bool = False,
    verbose: bool = False,
) -> None:
    """Quantize a folder, and print what was written. Raises EdgeLMError."""
    _check_flags(to, group, calibration)
    for package in PACKAGES:
        if find_spec(package) is None:
            raise EdgeLMError(f"packed INT4 is made by {package}, which is not installed", extra_command("cuda"))
    config = load_config({})
    folder = _folder(source) or model_or_served(source, config, installed_model).path
    out = _destination(destination, folder)
    job = Int4Job(
        folder=folder,
        out=out,
        method=to,
        group=group,
        symmetric=not zero_points,
        calibration=None if calibration is None else Path(calibration).expanduser().absolute(),
        sequences=max(calibration_tokens // SEQUENCE_LEN, 1) if calibration_tokens else SEQUENCES,
        threads=threads or None,
        device=config.settings.device,
    )
    files = ModelFiles(folder)
    log = "" if verbose else None
    errors = (UsageError, RequestError, ModelError, BusyError, EngineError)
    flags = ["-v"] if verbose else []
    with Worker(WORKER, *flags, replies=(Int4Progress, Note, Int4Done), errors=errors, echo=log) as worker:
        worker.send(job)
        try:
            done = _follow(worker.replies(), StatusLine(sys.stderr.isatty()))
        except KeyboardInterrupt:
            if unfinished(out).exists():
                line = "note: stopped; the same command continues after the last finished layer"
                print(f"{line} (kept in {unfinished(out)})", file=sys.stderr)
            raise
        if done is None:
            raise exit_reason(worker.exit(), files)
    _print(done, job, as_json=as_json)


def _check_flags(to: str, group: int, calibration: str | None) -> None:
    if to not in METHODS:
        raise UsageError(f"--to {shown(to)} is unknown", f"give {', '.join(METHODS)}")
    if group not in GROUPS:
        raise UsageError(f"--group is {group}", f"give {', '.join(map(str, GROUPS))}")
    if calibration is not None and to == "int4":
        raise UsageError("--to int4 needs no calibration", "omit --calibration, or use int4-awq or int4-gptq")


def _folder(source: str) -> Path | None:
    """Return the folder that a path names; None: it is the name of a model. Raises RequestError for a GGUF."""
    try:
        path = Path(source).expanduser()
        if path.suffix.lower() == ".gguf":
            hint = "name the folder of its safetensors; for a GGUF, --to has llama.cpp's types: Q4_K_M"
            raise RequestError(f"{shown(path.name)} is a GGUF, and packed INT4 is made from safetensors", hint)
        return path.absolute() if path.is_dir() else None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise RequestError(f"{shown(source)} cannot be read: {error}") from None


def _destination(text: str, folder: Path) -> Path:
    try:
        out = Path(text).expanduser().absolute()
        if folder.suffix.lower() == ".gguf":
            raise RequestError(f"{shown(folder.name)} is a GGUF", "name the folder of its safetensors")
        if out.exists():
            raise RequestError(f"{shown(text)} exists already", "give the name of a new folder, or remove it first")
        if out.is_relative_to(folder):
            raise RequestError(f"{shown(text)} is inside the model's own folder", "name another place")
        return out
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"{shown(text)} cannot be written: {error}") from None


def _follow(replies: Iterator[Any], line: StatusLine) -> Int4Done | None:
    try:
        for reply in replies:
            if isinstance(reply, Int4Done):
                return reply
            if isinstance(reply, Note):
                line.clear()
                print(f"note: {reply.text}", file=sys.stderr)
            else:
                left = "" if reply.left_s is None else f", {time_text(reply.left_s)} left"
                line.show(f"layer {reply.layer} of {reply.layers}: {reply.action}{left}")
        return None
    finally:
        line.clear()


def _print(done: Int4Done, job: Int4Job, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(done), "out": str(done.out), "method": job.method, "group": job.group}))
        return
    kind = f"{METHODS[job.method]}, groups of {job.group}{'' if job.symmetric else ' with zero points'}"
    print(f"{done.out}  {size_text(done.bytes)}, from {size_text(done.source_bytes)}, in {time_text(done.seconds)}")
    print(f"{done.matrices} matrices in 4 bits: {kind}; the others as they were")
    if done.tokens:
        print(f"calibrated on {done.tokens:,} tokens")
    print(f"try it: edgelm run {done.out} --engine torch 'Hello'")
