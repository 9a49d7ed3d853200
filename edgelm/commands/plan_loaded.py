"""The models that a running server has loaded beside the one that is planned: their memory, and what they leave.

Owns these lines of `edgelm plan`. A server that does not answer is left out: the plan is of use without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import find_front
from edgelm.commands.running import get_state
from edgelm.library.progress import size_text


@dataclass(frozen=True, slots=True)
class Loaded:
    """One loaded model."""

    name: str
    predicted_bytes: int
    memory_bytes: int
    is_idle: bool  # it makes room for another one
    gpu_bytes: int = 0  # predicted

    def line(self) -> str:
        """Return the line about it."""
        line = f"        {self.name}: {size_text(self.memory_bytes)}"
        line += f", predicted {size_text(self.predicted_bytes)}" if self.predicted_bytes else ""
        return line + (f", and {size_text(self.gpu_bytes)} of the GPU" if self.gpu_bytes else "")


@dataclass(frozen=True, slots=True)
class Beside:
    """The models of a running server."""

    models: Sequence[Loaded] = ()
    outstanding_bytes: int = 0  # promised to them, and not taken yet
    limit_bytes: int | None = None  # --max-memory of the server
    limit_left_bytes: int = 0

    def document(self) -> dict[str, Any]:
        """Return the JSON document for scripts."""
        return {
            "models": [
                {
                    "model": model.name,
                    "predicted_bytes": model.predicted_bytes,
                    "memory_bytes": model.memory_bytes,
                    "gpu_bytes": model.gpu_bytes,
                    "idle": model.is_idle,
                }
                for model in self.models
            ],
            "outstanding_bytes": self.outstanding_bytes,
            "max_memory_bytes": self.limit_bytes,
        }

    def lines(self, needed_bytes: int, usable_bytes: int, *, gpu_is_short: bool = False) -> list[str]:
        """Return the lines about them, and what remains beside a model that needs so much.

        `gpu_is_short`: more of the model would lie on the GPU if others left it.
        """
        if not self.models:
            return []
        rows = [model.line() for model in self.models]
        lines = ["loaded by the running server:", *rows]
        if self.limit_bytes is not None:
            left = max(self.limit_left_bytes, 0)
            lines.append(f"        {size_text(left)} of its --max-memory {size_text(self.limit_bytes)} remain")
        left = usable_bytes - needed_bytes
        if needed_bytes and left >= 0:
            lines.append(f"        {size_text(left)} remain free with this model loaded too")
        idle = [model for model in self.models if model.is_idle]
        if idle and (left < 0 or not needed_bytes):
            names = ", ".join(model.name for model in idle)
            lines.append(f"        the server unloads {names} for it, which frees {size_text(_sum(idle))}")
        on_gpu = [model for model in idle if model.gpu_bytes]
        if on_gpu and gpu_is_short:
            names, freed = ", ".join(model.name for model in on_gpu), sum(model.gpu_bytes for model in on_gpu)
            lines.append(
                f"        the server unloads {names} for it where that frees enough of the GPU: {size_text(freed)}"
            )
        return lines


def loaded_beside(runtime: Path, library: str = "") -> Beside:
    """Return the models that the running server has loaded; none where no server answers."""
    front = find_front(runtime, library)
    if front is None:
        return Beside()
    try:
        state = get_state(front)
        return _read(state)
    except (EdgeLMError, KeyError, TypeError):  # it ends, or it is of another version
        return Beside()


def _read(state: dict[str, Any]) -> Beside:
    alive = [model for model in state["models"] if model["pid"] is not None]
    models = [
        Loaded(
            model["model"],
            model["predicted_bytes"] or 0,
            model["memory_bytes"] or 0,
            model["state"] == "ready" and not model["requests"] and not model["pinned"],
            model["gpu_bytes"] or 0,
        )
        for model in alive
    ]
    limit = state["memory"]["limit_bytes"]
    taken = sum(max(model["promised_bytes"], model["memory_bytes"] or 0) for model in alive)
    return Beside(models, state["memory"]["outstanding_bytes"], limit, (limit or 0) - taken)


def _sum(models: Sequence[Loaded]) -> int:
    return sum(model.memory_bytes for model in models)
