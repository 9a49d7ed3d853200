"""The state of an interrupted `edgelm eval`, as a file of the cache folder.

Owns the file, its check and its end. Knows nothing of what the state holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgelm.base.atomic import atomic_json, read_json
from edgelm.base.kept_files import delete_older

STATE_FORMAT = 1  # of the file, and of the meaning of the figures: part of the key
MAX_AGE_S = 30 * 24 * 3600
MAX_STATE_BYTES = 2**28


class StateFile:
    """The file with the state of one evaluation. `key` is all that the figures depend on, as JSON."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        text = json.dumps({"format": STATE_FORMAT, **key}, sort_keys=True)
        self._key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        self._path = folder / f"{self._key[:32]}.json"
        delete_older(folder, MAX_AGE_S, "*.json", "*.tmp", "*.part")  # .part: of 0.3.1

    def load(self) -> dict[str, Any] | None:
        """Return the state that was saved last; None: there is no valid one."""
        try:
            document = read_json(self._path, MAX_STATE_BYTES)
            if document["key"] == self._key and document["sha256"] == _checksum(document["state"]):
                state: dict[str, Any] = document["state"]
                return state
        except (KeyError, TypeError):
            pass
        return None

    def save(self, state: dict[str, Any]) -> None:
        """Replace the saved state. If the disk refuses, the evaluation continues without one."""
        atomic_json(self._path, {"key": self._key, "sha256": _checksum(state), "state": state})

    def delete(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
