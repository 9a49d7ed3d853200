"""What was measured of this machine, kept in a file: the writing that machine.py, bandwidth.py and step_times.py share.

Knows nothing of what is kept.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def keep_json(path: Path, value: object) -> None:
    """Write a JSON document in one piece, for the user alone. A folder that cannot be written means measuring again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
