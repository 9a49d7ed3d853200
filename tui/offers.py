"""The suggestions under an empty prompt in a chat with the starter: first questions, and the larger model it names.

Owns the questions. Knows nothing of widgets.
"""

from __future__ import annotations

from edgelm.errors import EdgeLMError
from edgelm.knowledge.starter import offered_model
from edgelm.library.catalog import find_entry
from edgelm.library.names import STARTER, CatalogName, parse_name
from edgelm.library.progress import size_text
from edgelm.tui.commands import Suggestion
from edgelm.tui.session import Session

EXAMPLES = ("How do I download a model?", "How can the chat read my own notes?", "How do other programs use edgelm?")
HOW = "Down and Enter ask it"


def offers(session: Session, model: str) -> list[Suggestion]:
    """Return the suggestions for an empty prompt; none with a model other than the starter."""
    if model != STARTER:
        return []
    messages = session.tree.path()
    if not messages:
        return [Suggestion(text, text, "" if place else HOW) for place, text in enumerate(EXAMPLES)]
    last = messages[-1]
    name = offered_model(last.text) if last.role == "assistant" and last.state == "done" else None
    return [_pull(name)] if name else []


def _pull(name: str) -> Suggestion:
    """Return the command that pulls a model."""
    size = ""
    try:
        reference = parse_name(name)
        if isinstance(reference, CatalogName):
            size = f"{size_text(find_entry(reference).nbytes)}; "
    except EdgeLMError:  # the starter misspelt it: the command says so
        pass
    return Suggestion(f"/pull {name}", f"/pull {name}", f"{size}Down and Enter get it")
