"""The names and flags of the commands that make and judge models: convert, quantize, eval.

The work is in `commands.convert`, `commands.quantize` and `commands.eval`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from edgelm.base.errors import UsageError
from edgelm.commands.flags import EndpointKey, Flags, Json, MeasuredEndpoint, Verbose, with_fields, with_settings
from edgelm.commands.quantize_flags import FOR_A_GGUF, QuantizeFlags


@with_settings("eval")
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
    flags: Flags,
) -> None:
    """Measure how well models predict a text, and how far they are from a reference."""
    from edgelm.commands.eval import Task, eval_model, find_text, require_here
    from edgelm.commands.eval_models import is_several

    where = (endpoint, api_key)
    task = Task(find_text(file), window=window, stride=stride, limit=limit, restart=restart, verbose=verbose)
    if is_several(models) or plot or svg or as_csv:
        from edgelm.commands.eval_output import Form
        from edgelm.commands.eval_table import eval_models

        require_here(models, where, flags)
        form = Form(plot=plot, svg=svg, as_json=as_json, as_csv=as_csv)
        raise typer.Exit(eval_models(models, task, flags, against or [], speed=speed, form=form))
    eval_model(models[0], task, flags, against or [], where, as_json=as_json)


@with_settings("convert")
def convert(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A folder of safetensors, or its name.", show_default=False)
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.gguf", help="The new file.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="TYPE", help="source (as stored), F32, F16, BF16 or Q8_0.")] = "source",
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="ADAPTER", help="Merge this LoRA adapter; :0.5 behind it scales it.", show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare the file with the folder.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Convert a folder of safetensors to a GGUF, with its tokenizer and chat template."""
    from edgelm.commands.convert import convert_model

    convert_model(
        folder, out, flags, to=to, lora=lora or [], check=check, force=force, as_json=as_json, verbose=verbose
    )


@with_fields(QuantizeFlags)
def quantize(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SRC", help="A GGUF, a folder of safetensors, or the name of one here.", show_default=False
        ),
    ] = None,
    destination: Annotated[
        str | None, typer.Argument(metavar="DST", help="The new file, NAME.gguf; of int4 a folder.", show_default=False)
    ] = None,
    *,
    flags: QuantizeFlags,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a model with fewer bits for its weights, as a new GGUF."""
    from edgelm.commands.quantize import list_types, quantize_model

    if flags.show_list:
        list_types(as_json=as_json)
        return
    if source is None or destination is None:
        raise UsageError(
            "quantize takes a model and the name of the new file", "edgelm quantize SRC DST.gguf --to Q4_K_M"
        )
    if flags.to is None or not flags.to.lower().startswith("int4"):
        _refuse({"--group": flags.group is not None, "--zero-points": flags.zero_points}, "a type of llama.cpp")
        quantize_model(source, destination, flags, as_json=as_json, verbose=verbose)
        return
    from edgelm.commands.quantize_int4 import quantize_int4
    from edgelm.making.quantization.int4_job import GROUPS

    _refuse({f"--{name.replace('_', '-')}": getattr(flags, name) for name in FOR_A_GGUF}, f"--to {flags.to}")
    quantize_int4(
        source,
        destination,
        to=flags.to.lower(),
        group=GROUPS[-1] if flags.group is None else flags.group,
        zero_points=flags.zero_points,
        calibration=flags.calibration,
        calibration_tokens=flags.calibration_tokens,
        threads=flags.threads,
        as_json=as_json,
        verbose=verbose,
    )


def _refuse(flags: Mapping[str, object], purpose: str) -> None:
    """Raise UsageError where one of these flags is given."""
    if given := [name for name, value in flags.items() if value]:
        raise UsageError(
            f"{', '.join(given)} cannot be given with {purpose}", "omit " + ("it" if len(given) == 1 else "them")
        )
