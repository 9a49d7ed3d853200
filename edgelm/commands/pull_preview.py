"""`edgelm pull --dry-run`: what would come, how big it is, and whether it fits: nothing is kept.

Owns what is shown. A plan is made from the file's header, which some range requests bring.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from edgelm.commands.plan import read_machine
from edgelm.config import Config
from edgelm.errors import EdgeLMError
from edgelm.executors.llama_memory import LlamaMemory, repacked_types
from edgelm.library.hub import Hub
from edgelm.library.plan import Plan, plan
from edgelm.library.pull import Prepared, free_bytes, has_room
from edgelm.library.remote_header import fetch_headers
from edgelm.library.units import size_text
from edgelm.weights.facts import model_facts
from edgelm.weights.gguf import open_gguf

GIB = 2**30


def show_preview(prepared: Prepared, hub: Hub, config: Config, *, as_json: bool) -> None:
    """Print the files of a model, the room on the disk, and the plan for a GGUF."""
    free = free_bytes(hub.cache)
    found, problem = _plan(prepared, hub, config)
    if as_json:
        print(json.dumps(_document(prepared, free, found, problem), ensure_ascii=False))
        return
    listing = prepared.listing
    licence = f", licence {listing.licence}" if listing.licence else ""
    print(f"{listing.repository} at {listing.commit[:12]}{licence}")
    table = Table(box=None, pad_edge=False)
    table.add_column("FILE")
    table.add_column("SIZE", justify="right")
    table.add_column("HERE", justify="right")
    for file in prepared.files:
        here = prepared.here(file)
        table.add_row(file.path, size_text(file.size), "all" if here == file.size else size_text(here) if here else "")
    Console(highlight=False, markup=False).print(table)
    missing = prepared.missing()
    room = "enough" if has_room(missing, free) else "not enough"
    print(f"to fetch: {size_text(missing)} of {size_text(prepared.nbytes)}; {size_text(free)} free on the disk: {room}")
    print(_plan_line(found, problem))


def _plan(prepared: Prepared, hub: Hub, config: Config) -> tuple[Plan | None, str]:
    """Return the plan, or why there is none."""
    if not prepared.selection.main.casefold().endswith(".gguf"):
        return None, "only GGUFs are planned"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="edgelm-") as folder,
            open_gguf(fetch_headers(prepared, hub, Path(folder))) as gguf,
        ):
            facts = model_facts(gguf)
        memory = LlamaMemory(facts, sequences=config.settings.parallel, copied_types=repacked_types())
        return plan(facts, config.settings, read_machine(config.settings, config.places), memory), ""
    except EdgeLMError as error:
        return None, str(error)
    except OSError as error:  # of the temporary folder
        return None, f"the header cannot be put in {tempfile.gettempdir()}: {error.strerror}"


def _plan_line(found: Plan | None, problem: str) -> str:
    if found is None:
        return f"memory: not known: {problem}"
    if found.chosen is None:
        return f"memory: does not fit: {found.refusal}"
    need = f"{found.chosen.total_bytes / GIB:.2f} of {found.usable_bytes / GIB:.2f} GiB"
    return f"memory: fits: {need} with --ctx {found.chosen.context} --kv {found.chosen.kv}"


def _document(prepared: Prepared, free: int, found: Plan | None, problem: str) -> dict[str, Any]:
    chosen = found.chosen if found is not None else None
    return {
        "repository": prepared.listing.repository,
        "commit": prepared.listing.commit,
        "licence": prepared.listing.licence or None,
        "files": [{"path": each.path, "bytes": each.size, "here": prepared.here(each)} for each in prepared.files],
        "bytes": prepared.nbytes,
        "missing_bytes": prepared.missing(),
        "disk_free_bytes": free,
        "plan": None
        if found is None
        else {
            "fits": chosen is not None,
            "usable_bytes": found.usable_bytes,
            "total_bytes": chosen.total_bytes if chosen else None,
            "context": chosen.context if chosen else None,
            "kv": chosen.kv if chosen else None,
            "error": str(found.refusal) if found.refusal else None,
        },
        "plan_error": problem or None,
    }
