"""`edgelm plan`: what a model will take on this machine, before anything is loaded: a table, a picture, or JSON.

Owns how a plan is shown, and the gathering of what it is made from. The choices are library/plan.py's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edgelm.commands.choice import chosen_model
from edgelm.commands.engine_choice import Shown, ask_choice
from edgelm.commands.job import reader_may_leave
from edgelm.config import Config, Places, Settings, load_config
from edgelm.executors import machine
from edgelm.executors.bandwidth import read_bandwidth
from edgelm.executors.buffer_probe import BufferProbe
from edgelm.executors.cores import usable_cores
from edgelm.executors.gpus import Gpu, nvidia_gpus
from edgelm.executors.llama_memory import LlamaMemory, repacked_types
from edgelm.executors.memory import available_memory_bytes
from edgelm.executors.torch_memory import TorchMemory
from edgelm.library.plan import MachineMemory, Option, Plan, plan
from edgelm.weights.facts import ModelFacts, folder_facts, model_facts
from edgelm.weights.gguf import open_gguf
from edgelm.weights.safetensors import open_safetensors
from edgelm.weights.summary import ModelSummary

BAR_LEN = 60  # characters
PARTS = (("weights", "█", "blue"), ("KV cache", "▓", "magenta"), ("workspace", "▒", "yellow"), ("free", "░", "dim"))


def show_plan(model: str, flags: Mapping[str, object], *, as_json: bool) -> None:
    """Print the plan for a model. Raises EdgeLMError, after the plan, where nothing fits."""
    config = load_config(flags)
    settings = config.settings
    path = chosen_model(model, config).path
    choice = ask_choice(path, settings)
    facts = _read_facts(path)
    here = read_machine(settings, config.places)
    if choice.engine == "torch":
        here = here if choice.cuda is None else replace(here, free_bytes=choice.cuda.free_bytes, read_bytes_per_s=0.0)
        found, exact = _plan_for_torch(facts, settings, here, choice.device), False
    else:
        found, exact = _plan_for_llama(path, facts, config, here)
    gpus = nvidia_gpus()
    with reader_may_leave():
        if as_json:
            print(json.dumps(as_document(found, facts, here, gpus, choice, exact=exact), ensure_ascii=False))
        else:
            _print(found, facts, here, gpus, choice)
    found.require()


def _read_facts(path: Path) -> ModelFacts:
    if path.is_dir():
        with open_safetensors(path) as folder:
            return folder_facts(folder)
    with open_gguf(path) as gguf:
        return model_facts(gguf)


def _plan_for_torch(facts: ModelFacts, settings: Settings, here: MachineMemory, device: str) -> Plan:
    """Return the plan, without a speed: the reference ops do not wait for memory, and a GPU's is not measured here.

    Idle conversations stay in the KV cache itself, so they have no memory of their own.
    """
    memory = TorchMemory(facts, sequences=settings.parallel, device=device, quantize=settings.quantize)
    found = plan(facts, settings, replace(here, read_bytes_per_s=0.0), memory, with_options=True)
    return replace(found, snapshot_bytes=0)


def _plan_for_llama(path: Path, facts: ModelFacts, config: Config, here: MachineMemory) -> tuple[Plan, bool]:
    """Return the plan, and whether its sizes are llama.cpp's own."""
    settings = config.settings
    repack = _may_repack(config.places)
    memory = LlamaMemory(facts, sequences=settings.parallel, copied_types=repacked_types() if repack else frozenset())
    with BufferProbe(path, memory.estimated_buffers, sequences=settings.parallel, repack=repack) as probe:
        found = plan(facts, settings, here, memory.measured_by(probe), with_options=True)
        return found, probe.exact


def read_machine(settings: Settings, places: Places) -> MachineMemory:
    """Return what this machine has to give. The speed of its memory is measured once, in half a second."""
    cores = usable_cores()
    threads = settings.threads or cores.physical
    path = places.cache / "machine" / f"{machine.machine_key(cores)}-bandwidth.json"
    return MachineMemory(
        free_bytes=available_memory_bytes(),
        cores=cores.physical,
        read_bytes_per_s=read_bandwidth(path, threads),
    )


def as_document(
    found: Plan, facts: ModelFacts, here: MachineMemory, gpus: list[Gpu], choice: Shown, *, exact: bool
) -> dict[str, Any]:
    """Return a plan as the JSON document that scripts read."""
    chosen = found.chosen
    return {
        "model": found.name,
        "engine": choice.engine,
        "device": choice.device,
        "engine_reasons": list(choice.reasons),
        "file_bytes": facts.summary.nbytes,
        "weights_bytes": found.weights.resident,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "workspace_bytes": (chosen or min(found.options, key=lambda option: option.total_bytes)).workspace_bytes,
        "options": [
            {"kv": each.kv, "context": each.context, "total_bytes": each.total_bytes, "fits": each.fits}
            for each in found.options
        ],
        "chosen": None if chosen is None else _chosen_document(found, chosen),
        "machine": {
            "free_bytes": here.free_bytes,
            "usable_bytes": found.usable_bytes,
            "cores": here.cores,
            "read_bytes_per_second": round(here.read_bytes_per_s),
            "gpus": [gpu._asdict() for gpu in gpus],
        },
        "sizes": "llama.cpp" if exact else "formulas",
        "error": None if found.refusal is None else str(found.refusal),
    }


def _chosen_document(found: Plan, chosen: Option) -> dict[str, Any]:
    speed = None
    if found.tokens_per_second:
        speed = {name: round(each, 2) for name, each in zip(("empty", "full"), found.tokens_per_second, strict=True)}
    return {
        "kv": chosen.kv,
        "context": chosen.context,
        "threads": found.threads,
        "weights_bytes": found.weights.resident,
        "kv_bytes": chosen.kv_bytes,
        "workspace_bytes": chosen.workspace_bytes,
        "total_bytes": chosen.total_bytes,
        "load_peak_bytes": max(found.weights.load_peak, chosen.total_bytes),
        "snapshot_bytes": found.snapshot_bytes,
        "estimated_tokens_per_second": speed,
        "reason": found.reason,
    }


def _may_repack(places: Places) -> bool:
    """Return what the engine does: the canary's answer, which is asked for once on a machine."""
    return machine.facts(places.cache, notify=lambda line: print(line, file=sys.stderr)).repack


def _print(found: Plan, facts: ModelFacts, here: MachineMemory, gpus: list[Gpu], choice: Shown) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(found.name)}[/]: {escape(_described(facts.summary))}", soft_wrap=True)
    console.print("GiB in a full context, by context and KV cache (x: does not fit)")
    console.print(_table(found))
    if found.chosen is not None:
        for line in (_bar(found, found.chosen), *_explained(found, found.chosen, here)):
            console.print(line, soft_wrap=True)
    else:
        console.print(f"weights {_gib(found.weights.resident)}, memory free to use {_gib(found.usable_bytes)}")
    for gpu in gpus:
        room = f"{_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free"
        used = "" if choice.device != "cpu" else "; not used"
        console.print(escape(f"{gpu.name}: {room}{used}"), soft_wrap=True)
    where = {"cuda": "CUDA by our own kernels", "gpu": "the GPU, by llama.cpp", "cpu": "the processor"}[choice.device]
    by = " by the torch engine, slowly" if (choice.engine, choice.device) == ("torch", "cpu") else ""
    console.print(escape(f"runs on {where}{by}" + "".join(f"; {reason}" for reason in choice.reasons)), soft_wrap=True)


def _described(summary: ModelSummary) -> str:
    size = f"{summary.parameters / 1e9:.2f} B" if summary.parameters >= 1e9 else f"{summary.parameters / 1e6:.0f} M"
    context = f", made for {summary.context:,} tokens" if summary.context else ""
    return f"{summary.architecture}, {summary.quantization}, {size} parameters{context}"


def _table(found: Plan) -> Table:
    """Return the memory of each context and KV mode; what does not fit is marked."""
    modes = list(dict.fromkeys(each.kv for each in found.options))
    table = Table(box=None, pad_edge=False)
    table.add_column("context", justify="right")
    for kv in modes:
        table.add_column(kv, justify="right")
    rows: dict[int, list[Text]] = {}
    for each in found.options:
        is_chosen = found.chosen is not None and (each.kv, each.context) == (found.chosen.kv, found.chosen.context)
        mark = "" if each.fits else " x"
        style = "bold green" if is_chosen else "" if each.fits else "red"
        text = f"{'> ' if is_chosen else ''}{each.total_bytes / 2**30:.2f}{mark}"
        rows.setdefault(each.context, []).append(Text(text, style=style))
    for context, cells in rows.items():
        table.add_row(f"{context:,}", *cells)
    return table


def _bar(found: Plan, chosen: Option) -> Text:
    """Return the free memory as a bar of what will be in it, with its legend."""
    free = max(found.usable_bytes - chosen.total_bytes, 0)
    sizes = (found.weights.resident, chosen.kv_bytes, chosen.workspace_bytes, free)
    bar, ends = Text(), [round(BAR_LEN * sum(sizes[: i + 1]) / sum(sizes)) for i in range(len(sizes))]
    for (_, sign, style), start, end in zip(PARTS, [0, *ends], ends, strict=False):
        bar.append(sign * (end - start), style)
    bar.append("\n")
    for (name, sign, style), size in zip(PARTS, sizes, strict=True):
        bar.append(f"{sign} ", style).append(f"{name} {_gib(size)}  ")
    return bar


def _explained(found: Plan, chosen: Option, here: MachineMemory) -> list[str]:
    """Return the lines that say what was chosen, and why."""
    weights = found.weights
    peak = max(weights.load_peak, chosen.total_bytes)
    lines = [
        f"chosen: --ctx {chosen.context} --kv {chosen.kv} --threads {found.threads}: {found.reason}",
        f"memory: {_gib(chosen.total_bytes)} of the {_gib(found.usable_bytes)} that are free to use",
        f"        up to {_gib(peak)} while it loads, pages of the mapped file included",
    ]
    if found.snapshot_bytes:
        lines.append(f"        {_gib(found.snapshot_bytes)} more may hold earlier conversations")
    if found.tokens_per_second is not None:
        empty, full = found.tokens_per_second
        lines.append(
            f"speed: about {empty:.3g} tokens/s at first, {full:.3g} in a full context;"
            f" an estimate from {here.read_bytes_per_s / 1e9:.0f} GB/s of memory, `edgelm bench` measures it"
        )
    return lines


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.0f} MiB"
