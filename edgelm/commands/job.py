"""What `run`, `bench` and their like share: the machine's facts, an engine child, progress on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgelm.commands.engine_child import EngineChild
from edgelm.config import Places, Settings
from edgelm.executors import machine
from edgelm.library.usage import note_use


@contextmanager
def run_job(
    job: dict[str, Any], model: Path, settings: Settings, places: Places, verbose: bool
) -> Iterator[Iterator[dict[str, Any]]]:
    """Give the events of a job that an engine child does; the child is gone when the block is left.

    Raises EdgeLMError: what the child says, how it died, or that llama.cpp cannot run on this machine.
    """
    status = _Status(sys.stderr.isatty())
    facts = machine.facts(places.cache, notify=status.show)
    facts.require_working()
    job = job | {"model": str(model), "settings": asdict(settings), "repack": facts.repack}
    status.show(f"loading {model.name}")
    with EngineChild(job, machine.child_environment(facts), verbose) as child:
        yield _watch(child.events(), status, model.name, lambda: note_use(places.data, model))


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the block without an error when whoever reads standard output (`head`, a pager) has enough."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered


def _watch(
    events: Iterator[dict[str, Any]], status: _Status, name: str, on_loaded: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Show progress on the way; pass on all other events, the first of which says that the model is loaded."""
    loaded = False
    try:
        for event in events:
            if event["event"] == "progress":
                status.show(f"loading {name} {event['share']:.0%}")
                continue
            if not loaded:
                on_loaded()
                loaded = True
            if event["event"] == "status":
                status.show(event["text"])
            else:
                status.clear()
                yield event
    finally:
        status.clear()


class _Status:
    """One line on standard error that is overwritten, and only where a person sees it."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._shown = ""

    def show(self, text: str) -> None:
        if self._terminal and text != self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = text

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""
