"""The names and flags of the commands that make and judge models: convert, quantize, eval.

The work is in `commands.convert`, `commands.quantize` and `commands.eval`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from edgelm.base.errors import UsageError
from edgelm.commands.flags import Flags, Json, Verbose, with_settings


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
    as_json: Json = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Measure how well models predict a text, and how far they are from a reference."""
    from edgelm.commands.eval import Task, eval_model, find_text
    from edgelm.commands.eval_models import is_several

    task = Task(find_text(file), window=window, stride=stride, limit=limit, restart=restart, verbose=verbose)
    if is_several(models) or plot or svg or as_csv:
        from edgelm.commands.eval_output import Form
        from edgelm.commands.eval_table import eval_models

        form = Form(plot=plot, svg=svg, as_json=as_json, as_csv=as_csv)
        raise typer.Exit(eval_models(models, task, flags, against or [], speed=speed, form=form))
    eval_model(models[0], task, flags, against or [], as_json=as_json)


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
    to: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="Q4_K_M, Q8_0, …; auto; int4, int4-awq, int4-gptq. --list: all.", show_default=False
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The best types of this size: 4.5GiB, or 4.5bpw.", show_default=False),
    ] = None,
    fits: Annotated[bool, typer.Option("--fits", help="The best types that fit this machine's memory.")] = False,
    group: Annotated[
        int | None,
        typer.Option(metavar="N", help="int4: weights that share a scale: 32, 64 or 128 (128).", show_default=False),
    ] = None,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="int4: a zero point for each scale, too.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show all types with their bits per weight.")] = False,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Make the importance matrix on this text, not on edgelm's own.", show_default=False
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(
            min=512, metavar="N", help="Tokens of the text that are used (30,000; int4: 65,536).", show_default=False
        ),
    ] = None,
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
    if to is not None and to.lower().startswith("int4"):
        from edgelm.commands.quantize_int4 import quantize_int4
        from edgelm.making.quantization.int4_job import GROUPS

        for_a_gguf = {
            "--budget": budget,
            "--fits": fits,
            "--imatrix": imatrix,
            "--no-imatrix": no_imatrix,
            "--save-imatrix": save_imatrix,
            "--output-type": output_type,
            "--embedding-type": embedding_type,
            "--pure": pure,
            "--allow-requantize": allow_requantize,
            "--force": force,
        }
        _refuse(for_a_gguf, f"--to {to}")
        quantize_int4(
            source,
            destination,
            to=to.lower(),
            group=GROUPS[-1] if group is None else group,
            zero_points=zero_points,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            threads=threads,
            as_json=as_json,
            verbose=verbose,
        )
        return
    _refuse({"--group": group is not None, "--zero-points": zero_points}, "a type of llama.cpp")
    chosen = QuantizeFlags(
        to=to,
        budget=budget,
        fits=fits,
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


def _refuse(flags: Mapping[str, object], purpose: str) -> None:
    """Raise UsageError where one of these flags is given."""
    if given := [name for name, value in flags.items() if value]:
        raise UsageError(
            f"{', '.join(given)} cannot be given with {purpose}", "omit " + ("it" if len(given) == 1 else "them")
        )
