"""The suggestions under an empty prompt in a chat with the starter: first questions, a model for a first chat, and the
larger model that an answer names.

Owns the questions. Knows nothing of widgets.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgelm.base.errors import EdgeLMError
from edgelm.chats.history import Message
from edgelm.chats.knowledge.starter import offered_model
from edgelm.client.reader import guide_roots
from edgelm.client.session import Session
from edgelm.library.catalog import FIRST_CHAT, find_entry
from edgelm.library.names import STARTER, CatalogName, parse_name
from edgelm.library.progress import size_text
from edgelm.tui.commands.table import Suggestion

EXAMPLES = ("How do I download a model?", "How can the chat read my own notes?", "How do other programs use edgelm?")
HOW = "Down and Enter ask it"
PULL = f"/pull {FIRST_CHAT}"
MAX_QUESTION = 200  # characters


def offers(session: Session, model: str, listed: Sequence[str] = ()) -> list[Suggestion]:
    """Return the suggestions for an empty prompt; none with a model other than the starter.

    `listed` are the models that are here.
    """
    messages = session.tree.path()
    if model != STARTER:
        return _about_edgelm(messages)
    if not messages:
        questions = [Suggestion(text, text, "" if place else HOW) for place, text in enumerate(EXAMPLES)]
        return questions if FIRST_CHAT in listed else [*questions, _pull(FIRST_CHAT, "Tab gets it")]
    last = messages[-1]
    name = offered_model(last.text) if last.role == "assistant" and last.state == "done" else None
    return [_pull(name, "Down and Enter get it")] if name else []


def _about_edgelm(messages: Sequence[Message]) -> list[Suggestion]:
    """Offer the guide's answer to a question about edgelm, of which other models know nothing."""
    if len(messages) < 2 or messages[-1].role != "assistant" or messages[-1].state != "done":
        return []
    question = messages[-2]
    text = " ".join(question.text.split())
    if "edgelm" not in text.casefold() or len(text) > MAX_QUESTION or guide_roots(question):
        return []
    return [Suggestion(f"/help {text}", f"/help {text}", "Tab asks it")]


def _pull(name: str, how: str) -> Suggestion:
    """Return the command that pulls a model."""
    size = ""
    try:
        reference = parse_name(name)
        if isinstance(reference, CatalogName):
            size = f"{size_text(find_entry(reference).nbytes)}; "
    except EdgeLMError:  # the starter misspelt it: the command says so
        pass
    return Suggestion(f"/pull {name}", f"/pull {name}", f"{size}{how}")
