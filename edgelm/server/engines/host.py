"""The machine under a front's engines: how much memory a model will take, and how much there is.

Owns the questions to the worker that predicts, and the reading of the system's counters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.machine.gpu import has_torch, nvidia_gpus
from edgelm.base.machine.memory import USABLE, available_memory_bytes, process_memory
from edgelm.base.workers.messages import Footprint, Predict
from edgelm.base.workers.parent import Worker, WorkerDiedError, ask, in_daemon_thread
from edgelm.library.scan import LocalModel
from edgelm.server.engines.link import Launcher
from edgelm.server.engines.room import Measured

WORKER = "edgelm.backends.probe_worker"
PREDICT_LIMIT_S = 120.0


class Machine:
    """This machine: a `room.Host`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
        """Ask a worker, which reads the model's header. Raises EdgeLMError, as loading the model would."""
        question = await self._launcher.question(model, usable_bytes, freed_gpu_bytes)
        return await in_daemon_thread(lambda: _ask(model.name, question))

    async def measure(self, pids: Collection[int]) -> Measured:
        return await asyncio.to_thread(measure, [*pids])


def _ask(name: str, question: Predict) -> Footprint:
    try:
        worker = Worker(WORKER, replies=(Footprint,), errors=(ModelError,))
        footprint: Footprint = ask(worker, question, PREDICT_LIMIT_S)
    except TimeoutError:
        message = f"the memory of {name} could not be predicted within {PREDICT_LIMIT_S:.0f} s"
        raise EdgeLMError(message, "see `edgelm plan`") from None
    except WorkerDiedError as error:
        raise EdgeLMError(f"the memory of {name} could not be predicted: {error}", "see `edgelm plan`") from None
    return footprint


def measure(pids: Collection[int]) -> Measured:
    """Return the memory that is free less a reserve, and that of engine processes with all that they started."""
    processes = {pid: memory for pid in pids if (memory := process_memory(pid)) is not None}
    gpus = nvidia_gpus() if has_torch() else []
    return Measured(
        free_bytes=int(USABLE * available_memory_bytes()),
        held={pid: memory.held for pid, memory in processes.items()},
        resident={pid: memory.resident for pid, memory in processes.items()},
        gpu_free_bytes=int(USABLE * gpus[0].free_bytes) if gpus else 0,
    )
