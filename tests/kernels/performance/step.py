"""The launches of a step of Llama-3.1-8B as Q4_K_M, recorded from the project's executor on empty tensors.

Owns the steps that the budget has, and how two layers stand for all 32: V and down are Q6_K in every second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self
from unittest.mock import patch

import torch

from edgelm.backends.reports import Reports
from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.core import Chunk, SamplingParams, Sequence, Step
from edgelm.kernels.cache import BLOCK_LEN
from edgelm.models.decoder import Decoder
from edgelm.sampling.device import DeviceSampler
from tests.backends.torch import shape_models
from tests.kernels.benchmark import tensors_of
from tests.kernels.performance.recording import Node, name_of

LAYERS = 32
SEED = 5
LIKELY = 64  # tokens
CPU = torch.device("cpu")
PARTS = ("embedding", "layer with Q6_K", "layer", "output", "sampling")


def tiny(num_layers: int = 2) -> Decoder:
    """Return a decoder whose kernels are few and small."""
    return shape_models.decoder(
        hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, vocab=512, kind="Q4_K", num_layers=num_layers,
        feeds=[shape_models.dense("Q4_K", "Q4_K", 256)],
    )  # fmt: skip


class Scene(NamedTuple):
    """A step: sequences with so many computed tokens, each with so many rows, and the cache."""

    name: str
    sequences: int
    rows: int  # of a sequence
    depth: int
    kv: str = "f16"
    context: int = 8192
    model: Callable[..., Decoder] = shape_models.llama_8b
    parts: tuple[str, ...] = PARTS


SCENES = (
    Scene("decode, 1 sequence, 512 tokens deep", 1, 1, 512),
    Scene("verify, 8 rows", 1, 8, 512),
    Scene("verify, 16 rows", 1, 16, 512),
    Scene("decode, 16 sequences", 16, 1, 512),
    Scene("decode, 32,768 tokens deep, k8v4", 1, 1, 32_768 - BLOCK_LEN, "k8v4", 32_768),
)
TINY = Scene("decode, a tiny model", 1, 1, 32, context=64, model=tiny, parts=("embedding", "layer"))  # for dry runs


class Part(NamedTuple):
    """Nodes of a graph that run one after the other, `times` in a step. A name stands for a kernel of torch."""

    name: str
    times: int
    nodes: list[Node]


class Recorder(Protocol):
    """Notes the kernels that are launched in its context."""

    nodes: list[Node]
    runs: bool  # whether launches have to leave their results

    def keep_cold(self, tensors: list[torch.Tensor]) -> None:
        """Take tensors for too large, or too long ago, to be in the L2 cache."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class RecordedExecutor(TorchExecutor):
    """The executor as it is on a GPU, but nothing is compiled before it is launched: it samples by kernels."""

    def __init__(self, decoder: Decoder, options: TorchOptions) -> None:
        super().__init__(decoder, options)
        self._device_sampler = DeviceSampler(decoder.vocab_size, options.max_rows, decoder.device, "triton")

    @property
    def caches(self) -> list[Any]:
        return self._caches

    def _compile(self, reports: Reports) -> None: ...

    def _warm_up(self, reports: Reports) -> None: ...


def record(scene: Scene, recorded: Recorder, device: torch.device = CPU) -> list[Part]:
    """Return the parts of a step as they are launched on a device."""
    with patch.object(shape_models, "DEVICE", device):
        decoder = scene.model()
    blocks = -(-(scene.depth + scene.rows) // BLOCK_LEN)
    executor = RecordedExecutor(
        decoder,
        TorchOptions(
            context=scene.context,
            capacity=max(scene.context, scene.sequences * blocks * BLOCK_LEN),
            kv=scene.kv,
            max_sequences=scene.sequences,
            graphs=False,
        ),
    )
    step = step_of(scene)
    with recorded:
        recorded.keep_cold([*tensors_of(decoder.weights), *tensors_of(executor.caches)])
        with _parts_noted(decoder, recorded.nodes) as (starts, ends):
            executor.forward(step)
        forward = len(recorded.nodes)
        _fill(executor)
        sampling = len(recorded.nodes)
        if "sampling" in scene.parts:
            recorded.runs = True  # what a kernel of the sampler does depends on the results of those before it
            executor.sample(step, None)
    executor.close()
    nodes = recorded.nodes
    final = _final_norm(nodes, ends[0])
    parts = (
        Part("embedding", 1, nodes[: starts[0]]),
        Part("layer with Q6_K", LAYERS // 2, nodes[starts[0] : starts[1]]),
        Part("layer", LAYERS // 2, nodes[starts[1] : final]),
        Part("output", 1, nodes[final:forward]),
        Part("sampling", 1, nodes[sampling:]),
    )
    return [part for part in parts if part.name in scene.parts]


def step_of(scene: Scene) -> Step:
    """Return the step of a scene."""
    blocks = -(-(scene.depth + scene.rows) // BLOCK_LEN)
    return Step(tuple(_chunk(scene, number, blocks) for number in range(scene.sequences)))


def _chunk(scene: Scene, number: int, blocks: int) -> Chunk:
    sequence = Sequence(number, [0], 1, SamplingParams(temperature=0.8, top_p=0.95))
    table = tuple(range(number * blocks, (number + 1) * blocks))
    return Chunk(sequence, scene.depth, [5] * scene.rows, scene.rows, table)


def _fill(executor: TorchExecutor) -> None:
    """Give the logits the shape that those of a model have, a few likely tokens before all others.

    How long the sampler runs depends on it: a list of tokens that overflows is not used, and the whole row is read.
    """
    torch.manual_seed(SEED)
    with torch.inference_mode():
        executor._logits.normal_(0.0, 3.0)
        likely = min(LIKELY, executor._logits.shape[1])
        executor._logits[:, :likely] = torch.linspace(25.0, 15.0, likely)


@contextmanager
def _parts_noted(decoder: Decoder, nodes: list[Node]) -> Iterator[tuple[list[int], list[int]]]:
    """Note how many nodes there are before each layer, and before the output matrix."""
    starts: list[int] = []
    ends: list[int] = []

    def noted(counts: list[int], method: Any) -> Any:
        def call(*args: Any) -> Any:
            counts.append(len(nodes))
            return method(*args)

        return call

    with (
        patch.object(decoder, "_attend", noted(starts, decoder._attend)),
        patch.object(decoder, "logits", noted(ends, decoder.logits)),
    ):
        yield starts, ends


def _final_norm(nodes: list[Node], last: int) -> int:
    """Return where the last layer ends: the final norm, perhaps with the choice of rows, is before the output."""
    at = last
    while at > 0 and _is_rest(nodes[at - 1]):
        at -= 1
    return at


def _is_rest(node: Node) -> bool:
    name = name_of(node)
    return name.startswith("torch ") or "rms_norm" in name
