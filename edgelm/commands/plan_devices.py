"""The part of `edgelm plan` about GPUs of llama.cpp: which bytes lie on which device, as a table and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from edgelm.backends.choice import Route
from edgelm.backends.llama.placement import Device, Placement
from edgelm.backends.plan import Option, Plan

PROCESSOR = "main memory"


def device_documents(chosen: Option, devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Return the bytes on each device, for the JSON document."""
    known = {device.name: device for device in devices}
    return [
        {
            "name": part.name,
            "description": known[part.name].description,
            "layers": part.layers,
            "weights_bytes": part.weights,
            "kv_bytes": part.kv,
            "workspace_bytes": part.workspace,
            "total_bytes": part.total_bytes,
            "free_bytes": part.free_bytes,
            "memory_bytes": known[part.name].total_bytes,
        }
        for part in chosen.devices
    ]


def device_table(result: Plan, chosen: Option, num_layers: int) -> Table:
    """Return a table of the bytes on each device and in main memory; the output counts as a layer."""
    table = Table(box=None, pad_edge=False)
    table.add_column("device")
    for title in ("layers", "weights", "KV cache", "workspace", "draft model", "together", "free to use"):
        if title != "draft model" or chosen.draft_bytes:
            table.add_column(title, justify="right")
    rows = [
        (part.name, part.layers, part.weights, part.kv, part.workspace, 0, part.total_bytes, part.usable_bytes)
        for part in chosen.devices
    ]
    layers = num_layers + 1 - sum(part.layers for part in chosen.devices)
    sizes = (chosen.weights_bytes, chosen.kv_bytes, chosen.workspace_bytes, chosen.draft_bytes)
    rows.append((PROCESSOR, layers, *sizes, sum(sizes), result.usable_bytes))
    for name, count, weights, kv, workspace, draft, total, free in rows:
        drafts = [_mib(draft)] if chosen.draft_bytes else []
        table.add_row(name, str(count), _mib(weights), _mib(kv), _mib(workspace), *drafts, _mib(total), _mib(free))
    return table


def placement_line(placement: Placement, num_layers: int, experts: int) -> str:
    """Return the flags that repeat a placement, so that it can be fixed or changed."""
    flags = f"--device {','.join(placement.devices)} --gpu-layers {placement.gpu_layers}"
    if experts:
        flags += f" --n-cpu-moe {placement.expert_layers}"
    return f"placed: {flags} (of {num_layers + 1} layers, the output is one)"


def route_table(routes: Sequence[Route]) -> Table:
    """Return the ways to run the model, in their order: the one that is taken, and why the others are not."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for route in routes:
        table.add_row(">" if route.taken else "", route.name, "" if route.taken else escape(f"no: {route.reason}"))
    return table


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
