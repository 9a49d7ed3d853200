"""`edgelm plan`: print the memory that a model needs on this machine, without loading it: a table, a bar, or JSON.

Owns the input of a plan and its output. backends/plan.py makes the choices.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edgelm.backends.llama.adapter import adapter_bytes, find_adapters, with_adapters
from edgelm.backends.llama.memory import LlamaMemory, repacked_types
from edgelm.backends.llama.offload import OffloadedMemory
from edgelm.backends.llama.placement import ON_CPU, Device, Placement, Wish
from edgelm.backends.plan import DraftModel, MachineMemory, Option, Plan, draft_layouts, plan
from edgelm.backends.projectors import HeadsFile, fitting_heads, fitting_projector, names_heads
from edgelm.backends.questions import BufferProbe, ChosenEngine, ask_choice
from edgelm.backends.torch.memory import plan_for_torch
from edgelm.base.config import Config, Settings, load_config
from edgelm.base.machine import facts as machine
from edgelm.base.machine.bandwidth import read_bandwidth
from edgelm.base.machine.conditions import conditions
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.gpu import VISIBLE, Gpu, split_used, usable_gpus
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.places import Places
from edgelm.checkpoints.folder import folder_facts
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.checkpoints.summary import HEADS, ModelFacts, ModelSummary, model_facts
from edgelm.commands.flags import Flags, Json, Model, SettingsOf
from edgelm.commands.job import reader_may_leave
from edgelm.commands.plan_devices import device_documents, device_table, placement_line, route_table
from edgelm.commands.plan_loaded import loaded_beside
from edgelm.commands.running import model_or_served
from edgelm.library.local import find_draft_model, model_config, require_gguf
from edgelm.library.names import shown

BAR_LEN = 60  # characters
PARTS = (
    ("weights", "█", "blue"),
    ("KV cache", "▓", "magenta"),
    ("workspace", "▒", "yellow"),
    ("draft model", "▚", "cyan"),
    ("projector", "▞", "green"),
    ("free", "░", "dim"),
)


def show_plan(model: Model, flags: Annotated[Flags, SettingsOf("plan")], *, as_json: Json = False) -> None:
    """Print the plan for a model. Raises EdgeLMError, after printing the plan if nothing fits."""
    config = load_config(flags)
    local = model_or_served(model, config)
    config = model_config(local, config)
    settings, path = config.settings, local.path
    draft = find_draft_model(settings, config.places.hub)
    choice = ask_choice(path, settings, draft.path if draft else None)
    facts = _read_facts(path)
    named = draft.path if draft else None
    if names_heads(named):
        draft = None
    if draft and choice.engine == "llama":
        require_gguf(draft)
    draft_facts = _read_facts(draft.path) if draft else None
    beside = loaded_beside(config.places.runtime, config.library)
    memory = read_machine(settings, config.places)
    memory = replace(memory, free_bytes=max(0, memory.free_bytes - beside.outstanding_bytes))
    projector, problems, unfit = None, list[str](), list[str]()
    heads_file = fitting_heads(settings, path, facts, named, unfit.append)
    with_heads = facts.with_heads(heads_file.facts, share_ends=choice.engine == "torch") if heads_file else facts
    if choice.engine == "torch":
        if choice.cuda is not None:
            memory = replace(memory, free_bytes=choice.cuda.free_bytes, read_bytes_per_s=0.0, others=None)
        context_bytes = choice.cuda.context_bytes if choice.cuda else 0
        result = _plan_for_torch(with_heads, draft_facts, settings, memory, choice.device, context_bytes)
        exact, placement = False, ON_CPU
    else:
        facts = _with_adapters(path, facts, config)
        projector = fitting_projector(settings, path, facts.summary, problems.append)
        beside_bytes = projector.memory_bytes if projector else 0
        make_plan = partial(
            _plan_for_llama,
            path,
            draft_facts=draft_facts,
            projector_bytes=beside_bytes,
            config=config,
            memory=memory,
            devices=choice.devices,
        )
        result, exact, placement = _plan_with_drafts(path, facts, heads_file, choice, make_plan)
    gpus = usable_gpus()
    with reader_may_leave():
        if as_json:
            document = as_document(result, facts, memory, gpus, choice, placement, exact=exact)
            reads = {"projector": projector.document() if projector else None}
            more = {"beside": beside.document(), "lora": list(settings.lora), **reads}
            print(json.dumps(document | more, ensure_ascii=False))
        else:
            _print(result, facts, memory, gpus, choice, placement)
            if settings.lora:
                print(f"with {', '.join(settings.lora)}: {_gib(adapter_bytes(facts))} of the weights")
            if projector:
                print(
                    f"pictures are read by {shown(projector.path.name)}: {_gib(projector.memory_bytes)} of the memory"
                )
            if heads_file:
                print(_heads_line(shown(heads_file.path.name), with_heads, used=result.heads))
            for kind, reasons in (("pictures are not read", problems), ("no heads draft", unfit)):
                for reason in reasons:
                    print(f"note: {kind}: {reason}")
            needed = result.chosen.total_bytes if result.chosen else 0
            is_short = bool(choice.devices) and placement.gpu_layers <= facts.summary.layers
            for line in beside.lines(needed, result.usable_bytes, gpu_is_short=is_short):
                print(line)
    result.require()


def _heads_line(name: str, facts: ModelFacts, *, used: bool) -> str:
    if not used:
        return f"the heads of {name} do not draft here"
    size = sum(tensor.nbytes for tensor in facts.tensors if tensor.name.startswith(HEADS))
    return f"drafts come from {name}: {_gib(size)} of the weights"


def _read_facts(path: Path) -> ModelFacts:
    if path.is_dir():
        with open_safetensors(path) as folder:
            return folder_facts(folder)
    with open_gguf(path) as gguf:
        return model_facts(gguf)


def _with_adapters(path: Path, facts: ModelFacts, config: Config) -> ModelFacts:
    """Return the facts of a model with its adapters, as `--lora` names them."""
    if not config.settings.lora:
        return facts
    with open_gguf(path) as gguf:
        return with_adapters(facts, find_adapters(gguf, config.settings.lora, config.places.cache))


def _plan_for_torch(
    facts: ModelFacts,
    draft_facts: ModelFacts | None,
    settings: Settings,
    memory: MachineMemory,
    device: str,
    context_bytes: int,
) -> Plan:
    """Return the plan. It has no speed: memory does not limit the reference ops, and a GPU's memory is not measured.

    Idle conversations stay in the KV cache itself, so they need no extra memory.
    """
    machine = replace(memory, read_bytes_per_s=0.0)
    result = plan_for_torch(
        facts, draft_facts, settings, machine, device, context_bytes=context_bytes, with_options=True
    ).plan
    return replace(result, snapshot_bytes=0)


def _plan_with_drafts(
    path: Path,
    facts: ModelFacts,
    heads_file: HeadsFile | None,
    choice: ChosenEngine,
    make_plan: Callable[..., tuple[Plan, bool, Placement]],
) -> tuple[Plan, bool, Placement]:
    """Return the plan as in loading: with the states and heads that drafts need, if they cost nothing else."""
    with_heads = facts.with_heads(heads_file.facts) if heads_file else facts
    for rollback, heads in draft_layouts(choice.rollback, choice.heads):
        own = (with_heads if heads else facts).with_rollback(rollback)
        file = (heads_file.path if heads_file else path) if heads else None
        result, exact, placement = make_plan(own, rollback=rollback, heads=file)
        if result.preferred:
            return replace(result, heads=heads), exact, placement
    return make_plan(facts)


def _plan_for_llama(
    path: Path,
    facts: ModelFacts,
    draft_facts: ModelFacts | None,
    projector_bytes: int,
    config: Config,
    memory: MachineMemory,
    devices: Sequence[Device],
    rollback: int = 0,
    heads: Path | None = None,
) -> tuple[Plan, bool, Placement]:
    """Return the plan, whether llama.cpp itself gave its sizes, and the placement of the choice.

    The sizes of a draft model are always estimated, and with a GPU all are.
    """
    settings = config.settings
    repeatable = settings.repeatable and facts.summary.kind == "text"
    repack = _may_repack(config.places)
    types = repacked_types() if repack else frozenset()

    def layout(model: ModelFacts) -> LlamaMemory:
        return LlamaMemory(
            model,
            sequences=settings.parallel,
            copied_types=types,
            repeatable=repeatable and model is facts,
            heads=heads is not None and model is facts,
        )

    draft = DraftModel.of(draft_facts, layout(draft_facts)) if draft_facts else None
    options: dict[str, Any] = {"draft": draft, "projector_bytes": projector_bytes, "with_options": True}
    wish = Wish.of(settings, devices)
    if wish.devices:
        offloaded = OffloadedMemory(facts, wish, sequences=settings.parallel)
        result = plan(facts, settings, memory, offloaded, **options)
        chosen = result.chosen
        return result, False, offloaded.placement(chosen.kv, chosen.context) if chosen else ON_CPU
    own = layout(facts)
    if repeatable or path.is_dir():  # llama.cpp cannot be asked about a folder
        return plan(facts, settings, memory, own, **options), False, ON_CPU
    estimate, parallel = own.estimated_buffers, settings.parallel
    with BufferProbe(path, estimate, sequences=parallel, repack=repack, rollback=rollback, heads=heads) as probe:
        result = plan(facts, settings, memory, own.measured_by(probe), **options)
        return result, probe.exact, ON_CPU


def read_machine(settings: Settings, places: Places) -> MachineMemory:
    """Return the memory and cores of this machine. Measure the memory bandwidth once, in half a second."""
    cores = usable_cores()
    threads = settings.threads or cores.physical
    path = places.cache / "machine" / f"{machine.machine_key(cores)}-bandwidth.json"
    speed, others = read_bandwidth(path, threads)
    return MachineMemory(
        free_bytes=available_memory_bytes(), cores=cores.physical, read_bytes_per_s=speed, others=others
    )


def as_document(
    result: Plan,
    facts: ModelFacts,
    memory: MachineMemory,
    gpus: list[Gpu],
    choice: ChosenEngine,
    placement: Placement = ON_CPU,
    *,
    exact: bool,
) -> dict[str, Any]:
    """Return a plan as the JSON document that scripts read."""
    chosen = result.chosen
    return {
        "model": result.name,
        "draft": result.draft or None,
        "heads": result.heads,
        "engine": choice.engine,
        "device": choice.device,
        "engine_reasons": list(choice.reasons),
        "routes": [asdict(route) for route in choice.routes],
        "unused_gpu": choice.unused_gpu or None,
        "file_bytes": facts.summary.nbytes,
        "weights_bytes": result.weights.resident,
        "kv_bytes_per_token": result.kv_bytes_per_token,
        "workspace_bytes": (chosen or min(result.options, key=lambda option: option.total_bytes)).workspace_bytes,
        "options": [
            {"kv": option.kv, "context": option.context, "total_bytes": option.total_bytes, "fits": option.fits}
            for option in result.options
        ],
        "chosen": None if chosen is None else _chosen_document(result, chosen),
        "devices": device_documents(chosen, choice.devices) if chosen else [],
        "gpu_layers": placement.gpu_layers,
        "cpu_expert_layers": placement.expert_layers,
        "machine": {
            "free_bytes": memory.free_bytes,
            "usable_bytes": result.usable_bytes,
            "cores": memory.cores,
            "read_bytes_per_second": round(memory.read_bytes_per_s),
            "gpus": [gpu._asdict() for gpu in gpus],
        },
        "measured": asdict(conditions(choice.engine, memory.others)),
        "sizes": "llama.cpp" if exact else "formulas",
        "error": None if result.refusal is None else str(result.refusal),
    }


def _chosen_document(result: Plan, chosen: Option) -> dict[str, Any]:
    speed = None
    if result.tokens_per_second:
        empty, full = result.tokens_per_second
        speed = {"empty": round(empty, 2), "full": round(full, 2)}
    return {
        "kv": chosen.kv,
        "context": chosen.context,
        "threads": result.threads,
        "weights_bytes": chosen.weights_bytes,
        "kv_bytes": chosen.kv_bytes,
        "workspace_bytes": chosen.workspace_bytes,
        "draft_bytes": chosen.draft_bytes,
        "projector_bytes": chosen.projector_bytes,
        "total_bytes": chosen.total_bytes,
        "load_peak_bytes": result.load_peak_bytes,
        "snapshot_bytes": result.snapshot_bytes,
        "estimated_tokens_per_second": speed,
        "reason": result.reason,
        "note": result.note or None,
        "warning": result.warning or None,
    }


def _may_repack(places: Places) -> bool:
    """Return whether the engine will repack weights: the canary's result, measured once on a machine."""
    return machine.facts(places.cache, notify=lambda line: print(line, file=sys.stderr)).repack


def _print(
    result: Plan, facts: ModelFacts, memory: MachineMemory, gpus: list[Gpu], choice: ChosenEngine, placement: Placement
) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(result.name)}[/]: {escape(_model_line(facts.summary))}", soft_wrap=True)
    of_main_memory = " of main memory" if choice.devices else ""
    console.print(f"GiB{of_main_memory} in a full context, by context and KV cache (x: does not fit)")
    console.print(_table(result))
    if result.chosen is not None:
        for line in (_bar(result, result.chosen), *_choice_lines(result, result.chosen, memory)):
            console.print(line, soft_wrap=True)
        if placement.devices:
            layers = facts.summary.layers
            console.print(device_table(result, result.chosen, layers), placement_line(placement, layers, facts.experts))
    else:
        console.print(f"weights {_gib(result.weights.resident)}, memory free to use {_gib(result.usable_bytes)}")
    for device in choice.devices:
        unused = "" if device.name in placement.devices else "; not used"
        room = f"{_gib(device.free_bytes)} of {_gib(device.total_bytes)} free"
        console.print(escape(f"{device.name}, {device.description}: {room}{unused}"), soft_wrap=True)
    own, others = split_used(gpus, choice.cuda) if choice.cuda else (None, gpus)
    if choice.cuda:  # what the plan was made with; nvidia-smi tells no memory where it is the processor's
        room = f"{_gib(choice.cuda.free_bytes)} of {_gib(choice.cuda.total_bytes)} free"
        console.print(escape(f"{choice.cuda.name}: {room}"), soft_wrap=True)
    for gpu in () if choice.devices else others:
        tells = f"{_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free"
        room = tells if gpu.total_bytes else "its driver tells no memory"
        chooses = f": our own kernels use one GPU, {VISIBLE} chooses" if own else ""
        console.print(escape(f"{gpu.name}: {room}; not used{chooses}"), soft_wrap=True)
    kind = "gpu" if placement.devices else "cpu" if choice.device == "gpu" else choice.device
    where = {"cuda": "CUDA by our own kernels", "gpu": "the GPU, by llama.cpp", "cpu": "the processor"}[kind]
    by = " by the torch engine, slowly" if (choice.engine, choice.device) == ("torch", "cpu") else ""
    if choice.routes:
        console.print(route_table(choice.routes), soft_wrap=True)
    console.print(escape(f"runs on {where}{by}" + "".join(f"; {reason}" for reason in choice.reasons)), soft_wrap=True)
    if choice.unused_gpu:
        console.print(escape(choice.unused_gpu), soft_wrap=True)
    console.print(escape(str(conditions(choice.engine, memory.others))), soft_wrap=True)


def _model_line(summary: ModelSummary) -> str:
    size = f"{summary.parameters / 1e9:.2f} B" if summary.parameters >= 1e9 else f"{summary.parameters / 1e6:.0f} M"
    context = f", made for {summary.context:,} tokens" if summary.context else ""
    return f"{summary.architecture}, {summary.quantization}, {size} parameters{context}"


def _table(result: Plan) -> Table:
    """Return the memory of each context and KV mode, with a mark if it does not fit."""
    modes = list(dict.fromkeys(option.kv for option in result.options))
    table = Table(box=None, pad_edge=False)
    table.add_column("context", justify="right")
    for kv in modes:
        table.add_column(kv, justify="right")
    rows: dict[int, list[Text]] = {}
    chosen = (result.chosen.kv, result.chosen.context) if result.chosen else None
    for option in result.options:
        is_chosen = (option.kv, option.context) == chosen
        mark = "" if option.fits else " x"
        style = "bold green" if is_chosen else "" if option.fits else "red"
        text = f"{'> ' if is_chosen else ''}{option.total_bytes / 2**30:.2f}{mark}"
        rows.setdefault(option.context, []).append(Text(text, style=style))
    for context, cells in rows.items():
        table.add_row(f"{context:,}", *cells)
    return table


def _bar(result: Plan, chosen: Option) -> Text:
    """Return a bar of the free memory and its future contents, with a legend."""
    free = max(result.usable_bytes - chosen.total_bytes, 0)
    beside = (chosen.draft_bytes, chosen.projector_bytes)
    sizes = (chosen.weights_bytes, chosen.kv_bytes, chosen.workspace_bytes, *beside, free)
    bar, ends = Text(), [round(BAR_LEN * sum(sizes[: i + 1]) / sum(sizes)) for i in range(len(sizes))]
    for (_, sign, style), start, end in zip(PARTS, [0, *ends], ends, strict=False):
        bar.append(sign * (end - start), style)
    bar.append("\n")
    for (name, sign, style), size in zip(PARTS, sizes, strict=True):
        if name in ("draft model", "projector") and not size:
            continue
        bar.append(f"{sign} ", style).append(f"{name} {_gib(size)}  ")
    return bar


def _choice_lines(result: Plan, chosen: Option, memory: MachineMemory) -> list[str]:
    """Return the lines about the choice and its reason."""
    lines = [
        f"chosen: --ctx {chosen.context} --kv {chosen.kv} --threads {result.threads}: {result.reason}",
        f"memory: {_gib(chosen.total_bytes)} of the {_gib(result.usable_bytes)} that are free to use",
        f"        up to {_gib(result.load_peak_bytes)} while it loads, including pages of the mapped file",
    ]
    if result.warning:
        lines.insert(1, f"warning: {result.warning}")
    if result.note:
        lines.insert(1, f"note: {result.note}")
    if result.heads:
        lines.append("        with the cache of the model's heads that draft (--draft mtp)")
    if result.draft:
        lines.append(f"        {_gib(chosen.draft_bytes)} of it for {result.draft}, which drafts")
    if result.snapshot_bytes:
        lines.append(f"        {_gib(result.snapshot_bytes)} more for earlier conversations")
    if result.tokens_per_second is not None:
        empty, full = result.tokens_per_second
        lines.append(
            f"speed: about {empty:.3g} tokens/s at first, {full:.3g} in a full context;"
            f" an estimate from {memory.read_bytes_per_s / 1e9:.0f} GB/s of memory, `edgelm bench` measures it"
        )
    return lines


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.0f} MiB"
