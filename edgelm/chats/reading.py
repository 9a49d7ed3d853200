"""What was read for a question: passages of the chat's knowledge, as they were sent to the model.

Owns its form as JSON. Knows nothing of how passages are found and shown.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from edgelm.base.passages import Passage


@dataclass(frozen=True, slots=True)
class Reading:
    """The roots that were searched for a question, and the passages that were sent before it.

    `note` says in one line why there are no passages.
    """

    roots: tuple[str, ...]
    passages: tuple[Passage, ...] = ()
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as values of JSON, with the name of each passage."""
        passages = [{"name": passage.name, **asdict(passage)} for passage in self.passages]
        return {"roots": list(self.roots), "passages": passages, "note": self.note}


def reading_to_text(reading: Reading | None) -> str:
    """Return a reading as JSON; empty for None."""
    return json.dumps(reading.as_json()) if reading is not None else ""


def reading_from_text(text: str) -> Reading | None:
    """Return what `reading_to_text` wrote."""
    if not text:
        return None
    values = json.loads(text)
    passages = tuple(Passage(item["source"], item["heading"], item["text"]) for item in values["passages"])
    return Reading(tuple(values["roots"]), passages, values["note"])
