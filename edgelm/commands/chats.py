"""`edgelm chats`: list, show, export, search, delete and restore chats, without an engine.

Owns the output and the questions. A chat may be open on a screen meanwhile: the file is locked for moments only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edgelm.base.atomic import atomic_write
from edgelm.base.config import load_config
from edgelm.base.errors import USAGE_EXIT_CODE, EdgeLMError, UsageError
from edgelm.chats.export_json import chat_values
from edgelm.chats.exports import export_chat, file_name
from edgelm.chats.formats import FORMATS, Format
from edgelm.chats.handles import find_chat, handle, short_handles
from edgelm.chats.history import Chat, Hit, Tree
from edgelm.chats.printable import printable
from edgelm.chats.store import ChatsError, Store
from edgelm.commands.flags import Json, Yes
from edgelm.commands.job import reader_may_leave
from edgelm.commands.list import plain_console

BUSY_MS = 5_000  # a chat that is open elsewhere writes for moments
NUM_LISTED = 30
LONG_HANDLE = 8  # letters in the name of a file
NAMES = "As `list` shows it, `last`, or a part of the title."
OWN_FIELDS = ("id", "title", "model", "tags", "pinned", "archived", "created", "changed", "deleted")

Ids = Annotated[list[str], typer.Argument(metavar="ID…", help=NAMES)]
Limit = Annotated[
    int | None, typer.Option("-n", min=0, help="How many; 0: all (30, with --json all).", show_default=False)
]


@contextmanager
def open_store() -> Iterator[Store]:
    """Open the file of the chats; empty the trash of what is old. Raises EdgeLMError."""
    store = Store(load_config({}).places.data / "chats.db", busy_ms=BUSY_MS)
    try:
        with suppress(ChatsError):  # of a file that cannot be written now: what reads it does its work
            store.empty_trash()
        yield store
    finally:
        store.close()


def list_chats(
    *,
    tag: Annotated[str | None, typer.Option(help="Those with this tag.", show_default=False)] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Those in the archive.")] = False,
    deleted: Annotated[bool, typer.Option("--deleted", help="Those in the trash.")] = False,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Print the chats, newest first."""
    with open_store() as store:
        everything = store.chats()
        chats = store.deleted_chats() if deleted else [chat for chat in everything if chat.archived == archived]
        short = short_handles([*everything, *(chats if deleted else ())])
    if tag is not None:
        chats = [chat for chat in chats if tag.casefold() in (own.casefold() for own in chat.tags)]
    shown = chats[: _limit(limit, as_json=as_json)]
    with reader_may_leave():
        if as_json:
            _put(json.dumps([_document(chat) for chat in shown], ensure_ascii=False))
            return
        table = Table(box=None, pad_edge=False)
        table.add_column("ID", no_wrap=True)
        table.add_column("CHANGED", no_wrap=True)
        table.add_column("TITLE", overflow="fold")
        table.add_column("TAGS", overflow="fold")
        for chat in shown:
            title = f"* {chat.title}" if chat.pinned else chat.title
            table.add_row(short[chat.id], _date(chat.changed), printable(title), printable(", ".join(chat.tags)))
        if shown:
            plain_console().print(table)
    if len(shown) < len(chats):
        print(f"and {len(chats) - len(shown):,} more: -n 0 lists all", file=sys.stderr)
    if not chats:
        place = "in the trash" if deleted else "in the archive" if archived else "yet"
        print(f"there are no chats {place}", file=sys.stderr)


def show_chat(name: Annotated[str, typer.Argument(metavar="ID", help=NAMES)], *, as_json: Json = False) -> None:
    """Print a chat, as Markdown without control characters. Raises EdgeLMError."""
    with open_store() as store:
        chat = find_chat(name, [*store.chats(), *store.deleted_chats()])
        text = _exported(store, chat, "json" if as_json else "md")
    with reader_may_leave():
        _put(text if as_json else printable(text, "\n\t"), end="")


def export_chats(
    names: Annotated[list[str] | None, typer.Argument(metavar="ID…", help=NAMES, show_default=False)] = None,
    *,
    form: Annotated[
        Format | None, typer.Option("--to", help="The format (md, or by the name of the file).", show_default=False)
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="PATH", help="A file, or a folder for several.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All chats, archived ones too.")] = False,
) -> None:
    """Write chats to files, or one to standard output. Raises EdgeLMError."""
    names = names or []
    if every == bool(names):
        raise UsageError("give the chats to export, or --all", "`edgelm chats list` shows them")
    path = Path(output).expanduser() if output else None
    if path is None and (every or len(names) > 1):
        raise UsageError("several chats go into a folder", "name it with -o")
    if form is None and path is not None:
        form = next((form for form in FORMATS if path.suffix == f".{form}"), None)
    form = form or "md"
    with open_store() as store:
        all_chats = store.chats()
        chats = all_chats if every else _find(names, [*all_chats, *store.deleted_chats()])
        if path is None:
            with reader_may_leave():
                _put(_exported(store, chats[0], form), end="")
            return
        into_folder = every or len(chats) > 1 or path.is_dir() or (output or "").endswith("/")
        for chat in chats:
            name = f"{file_name(chat, '')[:-1]}-{handle(chat.id)[:LONG_HANDLE]}.{form}"
            target = path / name if into_folder else path
            try:
                atomic_write(target, _exported(store, chat, form).encode("utf-8", "replace"))
            except OSError as error:
                raise EdgeLMError(
                    printable(f"{target} cannot be written: {error.strerror}"), "choose another place"
                ) from None
    noun = "1 chat" if len(chats) == 1 else f"{len(chats):,} chats"
    print(printable(f"{noun} written to {path}"), file=sys.stderr)


def search_chats(
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help="All of them, in one message or the title.")],
    *,
    limit: Limit = None,
    as_json: Json = False,
) -> int:
    """Print the chats that a search finds; return the exit code."""
    query = " ".join(words)
    with open_store() as store:
        hits = store.search(query, _limit(limit, as_json=as_json) or 1_000_000)
        short = short_handles(store.chats())
    with reader_may_leave():
        if as_json:
            _put(json.dumps([_hit_document(hit) for hit in hits], ensure_ascii=False))
        for hit in () if as_json else hits:
            print(f"{short[hit.chat.id]}  {_date(hit.chat.changed)}  {printable(hit.chat.title)}")
            if hit.message is not None:
                print(f"    {printable(' '.join(_snippet(hit).split()))}")
    if not hits and not as_json:
        print(printable(f"no chat has {query}"), file=sys.stderr)
    return 0 if hits else 1


def delete_chats(
    names: Ids,
    *,
    forever: Annotated[bool, typer.Option("--forever", help="Not into the trash: they cannot be restored.")] = False,
    yes: Yes = False,
) -> int:
    """Move chats to the trash, or delete them for good, after a question; return the exit code. Raises EdgeLMError."""
    with open_store() as store:
        chats = _find(names, [*store.chats(), *(store.deleted_chats() if forever else ())])
        if not yes and not _confirmed(chats, forever=forever):
            return _refused()
        with store.transaction():
            for chat in chats:
                if forever:
                    store.delete_chat(chat.id)
                else:
                    chat.deleted = time.time()
                    store.put_chat(chat)
    for chat in chats:
        where = "deleted" if forever else f"moved to the trash (edgelm chats restore {handle(chat.id)[:LONG_HANDLE]})"
        print(f"{printable(chat.title)}: {where}")
    return 0


def restore_chats(names: Ids) -> None:
    """Bring chats back from the trash. Raises EdgeLMError."""
    with open_store() as store:
        trash = store.deleted_chats()
        if not trash:
            raise EdgeLMError("the trash is empty")
        chats = _find(names, trash)
        with store.transaction():
            for chat in chats:
                chat.deleted = None
                store.put_chat(chat)
    for chat in chats:
        print(f"{printable(chat.title)}: restored")


def _find(names: Sequence[str], chats: Sequence[Chat]) -> list[Chat]:
    """Return the chats that names mean, each once. Raises RequestError."""
    found = {chat.id: chat for chat in (find_chat(name, chats) for name in names)}
    return list(found.values())


def _exported(store: Store, chat: Chat, form: Format) -> str:
    return export_chat(form, chat, Tree(store.messages(chat.id), chat.leaf))


def _confirmed(chats: Sequence[Chat], *, forever: bool) -> bool:
    if not sys.stdin.isatty():
        return False
    for chat in chats:
        print(f"{handle(chat.id)[:LONG_HANDLE]}  {_date(chat.changed)}  {printable(chat.title)}", file=sys.stderr)
    question = "Delete for good?" if forever else "Move to the trash?"
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


def _refused() -> int:
    """Say that nothing was deleted; return the exit code."""
    if sys.stdin.isatty():
        print("nothing was deleted", file=sys.stderr)
        return 1
    print("error: delete asks first, and there is no terminal to ask on; add --yes", file=sys.stderr)
    return USAGE_EXIT_CODE


def _limit(limit: int | None, *, as_json: bool) -> int | None:
    """Return how many chats are shown; None: all."""
    if limit is None:
        return None if as_json else NUM_LISTED
    return limit or None


def _document(chat: Chat) -> dict[str, Any]:
    values = chat_values(chat)
    return {name: values[name] for name in OWN_FIELDS} | {"id": handle(chat.id)}


def _hit_document(hit: Hit) -> dict[str, Any]:
    return _document(hit.chat) | {"in_title": hit.message is None, "snippet": _snippet(hit)}


def _snippet(hit: Hit) -> str:
    return hit.snippet.replace("\x02", "").replace("\x03", "")


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M}"


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _put(text: str, end: str = "\n") -> None:
    """Print a text as it is, and on a terminal without what moves its cursor."""
    print(printable(text, "\n\t") if _on_terminal() else text, end=end)
