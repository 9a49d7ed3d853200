"""The model of the catalogue that is suggested for a first conversation on this machine.

Owns the choice. Knows neither models on the disk nor settings.
"""

from __future__ import annotations

from edgelm.base.machine.memory import USABLE, available_memory_bytes
from edgelm.library.catalog import Entry, entries, needed_bytes

FAMILY = "qwen3"  # answers in many languages
MAX_PARAMETERS = 9 * 10**9  # a laptop's processor writes at reading speed up to there


def suggested_model() -> str | None:
    """Return the name of the model that is suggested with this machine's free memory; None if none fits."""
    entry = suggested_entry(int(USABLE * available_memory_bytes()))
    return entry.name if entry else None


def suggested_entry(usable_bytes: int) -> Entry | None:
    """Return the largest model that fits into some bytes and writes at reading speed; None if none fits."""
    fitting = [
        entry
        for entry in entries()
        if entry.family == FAMILY and entry.parameters <= MAX_PARAMETERS and needed_bytes(entry) <= usable_bytes
    ]
    return max(fitting, key=lambda entry: entry.parameters, default=None)
