"""`edgelm convert`: make a GGUF from a folder of safetensors.

Owns the names that may be given, the question before a file is replaced, and the line of progress. A worker converts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich import progress as rich_progress
from rich.console import Console
from rich.markup import escape

from edgelm.base.config import Config, load_config
from edgelm.base.errors import ModelError, UsageError
from edgelm.base.machine import facts as machine
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.setting_checks import parse_adapters
from edgelm.base.workers.exit_reason import ModelFiles, exit_reason
from edgelm.base.workers.messages import Note, Result, Status
from edgelm.base.workers.parent import Worker
from edgelm.checkpoints.gguf import open_gguf
from edgelm.commands.flags import Flags, Json, SettingsOf, Verbose
from edgelm.commands.job import StatusLine
from edgelm.commands.running import model_or_served
from edgelm.library.local import installed_model, require_whole
from edgelm.library.names import shown
from edgelm.library.progress import size_text, time_text
from edgelm.making.conversion.messages import REPLIES, WORKER, ConvertJob, Written

TYPES = ("source", "F32", "F16", "BF16", "Q8_0")
GGUF = ".gguf"


def convert_model(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A folder of safetensors, or its name.", show_default=False)
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.gguf", help="The new file.", show_default=False)],
    flags: Annotated[Flags, SettingsOf("convert")],
    *,
    to: Annotated[str, typer.Option(metavar="TYPE", help="source (as stored), F32, F16, BF16 or Q8_0.")] = "source",
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="ADAPTER", help="Merge this LoRA adapter; :0.5 behind it scales it.", show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare the file with the folder.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a GGUF and print what it is. Raises EdgeLMError."""
    config = load_config(flags)
    job = ConvertJob(
        folder=source_folder(folder, config),
        out=target_file(out, force=force),
        to=_type(to),
        check=check,
        threads=config.settings.threads or usable_cores().physical,
        lora=_adapters(lora or ()),
    )
    _print(run_conversion(job, config, verbose=verbose), as_json)


def run_conversion(job: ConvertJob, config: Config, *, verbose: bool = False) -> dict[str, Any]:
    """Convert in a worker, with a line of progress; return what `--json` prints. Raises EdgeLMError."""
    environment = None
    if job.check:
        facts = machine.facts(config.places.cache, notify=lambda text: print(f"note: {text}", file=sys.stderr))
        facts.require_working()
        environment = facts.environment
    files = ModelFiles(job.folder)
    with ExitStack() as resources:
        bar = resources.enter_context(_Bar(sys.stderr.isatty()))
        worker = resources.enter_context(
            Worker(
                WORKER,
                *(["-v"] if verbose else []),
                replies=REPLIES,
                environment=environment,
                echo="" if verbose else None,
            )
        )
        worker.send(job)
        try:
            for reply in _replies(worker):
                if isinstance(reply, Result):
                    return reply.document
                bar.show(reply)
        except KeyboardInterrupt:
            bar.stopped()
            raise
        raise exit_reason(worker.exit(), files)


def source_folder(name: str, config: Config) -> Path:
    """Return the folder of safetensors with this name or path. Raises ModelError."""
    if (path := folder_at(name)) is not None:
        return path
    model = model_or_served(name, config, installed_model)
    if model.format == "gguf":
        with open_gguf(model.path):  # which says where the file is none
            raise ModelError(f"{shown(name)} is a GGUF already", "name a folder of safetensors")
    require_whole(model)
    return model.path if model.path.is_dir() else model.path.parent


def folder_at(name: str) -> Path | None:
    """Return the folder at a path; None: there is none."""
    try:
        path = Path(name).expanduser().absolute()
        return path if path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file can have; RuntimeError: ~ of an unknown user
        return None


def target_file(out: str, *, force: bool) -> Path:
    """Return the path of a new GGUF. Raises EdgeLMError where it cannot be one, or is not to be replaced."""
    try:
        path = Path(out).expanduser().absolute()
        if path.is_dir():
            raise UsageError(f"{out} is a folder", "give the name of the new file, such as model.gguf")
        if path.suffix != GGUF:
            raise UsageError(f"{out} does not end in {GGUF}", "give the name of the new file, such as model.gguf")
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}", "make it first")
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise UsageError(f"{out} cannot be a file: {error}") from None
    if exists and not force and not _replaced(path.name):
        raise UsageError(f"{out} exists", "give another name, or --force")
    return path


def _replaced(name: str) -> bool:
    """Ask whether a file is to be replaced; without a terminal, it is not."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"{name} exists. Replace it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _type(to: str) -> str:
    name = next((name for name in TYPES if name.lower() == to.lower()), None)
    if name is None:
        raise UsageError(f"--to {to} is not a type of convert", f"give one of {', '.join(TYPES)}")
    return name


def _adapters(lora: Sequence[str]) -> tuple[str, ...]:
    try:
        return parse_adapters(list(lora))
    except ValueError as error:
        raise UsageError("--lora has a wrong value", f"give {error}") from None


def _replies(worker: Worker) -> Iterator[Any]:
    yield from worker.replies()


class _Bar:
    """A line of progress on standard error, and the notes; without a terminal, a new line now and then."""

    def __init__(self, terminal: bool) -> None:
        self._written: Written | None = None
        self._lines = None if terminal else StatusLine(terminal=False)
        self._first: tuple[float, int] | None = None  # the time and bytes of the first report
        self._bar = rich_progress.Progress(
            rich_progress.BarColumn(bar_width=None),
            rich_progress.TextColumn("{task.percentage:>3.0f} %"),
            rich_progress.TextColumn("{task.fields[text]}"),
            console=Console(file=sys.stderr, highlight=False),
            transient=True,
            expand=True,
            disable=not terminal,
        )
        self._task = self._bar.add_task("", total=None, text="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, reply: Written | Status | Note) -> None:
        """Show a message of the worker."""
        if isinstance(reply, Written):
            self._written = reply
            text = f"{size_text(reply.done)} of {size_text(reply.total)}"
            if self._lines is not None:
                self._lines.show(f"{text}{self._left(reply)}")
            self._bar.update(self._task, completed=reply.done, total=max(reply.total, 1), text=text)
        elif isinstance(reply, Status):
            if self._lines is not None:
                self._lines.show(reply.text)
            self._bar.update(self._task, text=escape(reply.text))
        else:
            self._bar.stop()
            print(f"note: {reply.text}", file=sys.stderr)

    def _left(self, reply: Written) -> str:
        now = time.monotonic()
        started_at, already = self._first = self._first or (now, reply.done)
        if reply.done <= already:
            return ""
        return f", {time_text((now - started_at) / (reply.done - already) * (reply.total - reply.done))} left"

    def stopped(self) -> None:
        """Tell how to go on after Ctrl-C."""
        self._bar.stop()
        if self._written:
            done, total = size_text(self._written.done), size_text(self._written.total)
            print(f"note: stopped after {done} of {total}; the same command goes on there", file=sys.stderr)


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
        return
    types = ", ".join(document["types"])
    print(f"{document['file']}: {size_text(document['bytes'])}, {document['tensors']:,} tensors, {types}")
    print(f"checked: {_checked(document['check'])}")


def _checked(check: Mapping[str, Any]) -> str:
    """Describe in one line what was compared."""
    if check["method"] == "logits":
        return (
            f"logits of {check['tokens']} tokens, llama.cpp on the file against torch on the folder: "
            f"mean KL {check['mean_kl']:.2g}, greatest difference {check['max_difference']:.2g}, "
            f"the same most likely token for {check['same_top']} of them"
        )
    if check["method"] == "tensors":
        loaded = "" if "did not load" in check["reason"] else ", and llama.cpp computes finite numbers"
        return f"all {check['tensors']:,} tensors read back{loaded} ({check['reason']})"
    return f"nothing ({check['reason']})"
