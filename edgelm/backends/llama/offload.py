"""Predicts the memory of a model in llama.cpp that lies partly on GPUs: the processor's part, and each device's.

Owns the choice among the placements that the settings allow. The size of a part is that of memory.py for a model that
has only this part. Knows nothing of llama.cpp's pointers.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgelm.backends.llama.memory import LlamaMemory
from edgelm.backends.llama.placement import BLOCK, CPU, Placement, Wish, part_of
from edgelm.backends.plan import DeviceMemory, MachineMemory
from edgelm.checkpoints.summary import ModelFacts, WeightBytes


class OffloadedMemory:
    """The memory of one model, placed as `wish` allows: a `plan.EngineMemory`. All sizes are by formula."""

    def __init__(self, model: ModelFacts, wish: Wish, *, sequences: int) -> None:
        self._model = model
        self._wish = wish
        self._sequences = sequences
        self._whole = LlamaMemory(model, sequences=sequences)  # llama.cpp repacks nothing beside a GPU
        self._steps = wish.steps(model)
        self._placements: dict[tuple[str, int], Placement] = {}
        self._parts: dict[tuple[Placement, str], tuple[ModelFacts, LlamaMemory]] = {}

    def placement(self, kv: str, context: int) -> Placement:
        """Return the placement for a KV mode and a context: the first that fits the devices, or else the last."""
        if (kv, context) not in self._placements:
            low, high = 0, len(self._steps) - 1  # each step leaves less on the devices than the one before
            while low < high:
                middle = (low + high) // 2
                if all(part.fits for part in self._devices(self._steps[middle], kv, context)):
                    high = middle
                else:
                    low = middle + 1
            self._placements[kv, context] = self._steps[low]
        return self._placements[kv, context]

    def from_placement(self, kv: str, context: int) -> list[Placement]:
        """Return that placement, and those that the settings allow after it, with less and less on the devices."""
        return self._steps[self._steps.index(self.placement(kv, context)) :]

    def devices(self, kv: str, context: int) -> tuple[DeviceMemory, ...]:
        return self._devices(self.placement(kv, context), kv, context)

    # -- the processor's part --------------------------------------------------------------------------------------

    def resident_bytes(self, kv: str, context: int) -> int:
        return self._part(self.placement(kv, context), CPU)[1].weights.resident

    def kv_bytes(self, kv: str, context: int) -> int:
        return self._part(self.placement(kv, context), CPU)[1].kv_bytes(kv, context)

    def workspace_bytes(self, kv: str, context: int) -> int:
        """Return all that is neither weights nor KV cache in main memory; the same as without a device, at most."""
        return self._whole.workspace_bytes(kv, context)

    # -- the whole model -------------------------------------------------------------------------------------------

    @property
    def weights(self) -> WeightBytes:
        return self._whole.weights

    @property
    def process_bytes(self) -> int:
        return self._whole.process_bytes

    @property
    def kv_modes(self) -> Sequence[str]:
        return self._whole.kv_modes

    def refusal(self, kv: str) -> str:
        return self._whole.refusal(kv)

    def kv_bytes_per_token(self, kv: str) -> float:
        return self._whole.kv_bytes_per_token(kv)

    def token_seconds(self, machine: MachineMemory, kv: str, context: int) -> float:
        return self._whole.token_seconds(machine, kv, context)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _part(self, placement: Placement, device: str) -> tuple[ModelFacts, LlamaMemory]:
        if (placement, device) not in self._parts:
            part = part_of(self._model, placement, device)
            self._parts[placement, device] = part, LlamaMemory(part, sequences=self._sequences)
        return self._parts[placement, device]

    def _devices(self, placement: Placement, kv: str, context: int) -> tuple[DeviceMemory, ...]:
        """Return the parts on devices. Each has the compute buffer of the widest layer, and for prompts a copy of a
        matrix of the processor's: llama.cpp multiplies these on the first device, one at a time.
        """
        known = {device.name: device for device in self._wish.devices}
        compute = self._whole.estimated_buffers(kv, context).compute
        host, _ = self._part(placement, CPU)
        copied = max((tensor.nbytes for tensor in host.tensors if BLOCK.match(tensor.name)), default=0)
        devices = []
        for index, (name, layers) in enumerate(zip(placement.devices, placement.counts, strict=True)):
            facts, memory = self._part(placement, name)
            devices.append(
                DeviceMemory(
                    name=name,
                    layers=layers,
                    weights=sum(tensor.nbytes for tensor in facts.tensors),
                    kv=memory.kv_bytes(kv, context),
                    workspace=compute + (0 if index else copied),
                    free_bytes=known[name].free_bytes,
                    shared=known[name].shared,
                    attends=kv not in known[name].slow_kv,
                )
            )
        return tuple(devices)
