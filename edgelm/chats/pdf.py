"""The text of a PDF, read by a worker: a file that hangs or crashes the reader costs only its own text.

Owns the requests, and the limits of time. The worker is pdf_worker.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgelm.base.errors import EdgeLMError, EngineError
from edgelm.base.workers.parent import Worker, WorkerDiedError, ask

MAX_PAGES = 300
MAX_PDF_CHARS = 1_000_000
PDF_S = 30.0


@dataclass(frozen=True, slots=True)
class ReadPdf:
    """Read the text of the PDF at a path."""

    path: str
    max_pages: int
    max_chars: int


@dataclass(frozen=True, slots=True)
class PdfText:
    """The text of the pages that were read."""

    text: str
    num_read: int
    num_pages: int


def read_pdf(path: str, name: str, limit_s: float = PDF_S) -> PdfText:
    """Return the text of a PDF; `name` is its name in messages. Raises EdgeLMError."""
    try:
        worker = Worker("edgelm.chats.pdf_worker", replies=(PdfText,), grace_s=0.0)
        reply = ask(worker, ReadPdf(path, MAX_PAGES, MAX_PDF_CHARS), limit_s)
    except TimeoutError:
        raise EdgeLMError(f"{name} takes longer than {limit_s:.0f} s to read", "attach a part of it") from None
    except WorkerDiedError:
        raise EdgeLMError(f"{name} is damaged: reading it failed", "save it again as PDF, or paste its text") from None
    except EngineError as error:
        raise EdgeLMError(f"{name} cannot be read: {error.message}", "try again") from None
    except EdgeLMError as error:
        raise EdgeLMError(f"{name} {error.message}", error.hint) from None
    assert isinstance(reply, PdfText)
    return reply
