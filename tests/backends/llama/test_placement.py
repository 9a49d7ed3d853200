"""Where the parts of a model lie in llama.cpp: the rule, the bytes on each device, and loads that follow them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from edgelm.backends.build import predict
from edgelm.backends.llama import build as build_module
from edgelm.backends.llama.devices import llama_devices
from edgelm.backends.llama.encoder import EncoderExecutor
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.memory import LlamaMemory
from edgelm.backends.llama.model import DeviceMemoryError, LlamaModel
from edgelm.backends.llama.offload import OffloadedMemory
from edgelm.backends.llama.placement import CPU, Device, Override, Placement, Wish, parse_overrides
from edgelm.backends.plan import MachineMemory, plan
from edgelm.base.config import Settings, load_config
from edgelm.base.errors import EdgeLMError, ModelError, UsageError
from edgelm.base.machine.memory import USABLE
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import ModelFacts, model_facts
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step
from tests.tiny import write_tiny

MIB = 2**20
LAYERS = 6
CONTEXT = 1024
LAYER_KV = 2 * 2 * 32 * 2 * CONTEXT  # K and V, heads, numbers, bytes, cells


def facts_of(path: Path) -> ModelFacts:
    with open_gguf(path) as gguf:
        return model_facts(gguf)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("dense") / "m.gguf", layers=LAYERS, quant="q8_0", width=256, ffn=512)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("moe") / "m.gguf", layers=LAYERS, experts=8, quant="q8_0", width=128)


def device(free_bytes: int, name: str = "Vulkan0") -> Device:
    return Device(name, "a card", free_bytes, free_bytes)


def memory_of(model: ModelFacts, *devices: Device, **settings: object) -> OffloadedMemory:
    return OffloadedMemory(model, Wish.of(Settings(**settings), devices), sequences=8)  # type: ignore[arg-type]


def test_the_last_layers_go_to_the_device_and_the_output_first() -> None:
    for layers in range(LAYERS + 2):
        placement = Placement(("Vulkan0",), (layers,))
        start = LAYERS + 1 - layers  # llama.cpp's i_gpu_start
        expected = ["Vulkan0" if layer >= start else CPU for layer in range(LAYERS + 1)]
        assert [placement.layer_device(layer, LAYERS) for layer in range(LAYERS + 1)] == expected
    two = Placement(("A0", "B0"), (2, 3))
    assert [two.layer_device(layer, LAYERS) for layer in range(LAYERS + 1)] == [CPU, CPU, "A0", "A0", "B0", "B0", "B0"]


def test_the_bytes_of_each_layer_are_counted_where_it_lies(dense: Path) -> None:
    """The expected sizes are the gguf package's own reading of the file."""
    model = facts_of(dense)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(dense).tensors}
    for layers in range(LAYERS + 2):
        offloaded = [f"blk.{layer}." for layer in range(LAYERS + 1 - layers, LAYERS)] + (["output"] if layers else [])
        weights = sum(size for name, size in sizes.items() if name.startswith(tuple(offloaded)))
        memory = memory_of(model, device(2**30), gpu_layers=str(layers))
        parts = memory.devices("f16", CONTEXT)
        if not layers:
            assert parts == ()
            continue
        (part,) = parts
        assert (part.layers, part.weights, part.kv) == (layers, weights, max(layers - 1, 0) * LAYER_KV)
        assert part.kv + memory.kv_bytes("f16", CONTEXT) == LAYERS * LAYER_KV
        stays = memory.resident_bytes("f16", CONTEXT)
        assert stays >= sizes["token_embd.weight"]
        assert stays == pytest.approx(sum(sizes.values()) - weights, abs=MIB)


def test_a_shared_embedding_is_copied_to_multiply_with(dense: Path) -> None:
    model = facts_of(dense)
    tied = replace(model, tensors=tuple(tensor for tensor in model.tensors if tensor.name != "output.weight"))
    table = next(tensor.nbytes for tensor in model.tensors if tensor.name == "token_embd.weight")
    (part,) = memory_of(tied, device(2**30), gpu_layers="1").devices("f16", CONTEXT)
    assert part.weights == pytest.approx(table, abs=4 * 256)  # and the output's norm
    assert memory_of(tied, device(2**30), gpu_layers="1").resident_bytes("f16", CONTEXT) >= table


def test_auto_takes_as_many_layers_as_fit(dense: Path) -> None:
    model = facts_of(dense)
    totals = []
    for layers in range(1, LAYERS + 2):
        (part,) = memory_of(model, device(2**30), gpu_layers=str(layers)).devices("f16", CONTEXT)
        totals.append(part.total_bytes)
    for layers, total in enumerate(totals, start=1):
        exact = int(np.ceil(total / USABLE))
        assert memory_of(model, device(exact)).placement("f16", CONTEXT).gpu_layers == layers
        fewer = memory_of(model, device(exact - 2)).placement("f16", CONTEXT)
        assert fewer.gpu_layers == layers - 1
    assert memory_of(model, device(MIB)).placement("f16", CONTEXT).devices == ()
    assert memory_of(model, device(2**30), gpu_layers="all").placement("f16", CONTEXT).gpu_layers == LAYERS + 1
    assert memory_of(model, device(2**30), gpu_layers="99").placement("f16", CONTEXT).gpu_layers == LAYERS + 1


def test_several_devices_share_the_layers_by_their_free_memory(dense: Path) -> None:
    model = facts_of(dense)
    placement = memory_of(model, device(2 * 2**30, "A0"), device(2**30, "B0"), gpu_layers="6").placement("f16", CONTEXT)
    assert (placement.devices, placement.counts) == (("A0", "B0"), (4, 2))
    parts = memory_of(model, device(2 * 2**30, "A0"), device(2**30, "B0"), gpu_layers="6").devices("f16", CONTEXT)
    assert [part.kv for part in parts] == [4 * LAYER_KV, LAYER_KV]  # the output has no cache


def test_an_engine_places_what_it_was_promised(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what is free as it begins: that may be promised to one that loads beside it."""
    model, settings = facts_of(dense), Settings(threads=1, engine="llama", ctx=CONTEXT, spec="off")
    card = replace(device(2**30), total_bytes=2**30)
    monkeypatch.setattr("edgelm.backends.llama.devices.llama_devices", lambda *_: (card,))
    monkeypatch.setattr("edgelm.backends.build.standing_gpu", lambda: None)
    whole = predict(dense, settings)
    assert (whole.device, whole.offloaded_bytes) == ("gpu", whole.gpu_bytes)
    (part,) = memory_of(model, card).devices("f16", CONTEXT)
    assert (whole.gpu_bytes, whole.ram_bytes) == (part.total_bytes, whole.total_bytes)
    for others in (whole.gpu_bytes // 4, whole.gpu_bytes // 2, 2**30):
        left = predict(dense, settings, freed_gpu_bytes=-(2**30 - whole.gpu_bytes) - others)
        assert left.gpu_bytes < whole.gpu_bytes - others or left.gpu_bytes == 0
        assert left.total_bytes >= whole.total_bytes
        wish = Wish((card,)).with_room(limit_bytes=int(left.gpu_bytes / USABLE) + 1)
        memory = OffloadedMemory(model, wish, sequences=settings.parallel)
        assert sum(part.total_bytes for part in memory.devices("f16", CONTEXT)) == left.gpu_bytes
    assert predict(dense, settings, freed_gpu_bytes=2**40).gpu_bytes == whole.gpu_bytes


def test_memory_that_others_leave_counts_where_it_is_in_use() -> None:
    full, empty = Device("A0", "", 100, 20), Device("B0", "", 100, 100)
    wish = Wish((full, empty, Device("C0", "", 100, 0, shared=True)))
    assert [device.free_bytes for device in wish.with_room(40).devices] == [60, 100, 0]
    assert [device.free_bytes for device in wish.with_room(1000).devices] == [100, 100, 0]
    assert [device.free_bytes for device in wish.with_room(-60).devices] == [10, 50, 0]
    assert [device.free_bytes for device in wish.with_room(limit_bytes=12).devices] == [2, 10, 0]
    assert wish.with_room(limit_bytes=500) is wish


def test_experts_leave_the_device_before_layers_do(mixture: Path) -> None:
    model = facts_of(mixture)
    (whole,) = memory_of(model, device(2**30)).devices("f16", CONTEXT)
    assert whole.layers == LAYERS + 1
    experts = sum(tensor.nbytes for tensor in model.tensors if "_exps" in tensor.name)
    for kept in range(1, LAYERS + 1):
        memory = memory_of(model, device(2**30), n_cpu_moe=str(kept))
        (part,) = memory.devices("f16", CONTEXT)
        assert part.weights == whole.weights - experts * kept // LAYERS
        assert memory.resident_bytes("f16", CONTEXT) >= experts * kept // LAYERS
        auto = memory_of(model, device(int(np.ceil(part.total_bytes / USABLE)))).placement("f16", CONTEXT)
        assert (auto.gpu_layers, auto.expert_layers) == (LAYERS + 1, kept)
    small = memory_of(model, device(int(np.ceil(part.total_bytes / USABLE)) - 2)).placement("f16", CONTEXT)
    assert (small.gpu_layers, small.expert_layers) == (LAYERS, LAYERS)
    assert memory_of(model, device(2**30), n_cpu_moe="all").placement("f16", CONTEXT).expert_layers == LAYERS


def test_a_model_without_experts_has_none_to_keep(dense: Path) -> None:
    placement = memory_of(facts_of(dense), device(2**30), n_cpu_moe="3").placement("f16", CONTEXT)
    assert (placement.gpu_layers, placement.patterns) == (LAYERS + 1, ())
    assert placement.describe(LAYERS) == "Vulkan0"
    assert replace(placement, counts=(2,), expert_layers=3).describe(LAYERS) == (
        "Vulkan0, 2 of 7 layers, experts of 3 layers on cpu"
    )


def test_the_pattern_of_the_experts_is_llama_cpps() -> None:
    (override,) = Placement(("Vulkan0",), (9,), (), 12).patterns
    assert override.device == CPU
    matches = re.compile(override.pattern).search
    for name in ("ffn_up_exps", "ffn_down_exps", "ffn_gate_exps", "ffn_gate_up_exps", "ffn_up_chexps"):
        assert matches(f"blk.0.{name}.weight")
        assert matches(f"blk.11.{name}.weight")
        assert not matches(f"blk.12.{name}.weight")
        assert not matches(f"blk.112.{name}.weight")
    assert not matches("blk.0.ffn_up_shexp.weight")
    assert not matches("blk.0.ffn_gate_inp.weight")


def test_the_first_override_that_matches_wins(dense: Path) -> None:
    overrides = (Override(r"blk\.0\.attn_q", "Vulkan0"), Override(r"attn_", CPU))
    placement = Placement(("Vulkan0",), (LAYERS + 1,), overrides)
    assert placement.tensor_device("blk.0.attn_q.weight", LAYERS) == "Vulkan0"
    assert placement.tensor_device("blk.1.attn_q.weight", LAYERS) == CPU
    assert placement.tensor_device("blk.1.ffn_up.weight", LAYERS) == "Vulkan0"
    assert placement.tensor_device("token_embd.weight", LAYERS) == CPU
    memory = memory_of(facts_of(dense), device(2**30), gpu_layers="0", override_tensor=("ffn_down=vulkan0",))
    (part,) = memory.devices("f16", CONTEXT)
    assert part.weights == sum(tensor.nbytes for tensor in facts_of(dense).tensors if "ffn_down" in tensor.name)


@pytest.mark.parametrize(
    ("texts", "devices", "message"),
    [(("a=CUDA7",), ("Vulkan0",), "CUDA7 here; give one of CPU, Vulkan0"), (("a=Vulkan0",), (), "give one of CPU$")],
)
def test_an_override_to_an_unknown_device_is_one_line(
    texts: tuple[str, ...], devices: tuple[str, ...], message: str
) -> None:
    with pytest.raises(EdgeLMError, match=message):
        parse_overrides(texts, devices)


def test_settings_of_devices_are_checked(tmp_path: Path) -> None:
    def settings(**flags: object) -> Settings:
        return load_config(flags, {"EDGELM_CONFIG_DIR": str(tmp_path)}).settings

    assert settings(override_tensor=[r"blk\.(0|1)\.ffn=CPU,a{1,2}=Vulkan0"]).override_tensor == (
        r"blk\.(0|1)\.ffn=CPU",
        "a{1,2}=Vulkan0",
    )
    assert settings(device="Vulkan0,Vulkan1").device == "Vulkan0,Vulkan1"
    assert settings(gpu_layers="all", n_cpu_moe="all").gpu_layers == "all"
    for flags in (
        {"override_tensor": ["(=CPU"]},
        {"override_tensor": ["abc"]},
        {"device": "gpuu"},
        {"n_cpu_moe": "-1"},
    ):
        with pytest.raises(UsageError):
            settings(**flags)
    with pytest.raises(EdgeLMError, match="no device Vulkan3; its devices: Vulkan0; see"):
        Wish.of(Settings(device="Vulkan3"), [device(2**30)])


def test_a_plan_counts_each_memory_on_its_own(dense: Path) -> None:
    model = facts_of(dense)
    machine = MachineMemory(free_bytes=2**30, cores=2)
    alone = plan(model, Settings(), machine, LlamaMemory(model, sequences=8)).require()
    both = plan(model, Settings(), machine, memory_of(model, device(2**30))).require()
    assert both.devices[0].layers == LAYERS + 1
    assert both.total_bytes < alone.total_bytes
    assert both.kv_bytes == 0
    shared = replace(device(2**30), shared=True)
    total = plan(model, Settings(), machine, memory_of(model, shared)).require().total_bytes
    assert total == both.total_bytes + both.devices[0].total_bytes
    with pytest.raises(ModelError, match=rf"{LAYERS + 1} layers of .* GiB on Vulkan0 .*; use --gpu-layers auto"):
        plan(model, Settings(gpu_layers="all"), machine, memory_of(model, device(MIB), gpu_layers="all")).require()


# -- with llama.cpp ----------------------------------------------------------------------------------------------------


def logits_of(path: Path, placement: Placement) -> NDArray[np.float32]:
    """Return the logits of the last token of a prompt of 40."""
    executor = LlamaExecutor(LlamaModel(path, placement=placement, repack=False), LlamaOptions(context=256))
    tokens = list(range(260, 300))
    step = Step((Chunk(Sequence(0, tokens, len(tokens), SamplingParams()), 0, tokens, 1, 0),))
    try:
        executor.forward(step)
        return executor.logits(step).copy()
    finally:
        executor.close()


def test_a_mixture_with_overrides_computes_the_same(mixture: Path) -> None:
    plain = logits_of(mixture, Placement())
    assert np.isfinite(plain).all()
    assert plain.std() > 0.1
    placed = Placement(overrides=(Override(r"blk\.0\..*_exps", CPU), Override("attn", CPU)), expert_layers=3)
    assert np.array_equal(logits_of(mixture, placed), plain)


def test_a_pattern_that_only_python_understands_is_one_line(dense: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        LlamaModel(dense, placement=Placement(overrides=(Override("(?<=x)y", CPU),)))


def test_an_engine_on_the_processor_touches_no_device(dense: Path) -> None:
    model = LlamaModel(dense)
    assert model.placement.describe(model.num_layers) == "cpu"
    model.close()
    assert all(item.total_bytes >= item.free_bytes > 0 for item in llama_devices())


def fails_until(layers: int, tried: list[int]) -> Callable[[Placement], object]:
    def load(placement: Placement) -> object:
        tried.append(placement.gpu_layers)
        if placement.gpu_layers > layers:
            raise DeviceMemoryError("Vulkan0 has no memory")
        return placement

    return load


@pytest.mark.parametrize("fitting", [0, 1, 20, 60])
def test_a_device_that_is_short_of_memory_gets_fewer_layers(
    fitting: int, dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = facts_of(dense)
    long = replace(
        model, summary=replace(model.summary, layers=64, kv_heads=[0] * 64, key_lens=[0] * 64, value_lens=[0] * 64)
    )
    memory = memory_of(long, device(2**40))
    tried: list[int] = []
    loaded = build_module._first_that_loads(fails_until(fitting, tried), memory.from_placement("f16", CONTEXT))
    assert isinstance(loaded, Placement)
    assert loaded.gpu_layers <= fitting
    assert tried[0] == 65
    assert len(tried) <= build_module.RETRIES
    assert all(f"trying {layers} layers" in caplog.text for layers in tried[1:])


def test_a_fixed_number_of_layers_is_not_changed(dense: Path) -> None:
    memory = memory_of(facts_of(dense), device(2**40), gpu_layers="3")
    tried: list[int] = []
    with pytest.raises(DeviceMemoryError):
        build_module._first_that_loads(fails_until(2, tried), memory.from_placement("f16", CONTEXT))
    assert tried == [3]


def test_a_model_for_vectors_tells_its_own_place() -> None:
    model: Any = SimpleNamespace(placement=Placement(("CUDA0",), (3,)), num_layers=2, num_vocab=5)
    assert EncoderExecutor(model, 512).info.device == "CUDA0"
    model.placement = Placement()
    assert EncoderExecutor(model, 512).info.device == "cpu"
