"""`edgelm quantize`: write a model with fewer bits for its weights, and say which types it really has.

Owns the choice of source and destination, and the output. A worker does the work; ending it cancels.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edgelm.base.config import Config, load_config
from edgelm.base.disk import unfinished
from edgelm.base.errors import BusyError, EdgeLMError, EngineError, ModelError, RequestError, UsageError
from edgelm.base.machine import facts as machine
from edgelm.base.places import Places
from edgelm.base.workers.exit_reason import ModelFiles
from edgelm.base.workers.messages import Result, Status
from edgelm.base.workers.parent import Exit, Worker
from edgelm.commands.convert import run_conversion
from edgelm.commands.flags import Json, Verbose
from edgelm.commands.job import StatusLine
from edgelm.commands.list import plain_console
from edgelm.commands.quantize_flags import FOR_A_GGUF, QuantizeFlags
from edgelm.commands.running import model_or_served
from edgelm.library.local import installed_model, require_whole
from edgelm.library.names import shown
from edgelm.library.progress import size_text, time_text
from edgelm.library.scan import LocalModel
from edgelm.making.conversion.messages import ConvertJob
from edgelm.making.quantization.file_size import parse_budget
from edgelm.making.quantization.job import IMPORTANCE_LIMIT_S, NUM_TOKENS, WORKER, QuantizeJob
from edgelm.making.quantization.recipe import Recipe
from edgelm.making.quantization.types import FILE_TYPES, FileType, file_type, tensor_type

AUTO = "auto"
CONVERTED = ".edgelm-source.gguf"  # the end of the hidden name of a converted folder
SMALL_BITS = 6.0  # below, an importance matrix is made by default


def quantize(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SRC", help="A GGUF, a folder of safetensors, or the name of one here.", show_default=False
        ),
    ] = None,
    destination: Annotated[
        str | None, typer.Argument(metavar="DST", help="The new file, NAME.gguf; of int4 a folder.", show_default=False)
    ] = None,
    *,
    flags: QuantizeFlags,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the types, or quantize to one of llama.cpp, or to packed INT4. Raises EdgeLMError."""
    if flags.show_list:
        list_types(as_json=as_json)
        return
    if source is None or destination is None:
        raise UsageError(
            "quantize takes a model and the name of the new file", "edgelm quantize SRC DST.gguf --to Q4_K_M"
        )
    if flags.to is None or not flags.to.lower().startswith("int4"):
        _refuse({"--group": flags.group is not None, "--zero-points": flags.zero_points}, "a type of llama.cpp")
        quantize_model(source, destination, flags, as_json=as_json, verbose=verbose)
        return
    from edgelm.commands.quantize_int4 import quantize_int4
    from edgelm.making.quantization.int4_job import GROUPS

    _refuse({f"--{name.replace('_', '-')}": getattr(flags, name) for name in FOR_A_GGUF}, f"--to {flags.to}")
    quantize_int4(
        source,
        destination,
        to=flags.to.lower(),
        group=GROUPS[-1] if flags.group is None else flags.group,
        zero_points=flags.zero_points,
        calibration=flags.calibration,
        calibration_tokens=flags.calibration_tokens,
        threads=flags.threads,
        as_json=as_json,
        verbose=verbose,
    )


def _refuse(flags: Mapping[str, object], purpose: str) -> None:
    """Raise UsageError where one of these flags is given."""
    if given := [name for name, value in flags.items() if value]:
        raise UsageError(
            f"{', '.join(given)} cannot be given with {purpose}", "omit " + ("it" if len(given) == 1 else "them")
        )


def list_types(*, as_json: bool) -> None:
    """Print the types of files with their bits per weight."""
    if as_json:
        rows = [
            {"type": row.name, "bits": row.bits, "tensors": row.tensor, "needs_importance": row.needs_importance}
            for row in FILE_TYPES.values()
        ]
        print(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("TYPE")
    table.add_column("BITS", justify="right")
    table.add_column("")
    for row in FILE_TYPES.values():
        note = "; ".join(filter(None, (row.note, "needs an importance matrix" if row.needs_importance else "")))
        table.add_row(row.name, "" if row.name == "COPY" else f"{row.bits:.2f}", note)
    plain_console().print(table)
    print("BITS: for each weight of most matrices; output and embedding often have more.")


def quantize_model(source: str, destination: str, flags: QuantizeFlags, *, as_json: bool, verbose: bool) -> None:
    """Quantize a model, and print what its file has. Raises EdgeLMError."""
    config = load_config({})
    chosen = _chosen_type(flags)
    model = model_or_served(source, config, installed_model)
    target = _destination(destination, model.files, force=flags.force)
    if saved := _file(flags.save_imatrix):
        if saved in (target, *model.files):
            raise UsageError("--save-imatrix names a file of the model", "name another file")
        if saved.is_dir() or not saved.parent.is_dir():
            raise UsageError(
                f"--save-imatrix {shown(str(saved), 200)} is no place for a file", "name a file in a folder"
            )
    with _as_gguf(model, target, config, verbose=verbose) as path:
        job = replace(_job(path, target, chosen, flags, config), is_source_temporary=path != model.path)
        with _worker(job, config.places, verbose=verbose) as replies:
            document = _follow(replies, job)
    if job.is_source_temporary:  # the user has the folder only
        document["source"] = str(_folder(model))
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        _print(document, chosen)


def _chosen_type(flags: QuantizeFlags) -> FileType:
    """Return the type of the file. Raises UsageError for flags that do not go together."""
    if _is_automatic(flags):
        chosen = file_type("Q4_K_M")  # until its types are chosen
    elif flags.to is None:
        raise UsageError("--to is missing", "--to Q4_K_M is the usual choice; edgelm quantize --list shows all")
    else:
        chosen = file_type(flags.to)
    for name in filter(None, (flags.output_type, flags.embedding_type)):
        tensor_type(name)
    if flags.imatrix and (flags.no_imatrix or flags.calibration or flags.save_imatrix):
        raise UsageError("--imatrix does not go with --no-imatrix, --calibration or --save-imatrix", "leave out one")
    if flags.no_imatrix and flags.save_imatrix:
        raise UsageError("--no-imatrix does not go with --save-imatrix", "leave out one")
    if flags.no_imatrix and flags.calibration and not _is_automatic(flags):
        raise UsageError("--no-imatrix does not go with --calibration", "leave out one")
    if flags.no_imatrix and chosen.needs_importance:
        raise UsageError(f"{chosen.name} needs an importance matrix", "leave out --no-imatrix, or take Q3_K_M or more")
    if flags.pure and not chosen.is_quantized:
        raise UsageError(f"--pure means nothing for {chosen.name}", "leave it out")
    return chosen


def _is_automatic(flags: QuantizeFlags) -> bool:
    """Tell whether the types are chosen by a size. Raises UsageError for a wrong one, and for flags beside it."""
    has_size = flags.budget is not None or flags.fits
    named_auto = flags.to is not None and flags.to.strip().lower() == AUTO
    if not has_size:
        if named_auto:
            raise UsageError("--to auto needs a size", "add --budget 4.5GiB, --budget 4.5bpw, or --fits")
        return False
    if flags.budget is not None and flags.fits:
        raise UsageError("--budget and --fits are two sizes", "leave out one")
    if not named_auto and flags.to is not None:
        raise UsageError(f"--to {flags.to} does not go with a size", "leave out --to, or --budget and --fits")
    if flags.pure:
        raise UsageError("--pure does not go with a size, for which types differ", "leave it out")
    if flags.output_type or flags.embedding_type:
        raise UsageError("--output-type and --embedding-type do not go with a size", "leave them out")
    if flags.budget is not None:
        parse_budget(flags.budget, 1)  # a wrong one is refused before the model runs for its importance matrix
    return True


def _destination(text: str, sources: list[Path] | tuple[Path, ...], *, force: bool) -> Path:
    """Return the path of the new file. Raises RequestError if it is no place for one."""
    try:
        path = Path(text).expanduser().absolute()
        if path.is_dir():
            raise RequestError(f"{shown(text)} is a folder", f"name a file in it: {shown(text.rstrip('/'))}/NAME.gguf")
        if path.suffix.lower() != ".gguf":
            raise RequestError(f"{shown(text)} is no name of a GGUF", f"call it {shown(text)}.gguf")
        if not path.parent.is_dir():
            raise RequestError(f"the folder {shown(str(path.parent), 200)} does not exist", "make it, or name another")
        if path.exists():
            if any(path.samefile(source) for source in sources if source.exists()):
                raise RequestError(f"{shown(text)} is the source itself", "name another file")
            if not force:
                raise RequestError(f"{shown(text)} exists already", "name another file, or replace it with --force")
        return path
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise RequestError(f"{shown(text)} cannot be written: {error}") from None


@contextmanager
def _as_gguf(model: LocalModel, destination: Path, config: Config, *, verbose: bool) -> Iterator[Path]:
    """Give the source as a GGUF: for a folder of safetensors a hidden one beside the new file, removed at the end.

    Its weights are as the folder stores them. A conversion that was interrupted goes on. Raises EdgeLMError.
    """
    if model.format != "safetensors":
        yield model.path
        return
    require_whole(model)
    folder = _folder(model)
    for left in destination.parent.glob(f".*{CONVERTED}"):
        with suppress(BusyError):  # another process uses it
            _remove_converted(left)
    converted = destination.with_name(f".{destination.stem}{CONVERTED}")
    _remove_converted(converted)
    run_conversion(ConvertJob(folder, converted, check=False), config, verbose=verbose)
    try:
        with converted.open("rb") as file:
            with suppress(OSError):  # a disk without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that the same command elsewhere leaves it alone
            newest = max(path.stat().st_mtime_ns for path in model.files)
            os.utime(converted, ns=(newest, newest))  # measurements are kept by the time of the file
            yield converted
    finally:
        converted.unlink(missing_ok=True)


def _remove_converted(path: Path) -> None:
    """Remove the file that a process left when it was killed. Raises BusyError where a process uses it."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError("another process quantizes to this file", "wait for it") from None
        path.unlink()


def _folder(model: LocalModel) -> Path:
    return model.path if model.path.is_dir() else model.path.parent


def _job(source: Path, target: Path, chosen: FileType, flags: QuantizeFlags, config: Config) -> QuantizeJob:
    return QuantizeJob(
        source=source,
        destination=target,
        recipe=Recipe(chosen.name, pure=flags.pure),
        budget=flags.budget,
        fits=flags.fits,
        settings=config.settings,
        output_type=flags.output_type,
        embedding_type=flags.embedding_type,
        allow_requantize=flags.allow_requantize,
        threads=flags.threads,
        measure_importance=_wants_importance(chosen, flags),
        may_do_without=not (chosen.needs_importance or flags.calibration or flags.save_imatrix),
        imatrix=_file(flags.imatrix),
        save_imatrix=_file(flags.save_imatrix),
        calibration=_file(flags.calibration),
        calibration_tokens=flags.calibration_tokens or NUM_TOKENS,
        importance_limit_s=None if _names_calibration(flags) else IMPORTANCE_LIMIT_S,
        cache=config.places.cache / "importance",
        measurements=config.places.cache / "sensitivity",
    )


def _names_calibration(flags: QuantizeFlags) -> bool:
    return bool(flags.calibration or flags.calibration_tokens or flags.save_imatrix)


def _wants_importance(chosen: FileType, flags: QuantizeFlags) -> bool:
    if flags.imatrix or flags.no_imatrix or not chosen.is_quantized:
        return False
    asked = bool(flags.calibration or flags.save_imatrix)
    return asked or chosen.needs_importance or chosen.bits < SMALL_BITS


def _file(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser().absolute()


@contextmanager
def _worker(job: QuantizeJob, places: Places, *, verbose: bool) -> Iterator[Iterator[Any]]:
    """Start the worker for a job, and give its replies. The worker is gone when the block ends. Raises EdgeLMError."""
    files = ModelFiles(job.source)
    facts = machine.facts(places.cache, notify=lambda _: None)
    facts.require_working()
    with Worker(
        WORKER,
        *(["-v"] if verbose else []),
        replies=(Status, Result),
        errors=(UsageError, RequestError, ModelError, BusyError, EngineError),
        environment=facts.environment,
        echo="" if verbose else None,
    ) as worker:
        worker.send(replace(job, repack=facts.repack))

        def replies() -> Iterator[Any]:
            yield from worker.replies()
            end = worker.exit()
            _remove_unfinished(job.destination)  # a worker that was killed could not
            raise _end(end, files)

        yield replies()


def _remove_unfinished(destination: Path) -> None:
    """Remove the unfinished file that a worker left, unless another process writes it."""
    part = unfinished(destination)
    with suppress(OSError), part.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink()


def _end(end: Exit, files: ModelFiles) -> EdgeLMError:
    """Return the error for a worker that ended without a result."""
    if files.rewritten() or (end.code == -signal.SIGBUS and files.changed()):
        return files.change()
    if end.code == -signal.SIGKILL:
        return EngineError("the process that quantizes was killed", "memory may have run out: close other programs")
    last = f" ({end.last_line})" if end.last_line else ""
    return EngineError(end.error or f"the process that quantizes {end.how}{last}", "-v shows llama.cpp's log")


def _follow(replies: Iterator[Any], job: QuantizeJob) -> dict[str, Any]:
    """Show the progress; return the result. Whatever ends the work early, no unfinished file stays."""
    line = StatusLine(sys.stderr.isatty())
    try:
        for reply in replies:
            if isinstance(reply, Result):
                return reply.document
            line.show(reply.text)
    except KeyboardInterrupt:
        line.clear()
        again = "uses the measurements made so far" if job.is_automatic else "starts over"
        print(f"note: stopped; {job.destination.name} was not written. The same command {again}", file=sys.stderr)
        raise
    finally:
        line.clear()
    raise AssertionError("a worker ends with a result or an error")


def _print(document: dict[str, Any], chosen: FileType) -> None:
    origin, target = document["source"], document["path"]
    before, after = document["source_bytes"], document["bytes"]
    print(
        f"{document['path']}: {size_text(after)}, {document['bits_per_weight']:.2f} bits per weight "
        f"(from {size_text(before)}), {_how(document['importance'])}in {time_text(document['seconds'])}"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("TYPE")
    for title in ("TENSORS", "SIZE", "SHARE"):
        table.add_column(title, justify="right")
    for row in document["types"]:
        table.add_row(row["type"], f"{row['tensors']:,}", size_text(row["bytes"]), f"{row['share']:.1%}")
    plain_console().print(table)
    if choice := document["choice"]:
        plain_console().print(_choice_table(choice))
        print("\n".join(_choice_lines(choice)))
    if chosen.is_quantized:
        print(f"what it costs: edgelm eval {shlex.quote(target)} TEXT --against {shlex.quote(origin)}")
    for note in _notes(document, chosen):
        print(f"note: {note}", file=sys.stderr)


def _choice_table(report: dict[str, Any]) -> Table:
    """Return a table of the types that `--to auto` chose, and by what: a row for each group of matrices."""
    probes = list(dict.fromkeys(kind for row in report["rows"] for kind in row["probes"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("MATRICES", overflow="fold")
    for title in ("WEIGHTS", *(f"KL AS {kind}" for kind in probes)):
        table.add_column(title, justify="right")
    table.add_column("TYPE")
    for title in ("SIZE", "KL"):
        table.add_column(title, justify="right")
    for row in report["rows"]:
        alone = [_number(row["probes"].get(kind)) for kind in probes]
        size = size_text(row["nbytes"])
        name = row["name"].removesuffix(".weight")
        table.add_row(name, f"{row['numbers']:,}", *alone, row["type"], size, _number(row["predicted"]))
    return table


def _choice_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines below the table."""
    size, budget = size_text(report["nbytes"]), size_text(report["budget_bytes"])
    lines = [f"{size} of {budget}, KL divergence of the source about {report['predicted']:.5f} by the sum of the rows"]
    if report["measured"] is not None:
        lines.append(f"all types together: {report['measured']:.5f}, on {report['num_tokens']:,} tokens of the text")
    return lines


def _number(divergence: float | None) -> str:
    return "" if divergence is None else f"{divergence:.2g}"


def _how(importance: dict[str, Any] | None) -> str:
    if importance is None:
        return ""
    if "file" in importance:
        return f"by the importance matrix in {importance['file']}, "
    text = importance["text"]
    return f"by an importance matrix on {'the built-in text' if text == 'built-in' else text}, "


def _notes(document: dict[str, Any], chosen: FileType) -> Iterator[str]:
    """Yield what the user may not expect of the new file."""
    replaced: dict[tuple[str, str], list[str]] = {}
    for row in document["replaced"]:
        replaced.setdefault((row["asked"], row["type"]), []).append(row["tensor"])
    for (asked, kind), tensors in replaced.items():
        more = f" and {len(tensors) - 1:,} more" if len(tensors) > 1 else ""
        yield f"{tensors[0]}{more}: {kind} instead of {asked}, which its shape does not allow"
    if document["no_importance"]:
        yield f"no importance matrix was used: {document['no_importance']}"
    if (
        not document["choice"]
        and chosen.name not in ("COPY", "MXFP4_MOE")
        and all(row["type"] != chosen.tensor for row in document["types"])
    ):
        yield f"no tensor has the type {chosen.tensor}, which {chosen.name} stands for"
    if document["bytes"] > document["source_bytes"]:
        yield "the new file is larger than its source"
