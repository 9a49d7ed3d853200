"""The passages of `edgelm run --know`: read and searched in this process, whatever the model is.

Owns the lines on standard error about what is read and left out. Knows nothing of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from edgelm.base.errors import EdgeLMError
from edgelm.base.passages import Passage
from edgelm.base.places import Places
from edgelm.base.workers.messages import Read
from edgelm.chats.knowledge.files import LeftOut
from edgelm.chats.knowledge.index import Knowledge
from edgelm.chats.knowledge.quote import MOST_CHARS
from edgelm.chats.knowledge.starter import starter_answers, starter_passages
from edgelm.library.suggestion import suggested_model

NUM_NAMED = 3  # files that are left out and named without --verbose


def find_passages(roots: Sequence[str], question: str, places: Places, *, verbose: bool) -> tuple[Passage, ...]:
    """Return the passages of files and folders that fit a question, best first, as many as the largest context takes.

    How many of them fit this model's context is known once it is loaded: its worker drops the last ones. So files and
    the index stay with the user's process, and the worker gets text alone. Raises EdgeLMError.
    """
    terminal = sys.stderr.isatty()
    if terminal:
        print(f"reading {', '.join(roots)}"[:70], end="\r", file=sys.stderr, flush=True)
    try:
        with closing(Knowledge(places.cache / "knowledge.db")) as knowledge:
            state = knowledge.refresh(roots)
            passages = knowledge.search(roots, question, max_chars=MOST_CHARS)
    finally:
        if terminal:
            print("\x1b[K", end="", file=sys.stderr, flush=True)
    if not state.num_passages:
        reason = next((f"{path}: {reason}" for path, reason in state.left_out), "name a folder with text files")
        raise EdgeLMError(f"there is nothing to read in {', '.join(roots)}", reason)
    _note_left_out(state.left_out, verbose)
    return tuple(passages)


def read_guide(question: str, places: Places) -> tuple[tuple[Passage, ...] | None, list[str]]:
    """Return passages of the guide for the starter, and its possible answers; None: the guide cannot be searched."""
    try:
        with closing(Knowledge(places.cache / "knowledge.db")) as knowledge:
            passages = tuple(starter_passages(knowledge, question, suggested_model()))
    except EdgeLMError as error:
        print(f"note: the guide is not read: {error}", file=sys.stderr)
        return None, []
    return passages, starter_answers(passages, question)


def note_passages(read: Read, num_found: int) -> None:
    """Name the passages that the model reads, on standard error."""
    if read.passages:
        names = ", ".join(f"{number} {passage.name}" for number, passage in enumerate(read.passages, 1))
    elif num_found:
        names = "nothing: the context has no room; raise --ctx"
    else:
        names = "nothing: no passage fits the question"
    print(f"read: {names}", file=sys.stderr)


def _note_left_out(left_out: Sequence[LeftOut], verbose: bool) -> None:
    named = left_out if verbose else left_out[:NUM_NAMED]
    if not named:
        return
    names = ", ".join(f"{path} ({reason})" for path, reason in named)
    rest = len(left_out) - len(named)
    print(f"note: not read: {names}" + (f" and {rest} more; --verbose names them" if rest else ""), file=sys.stderr)
