"""The table of `edgelm doctor`: which kinds of models each engine runs on which device, and whether it is there.

Owns the kinds. The engines' own lists say what belongs to them: our families, and the catalogue for the others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table

from edgelm.library.catalog import entries
from edgelm.models.families import FAMILIES, family_of_gguf

MAX_NAMED = 6  # families of the catalogue in a row


@dataclass(slots=True)
class Engines:
    """What the checks found: why each engine cannot be used here; empty: it can."""

    cuda: str = "it was not checked"
    llama: str = "it was not checked"
    has_llama_gpu: bool = False


class Kind(NamedTuple):
    """A kind of models, and how each engine runs it; empty: not at all."""

    models: str
    kernels: str
    llama_gpu: str
    processor: str


def kinds() -> list[Kind]:
    """Return the kinds of models."""
    ours = ", ".join(family.name for family in FAMILIES if family.gguf)
    texts = [entry for entry in entries() if entry.kind == "text"]
    partly_ours = {entry.family for entry in texts if family_of_gguf(entry.architecture)}
    others = ", ".join([*dict.fromkeys(entry.family for entry in texts if entry.family not in partly_ours)][:MAX_NAMED])
    return [
        Kind(f"GGUF of {ours}", "whole", "whole or in part", "llama.cpp"),
        Kind(f"any other GGUF, such as {others}", "", "whole or in part", "llama.cpp"),
        Kind("a GGUF with --lora or pictures", "", "whole or in part", "llama.cpp"),
        Kind("folder of safetensors of these families", "whole", "", "torch, slowly"),
        Kind("BERT, embeddings, rerankers", "", "whole", "llama.cpp"),
    ]


def engine_table(engines: Engines) -> Table:
    """Return the table, with a last row that says what is there on this machine."""
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    for title in ("our kernels, CUDA", "llama.cpp, GPU", "processor"):
        table.add_column(title)
    for kind in kinds():
        table.add_row(*(cell or "no" for cell in kind))
    table.add_row("[bold]here[/]", *(f"[bold]{cell}[/]" for cell in _here(engines)))
    return table


def engine_documents(engines: Engines) -> dict[str, Any]:
    """Return the table for scripts."""
    cuda, llama_gpu, processor = _here(engines)
    here = {"kernels": cuda, "llama_gpu": llama_gpu, "processor": processor}
    return {"kinds": [kind._asdict() for kind in kinds()], "here": here, **asdict(engines)}


def _here(engines: Engines) -> tuple[str, str, str]:
    llama_gpu = "there" if engines.has_llama_gpu else "not there"
    return ("there" if not engines.cuda else "not there", llama_gpu, "there" if not engines.llama else "not there")
