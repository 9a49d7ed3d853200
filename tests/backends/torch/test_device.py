"""The torch executor's GPU code, imitated on the CPU: graphs over static buffers, and a lack of memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.backends.plan import Option
from edgelm.backends.torch import batch, build, failures
from edgelm.backends.torch.batch import StepBuffers, StepTensors, bucket_of
from edgelm.backends.torch.executor import TorchExecutor
from edgelm.backends.torch.graph_sizes import SIZES
from edgelm.backends.torch.graphs import Graphs
from edgelm.backends.torch.memory import SMALL_STEP
from edgelm.backends.torch.sampler import DeviceSampler
from edgelm.base.config import Settings
from edgelm.base.errors import EngineError, ModelError, OutOfMemoryError
from edgelm.engine.core import LAST, NOT_A_TOKEN, Chunk, SamplingParams, Sequence, Step
from edgelm.kernels import cache as kv_cache
from edgelm.models.decoder import Batch, Decoder
from tests.backends.torch.torch_engine import load_gguf, make_executor
from tests.models import tiny_models
from tests.models.tiny_gguf import write_gguf
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", quant="f32", width=64, ffn=128, head_dim=32)


@pytest.fixture(scope="module")
def decoder(path: Path) -> Decoder:
    return load_gguf(path)


def chunk(tokens: list[int], start: int, block_table: tuple[int, ...], rows: int = 1) -> Chunk:
    return Chunk(Sequence(0, [0] * start + tokens, 1, SamplingParams()), start, tokens, rows, block_table)


# -- graphs ------------------------------------------------------------------------------------------------------------


class FakeGraph:
    """Repeats the captured work: it reads and writes the same tensors."""

    capturing: Self | None = None
    replay: Callable[[], object]

    def pool(self) -> tuple[int, int]:
        return (0, 1)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: FakeGraph, pool: object, stream: object) -> Iterator[None]:
        FakeGraph.capturing = graph
        yield
        FakeGraph.capturing = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", object)


def give_graphs(executor: TorchExecutor) -> Graphs:
    """Give graphs to an executor on the CPU, as on a GPU."""

    graphs = Graphs(executor.info.max_sequences, executor.info.max_tokens)
    logits = torch.empty(graphs.sizes[0], executor.info.num_vocab)

    def forward(tensors: StepTensors, out: Tensor) -> None:
        if graph := FakeGraph.capturing:
            graph.replay = lambda: executor._run(tensors, out)
        executor._run(tensors, out)

    with torch.inference_mode():
        graphs.capture(forward, executor._buffers, logits)
    executor._graphs = graphs
    return graphs


@pytest.mark.usefixtures("fake_cuda")
def test_a_graph_has_the_results_of_a_step_without_one(decoder: Decoder) -> None:
    """Run steps of every size in turn, so that the buffers hold leftovers of larger ones."""
    plain, graphed = (make_executor(decoder, context=128, capacity=256, max_tokens=64) for _ in range(2))
    graphs = give_graphs(graphed)
    first = Step((chunk(list(range(20, 60)), 0, (1, 2)), chunk(list(range(3, 12)), 0, (4,))))
    assert graphs.bucket(bucket_of(first)) is None  # 40 tokens of one sequence are a prompt
    sizes = [16, 1, 3, 8, 2, 5, 13, 1]
    steps = [first]
    for size in sizes:
        ones = [chunk([size], 40, (1, 2))]
        steps.append(Step((*ones, chunk(list(range(70, 69 + size)), 9, (4,), rows=size - 1)) if size > 1 else (*ones,)))
    for most in (16, 11):  # four sequences of so many tokens
        chunks = [chunk(list(range(70, 70 + most)), 9, (4 + i,), rows=most) for i in range(4)]
        steps += [Step(tuple(chunks)), Step(tuple(chunks[:2]))]
    for step in steps:
        for executor in (plain, graphed):
            executor.forward(step)
        np.testing.assert_allclose(graphed.logits(step), plain.logits(step), rtol=1e-4, atol=1e-4)
        assert graphed.sample(step, None).read() == plain.sample(step, None).read()
    chosen = [graphs.bucket(bucket_of(step)) for step in steps[1:]]
    assert [bucket.tokens for bucket in chosen] == [16, 1, 4, 8, 2, 8, 16, 1, 64, 32, 48, 24]
    assert [bucket.max_query_len for bucket in chosen] == [16, 1, 4, 8, 1, 8, 16, 1, 16, 16, 16, 16]


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5])
def test_a_graph_runs_one_step_ahead(decoder: Decoder, num_sequences: int) -> None:
    executors = [make_executor(decoder, context=64, capacity=320, runs_ahead=True, max_sequences=5) for _ in range(2)]
    graphs = give_graphs(executors[1])
    seqs = [Sequence(i, [30 + i, 4], 2, SamplingParams(temperature=1.0, seed=i)) for i in range(num_sequences)]
    prompts = Step(tuple(Chunk(seq, 0, seq.tokens, 1, (9 - seq.id,)) for seq in seqs))
    answers = []
    for executor in executors:
        executor.forward(prompts)
        read = [executor.sample(prompts, None).read()]
        for position in range(2, 12):
            order = seqs if position % 2 else seqs[::-1]
            step = Step(tuple(Chunk(seq, position, [LAST], 1, (9 - seq.id,)) for seq in order))
            executor.forward(step)
            read.append(executor.sample(step, None).read())
        answers.append(read)
    assert answers[0] == answers[1]
    bucket = graphs.bucket(bucket_of(step))
    assert (bucket.max_query_len, bucket.sequences) == (1, {1: 1, 2: 2, 3: 4, 5: 5}[num_sequences])


class Repeated:
    """A graph on the CPU: it repeats the recorded work."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.replay = work


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("graphed", [False, True])
def test_tokens_that_only_the_device_knows_equal_known_ones(decoder: Decoder, graphed: bool) -> None:
    """The sampler is the GPU's. Sequences change their order and end, one is penalized, and one has logits of NaN."""
    ahead, known = (
        make_executor(decoder, context=64, capacity=256, runs_ahead=True, max_sequences=4) for _ in range(2)
    )
    for executor in (ahead, known):
        executor._device_sampler = DeviceSampler(decoder.vocab_size, SIZES[-1], "cpu", "reference")
    if graphed:
        graphs = give_graphs(ahead)
        ahead._device_sampler.capture(graphs._logits[:4], Repeated)
    seqs = [Sequence(i, [30 + i, 4], 2, SamplingParams(temperature=1.0, seed=i)) for i in range(3)]
    seqs.append(Sequence(3, [33, 4], 2, SamplingParams(temperature=0.5, repetition_penalty=1.3)))
    step = Step(tuple(Chunk(seq, 0, seq.tokens, 1, (seq.id,)) for seq in seqs))
    same = step  # with known tokens
    for position, order in enumerate(((0, 1, 2, 3), (3, 1, 0, 2), (1, 2), (2, 1), (1,)), 2):
        ahead.forward(step)
        known.forward(same)
        np.testing.assert_allclose(ahead.logits(step), known.logits(same), rtol=1e-4, atol=1e-4)
        with torch.inference_mode():
            for executor in (ahead, known):
                executor._logits[0, 0] = torch.nan if position == 4 else 0.0
        read = known.sample(same, None).read()
        assert ahead.sample(step, None).read() == read
        assert (read[0][0].id == NOT_A_TOKEN) == (position == 4)
        tokens = {chunk.seq.id: max(rows[0].id, 0) for chunk, rows in zip(same.chunks, read, strict=True)}
        step = Step(tuple(Chunk(seqs[i], position, [LAST], 1, (i,)) for i in order))
        same = Step(tuple(Chunk(seqs[i], position, [tokens[i]], 1, (i,)) for i in order))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("family", ["llama3", "gemma2"])  # gemma2 has a soft cap
def test_logits_are_written_where_a_graph_wants_them(family: str, implementation: str, tmp_path: Path) -> None:
    decoder = load_gguf(write_gguf(tiny_models.build(family), tmp_path / "m.gguf"), implementation)
    assert bool(decoder.config.final_softcap) == (family == "gemma2")
    hidden = torch.randn(3, decoder.config.hidden_size, generator=torch.Generator().manual_seed(1))
    place = torch.full((4, decoder.vocab_size), torch.nan)
    with torch.inference_mode():
        got = decoder.logits(hidden, place[:3])
        assert got.data_ptr() == place.data_ptr()
        assert torch.equal(place[:3], decoder.logits(hidden))
    assert place[3].isnan().all()


@pytest.mark.parametrize(
    ("lengths", "only_prompts"), [((17,), True), ((17, 40), True), ((16,), False), ((40, 1), False), ((), False)]
)
def test_a_step_of_prompts_alone_says_so(lengths: tuple[int, ...], only_prompts: bool, decoder: Decoder) -> None:
    executor = make_executor(decoder, context=64, capacity=128)
    size = bucket_of(Step(tuple(chunk([3] * length, 0, (0, 1)) for length in lengths)))
    assert executor._buffers.views(size).batch.only_prompts == only_prompts


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_memory_that_is_still_copied_is_not_written(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device copies as late as possible: when the host waits for it."""
    under_way: list[tuple[Tensor, Tensor, Tensor]] = []  # target, source, and the source's content
    num_copied = 0

    class Late:
        """The device's memory."""

        def __init__(self, memory: Tensor) -> None:
            self.memory = memory

        def __getitem__(self, part: slice) -> Late:
            return Late(self.memory[part])

        def copy_(self, source: Tensor, non_blocking: bool) -> None:
            assert non_blocking
            under_way.append((self.memory, source, source.clone()))

    class Event:
        number = 0

        def record(self) -> None:
            self.number = len(under_way)

        def synchronize(self) -> None:
            nonlocal num_copied
            for target, source, was in under_way[num_copied : self.number]:
                assert torch.equal(source, was), "it was written while it was copied"
                target.copy_(source)
            num_copied = max(num_copied, self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    sizes: dict[str, Any] = {"max_tokens": 20, "max_sequences": 3, "max_rows": 20, "max_blocks": 4}
    cpu = torch.device("cpu")
    late, plain = (StepBuffers(**sizes, block_len=32, device=cpu) for _ in range(2))
    late._host.append(batch._Fields(*sizes.values(), cpu, pinned=False))
    late._device, late._copied = batch._Fields(*sizes.values(), cpu, pinned=False), [Event(), Event()]
    late._device.memory = Late(late._device.memory.fill_(77))  # type: ignore[assignment]
    rng = np.random.default_rng(num_steps)
    for _ in range(num_steps):
        count = int(rng.integers(1, 4))
        starts, block_tables = (
            rng.integers(0, 90, count).tolist(),
            [tuple(rng.permutation(40)[:4].tolist()) for _ in range(3)],
        )
        tokens = [rng.integers(0, 9, n).tolist() for n in rng.integers(1, 6, count)]
        step = Step(tuple(map(chunk, tokens, starts, block_tables)))
        size = bucket_of(step)
        late.fill(step, size)
        plain.fill(step, size)
        tensors, expected = late.views(size), plain.views(size)
    assert num_copied == max(num_steps - 2, 0), "the host waits for its own memory only"
    for event in sorted(late._copied, key=lambda event: event.number):
        event.synchronize()
    assert torch.equal(tensors.ids, expected.ids)
    assert torch.equal(tensors.rows, expected.rows)
    for one, other in zip(_tensors(tensors.batch), _tensors(expected.batch), strict=True):
        assert torch.equal(one, other)


def _tensors(step: Batch) -> list[Tensor]:
    return [step.positions, step.slot_mapping, step.block_tables, step.query_start_loc, step.seq_lens]


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize(("max_tokens", "largest"), [(512, 48), (48, 48), (40, 32), (16, 16), (10, 8), (1, 1)])
def test_no_graph_is_larger_than_a_step(decoder: Decoder, max_tokens: int, largest: int) -> None:
    executor = make_executor(decoder, context=64, capacity=128, max_tokens=max_tokens, max_sequences=3)
    graphs = give_graphs(executor)
    one_each = [bucket.tokens for bucket in graphs._buckets if bucket.max_query_len == 1]
    several = [bucket.tokens for bucket in graphs._buckets if bucket.max_query_len > 1]
    assert one_each == [size for size in SIZES if size <= min(largest, 4)]  # at most three sequences
    assert several == [size for size in SIZES if 1 < size <= largest]
    for bucket in graphs._buckets:
        views = executor._buffers.views(bucket)
        assert len(views.ids) == len(views.batch.slot_mapping) == len(views.rows) == bucket.tokens
        assert len(views.batch.seq_lens) == len(views.batch.query_start_loc) - 1 == min(bucket.tokens, 3)


# -- memory ------------------------------------------------------------------------------------------------------------


class Memory:
    """A device with memory for `room` positions of one layer, which is free again when its tensors are gone."""

    def __init__(self, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = room
        self.held: list[weakref.ref[Any]] = []
        self.most_left = 0  # most caches of a failed attempt that were alive when the next one began
        self._allocate = kv_cache.allocate
        self._num_blocks = 0
        monkeypatch.setattr(kv_cache, "allocate", self.allocate)

    def allocate(self, cache_format: Any, num_blocks: int, *args: Any) -> Any:
        if num_blocks != self._num_blocks:
            self._num_blocks = num_blocks
            self.most_left = max(self.most_left, sum(plane() is not None for plane in self.held))
            self.held.clear()
        if num_blocks * 32 > self.room and self.held:  # the second layer
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore lines")
        layer = self._allocate(cache_format, num_blocks, *args)
        self.held.append(weakref.ref(layer.keys))
        return layer


def option(context: int) -> Option:
    return Option("f16", context, 0, 0, 0, fits=True)


def test_less_context_if_memory_is_short(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(700, monkeypatch)
    gc.disable()  # the memory must be free without the garbage collector
    try:
        executor = build._executor(decoder, Settings(parallel=2), option(2048), "m", SMALL_STEP)
    finally:
        gc.enable()
    assert executor.info.context == 512
    assert memory.most_left == 0


def test_a_requested_context_is_not_made_smaller(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(700, monkeypatch)
    with pytest.raises(ModelError, match="m and 2,048 tokens of context do not fit"):
        build._executor(decoder, Settings(parallel=2, ctx=2048), option(2048), "m", SMALL_STEP)


def test_a_context_below_the_minimum_is_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(32, monkeypatch)
    with pytest.raises(ModelError, match="512 tokens of context do not fit"):
        build._executor(decoder, Settings(parallel=2), option(2048), "m", SMALL_STEP)


def test_a_gpu_failure_is_no_lack_of_memory(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def fail(*_: Any) -> None:
        attempts.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setattr(kv_cache, "allocate", fail)
    with pytest.raises(EngineError, match="the GPU failed: CUDA error: an illegal memory access was encountered;"):
        build._executor(decoder, Settings(parallel=2), option(2048), "m", SMALL_STEP)
    assert len(attempts) == 1


def test_a_capture_that_fails_for_lack_of_memory_says_so() -> None:
    def capture() -> None:
        with failures.gpu_errors():
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:  # as when a failed capture ends
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    with pytest.raises(OutOfMemoryError):
        capture()


def test_memory_of_the_processor_runs_out_in_one_line(decoder: Decoder) -> None:
    with pytest.raises(OutOfMemoryError, match="the memory is used up; lower --ctx"):
        make_executor(decoder, context=2**42, capacity=2**42)


def test_nothing_is_left_after_closing(decoder: Decoder) -> None:
    executor = make_executor(decoder, context=64, capacity=128)
    step = Step((chunk([5, 6], 0, (0,)),))
    executor.forward(step)
    planes = [weakref.ref(plane) for cache in executor._caches for plane in cache.planes.values()]
    buffers, logits = weakref.ref(executor._buffers), weakref.ref(executor._logits)
    executor.close()
    assert not any(tensor() is not None for tensor in [*planes, buffers, logits])
    with pytest.raises(AssertionError, match="closed"):
        executor.forward(step)


def test_closing_frees_the_memory_of_a_device_that_failed(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    executor = make_executor(decoder, context=64, capacity=128)
    planes = [weakref.ref(plane) for cache in executor._caches for plane in cache.planes.values()]
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    executor._device = torch.device("cuda")
    executor.close()
    assert not any(plane() is not None for plane in planes)


def test_16_bit_activations_over_the_cache(path: Path, decoder: Decoder) -> None:
    """A GPU has these types: the cache is float16 for every type of activations."""
    step = Step((chunk(list(range(5, 45)), 0, (0, 1)),))

    def logits(model: Decoder) -> NDArray[np.float32]:
        executor = make_executor(model, context=64, capacity=128)
        executor.forward(step)
        return executor.logits(step)

    expected = logits(decoder)
    half, brain = (
        np.linalg.norm(logits(load_gguf(path, dtype=dtype)) - expected) / np.linalg.norm(expected)
        for dtype in (torch.float16, torch.bfloat16)
    )
    assert half < 1e-2
    assert brain < 16 * half  # its rounding is 8 times as coarse
