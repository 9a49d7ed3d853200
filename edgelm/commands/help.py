"""`edgelm help`: the topics of the guide, a page of it, or the sections that fit a few words."""

from __future__ import annotations

import difflib
import sys
from typing import Annotated

import typer

from edgelm.base.errors import UsageError
from edgelm.chats.knowledge import guide

MAX_WIDTH = 100  # columns; longer lines are hard to read
MIN_PREFIX_LEN = 3  # of a topic that is not typed in full


def show_help(
    topic: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC]", help="A topic, or words to look for; none: all topics.", show_default=False),
    ] = None,
) -> None:
    """Print what the guide has about a topic or some words; without words its topics. Raises UsageError."""
    query = " ".join(topic or ()).strip()
    if not query:
        _print_topics()
        return
    name = _find_topic(query)
    _print_markdown(guide.page(name) if name else _found(query))


def _print_topics() -> None:
    width = max(map(len, guide.TOPICS))
    for topic in guide.TOPICS:
        print(f"{topic:<{width}}  {guide.summary(topic)}")
    print("\n`edgelm help TOPIC` explains one, and `edgelm help WORDS` finds a section by words.")
    print("`edgelm COMMAND --help` shows the flags of a command.")


def _find_topic(query: str) -> str | None:
    """Return the topic of a name, or of the beginning of one name; None: there is none."""
    name = query.casefold().replace(" ", "-")
    if name in guide.TOPICS:
        return name
    matches = [topic for topic in guide.TOPICS if topic.startswith(name)]
    return matches[0] if len(matches) == 1 and len(name) >= MIN_PREFIX_LEN else None


def _found(query: str) -> str:
    """Return the sections that have the words. Raises UsageError with near names if there is none."""
    found = guide.find_sections(query)
    if not found:
        near = difflib.get_close_matches(query.casefold(), [*guide.TOPICS, *_titles()], cutoff=0.5)
        hint = f"near are {', '.join(repr(name) for name in near)}" if near else "`edgelm help` lists the topics"
        starter = "`edgelm run starter QUESTION` takes typing errors, German, French and Chinese"
        raise UsageError(f"the guide has nothing about {query!r}", f"{hint}; {starter}")
    parts = [f"## {section.title}\n\n{section.text}" for section in found]
    topics = dict.fromkeys(section.topic for section in found)
    return "\n\n".join([*parts, "More: " + ", ".join(f"`edgelm help {topic}`" for topic in topics)])


def _titles() -> list[str]:
    return [section.title.casefold() for section in guide.sections()]


def _print_markdown(text: str) -> None:
    """Print Markdown: drawn for a terminal, and as it is for a pipe."""
    if not sys.stdout.isatty():
        print(text.rstrip())
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(text, code_theme="ansi_dark"), width=min(console.width, MAX_WIDTH))
