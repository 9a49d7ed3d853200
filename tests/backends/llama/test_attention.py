"""KV modes whose attention a device of llama.cpp cannot compute: they are found, avoided, and told of.

No backend for a GPU is here. `Rules` answers for one, and reads the op that it is asked about.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgelm.backends.llama import attention, devices
from edgelm.backends.llama import build as build_module
from edgelm.backends.llama.attention import BATCHES, slow_modes
from edgelm.backends.llama.devices import llama_devices
from edgelm.backends.llama.graph_nodes import Node, graph_reader
from edgelm.backends.llama.memory import CELLS, GGML_TYPES
from edgelm.backends.llama.offload import OffloadedMemory
from edgelm.backends.llama.placement import Device, Wish
from edgelm.backends.model import LoadedModel
from edgelm.backends.plan import MachineMemory, Plan, plan
from edgelm.backends.questions import ChosenEngine
from edgelm.backends.reports import Reports
from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.machine.memory import USABLE
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.base.workers.wire import decode, encode
from edgelm.checkpoints.summary import ModelFacts
from tests.library.model_shapes import dense_model
from tests.tiny import write_tiny

GIB = 2**30
MODEL = dense_model(heads=32, kv_heads=8, head_len=128, context=32_768)
Q8_0, Q4_0 = GGML_TYPES["Q8_0"].id, GGML_TYPES["Q4_0"].id


class Rules:
    """A device that computes attention where `takes` says so of its queries, keys and values."""

    def __init__(self, takes: Callable[[Node, Node, Node], bool]) -> None:
        graph_reader()  # it checks the layout of `Node`
        self._takes = takes
        self.asked: list[tuple[tuple[int, int, int], tuple[int, int, int], int, int]] = []

    def __call__(self, device: int, op: int) -> bool:
        node = Node.from_address(op)
        queries, keys, values, mask = (node.source(index) for index in range(4))
        sizes = [tuple(tensor.sizes)[:3] for tensor in (queries, keys, values, mask)]
        assert sizes[1][1:] == sizes[2][1:]
        assert sizes[3] == (keys.sizes[1], queries.sizes[1], 1)
        self.asked.append((sizes[0], sizes[1], keys.type, values.type))
        return self._takes(queries, keys, values)


def card(free_bytes: int, *slow_kv: str) -> Device:
    return Device("MTL0", "a card", free_bytes, free_bytes, slow_kv=slow_kv)


def rules(monkeypatch: pytest.MonkeyPatch, takes: Callable[[Node, Node, Node], bool]) -> Rules:
    device = Rules(takes)
    monkeypatch.setattr(attention, "supports_op", device)
    return device


# -- which modes -------------------------------------------------------------------------------------------------------


def test_the_processor_itself_computes_all_of_them() -> None:
    """By llama.cpp's own answer."""
    devices.start_backend()
    (processor,) = (handle for handle, properties in devices._all_devices() if properties.name == b"CPU")
    for head_len in (32, 48, 64, 80, 128, 256):
        assert slow_modes(processor, dense_model(head_len=head_len).summary) == ()


def test_a_device_is_asked_about_the_heads_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    device = rules(monkeypatch, lambda *_: True)
    assert slow_modes(1, MODEL.summary) == ()
    expected = [(types, batch) for types in ((Q8_0, Q8_0), (Q8_0, Q4_0)) for batch in BATCHES]
    assert device.asked == [((128, batch, 32), (128, CELLS, 8), *types) for types, batch in expected]


@pytest.mark.parametrize(
    ("takes", "slow"),
    [
        (lambda q, k, v: k.type == v.type, ("k8v4",)),  # Metal
        (lambda q, k, v: k.sizes[0] == 64, ("int8", "k8v4")),  # other heads
        (lambda q, k, v: q.sizes[1] == 1, ("int8", "k8v4")),  # prompts are computed elsewhere
        (lambda q, k, v: False, ("int8", "k8v4")),  # no flash attention at all
        (lambda q, k, v: True, ()),
    ],
)
def test_modes_that_a_device_has_no_kernel_for_are_slow(
    takes: Callable[[Node, Node, Node], bool], slow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(monkeypatch, takes)
    assert slow_modes(1, MODEL.summary) == slow


def test_every_kind_of_layer_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer without attention, one of wide heads, and one with fewer heads than the others."""
    rules(monkeypatch, lambda q, k, v: k.sizes[0] < 256)
    lens = [128, 0, 256, 128]
    summary = replace(MODEL.summary, layers=4, kv_heads=[8, 0, 4, 12], key_lens=lens, value_lens=lens)
    assert slow_modes(1, summary) == ("int8", "k8v4")
    device = rules(monkeypatch, lambda *_: True)
    assert slow_modes(1, summary) == ()
    assert {(queries[2], keys[2], keys[0]) for queries, keys, *_ in device.asked} == {
        (32, 8, 128),
        (32, 4, 256),
        (24, 12, 128),
    }


@pytest.mark.parametrize(("softcap", "has_sinks"), [(50.0, False), (0.0, True), (0.0, False)])
def test_the_op_has_the_soft_cap_and_the_sinks_of_the_model(
    softcap: float, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backends have kernels with and without them apart."""
    seen: list[tuple[float, tuple[int, ...]]] = []

    def asked(device: int, op: int) -> bool:
        node = Node.from_address(op)
        _, _, cap = struct.unpack("3f", bytes(node.op_params)[:12])
        seen.append((cap, tuple(node.source(4).sizes) if node.sources[4] else ()))
        return softcap == 0

    graph_reader()  # it checks the layout of `Node`
    monkeypatch.setattr(attention, "supports_op", asked)
    summary = replace(MODEL.summary, attention_softcap=softcap, attention_sinks=has_sinks)
    assert slow_modes(1, summary) == (("int8", "k8v4") if softcap else ())
    assert set(seen) == {(softcap, (32, 1, 1, 1) if has_sinks else ())}


def test_heads_that_no_quantized_cache_can_have_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """ggml would abort; the plan refuses the mode."""
    device = rules(monkeypatch, lambda *_: False)
    assert slow_modes(1, dense_model(head_len=80).summary) == ()
    latent = replace(MODEL.summary, key_lens=[576] * 16, value_lens=[0] * 16)
    assert slow_modes(1, latent) == ()
    assert not device.asked


def test_devices_are_asked_only_about_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = devices._Properties(b"MTL0", b"a card", GIB, GIB, devices._GPU)
    monkeypatch.setattr(devices, "_all_devices", lambda: iter([(7, gpu)]))
    rules(monkeypatch, lambda q, k, v: k.type == v.type)
    assert [device.slow_kv for device in llama_devices()] == [()]
    assert [device.slow_kv for device in llama_devices(MODEL)] == [("k8v4",)]


def test_the_slow_modes_of_a_device_reach_the_process_that_plans() -> None:
    chosen = ChosenEngine("llama", "gpu", (), None, (card(GIB, "int8", "k8v4"), card(GIB)))
    assert decode(encode(chosen), [ChosenEngine]) == chosen


# -- the choice --------------------------------------------------------------------------------------------------------


def planned(device: Device, free_bytes: int = 64 * GIB, model: ModelFacts = MODEL, **settings: object) -> Plan:
    given = Settings(**{"gpu_layers": "all"} | settings)
    memory = OffloadedMemory(model, Wish.of(given, [device]), sequences=8)
    return plan(model, given, MachineMemory(free_bytes=free_bytes, cores=4), memory, with_options=True)


def room_for(kv: str, context: int) -> int:
    """Return the free bytes of a device on which all layers just fit."""
    (option,) = (one for one in planned(card(64 * GIB)).options if (one.kv, one.context) == (kv, context))
    return int(sum(part.total_bytes for part in option.devices) / USABLE) + 2


def test_auto_takes_a_shorter_context_before_a_slow_mode() -> None:
    room = room_for("k8v4", 8192)
    fast, slow = planned(card(room)), planned(card(room, "k8v4"))
    assert (fast.require().kv, fast.require().context, fast.warning) == ("k8v4", 8192, "")
    assert (slow.require().kv, slow.require().context) == ("int8", 4096)
    told = "8,192 tokens of context fit with --kv k8v4, but MTL0 cannot compute its attention, so the processor does"
    assert slow.reason.startswith(told)
    assert slow.warning == "the context is 4,096 tokens; " + told.replace(" tokens of context", "")


def test_auto_takes_a_slow_mode_before_less_than_half_of_the_context() -> None:
    room = room_for("k8v4", 8192)
    result = planned(card(room, "int8", "k8v4"))
    assert (result.require().kv, result.require().context) == ("k8v4", 8192)
    assert result.warning == (
        "--kv k8v4 is slow: MTL0 cannot compute its attention, so the processor does; "
        "others leave less than half of the context"
    )


def test_the_modes_before_it_are_chosen_as_ever() -> None:
    for kv in ("f16", "k8v16", "int8"):
        room = room_for(kv, 8192)
        assert planned(card(room, "k8v4")).require() == planned(card(room)).require()
        assert planned(card(room)).require().kv == kv


def test_a_slow_mode_that_the_user_names_is_taken_with_a_warning() -> None:
    result = planned(card(64 * GIB, "k8v4"), kv="k8v4")
    assert (result.require().kv, result.require().context) == ("k8v4", 8192)
    assert result.warning == (
        "--kv k8v4 is slow: MTL0 cannot compute its attention, so the processor does; "
        "--kv auto takes a faster mode where one fits"
    )
    assert planned(card(64 * GIB), kv="k8v4").warning == ""


def test_where_nothing_else_fits_a_slow_mode_is_better_than_none() -> None:
    room = room_for("k8v4", 8192)
    result = planned(card(room, "k8v4"), ctx=8192)
    assert result.require().kv == "k8v4"
    assert result.warning.endswith("so the processor does; no other mode fits")


@pytest.mark.parametrize("layers", ["0", "1"])
def test_a_device_without_layers_that_attend_slows_nothing(layers: str) -> None:
    """The output counts as a layer, and comes first."""
    assert planned(card(64 * GIB, "k8v4"), gpu_layers=layers, kv="k8v4").warning == ""
    assert planned(card(64 * GIB, "k8v4"), gpu_layers="2", kv="k8v4").warning


def test_without_a_device_the_choice_is_as_ever() -> None:
    memory = OffloadedMemory(MODEL, Wish(()), sequences=8)
    result = plan(MODEL, Settings(kv="k8v4"), MachineMemory(free_bytes=64 * GIB, cores=4), memory)
    assert (result.require().kv, result.warning) == ("k8v4", "")


def test_an_engine_tells_of_the_slow_mode_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    found = build_module.plan_context
    monkeypatch.setattr(build_module, "plan_context", lambda *a, **o: replace(found(*a, **o), warning="it is slow"))
    told: list[str] = []
    with build_module.open_gguf(path) as gguf:
        facts = build_module.model_facts(gguf)

    def built(settings: Settings) -> LoadedModel:
        return build_module.build_llama(
            EngineJob(model=path, settings=settings),
            facts,
            build_module.LlamaFiles((path,)),
            gpu=False,
            places=Places({}),
            reports=Reports(warn=told.append),
        )

    built(Settings(threads=1)).engine.close()
    assert told == ["it is slow"]
    with pytest.raises(ModelError):
        built(Settings(kv="fp8"))
    assert told == ["it is slow"]


@pytest.mark.parametrize(("processor", "found"), [("arm64", 1), ("x86_64", 0)])
def test_metal_computes_on_apples_processors_only(monkeypatch: pytest.MonkeyPatch, processor: str, found: int) -> None:
    gpu = devices._Properties(b"MTL0", b"a card", GIB, GIB, devices._GPU)
    monkeypatch.setattr(devices, "_all_devices", lambda: iter([(7, gpu)]))
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: processor)
    assert len(llama_devices()) == found
