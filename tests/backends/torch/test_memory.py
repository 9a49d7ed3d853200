"""The formulas of the torch executor's memory against real allocations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgelm.backends.plan import MachineMemory, plan
from edgelm.backends.torch import sampler as device
from edgelm.backends.torch.graph_sizes import SIZES, VERIFY_LEN, graph_sizes
from edgelm.backends.torch.memory import (
    BLOCK_LEN,
    RING,
    SAMPLED_ROWS,
    TorchMemory,
    capacity,
    chunk_sum_bytes,
    head_bytes,
    num_chunks,
    num_states,
    plan_for_torch,
    sampler_bytes,
    split_sum_bytes,
    staged_bytes,
)
from edgelm.backends.torch.sampler import DeviceSampler
from edgelm.base.config import Settings
from edgelm.base.kv_modes import TORCH_KV
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import model_facts
from edgelm.kernels import cache, delta
from edgelm.kernels.layout import DenseWeight, PackedWeight, Weight, planes
from edgelm.kernels.matmul import ROWS
from edgelm.models.config import read_config
from edgelm.models.loading.decoder import load
from edgelm.models.loading.sources import GGUFSource
from tests.bench.gpu_plans import CONTEXT_BYTES, QWEN3_8B, QWEN3_14B, Model, write_header
from tests.odd_models import write_odd
from tests.tiny import write_tiny

GIB = 2**30


@pytest.mark.parametrize("kv", cache.FORMATS)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_a_position_has_the_bytes_of_the_cache(kv: str, head_dim: int) -> None:
    assert 3 * head_bytes(kv, head_dim) == cache.FORMATS[kv].bytes_per_token(3, head_dim)
    layer = cache.allocate(cache.FORMATS[kv], 2, 3, head_dim, "cpu")
    assert sum(plane.nbytes for plane in layer.planes.values()) == 2 * BLOCK_LEN * 3 * head_bytes(kv, head_dim)


def test_the_block_length_is_that_of_the_cache() -> None:
    assert BLOCK_LEN == cache.BLOCK_LEN


def test_the_chunks_of_a_context_are_those_of_the_kernel() -> None:
    from edgelm.kernels.attention import launch

    for length in (1, 32, 256, 257, 16384, 16385, 49152, 49153, 131072, 10**6):
        assert num_chunks(length) == launch.num_chunks(length)
    assert launch.VERIFY_LEN == VERIFY_LEN


def test_the_largest_graph_has_the_rows_that_decode_kernels_take() -> None:
    assert SIZES[-1] == ROWS == SAMPLED_ROWS


def test_there_are_graphs_for_the_steps_that_so_many_sequences_have() -> None:
    def sizes(max_sequences: int, *, decoding: bool, max_tokens: int = 1024) -> list[int]:
        graphs = graph_sizes(max_sequences, max_tokens)
        return [tokens for tokens, query_len in graphs if (query_len == 1) == decoding]

    assert sizes(1, decoding=True) == [1]
    assert sizes(1, decoding=False) == [2, 4, 8, 16]
    assert sizes(8, decoding=True) == [1, 2, 4, 8]
    assert sizes(8, decoding=False) == [2, 4, 8, 16, 24, 32, 48, 64]
    assert sizes(17, decoding=True) == [1, 2, 4, 8, 16, 24]
    assert sizes(64, decoding=True) == list(SIZES)
    assert sizes(64, decoding=False, max_tokens=10) == [2, 4, 8]


@pytest.mark.parametrize(("rows", "num_vocab"), [(1, 100), (64, 5000), (3, 2048)])
def test_the_scratch_of_the_sampler_equals_its_allocations(
    rows: int, num_vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgelm.kernels.sampling import NUM_ANSWER, Batch, Word, kernel

    sizes: list[int] = []
    real = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        tensor = real(*args, **options)
        sizes.append(tensor.nbytes)
        return tensor

    for name in ("prepare", "limit", "weigh", "collect", "draw"):
        monkeypatch.setattr(kernel, f"{name}_kernel", _NoKernel())
    none = torch.zeros(0, dtype=torch.int32, device="meta")
    words = torch.zeros(rows, len(Word), dtype=torch.int64, device="meta")
    logits = torch.zeros(rows, num_vocab, device="meta")
    batch = Batch(words, none, none, none, none, torch.zeros(rows, 1, dtype=torch.int32, device="meta"))
    answers = torch.zeros(rows, NUM_ANSWER, dtype=torch.int64, device="meta")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        kernel.sample(logits, batch, answers)
    assert sum(sizes) == sampler_bytes(rows, num_vocab)


@pytest.mark.parametrize(("rows", "num_vocab"), [(1, 100), (64, 5000), (3, 2049)])
def test_what_rows_are_sampled_by_has_the_predicted_size(rows: int, num_vocab: int) -> None:
    sampler = DeviceSampler(num_vocab, rows, "cpu", "reference")
    columns = [value for value in vars(sampler).values() if isinstance(value, device._Column)]
    held = [*(column._device for column in columns), sampler._latest]
    assert sum(tensor.nbytes for tensor in held) == staged_bytes(rows, num_vocab)


class _NoKernel:
    """Replaces a kernel, and does nothing when launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: None


def allocated(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    context: int,
    rows: int,
) -> tuple[int, int]:
    """Return the bytes that a call of attention allocates: for decode and verify, and for prompts."""
    from edgelm.kernels.attention import launch

    sizes: list[int] = []
    real = torch.empty

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = real(shape, dtype=dtype, device=device)
        sizes.append(tensor.nbytes)
        return tensor

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device="meta")

    monkeypatch.setattr(launch, "interpreting", lambda: False)
    for name in ("attend_chunks", "combine_chunks", "attend_tiles"):
        monkeypatch.setattr(launch, name, _NoKernel())
    layer = cache.allocate(cache.FORMATS["int8"], 1, num_kv_heads, head_dim, "meta")
    q = torch.zeros(tokens, num_heads, head_dim, device="meta")
    block_tables = integers(sequences, -(-context // BLOCK_LEN))
    query_start_loc, seq_lens = integers(sequences + 1), integers(sequences)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        launch.run(q, layer, block_tables, query_start_loc, seq_lens, 1.0, 0, 0.0, None, rows, q)
    return sum(sizes[:2]), sum(sizes[2:]) if rows > launch.VERIFY_LEN and sequences == 1 else 0


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "context"), [(32, 8, 128, 131072), (4, 2, 80, 2048), (16, 4, 256, 40_000)]
)
def test_the_scratch_of_attention_equals_its_allocations(
    num_heads: int, num_kv_heads: int, head_dim: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = num_heads, num_kv_heads, head_dim, context
    width, positions = -(-head_dim // 32) * 32, -(-context // BLOCK_LEN) * BLOCK_LEN
    for tokens, sequences in ((1, 1), (4, 4), (16, 1), (16, 16), (512, 1), (512, 3), (512, 16), (512, 40)):
        numbers = {1, 2, 3, sequences // 2, sequences - 1, sequences} & set(range(1, sequences + 1))
        few = max(
            allocated(monkeypatch, min(tokens, number * rows), number, *shape, rows)[0]
            for number in numbers
            for rows in (1, 4, 8, 11, 16)
        )
        planned = chunk_sum_bytes(tokens, sequences, num_heads, width, positions)
        assert 0.7 * planned <= few <= planned, (tokens, sequences)
    for tokens in (17, 32, 33, 64, 100, 128, 512):
        _, prompts = allocated(monkeypatch, tokens, 1, *shape, rows=tokens)
        assert prompts == split_sum_bytes(tokens, num_heads, num_kv_heads, width, positions), tokens
        assert prompts < 16 * 2**20


def test_a_plan_has_room_for_attention(tmp_path: Path) -> None:
    """Graphs and other steps each have sums, which grow with the context."""
    with open_gguf(write_tiny(tmp_path / "m.gguf", heads=4, kv_heads=2, head_dim=80, width=64)) as gguf:
        memory = TorchMemory(model_facts(gguf), sequences=8)
    grown = memory.workspace_bytes("f16", 131072) - memory.workspace_bytes("f16", 8192)
    chunks = num_chunks(131072) - num_chunks(8192)
    assert grown == (64 + 8 * 16) * 4 * chunks * (96 + 2) * 4


def nbytes(weight: Weight) -> int:
    if isinstance(weight, PackedWeight):
        return sum(plane.nbytes for plane in planes(weight).values())
    assert isinstance(weight, DenseWeight)
    return weight.data.nbytes


@pytest.mark.parametrize("quant", ["f32", "q8_0", "q4_0", "q4_k"])
def test_weights_have_the_predicted_size(tmp_path: Path, quant: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant=quant, width=256, ffn=512, head_dim=64)
    with open_gguf(path) as gguf:
        predicted = TorchMemory(model_facts(gguf), sequences=1).weights.resident
        source = GGUFSource(gguf)
        held = sum(
            nbytes(source.matrix(name)) if len(source.shape(name)) == 2 else source.vector(name).nbytes
            for name in source.names
        )
    assert held == pytest.approx(predicted, rel=0.01)


def test_int4_makes_weights_smaller(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant="f32", layers=1, width=128, ffn=256)
    with open_gguf(path) as gguf:
        facts = model_facts(gguf)
        plain, small = (
            TorchMemory(facts, sequences=1, quantize=quantize).weights.resident for quantize in ("off", "int4")
        )
        source = GGUFSource(gguf, quantize="int4")
        held = sum(
            nbytes(source.matrix(name)) if len(source.shape(name)) == 2 else source.vector(name).nbytes
            for name in source.names
        )
    assert small < plain / 6
    assert held == pytest.approx(small, rel=0.02)


def test_less_memory_gives_a_smaller_cache_and_then_less_context(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", layers=8, heads=8, kv_heads=8, head_dim=256, context=32768)
    with open_gguf(path) as gguf:
        facts = model_facts(gguf)
    memory = TorchMemory(facts, sequences=8)

    def chosen(free: float) -> tuple[str, int]:
        option = plan(facts, Settings(), MachineMemory(free_bytes=int(free), cores=1), memory).require()
        assert option.total_bytes <= 0.95 * free
        return option.kv, option.context

    def needed(kv: str) -> float:
        return (memory.weights.resident + memory.kv_bytes(kv, 8192) + memory.workspace_bytes(kv, 8192)) / 0.95

    assert chosen(8 * GIB) == ("f16", 8192)
    assert chosen(needed("f16") * 0.99) == ("int8", 8192)
    assert chosen(needed("k8v4") * 0.99) == ("k6v4", 8192)
    assert chosen(needed("k6v4") * 0.99)[1] < 8192


def test_the_largest_matrix_as_float32_is_counted_on_the_cpu(tmp_path: Path) -> None:
    """The reference dequantizes it in each step, and the process keeps that memory."""
    sizes = {}
    for vocab in (512, 100_512):
        path = write_tiny(tmp_path / f"{vocab}.gguf", vocab_size=vocab, width=64, layers=1)
        with open_gguf(path) as gguf:
            sizes[vocab] = TorchMemory(model_facts(gguf), sequences=1, device="cpu").workspace_bytes("f16", 512)
    logits = 64 * 100_000 * 4 * 2
    assert sizes[100_512] - sizes[512] - logits == 4 * 64 * (100_512 - 512)


def test_a_mode_of_llama_cpp_is_refused(tmp_path: Path) -> None:
    with open_gguf(write_tiny(tmp_path / "m.gguf")) as gguf:
        memory = TorchMemory(model_facts(gguf), sequences=1)
    assert "torch engine" in memory.refusal("k8v16")
    assert not memory.refusal("k6v4")


def test_codes_are_refused_for_heads_that_spill(tmp_path: Path) -> None:
    with open_gguf(write_tiny(tmp_path / "m.gguf")) as gguf:
        facts = model_facts(gguf)
    wide = replace(facts, summary=replace(facts.summary, key_lens=[256, 512]))
    memory = TorchMemory(wide, sequences=1)
    assert not memory.refusal("f16")
    assert "heads of 512" in memory.refusal("int8")
    assert not TorchMemory(facts, sequences=1).refusal("int8")


def test_capacity_holds_the_context_and_a_block_for_each_sequence() -> None:
    assert capacity(100, 3) == (4 + 3) * BLOCK_LEN
    assert torch.tensor(capacity(8192, 8)).item() % BLOCK_LEN == 0


def test_states_are_counted(tmp_path: Path) -> None:
    with open_gguf(write_odd(tmp_path / "m.gguf", "qwen35")) as gguf:
        facts = model_facts(gguf)
        decoder = load(read_config(gguf.metadata), GGUFSource(gguf), "cpu", torch.float32, "reference")
    slots = num_states(2)
    caches = decoder.new_caches(cache.FORMATS["f16"], capacity(256, 2) // BLOCK_LEN, slots, torch.float16)
    real = sum(plane.nbytes for one in caches for plane in one.planes.values())
    predicted = TorchMemory(facts, sequences=2, device="cpu").kv_bytes("f16", 256)
    assert RING == delta.RING
    assert real <= predicted <= 1.03 * real


def test_where_memory_is_short_steps_are_shorter_and_then_fewer_sequences_run(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "wide.gguf", quant="q8_0", context=8192, layers=8, heads=32, kv_heads=32)
    with open_gguf(path) as gguf:
        facts, settings = model_facts(gguf), Settings(parallel=8, kv="f16", ctx=8192)

    def needed(sequences: int, tokens: int, context_bytes: int = 0) -> int:
        memory = TorchMemory(facts, sequences=sequences, max_tokens=tokens, context_bytes=context_bytes)
        return memory.weights.resident + memory.kv_bytes("f16", 8192) + memory.workspace_bytes("f16", 8192)

    def planned(usable_bytes: int, context_bytes: int = 0) -> tuple[bool, int, int]:
        machine = MachineMemory(free_bytes=int(usable_bytes / 0.95) + 10, cores=1)
        result, sequences, tokens = plan_for_torch(facts, None, settings, machine, "cuda", context_bytes=context_bytes)
        assert bool(result.note) == (sequences < 8 and result.chosen is not None)
        return result.chosen is not None, sequences, tokens

    assert planned(needed(8, 1024)) == (True, 8, 1024)
    assert planned(needed(8, 512)) == (True, 8, 512)
    assert planned(needed(2, 512)) == (True, 2, 512)
    assert planned(needed(1, 512)) == (True, 1, 512)
    assert not planned(needed(1, 512) - 2**20)[0]
    assert needed(8, 1024, 300 << 20) == needed(8, 1024) - (300 << 20)  # that context is not among the free memory
    assert needed(8, 1024, 900 << 20) == needed(8, 1024) - (350 << 20)  # what is more may be another program's


@pytest.mark.parametrize(
    ("model", "free_gib", "kv"), [(QWEN3_8B, 7.2, "f16"), (QWEN3_8B, 6.5, "int8"), (QWEN3_14B, 10.5, "k6v4")]
)
def test_what_people_have_takes_a_model_of_its_class(tmp_path: Path, model: Model, free_gib: float, kv: str) -> None:
    """Goals: cards of 8 and 12 GB, whose desktop has a part; Q4_K_M, 8,192 tokens, and no more than is free."""
    write_header(tmp_path / "m.gguf", model)
    with open_gguf(tmp_path / "m.gguf") as gguf:
        facts = model_facts(gguf)
    free = int(free_gib * GIB)
    machine = MachineMemory(free_bytes=free, cores=1)
    chosen = plan_for_torch(facts, None, Settings(), machine, "cuda", context_bytes=CONTEXT_BYTES).plan.require()
    assert chosen.context == 8192
    assert list(TORCH_KV).index(chosen.kv) <= list(TORCH_KV).index(kv), chosen.kv
    assert chosen.total_bytes <= 0.95 * free
