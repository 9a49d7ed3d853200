"""How a pull looks: one moving line on a terminal, a plain line now and then elsewhere.

Owns both displays. Knows events, and nothing of how a pull works.
"""

from __future__ import annotations

import time
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from edgelm.library import events
from edgelm.library.units import size_text, time_text

LINE_S = 5.0  # between two plain lines


class Display(Protocol):
    """What shows the events of one pull."""

    files: tuple[events.Wanted, ...]

    def show(self, event: events.Event) -> None: ...
    def kept(self) -> str: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def display_for(stream: TextIO) -> Display:
    """Return the display that suits a stream."""
    return TerminalDisplay(stream) if stream.isatty() else PlainDisplay(stream)


class PlainDisplay:
    """Lines that a log can hold."""

    def __init__(self, stream: TextIO) -> None:
        self.files: tuple[events.Wanted, ...] = ()
        self._stream = stream
        self._progress: events.Progress | None = None
        self._next_line = 0.0

    def show(self, event: events.Event) -> None:
        """Show an event, or leave it out."""
        if isinstance(event, events.Listed):
            self.files = event.files
            self._print(listed_text(event))
            self._next_line = time.monotonic() + LINE_S
        elif isinstance(event, events.Progress):
            self._progress = event
            if time.monotonic() >= self._next_line and event.done < event.total:
                self._print(", ".join(progress_texts(event)))
                self._next_line = time.monotonic() + LINE_S
        elif (note := note_text(event)) is not None:
            self._print(note)

    def kept(self) -> str:
        """Return what an interrupted pull leaves."""
        return kept_text(self._progress)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class TerminalDisplay:
    """One line that moves, and notes above it."""

    def __init__(self, stream: TextIO) -> None:
        self.files: tuple[events.Wanted, ...] = ()
        self._last: events.Progress | None = None
        self._bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[said]}"),
            console=Console(file=stream, highlight=False),
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, said="asking the hub", start=True)

    def show(self, event: events.Event) -> None:
        """Show an event."""
        if isinstance(event, events.Listed):
            self.files = event.files
            self._bar.console.print(escape(listed_text(event)), soft_wrap=True)
        elif isinstance(event, events.Progress):
            self._last = event
            said = "  ".join(progress_texts(event))
            self._bar.update(self._task, completed=event.done, total=max(event.total, 1), said=escape(said))
        elif (note := note_text(event)) is not None:
            self._bar.console.print(escape(note), soft_wrap=True)

    def kept(self) -> str:
        """Return what an interrupted pull leaves."""
        return kept_text(self._last)

    def close(self) -> None:
        self._bar.stop()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listed_text(event: events.Listed) -> str:
    """Return what the model is made of."""
    total, here = sum(file.size for file in event.files), sum(file.here for file in event.files)
    name = event.files[0].path if len(event.files) == 1 else f"{len(event.files)} files"
    had = f", {size_text(here)} of it here" if 0 < here < total else ""
    return f"{event.repository}: {name}, {size_text(total)}{had}"


def progress_texts(event: events.Progress) -> list[str]:
    """Return bytes, rate, time left and files."""
    texts = [f"{size_text(event.done)} of {size_text(event.total)}", f"{size_text(event.rate)}/s"]
    texts.append(f"{time_text(event.seconds_left)} left" if event.seconds_left is not None else "")
    texts.append(f"{event.files_done} of {event.files} files" if event.files > 1 else "")
    return [text for text in texts if text]


def note_text(event: events.Event) -> str | None:
    """Return the line of an event that is worth one."""
    match event:
        case events.Waiting(path):
            return f"{path}: another process fetches it; waiting"
        case events.Retrying(path, reason, wait_s):
            return f"{path}: {reason}; trying again{f' in {time_text(wait_s)}' if wait_s >= 1 else ''}"
        case events.Checking(path):
            return f"{path}: checking"
        case events.Wrong(path):
            return f"{path}: its hash is wrong; fetching it again"
        case events.Fetched(path):
            return None
    return None


def kept_text(progress: events.Progress | None) -> str:
    """Return what is here after an interrupt, and what to do."""
    if progress is None:
        return "nothing was fetched"
    return f"{size_text(progress.done)} of {size_text(progress.total)} are here, run it again to continue"
