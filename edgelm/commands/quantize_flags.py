"""The flags of `edgelm quantize`: their names, their help, and what they may be given with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

# That say nothing about packed INT4.
FOR_A_GGUF = (
    *("budget", "fits", "imatrix", "no_imatrix", "save_imatrix", "output_type", "embedding_type", "pure"),
    *("allow_requantize", "force"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeFlags:
    """The flags of the command. None: not given."""

    to: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="Q4_K_M, Q8_0, …; auto; int4, int4-awq, int4-gptq. --list: all.", show_default=False
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The best types of this size: 4.5GiB, or 4.5bpw.", show_default=False),
    ] = None
    fits: Annotated[bool, typer.Option("--fits", help="The best types that fit this machine's memory.")] = False
    group: Annotated[
        int | None,
        typer.Option(metavar="N", help="int4: weights that share a scale: 32, 64 or 128 (128).", show_default=False),
    ] = None
    zero_points: Annotated[bool, typer.Option("--zero-points", help="int4: a zero point for each scale, too.")] = False
    show_list: Annotated[bool, typer.Option("--list", help="Show all types with their bits per weight.")] = False
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Make the importance matrix on this text, not on edgelm's own.", show_default=False
        ),
    ] = None
    calibration_tokens: Annotated[
        int | None,
        typer.Option(
            min=512, metavar="N", help="Tokens of the text that are used (30,000; int4: 65,536).", show_default=False
        ),
    ] = None
    imatrix: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take the importance matrix in this file.", show_default=False)
    ] = None
    no_imatrix: Annotated[bool, typer.Option("--no-imatrix", help="Use no importance matrix.")] = False
    save_imatrix: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the importance matrix there.", show_default=False)
    ] = None
    output_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="The type of the output matrix: Q6_K.", show_default=False)
    ] = None
    embedding_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="The type of the token embedding: Q4_K.", show_default=False)
    ] = None
    pure: Annotated[bool, typer.Option("--pure", help="Give all matrices the same type.")] = False
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Take a source that is quantized already; both errors add up.")
    ] = False
    threads: Annotated[int, typer.Option(min=0, help="Threads (0: one for each core).")] = 0
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False
