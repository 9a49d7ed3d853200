"""The names and flags of `edgelm chats`. The work is in `commands.chats` and `commands.chats_import`."""

from __future__ import annotations

from typing import Annotated

import typer

from edgelm.chats.formats import Format, Source
from edgelm.commands.flags import Json, Yes

chats_app = typer.Typer(
    help="The chats of `edgelm`, for scripts: list, search, export, import, delete.", no_args_is_help=True
)

Ids = Annotated[list[str], typer.Argument(metavar="ID…", help="As `list` shows it, `last`, or a part of the title.")]
MaybeIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID…", help="As `list` shows it, `last`, or a part of the title.", show_default=False),
]
Limit = Annotated[
    int | None, typer.Option("-n", min=0, help="How many; 0: all (30, with --json all).", show_default=False)
]


@chats_app.command("list")
def list_chats(
    tag: Annotated[str | None, typer.Option(help="Those with this tag.", show_default=False)] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Those in the archive.")] = False,
    deleted: Annotated[bool, typer.Option("--deleted", help="Those in the trash.")] = False,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """List the chats, newest first; * is pinned."""
    from edgelm.commands.chats import list_chats

    list_chats(tag=tag, archived=archived, deleted=deleted, limit=limit, as_json=as_json)


@chats_app.command("show")
def show_chat(
    name: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it, `last`, or a part of the title.")],
    as_json: Json = False,
) -> None:
    """Print a chat as Markdown."""
    from edgelm.commands.chats import show_chat

    show_chat(name, as_json=as_json)


@chats_app.command("export")
def export_chats(
    names: MaybeIds = None,
    form: Annotated[
        Format | None, typer.Option("--to", help="The format (md, or by the name of the file).", show_default=False)
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="PATH", help="A file, or a folder for several.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All chats, archived ones too.")] = False,
) -> None:
    """Write chats as Markdown, JSON or HTML; without -o, one chat to standard output."""
    from edgelm.commands.chats import export_chats

    export_chats(names or [], form=form, output=output, every=every)


@chats_app.command("search")
def search_chats(
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help="All of them, in one message or the title.")],
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Search titles and messages; ends with 1 where nothing is found."""
    from edgelm.commands.chats import search_chats

    raise typer.Exit(search_chats(words, limit=limit, as_json=as_json))


@chats_app.command("delete")
def delete_chats(
    names: Ids,
    forever: Annotated[bool, typer.Option("--forever", help="Not into the trash: they cannot be restored.")] = False,
    yes: Yes = False,
) -> None:
    """Move chats to the trash, where `restore` finds them."""
    from edgelm.commands.chats import delete_chats

    raise typer.Exit(delete_chats(names, forever=forever, yes=yes))


@chats_app.command("restore")
def restore_chats(names: Ids) -> None:
    """Bring chats back from the trash."""
    from edgelm.commands.chats import restore_chats

    restore_chats(names)


@chats_app.command("import")
def import_chats(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="A .json or .zip that was exported, or Ollama's db.sqlite.")
    ],
    source: Annotated[Source, typer.Option("--from", help="The program that the chats are from.")] = "auto",
    as_json: Json = False,
) -> None:
    """Import chats of ChatGPT, Open WebUI, Ollama or edgelm. What is here already is not imported again."""
    from edgelm.commands.chats_import import import_chats

    raise typer.Exit(import_chats(files, source, as_json=as_json))
