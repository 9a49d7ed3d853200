"""Decides which part of a model lies on which device of llama.cpp. The plan, the load and `ps` all read it from here.

    the processor          the first layers │ the token embedding, always │ experts that were told to stay
    device 1, device 2 …   the last layers, in order, with their KV cache; the output comes last and counts as a layer

An override sends tensors whose names match a pattern elsewhere, wherever their layer lies. Everything is data:
devices.py asks llama.cpp for its devices, offload.py counts the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.checkpoints.summary import ModelFacts, TensorFacts

CPU = "CPU"  # llama.cpp's name of the processor's memory
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # as in llama.cpp's --n-cpu-moe
BLOCK = re.compile(r"blk\.(\d+)\.")
INPUTS = ("token_embd.", "token_types.", "position_embd.", "per_layer_token_embd.")  # llama.cpp never offloads them


@dataclass(frozen=True, slots=True)
class Device:
    """A device of llama.cpp beside the processor."""

    name: str  # "Vulkan0", "CUDA0"
    description: str
    total_bytes: int
    free_bytes: int
    shared: bool = False  # its memory is the processor's
    slow_kv: tuple[str, ...] = ()  # modes in which the processor has to compute the attention of a model


@dataclass(frozen=True, slots=True)
class Override:
    """Tensors whose names match `pattern` lie on `device`."""

    pattern: str
    device: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model lies: how many of its last layers each device has, and the exceptions."""

    devices: tuple[str, ...] = ()  # empty: everything is with the processor
    counts: tuple[int, ...] = ()  # of layers, by device; the output is one
    overrides: tuple[Override, ...] = ()  # the first that matches wins
    expert_layers: int = 0  # the first layers, whose experts stay with the processor

    @property
    def gpu_layers(self) -> int:
        return sum(self.counts)

    @property
    def patterns(self) -> tuple[Override, ...]:
        """All overrides, the experts' included, in the order in which llama.cpp has to see them."""
        if not self.expert_layers:
            return self.overrides
        layers = "|".join(map(str, range(self.expert_layers)))
        return (*self.overrides, Override(rf"blk\.({layers}){EXPERTS}", CPU))

    def layer_device(self, layer: int, num_layers: int) -> str:
        """Return the device of a layer; layer `num_layers` is the output."""
        index = layer - (num_layers + 1 - self.gpu_layers)
        for name, count in zip(self.devices, self.counts, strict=True):
            if 0 <= index < count:
                return name
            index -= count
        return CPU

    def tensor_device(self, name: str, num_layers: int) -> str:
        """Return the device of a tensor."""
        for pattern, device in self._compiled:
            if pattern.search(name):
                return device
        if name.startswith(INPUTS):
            return CPU
        block = BLOCK.match(name)
        return self.layer_device(int(block[1]) if block else num_layers, num_layers)

    def describe(self, num_layers: int) -> str:
        """Return the place of a model in a few words, for `ps` and the like."""
        if not self.devices:
            return "cpu"
        text = " + ".join(self.devices)
        if self.gpu_layers <= num_layers:
            text += f", {self.gpu_layers} of {num_layers + 1} layers"
        if self.expert_layers:
            text += f", experts of {min(self.expert_layers, num_layers)} layers on cpu"
        return text

    @property
    def _compiled(self) -> list[tuple[re.Pattern[str], str]]:
        return [(re.compile(override.pattern), override.device) for override in self.patterns]


ON_CPU = Placement()


@dataclass(frozen=True)
class Wish:
    """The settings about devices, and the devices that they name."""

    devices: tuple[Device, ...]
    gpu_layers: str = "auto"
    cpu_experts: str = "auto"  # --n-cpu-moe
    overrides: tuple[Override, ...] = ()

    def with_room(self, more_bytes: int = 0, limit_bytes: int | None = None) -> Self:
        """Return the same for devices that have `more_bytes` free, fewer if it is negative, and within a limit.

        Bytes that others give back count where memory is in use, bytes that they will take where it is free.
        """
        own = [device for device in self.devices if not device.shared]
        free = sum(device.free_bytes for device in own)
        taken = sum(device.total_bytes - device.free_bytes for device in own)
        more = min(more_bytes, taken)
        if limit_bytes is not None:
            more = min(more, limit_bytes - free)
        if not own or not more:
            return self

        def moved(device: Device) -> Device:
            share = (device.total_bytes - device.free_bytes) / taken if more > 0 else device.free_bytes / max(free, 1)
            return replace(device, free_bytes=max(0, round(device.free_bytes + more * share)))

        return replace(self, devices=tuple(moved(device) if device in own else device for device in self.devices))

    @classmethod
    def of(cls, settings: Settings, devices: Sequence[Device]) -> Self:
        """Take the settings for the devices of llama.cpp. Raises EdgeLMError for a name that none of them has."""
        chosen = choose_devices(settings.device, devices)
        overrides = parse_overrides(settings.override_tensor, [device.name for device in chosen])
        return cls(tuple(chosen), settings.gpu_layers, settings.n_cpu_moe, overrides)

    def steps(self, model: ModelFacts) -> list[Placement]:
        """Return the placements to try, from the most on the devices to the least. The settings leave one, or a choice.

        The experts of a mixture leave the devices before whole layers do: they are most of the weights, and a token
        reads a few of them only.
        """
        num_layers = model.summary.layers
        counts: Sequence[int] = range(num_layers + 1, -1, -1)
        if self.gpu_layers not in ("auto", "all"):
            counts = [min(int(self.gpu_layers), num_layers + 1)]
        elif self.gpu_layers == "all":
            counts = [num_layers + 1]
        experts: Sequence[int] = [0]
        if self.cpu_experts == "all":
            experts = [num_layers]
        elif self.cpu_experts != "auto":
            experts = [min(int(self.cpu_experts), num_layers)]
        elif self.gpu_layers == "auto":
            experts = range(num_layers + 1)
        if not model.experts:
            experts = [0]
        pairs = [(counts[0], kept) for kept in experts] + [(count, experts[-1]) for count in counts[1:]]
        return list(dict.fromkeys(self._place(count, kept) for count, kept in pairs))

    def _place(self, layers: int, experts: int) -> Placement:
        """Return a placement: several devices share the layers by their free memory."""
        names = tuple(device.name for device in self.devices)
        if not names or not (layers or self.overrides):
            return Placement(overrides=self.overrides)
        free = [max(device.free_bytes, 1) for device in self.devices]
        ends = [round(layers * sum(free[: i + 1]) / sum(free)) for i in range(len(free))]
        counts = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        return Placement(names, counts, self.overrides, experts)


def choose_devices(requested: str, devices: Sequence[Device]) -> list[Device]:
    """Return the devices of `--device`: all for gpu and auto, else those of the given names.

    Raises EdgeLMError for a name that llama.cpp does not have.
    """
    if requested == "cpu":
        return []
    if requested in ("auto", "gpu", "cuda"):
        return list(devices)
    chosen = []
    for name in requested.split(","):
        device = next((device for device in devices if device.name.casefold() == name.strip().casefold()), None)
        if device is None:
            known = ", ".join(device.name for device in devices) or "none"
            raise EdgeLMError(
                f"llama.cpp has no device {name.strip()}; its devices: {known}",
                "see `edgelm doctor`, or use --device auto",
            )
        if device not in chosen:
            chosen.append(device)
    return chosen


def parse_overrides(texts: Sequence[str], devices: Sequence[str]) -> tuple[Override, ...]:
    """Return the overrides of `--override-tensor`. Raises EdgeLMError for a device that is not among `devices`."""
    known = {name.casefold(): name for name in (CPU, *devices)}
    overrides = []
    for text in texts:
        pattern, _, device = text.rpartition("=")
        if device.casefold() not in known:
            raise EdgeLMError(
                f"--override-tensor {text}: llama.cpp does not compute on {device} here",
                f"give one of {', '.join(known.values())}",
            )
        overrides.append(Override(pattern, known[device.casefold()]))
    return tuple(overrides)


def part_of(model: ModelFacts, placement: Placement, device: str) -> ModelFacts:
    """Return the facts of the part that lies on a device: other tensors have no bytes, other layers no cache."""
    summary = model.summary
    here = [placement.layer_device(layer, summary.layers) == device for layer in range(summary.layers)]
    recurrent = [not heads for heads in summary.kv_heads]
    states = sum(mine for mine, has_state in zip(here, recurrent, strict=True) if has_state) / max(sum(recurrent), 1)
    return replace(
        model,
        summary=replace(
            summary, kv_heads=[heads if mine else 0 for heads, mine in zip(summary.kv_heads, here, strict=True)]
        ),
        tensors=tuple(_tensors(model, placement, device)),
        state_bytes=round(model.state_bytes * states),
    )


def _tensors(model: ModelFacts, placement: Placement, device: str) -> list[TensorFacts]:
    num_layers = model.summary.layers
    tensors = list(model.tensors)
    if model.tied and placement.tensor_device("output.weight", num_layers) != CPU:
        table = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
        if table:  # llama.cpp makes a second copy of it, to multiply with
            tensors.append(table._replace(name="output.weight"))
    here = [placement.tensor_device(tensor.name, num_layers) == device for tensor in tensors]
    return [tensor if mine else tensor._replace(nbytes=0) for tensor, mine in zip(tensors, here, strict=True)]
