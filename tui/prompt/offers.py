"""The suggestions under an empty prompt: first things to try, the model that suits this machine, and the larger model
that an answer of the starter names; and what an empty chat says about its model.

Owns the questions and the wording. Knows nothing of widgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgelm.base.errors import EdgeLMError
from edgelm.chats.history import Message
from edgelm.client.endpoint import ModelEntry
from edgelm.client.reader import guide_roots
from edgelm.client.session import Session
from edgelm.library.catalog import FIRST_CHAT, find_entry
from edgelm.library.names import STARTER, CatalogName, parse_name
from edgelm.library.progress import size_text
from edgelm.tui.commands.table import Suggestion
from edgelm.tui.lines import short_name
from edgelm.tui.model_names import is_path

EXAMPLES = ("How do I download a model?", "How can the chat read my own notes?", "How do other programs use edgelm?")
QUESTIONS = ("Explain recursion with an example", "Draft a reply to a late invoice")
SMALL_BYTES = 1_500_000_000
HOW = "Down and Enter ask it"
PULL = f"/pull {FIRST_CHAT}"
MAX_QUESTION = 200  # characters
MAX_NAMED = 3  # models


def offers(
    session: Session,
    model: str,
    listed: Sequence[str] = (),
    *,
    is_first: bool = False,
    better: str = "",
    is_remote: bool = False,
) -> list[Suggestion]:
    """Return the suggestions for an empty prompt.

    `listed` are the models that are here. `is_first`: there was no chat before this one. `better` is the model that
    suits this machine. `is_remote`: the models are an endpoint's: none is pulled there, and a starter has no guide.
    """
    messages = session.tree.path()
    if is_remote and (messages or not is_first or model in ("", STARTER)):
        return []
    if model != STARTER:
        return _about_edgelm(messages) if messages else _first(listed, better) if is_first else []
    if not messages:
        questions = [Suggestion(text, text, "" if place else HOW) for place, text in enumerate(EXAMPLES)]
        is_alone = all(name == STARTER for name in listed)
        first = FIRST_CHAT if is_alone or not better else better
        return questions if first in listed else [*questions, _pull(first, "Tab gets it")]
    last = messages[-1]
    if last.role != "assistant" or last.state != "done":
        return []
    from edgelm.chats.knowledge.starter import offered_model  # a chat that begins needs no search

    name = offered_model(last.text)
    return [_pull(name, "Down and Enter get it")] if name else []


def _first(listed: Sequence[str], better: str) -> list[Suggestion]:
    """Offer three things to try, and the model that suits this machine."""
    things = [Suggestion(text, text, "" if place else HOW) for place, text in enumerate(QUESTIONS)]
    things.append(Suggestion("/attach", "/attach", "asks about a file of yours"))
    return [*things, _pull(better, "fits here: Tab gets it")] if better and better not in listed else things


def about_model(model: str, entry: ModelEntry | None, endpoint: str | None, others: Sequence[str] = ()) -> list[str]:
    """Return lines about the model that answers, and where it runs, for a chat without messages.

    `others` are the other models of the endpoint.
    """
    endpoint = (entry.remote if entry is not None else "") or endpoint
    if endpoint is not None:
        lines = [" · ".join(filter(None, (short_name(model), f"answers from {endpoint}")))]
        if others:
            names = ", ".join(short_name(name) for name in others[:MAX_NAMED])
            more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
            lines.append(f"also there: {names}{more}")
        return [*lines, "What you write is sent there."]
    parts = [short_name(model)]
    if model == STARTER:
        parts.append("answers questions about edgelm")
    elif nbytes := (entry.bytes if entry is not None else _file_bytes(model)):
        parts.append(size_text(nbytes))
        parts += ["small: quick, and often wrong"] if nbytes < SMALL_BYTES else []
    return [*([" · ".join(parts)] if model else []), "Nothing that you write leaves this machine."]


def _file_bytes(model: str) -> int:
    """Return the size of a model that is named by its path; 0 where that is not a file."""
    path = Path(model)
    return path.stat().st_size if is_path(model) and path.is_file() else 0


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
