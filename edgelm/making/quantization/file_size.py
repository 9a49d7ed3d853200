"""The size that a quantized file may have: as the user gives it, or as this machine's memory allows.

Owns the forms of a size. Loads no native code, so that a command may use it.
"""

from __future__ import annotations

import re

from edgelm.backends.llama.memory import LlamaMemory
from edgelm.backends.plan import MachineMemory
from edgelm.base.config import DEFAULT_CONTEXT, Settings
from edgelm.base.errors import ModelError, UsageError
from edgelm.checkpoints.summary import ModelFacts

DECIMAL, BINARY = ("kb", "mb", "gb", "tb"), ("kib", "mib", "gib", "tib")
UNITS = (
    {"b": 1}
    | {name: 1000 ** (power + 1) for power, name in enumerate(DECIMAL)}
    | {name: 1024 ** (power + 1) for power, name in enumerate(BINARY)}
)
BITS = ("bpw", "bit", "bits")
MOST_BITS = 32.0
MOST_BYTES = 2**50

_SIZE = re.compile(r"\s*(\d{1,12}(?:\.\d{0,6})?|\.\d{1,6})\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)


def parse_budget(text: str, num_weights: int) -> int:
    """Return the bytes of `4.5GiB`, `4500 MB`, or `4.5bpw`: bits for each of a model's weights. Raises UsageError."""
    match = _SIZE.fullmatch(text)
    number, unit = (float(match[1]), match[2].lower()) if match else (0.0, "")
    if unit in BITS and 0 < number <= MOST_BITS:
        return int(number * num_weights / 8)
    if unit in UNITS and 0 < number * UNITS[unit] <= MOST_BYTES:
        return int(number * UNITS[unit])
    raise UsageError(f"{text!r} is no size of a file", "give one such as 4.5GiB, 4500MB, or 4.5bpw (bits per weight)")


def fitting_bytes(model: ModelFacts, settings: Settings, machine: MachineMemory) -> int:
    """Return the bytes of weights with which a model runs in this machine's memory, with its usual context.

    The KV cache is the most exact one that the settings allow. Raises ModelError where that alone does not fit.
    """
    memory = LlamaMemory(model, sequences=settings.parallel)
    context = settings.ctx or min(model.summary.context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    kv = memory.kv_modes[0] if settings.kv == "auto" else settings.kv
    beside = memory.kv_bytes(kv, context) + memory.workspace_bytes(kv, context)
    if beside >= machine.usable_bytes:
        raise ModelError(
            f"{model.summary.name} needs {_gib(beside)} beside its weights, and {_gib(machine.usable_bytes)} are free",
            "give --budget, or close other programs",
        )
    return machine.usable_bytes - beside


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
