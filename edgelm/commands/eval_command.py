"""The flags of `edgelm eval`, and the choice between one model (eval.py) and a table of several (eval_table.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgelm.commands.eval import Task, eval_model, find_text, require_here
from edgelm.commands.eval_models import is_several
from edgelm.commands.eval_output import Form
from edgelm.commands.eval_table import eval_models
from edgelm.commands.flags import EndpointKey, Flags, Json, MeasuredEndpoint, SettingsOf, Verbose


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…", help="A model, or several: names, NAME:all, a folder of GGUFs.", show_default=False
        ),
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text file, of any length.", show_default=False)],
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="The reference: another file of the same model, a KV mode, llama or torch (of several models: the "
            "largest).",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens that the model sees at a time (512).", show_default=False)
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Overlapping windows, this many tokens apart.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="End after this many windows.", show_default=False)] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Do not continue an interrupted run.")] = False,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Of several models, also measure the speed.")
    ] = True,
    plot: Annotated[bool, typer.Option("--plot", help="Draw size and distance in the terminal.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw them, and the speed, into this file.", show_default=False)
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a line of CSV for each model.")] = False,
    endpoint: MeasuredEndpoint = None,
    api_key: EndpointKey = None,
    as_json: Json = False,
    verbose: Verbose = False,
    *,
    flags: Annotated[Flags, SettingsOf("eval")],
) -> int:
    """Evaluate one model, or several with a table; return the exit code. Raises EdgeLMError."""
    where = (endpoint, api_key)
    task = Task(find_text(file), window=window, stride=stride, limit=limit, restart=restart, verbose=verbose)
    if is_several(models) or plot or svg or as_csv:
        require_here(models, where, flags)
        form = Form(plot=plot, svg=svg, as_json=as_json, as_csv=as_csv)
        return eval_models(models, task, flags, against or [], speed=speed, form=form)
    eval_model(models[0], task, flags, against or [], where, as_json=as_json)
    return 0
