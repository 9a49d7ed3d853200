"""`edgelm pull`: download a model from the hub; with --dry-run, show its files and whether it fits.

Owns the output: a progress line on a terminal, plain lines elsewhere, both on standard error; the path or one JSON
document on standard output. library/pull.py does the work.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO

import typer
from rich import progress as rich_progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgelm.base.config import Config, load_config
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.commands.flags import Json
from edgelm.commands.kept_results import result_lines, results_document, speeds_document
from edgelm.commands.running import refuse_remote
from edgelm.evaluation.kept import KeptModel, KeptResults
from edgelm.library.catalog import hub_reference, stand_in
from edgelm.library.http_range import fetch_headers
from edgelm.library.hub import Hub
from edgelm.library.local import ADAPTER, find_local, require_whole
from edgelm.library.names import HubReference, shown
from edgelm.library.packages import package_of
from edgelm.library.progress import (
    Checking,
    Event,
    Listed,
    ListedFile,
    Progress,
    Pulled,
    Retrying,
    StandingIn,
    Waiting,
    Wrong,
    size_text,
    time_text,
)
from edgelm.library.pull import PreparedPull, free_bytes, has_room, prepare, pull, require_runnable_folder
from edgelm.library.runnable import HEAD_BYTES, require_runnable_gguf
from edgelm.library.selection import group_ggufs

if TYPE_CHECKING:
    from edgelm.backends.plan import Plan

GIB = 2**30
LINE_INTERVAL_S = 5.0  # between two plain lines


def pull_model(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="qwen3:4b, or OWNER/NAME[:QUANT or FILE] of the hub; none: choose from a list.",
            show_default=False,
        ),
    ] = None,
    *,
    quant: Annotated[str | None, typer.Option(help="Quantization, such as Q4_K_M.", show_default=False)] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit (main).", show_default=False)] = None,
    connections: Annotated[int, typer.Option(min=1, max=16, help="Connections at the same time, to one file too.")] = 4,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the files that are here, and replace damaged ones.")
    ] = False,
    mmproj: Annotated[
        bool, typer.Option("--mmproj/--no-mmproj", help="With the projector of a model that reads pictures.")
    ] = True,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="With the file of the heads that draft.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files, and whether the model fits.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Use the files on this disk; open no connection.")] = False,
    as_json: Json = False,
) -> None:
    """Pull a model, or show what a pull would do; without a name, let the user choose from a list.

    Raises EdgeLMError on failure; the bytes downloaded so far are kept.
    """
    if model is None and (model := _pick()) is None:
        return
    config = load_config({})
    reference = _reference(model, config, quant, revision)
    model = config.model_name(model)
    if verify and offline:
        raise EdgeLMError("--verify asks the hub for the checksums", "omit --offline")
    if offline or (not dry_run and not verify and _is_set_offline()):
        _print_local(reference, model, config, as_json=as_json)
        return
    hub = Hub(config.places.hub_endpoint, config.places.hub)
    if dry_run:
        prepared = prepare(reference, hub, mmproj=mmproj, mtp=mtp)
        require_runnable_folder(prepared, hub, threading.Event())
        _print_preview(prepared, hub, config, as_json=as_json)
        return
    with (TerminalDisplay if sys.stderr.isatty() else Display)(sys.stderr) as display:
        try:
            other = None if quant or revision else stand_in(model)
            pulled = pull(
                reference,
                hub,
                display.show,
                connections=connections,
                verify=verify,
                mmproj=mmproj,
                mtp=mtp,
                stand_in=other,
            )
        except KeyboardInterrupt:
            display.close()
            print(f"interrupted: {display.kept_text()}", file=sys.stderr)
            raise
    if as_json:
        files = [{"path": file.path, "bytes": file.size} for file in display.files]
        document = {"model": str(reference), "path": str(pulled.path), "bytes": pulled.nbytes}
        more: dict[str, Any] = {"fetched_bytes": pulled.fetched, "seconds": round(pulled.seconds, 3), "files": files}
        print(json.dumps({**document, **more}, ensure_ascii=False))
        return
    print(_summary(pulled, verified=verify), file=sys.stderr)
    if any(file.path == ADAPTER for file in display.files):
        print(f"it is an adapter (LoRA): edgelm run MODEL --lora {pulled.path}", file=sys.stderr)
    print(pulled.path)


def _pick() -> str | None:
    """Return the model that the user chooses on the terminal, None if the choice is cancelled."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise EdgeLMError("no model is named, and there is no terminal to choose one", "name it: edgelm pull qwen3:4b")
    from edgelm.tui.dialogs.picker import pick_model

    return pick_model()


def _reference(named: str, config: Config, quantization: str | None, revision: str | None) -> HubReference:
    try:
        reference = hub_reference(config.model_name(named))
    except ModelError:
        refuse_remote(named, config)
        raise
    if quantization is not None:
        if not quantization.strip():
            raise EdgeLMError("--quant is empty", "give a quantization such as Q4_K_M")
        reference = replace(reference, quantization=quantization.strip().upper(), file=None)
    return replace(reference, revision=revision) if revision else reference


def _is_set_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set, as the hub client reads it."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def _print_local(reference: HubReference, model: str, config: Config, *, as_json: bool) -> None:
    """Print where the model is on this machine. Opens no connection."""
    try:
        local = find_local(str(reference), config.places.hub, config.settings.model_folders, paths=False)
        require_whole(local)
    except EdgeLMError:
        message = f"{shown(model)} is not on this machine, or not complete"
        raise EdgeLMError(message, "pull it without --offline") from None
    nbytes = sum(file.stat().st_size for file in local.all_files)
    if as_json:
        files = [{"path": file.name, "bytes": file.stat().st_size} for file in local.all_files]
        document = {"model": str(reference), "path": str(local.path), "bytes": nbytes}
        print(json.dumps({**document, "fetched_bytes": 0, "seconds": 0.0, "files": files}, ensure_ascii=False))
        return
    print(f"{size_text(nbytes)} here", file=sys.stderr)
    print(local.path)


def _summary(pulled: Pulled, *, verified: bool) -> str:
    if not pulled.fetched:
        return f"already complete: {size_text(pulled.nbytes)}{', all checksums are right' if verified else ''}"
    rate = f" ({size_text(pulled.fetched / pulled.seconds)}/s)" if pulled.seconds > 0 else ""
    return f"pulled {size_text(pulled.fetched)} in {time_text(pulled.seconds)}{rate}"


class Display:
    """Shows the events of one pull as plain lines, which a log can hold."""

    def __init__(self, stream: TextIO) -> None:
        self.files: tuple[ListedFile, ...] = ()
        self._stream = stream
        self._from_pip = False
        self._progress: Progress | None = None
        self._next_line = 0.0

    def show(self, event: Event) -> None:
        """Show an event, or skip it."""
        if isinstance(event, Listed):
            self.files = event.files
            self._from_pip = package_of(event.repository) is not None
            self._print(listed_text(event))
            self._next_line = time.monotonic() + LINE_INTERVAL_S
        elif isinstance(event, Progress):
            self._progress = event
            self._show_progress(event)
        elif (note := note_text(event)) is not None:
            self._print(note)

    def kept_text(self) -> str:
        """Return the note of an interrupted pull: the bytes kept on the disk, and the command that resumes it."""
        if self._progress is None:
            return "nothing was downloaded"
        if self._from_pip:
            return "pip keeps no part; run it again to begin anew"
        done, total = size_text(self._progress.done), size_text(self._progress.total)
        return f"{done} of {total} are here, run it again to resume"

    def close(self) -> None:
        """Remove the progress line, if there is one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show_progress(self, event: Progress) -> None:
        if time.monotonic() >= self._next_line and event.done < event.total:
            self._print(", ".join(progress_texts(event)))
            self._next_line = time.monotonic() + LINE_INTERVAL_S

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class TerminalDisplay(Display):
    """Shows a progress line, and notes above it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._bar = rich_progress.Progress(
            rich_progress.BarColumn(bar_width=None),
            rich_progress.TextColumn("{task.percentage:>3.0f} %"),
            rich_progress.TextColumn("{task.fields[text]}"),
            console=Console(file=stream, highlight=False),
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, text="asking the hub", start=True)

    def close(self) -> None:
        self._bar.stop()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def _show_progress(self, event: Progress) -> None:
        text = escape("  ".join(progress_texts(event)))
        self._bar.update(self._task, completed=event.done, total=max(event.total, 1), text=text)

    def _print(self, line: str) -> None:
        self._bar.console.print(escape(line), soft_wrap=True)


def listed_text(event: Listed) -> str:
    """Return the model's files and size in one line."""
    total, here = sum(file.size for file in event.files), sum(file.here for file in event.files)
    name = event.files[0].path if len(event.files) == 1 else f"{len(event.files)} files"
    partly = f", {size_text(here)} of it here" if 0 < here < total else ""
    renamed = f" (now {event.new_name})" if event.new_name else ""
    return f"{event.repository}{renamed}: {name}, {size_text(total)}{partly}"


def progress_texts(event: Progress) -> list[str]:
    """Return bytes, rate, time left and files."""
    texts = [f"{size_text(event.done)} of {size_text(event.total)}", f"{size_text(event.rate)}/s"]
    texts.append(f"{time_text(event.seconds_left)} left" if event.seconds_left is not None else "")
    texts.append(f"{event.files_done} of {event.files} files" if event.files > 1 else "")
    return [text for text in texts if text]


def note_text(event: Event) -> str | None:
    """Return the line for an event, None if it needs none."""
    match event:
        case Waiting(path):
            return f"{path}: another process downloads it; waiting"
        case Retrying(path, reason, wait_s):
            return f"{path}: {reason}; retrying{f' in {time_text(wait_s)}' if wait_s >= 1 else ''}"
        case StandingIn(named, model):
            return f"{named}: the hub cannot be reached; pulling {model} in its place, from pip's index"
        case Checking(path):
            return f"{path}: checking"
        case Wrong(path):
            return f"{path}: wrong checksum; downloading it again"
    return None


def _print_preview(prepared: PreparedPull, hub: Hub, config: Config, *, as_json: bool) -> None:
    """Print the files of a model, the room on the disk, and the memory plan of a GGUF. Keeps nothing."""
    free = free_bytes(hub.cache)
    memory, problem = _plan(prepared, hub, config)
    measured = _measured(prepared, config)
    if as_json:
        document = _preview_document(prepared, free, memory, problem)
        results = [
            {"files": list(files), "evaluations": results_document(kept), "speeds": speeds_document(kept)}
            for files, kept in measured
        ]
        print(json.dumps({**document, "measured_here": results}, ensure_ascii=False))
        return
    listing = prepared.listing
    licence = f", licence {listing.licence}" if listing.licence else ""
    print(f"{listing.repository} at {listing.commit[:12]}{licence}")
    table = Table(box=None, pad_edge=False)
    table.add_column("FILE")
    table.add_column("SIZE", justify="right")
    table.add_column("HERE", justify="right")
    for file in prepared.files:
        here = prepared.here(file)
        table.add_row(file.path, size_text(file.size), "all" if here == file.size else size_text(here) if here else "")
    Console(highlight=False, markup=False).print(table)
    missing = prepared.missing()
    room = "enough" if has_room(missing, free) else "not enough"
    need = f"to download: {size_text(missing)} of {size_text(prepared.nbytes)}"
    print(f"{need}; {size_text(free)} free on the disk: {room}")
    print(_memory_line(memory, problem))
    for files, kept in measured:
        for line in result_lines(kept):
            print(f"measured here: {files[0]}: {line}")


def _measured(prepared: PreparedPull, config: Config) -> list[tuple[tuple[str, ...], KeptModel]]:
    """Return the quantizations of the repository that were evaluated on this machine, by the hashes of their files."""
    blobs = {file.path: file.blob for file in prepared.listing.files}
    kept = KeptResults(config.places.data)
    groups = [group.files for group in group_ggufs(blobs)]
    matches = [(files, kept.of_blobs([blobs[file] for file in files])) for files in groups]
    return [(files, model) for files, model in matches if model is not None]


def _plan(prepared: PreparedPull, hub: Hub, config: Config) -> tuple[Plan | None, str]:
    """Return the memory plan from the header of the remote GGUF, or the reason why there is none."""
    from edgelm.backends.llama.memory import LlamaMemory, repacked_types  # a pull needs neither these nor numpy
    from edgelm.backends.plan import plan
    from edgelm.checkpoints.gguf import open_gguf
    from edgelm.checkpoints.summary import model_facts
    from edgelm.commands.plan import read_machine

    if not prepared.selection.main.casefold().endswith(".gguf"):
        return None, "only GGUFs are planned"
    if package_of(prepared.listing.repository):
        return None, "its file can be read when it is here"
    try:
        by_path = {file.path: file for file in prepared.files}
        shards = [by_path[path] for path in prepared.selection.files]
        with tempfile.TemporaryDirectory(prefix="edgelm-") as folder:
            first = fetch_headers(hub, prepared.listing, shards, Path(folder))
            with first.open("rb") as opened:
                require_runnable_gguf(prepared.listing.repository, opened.read(HEAD_BYTES))
            with open_gguf(first) as gguf:
                facts = model_facts(gguf)
        memory = LlamaMemory(facts, sequences=config.settings.parallel, copied_types=repacked_types())
        projector = by_path.get(prepared.selection.projector or "")
        beside = projector.size if projector else 0  # its header is not read: without the memory of its work
        machine = read_machine(config.settings, config.places)
        return plan(facts, config.settings, machine, memory, projector_bytes=beside), ""
    except EdgeLMError as error:
        return None, str(error)
    except OSError as error:  # of the temporary folder
        return None, f"the header cannot be stored in {tempfile.gettempdir()}: {error.strerror}"


def _memory_line(memory: Plan | None, problem: str) -> str:
    if memory is None:
        return f"memory: not known: {problem}"
    if memory.chosen is None:
        return f"memory: does not fit: {memory.refusal}"
    need = f"{memory.chosen.total_bytes / GIB:.2f} of {memory.usable_bytes / GIB:.2f} GiB"
    return f"memory: fits: {need} with --ctx {memory.chosen.context} --kv {memory.chosen.kv}"


def _preview_document(prepared: PreparedPull, free: int, memory: Plan | None, problem: str) -> dict[str, Any]:
    chosen = memory.chosen if memory is not None else None
    return {
        "repository": prepared.listing.repository,
        "commit": prepared.listing.commit,
        "licence": prepared.listing.licence or None,
        "files": [{"path": file.path, "bytes": file.size, "here": prepared.here(file)} for file in prepared.files],
        "bytes": prepared.nbytes,
        "missing_bytes": prepared.missing(),
        "disk_free_bytes": free,
        "plan": None
        if memory is None
        else {
            "fits": chosen is not None,
            "usable_bytes": memory.usable_bytes,
            "total_bytes": chosen.total_bytes if chosen else None,
            "context": chosen.context if chosen else None,
            "kv": chosen.kv if chosen else None,
            "error": str(memory.refusal) if memory.refusal else None,
        },
        "plan_error": problem or None,
    }
