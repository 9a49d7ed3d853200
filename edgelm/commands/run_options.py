"""The flags of `edgelm run` that are no settings: their names and their help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from edgelm.base.workers.messages import Thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The flags of the command. None: not given."""

    go_on: Annotated[
        bool, typer.Option("-c", "--continue", help="Continue the last chat, with its model: edgelm run -c PROMPT.")
    ] = False
    chat: Annotated[
        str | None, typer.Option(metavar="ID", help="Continue this chat of `edgelm chats list`.", show_default=False)
    ] = None
    save: Annotated[bool, typer.Option("--save", help="Save it as a new chat.")] = False
    no_stdin: Annotated[bool, typer.Option("--no-stdin", help="Do not read standard input: in loops.")] = False
    raw: Annotated[bool, typer.Option("--raw", help="Complete the prompt as it is, without a chat template.")] = False
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text.", show_default=False)] = None
    schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="Answer with JSON of this JSON schema.", show_default=False)
    ] = None
    json_object: Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")] = False
    regex: Annotated[str | None, typer.Option(help="Answer with text that this matches.", show_default=False)] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer with this text, or with another choice.", show_default=False)
    ] = None
    grammar: Annotated[
        str | None, typer.Option(metavar="FILE", help="Answer by this grammar, in GBNF or Lark.", show_default=False)
    ] = None
    think: Annotated[
        Thinking, typer.Option(help="How long to reason before the answer, where the model can.", show_default=False)
    ] = "auto"
    know: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Answer from this file or folder. May be repeated.", show_default=False),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Take system prompt and sampling from a preset.", show_default=False),
    ] = None
