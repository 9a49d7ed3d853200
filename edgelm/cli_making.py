"""The names and flags of the commands that make and judge models: convert, quantize, eval.

The work is in `commands.convert`, `commands.quantize` and `commands.eval`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from edgelm.commands.flags import Flags, Json, Model, Verbose, with_settings
from edgelm.errors import UsageError


@with_settings("eval")
def evaluate(
    model: Model,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text file, of any length.", show_default=False)],
    against: Annotated[
        list[str] | None,
        typer.Option(help="The reference: a KV mode, another file of the same model, or both.", show_default=False),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens that the model sees at a time (512).", show_default=False)
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Overlapping windows, this many tokens apart.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="End after this many windows.", show_default=False)] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Do not continue an interrupted run.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Measure how well a model predicts a text, and how far it is from a reference."""
    from edgelm.commands.eval import eval_model

    eval_model(
        model,
        file,
        flags,
        against or [],
        window=window,
        stride=stride,
        limit=limit,
        restart=restart,
        as_json=as_json,
        verbose=verbose,
    )


def quantize(
    source: Annotated[
        str | None, typer.Argument(metavar="SRC", help="A GGUF, or the name of a model here.", show_default=False)
    ] = None,
    destination: Annotated[
        str | None, typer.Argument(metavar="DST", help="The new file, NAME.gguf.", show_default=False)
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Q4_K_M, Q8_0, …; --list shows all.", show_default=False)
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show all types with their bits per weight.")] = False,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Make the importance matrix on this text, not on edgelm's own.", show_default=False
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(min=512, metavar="N", help="Tokens of the text that are used.")
    ] = 30_000,
    imatrix: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take the importance matrix in this file.", show_default=False)
    ] = None,
    no_imatrix: Annotated[bool, typer.Option("--no-imatrix", help="Use no importance matrix.")] = False,
    save_imatrix: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the importance matrix there.", show_default=False)
    ] = None,
    output_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="The type of the output matrix: Q6_K.", show_default=False)
    ] = None,
    embedding_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="The type of the token embedding: Q4_K.", show_default=False)
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="Give all matrices the same type.")] = False,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Take a source that is quantized already; both errors add up.")
    ] = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads (0: one for each core).")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a model with fewer bits for its weights, as a new GGUF."""
    from edgelm.commands.quantize import QuantizeFlags, list_types, quantize_model

    if show_list:
        list_types(as_json=as_json)
        return
    if source is None or destination is None:
        raise UsageError(
            "quantize takes a model and the name of the new file", "edgelm quantize SRC DST.gguf --to Q4_K_M"
        )
    chosen = QuantizeFlags(
        to=to,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        imatrix=imatrix,
        no_imatrix=no_imatrix,
        save_imatrix=save_imatrix,
        output_type=output_type,
        embedding_type=embedding_type,
        pure=pure,
        allow_requantize=allow_requantize,
        threads=threads,
        force=force,
    )
    quantize_model(source, destination, chosen, as_json=as_json, verbose=verbose)
