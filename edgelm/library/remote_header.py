"""The headers of GGUFs that are still on the hub: some megabytes of each file, as if the whole file were here.

Owns how much is fetched: until the header can be read, and no byte twice. The rest of each file is a hole, which takes
no room on the disk: what needs metadata and tensor descriptions alone does not notice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from edgelm.errors import EdgeLMError, ModelError
from edgelm.library.hub import Hub, HubFile
from edgelm.library.patience import Backoff
from edgelm.library.pull import Prepared
from edgelm.library.source import InterruptedTransferError, Source
from edgelm.weights.gguf import open_gguf

FIRST_BYTES = 2**20
MOST_BYTES = 2**28  # the largest vocabularies take some 30 MB


def fetch_headers(prepared: Prepared, hub: Hub, folder: Path) -> Path:
    """Fetch the headers of a GGUF and its parts into a folder; return the path of the first.

    Raises EdgeLMError where the hub does not give them, ModelError where they cannot be read.
    """
    cancelled = threading.Event()
    source = Source(hub, prepared.listing, cancelled)
    files = {file.path: file for file in prepared.files}
    heads = [_Head(source, files[path], folder, cancelled) for path in prepared.selection.files]
    first = heads[0].path
    while True:
        for head in heads:
            head.grow()
        try:
            with open_gguf(first) as gguf:
                start = min((tensor.offset for tensor in gguf.tensors.values()), default=0)
        except ModelError:
            if all(head.is_enough for head in heads):
                raise
            continue
        if start <= heads[0].length or heads[0].is_enough:
            return first


class _Head:
    """The beginning of one file, in a file as long as the whole."""

    def __init__(self, source: Source, file: HubFile, folder: Path, cancelled: threading.Event) -> None:
        self.path = folder / Path(file.path).name
        self.length = 0
        self._source = source
        self._file = file
        self._backoff = Backoff(source.hub.patience, cancelled)
        with self.path.open("wb") as whole:
            whole.truncate(file.size)

    @property
    def is_enough(self) -> bool:
        return self.length >= min(self._file.size, MOST_BYTES)

    def grow(self) -> None:
        """Fetch as much again as is there."""
        goal = min(self._file.size, max(FIRST_BYTES, 2 * self.length), MOST_BYTES)
        with self.path.open("r+b") as whole:
            while self.length < goal:
                try:
                    with self._source.open(self._file, self.length, end=goal) as answer:
                        self._take(whole.fileno(), answer.start, goal, answer.pieces)
                except InterruptedTransferError as stop:
                    if not self._backoff.wait(stop.asked_s):
                        message = f"{self._file.path} does not come from {self._source.hub.host}: {stop.why}"
                        raise EdgeLMError(message, "run it again later") from None

    def _take(self, descriptor: int, at: int, goal: int, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            os.pwrite(descriptor, piece, at)
            at += len(piece)
            self.length = max(self.length, min(at, goal))
            if self.length == goal:
                return  # a server without ranges sends on
