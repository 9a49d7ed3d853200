"""The worker that reads the text of one PDF with pypdf.

Its errors go on from the name of the file: "is encrypted".
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.child import Child, limit_memory, run_job
from edgelm.chats.pdf import PdfText, ReadPdf

if TYPE_CHECKING:
    from pypdf import PdfReader

MAX_MEMORY_BYTES = 2 * 2**30


def read(request: ReadPdf) -> PdfText:
    """Return the text of the first pages. Raises EdgeLMError."""
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = _open(request.path)
        num_pages = len(reader.pages)
    except EdgeLMError:
        raise
    except Exception:  # noqa: BLE001 - a damaged file may raise anything in pypdf
        raise EdgeLMError("is damaged: its pages cannot be found", "save it again as PDF, or paste its text") from None
    texts: list[str] = []
    num_chars = num_failed = 0
    for number in range(min(num_pages, request.max_pages)):
        try:
            text = reader.pages[number].extract_text().strip()
        except Exception:  # noqa: BLE001 - as above, of one page
            num_failed += 1
            text = ""
        texts.append(text)
        num_chars += len(text)
        if num_chars > request.max_chars:
            break
    if not num_chars:
        if num_failed:
            raise EdgeLMError("is damaged: none of its pages can be read", "save it again as PDF, or paste its text")
        raise EdgeLMError("has no text, only pictures", "scan it with text recognition (OCR) first")
    return PdfText("\n\n".join(filter(None, texts))[: request.max_chars], len(texts), num_pages)


def _open(path: str) -> PdfReader:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    reader = PdfReader(path)
    if reader.is_encrypted:
        try:
            opened = bool(reader.decrypt(""))
        except (DependencyError, NotImplementedError):
            opened = False
        if not opened:
            raise EdgeLMError("is encrypted", "save a copy without a password")
    return reader


def _read(request: ReadPdf, child: Child) -> None:
    limit_memory(MAX_MEMORY_BYTES)
    child.send(read(request))


if __name__ == "__main__":
    sys.exit(run_job({ReadPdf: _read}))
