"""The arguments and flags that several commands have: their types and their help.

Knows no command, and not what a value means: config.py checks it.
"""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="starter, qwen3:4b, OWNER/NAME:QUANT, or a path.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show llama.cpp's log and timings.")]
Ctx = Annotated[int | None, typer.Option(help="Tokens of context.", show_default=False)]
Kv = Annotated[str | None, typer.Option(help="KV cache: auto, f16, k8v16, int8, fp8, k8v4, k6v4.", show_default=False)]
Engine = Annotated[str | None, typer.Option(help="auto, torch (our kernels, for CUDA), or llama.", show_default=False)]
Device = Annotated[
    str | None, typer.Option(help="auto, cuda, gpu (as llama.cpp's build can), or cpu.", show_default=False)
]
GpuLayers = Annotated[
    str | None,
    typer.Option(metavar="N", help="Layers that llama.cpp computes on a GPU: auto or N.", show_default=False),
]
Graphs = Annotated[bool | None, typer.Option("--graphs/--no-graphs", help="CUDA graphs (torch).", show_default=False)]
Quantize = Annotated[
    str | None, typer.Option(metavar="int4", help="Make 16-bit weights 4-bit at load (torch).", show_default=False)
]
ModelDirs = Annotated[
    list[str] | None,
    typer.Option("--model-dirs", help="A folder with models of your own. May be repeated.", show_default=False),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default=False)]
Spec = Annotated[
    str | None, typer.Option(help="Speculation: auto, off, or the most tokens to draft.", show_default=False)
]
Draft = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="A smaller model of the same vocabulary that drafts.", show_default=False),
]
Memory = Annotated[
    bool | None, typer.Option("--memory/--no-memory", help="Remember answers, to draft later ones from.")
]
