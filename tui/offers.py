"""What an empty prompt offers in a chat with the starter: questions to begin with, and a larger model.

Owns the questions. Knows nothing of widgets.
"""

from __future__ import annotations

from edgelm.library.catalog import Entry, suggested_entry
from edgelm.library.names import STARTER
from edgelm.library.progress import size_text
from edgelm.machine.memory import USABLE, available_memory_bytes
from edgelm.tui.commands import Suggestion
from edgelm.tui.session import Session

EXAMPLES = ("What can you do?", "How do I download a model?", "How do I use edgelm from Python?")
UNKNOWN = "I do not know that."  # how the starter declines
HOW = "Down and Enter ask it"


def larger_model() -> Entry | None:
    """Return a model of the catalogue that fits the free memory of this machine; None: there is none."""
    return suggested_entry(int(USABLE * available_memory_bytes()))


def offers(session: Session, model: str, larger: Entry | None) -> list[Suggestion]:
    """Return what an empty prompt may become: where the starter declined, the command that pulls a larger model."""
    if model != STARTER:
        return []
    messages = session.tree.path()
    if not messages:
        return [Suggestion(text, text, "" if place else HOW) for place, text in enumerate(EXAMPLES)]
    last = messages[-1]
    declined = last.role == "assistant" and last.state == "done" and last.text.startswith(UNKNOWN)
    if not declined or larger is None:
        return []
    command = f"/pull {larger.name}"
    return [Suggestion(command, command, f"{size_text(larger.nbytes)}, fits here: Down and Enter get it")]
