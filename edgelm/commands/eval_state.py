"""Where an evaluation that was interrupted goes on: one small file for each, in the cache folder.

Owns the files, their names and their age. A file that is damaged, or belongs to something else, is no state.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 1  # of the file and of what the figures mean: part of the key
KEPT_S = 30 * 24 * 3600


class EvalState:
    """The state of the evaluation that `key` describes: everything that its figures depend on, as JSON."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
        self._key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        self._path = folder / f"{self._key[:32]}.json"
        _drop_old(folder)

    def load(self) -> dict[str, Any] | None:
        """Return what was saved last; None where there is nothing, or nothing valid."""
        try:
            found = json.loads(self._path.read_bytes())
            if found["key"] == self._key and found["sha256"] == _checksum(found["state"]):
                state: dict[str, Any] = found["state"]
                return state
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def save(self, state: dict[str, Any]) -> None:
        """Keep a state in place of the last one. Where the disk refuses, the evaluation goes on without."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = {"key": self._key, "sha256": _checksum(state), "state": state}
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, suffix=".part", delete=False) as file:
                try:
                    json.dump(content, file)
                    file.close()
                    Path(file.name).replace(self._path)
                except OSError:
                    Path(file.name).unlink(missing_ok=True)
                    raise

    def forget(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _drop_old(folder: Path) -> None:
    """Delete what nobody went on with."""
    with suppress(OSError):
        for path in [*folder.glob("*.json"), *folder.glob("*.part")]:
            if path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink(missing_ok=True)
