"""The text that a quantization is calibrated and measured on: the user's, or a built-in one.

Owns the choice of the built-in text. Knows nothing of tokens and models.
"""

from __future__ import annotations

from pathlib import Path

from edgelm.errors import RequestError
from edgelm.guide import FOLDER


def calibration_text(file: Path | None) -> str:
    """Return the text of a file; without one, the built-in text. Raises RequestError."""
    if file is None:
        return "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md")))
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}", "give a text file") from None
    if not text.strip():
        raise RequestError(f"{file} is empty", "give a text of some thousand words")
    return text
