"""Model files are read by a worker: a file that crashes it costs only its own answer.

Owns the requests, and the error for a file that crashed the worker. The worker is jobs/reader.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.parent import Exit, Worker

READER = "edgelm.jobs.reader"
FILE_LIMIT_S = 60.0  # for one file: its network drive may be gone


@dataclass(frozen=True, slots=True)
class Describe:
    """Read what `edgelm list` and `/v1/models` show of a model."""

    path: Path


@dataclass(frozen=True, slots=True)
class Detail:
    """Read all of a model's header, and plan its memory with these settings."""

    path: Path
    settings: Settings


@dataclass(frozen=True, slots=True)
class Card:
    """Read what Ollama's `/api/show` and llama-server's `/props` show of a model."""

    path: Path


@dataclass(frozen=True, slots=True)
class Contents:
    """Read what `edgelm eval` shows of a model: its identity, its size, and the types of its tensors."""

    path: Path


@dataclass(frozen=True, slots=True)
class Answer:
    """The content of a file, as the document of `--json`."""

    document: dict[str, Any]


def read_each(
    requests: Iterable[Describe | Detail | Card | Contents], limit_s: float = FILE_LIMIT_S, module: str = READER
) -> Iterator[dict[str, Any]]:
    """Yield the document of each request, in order; `{"error": …}` for a file that cannot be read."""
    worker: Worker | None = None
    try:
        for request in requests:
            worker = worker or Worker(module, replies=(Answer,), defaults={"OMP_NUM_THREADS": "1"})
            worker.send(request)
            try:
                reply = worker.receive(limit_s)
                if reply is not None:
                    yield reply.document
                    continue
                reason = _reason(worker.exit())
            except EdgeLMError as error:
                yield {"error": str(error)}
                continue
            except TimeoutError:
                worker.kill()
                reason = f"nothing came within {limit_s:.0f} s"
            worker.close()
            worker = None
            yield {"error": f"it cannot be read: {reason}"}
    finally:
        if worker is not None:
            worker.kill()  # it holds nothing that must be saved
            worker.close()


def _reason(end: Exit) -> str:
    if end.code == -signal.SIGBUS:
        return "it is cut short, or was changed while it was read"
    return f"reading it failed ({end.signal_name or f'exit code {end.code}'})"
