"""LoRA adapters in llama.cpp: the logits of the merged weights, and one line for adapters that do not fit."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFType, GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file

from edgelm.backends.build import build
from edgelm.backends.llama.adapter import LlamaAdapter, find_adapters
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions, state_identity
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.checkpoints.gguf import open_gguf
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step
from edgelm.engine.engine import Engine
from tests.adapters import PREFIX, write_adapter
from tests.models import tiny_models
from tests.models.tiny_gguf import write_gguf
from tests.tiny import write_tiny

TOKENS = [1, 5, 17, 80, 42, 42, 9, 33, 60, 3, 11]
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_up_proj", "gate_proj", "up_proj", "down_proj")


def layers_of(model: Any, *more: str) -> dict[str, tuple[int, int]]:
    """Return the layers of a model that an adapter usually changes."""
    names = (*LAYERS, *more)
    return {
        name: tuple(module.weight.shape) for name, module in model.named_modules() if name.rpartition(".")[2] in names
    }


def deltas_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the layers of an adapter, and B @ A of each in the shape of its weight, as torch computes it."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        layer = name.removeprefix(PREFIX).partition(".lora_")[0]
        if ".lora_A" in name:
            yield layer, torch.from_numpy(tensors[name.replace("lora_A", "lora_B")] @ a)
        elif ".lora_embedding_A" in name:
            yield layer, torch.from_numpy((tensors[name.replace("_A", "_B")] @ a).T)


def merge(model: Any, folder: Path, scale: float, scalings: Mapping[str, float] = MappingProxyType({"": 1.0})) -> None:
    """Add scale * scaling * B @ A to the weights of a model; `scalings` are by the ends of layers' names."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for layer, delta in deltas_of(folder):
            scaling = next(number for end, number in scalings.items() if layer.endswith(end))
            modules[layer].weight += scale * scaling * delta


def logits(path: Path, adapters: Many[LlamaAdapter] = ()) -> NDArray[np.float32]:
    """Return the logits behind every token."""
    executor = LlamaExecutor(LlamaModel(path, adapters=adapters, repack=False), LlamaOptions(context=256))
    seq = Sequence(0, list(TOKENS), len(TOKENS), SamplingParams())
    step = Step((Chunk(seq, 0, list(TOKENS), len(TOKENS), 0),))
    executor.forward(step)
    result = executor.logits(step).copy()
    executor.close()
    return result


def found(path: Path, cache: Path, *lora: str) -> tuple[LlamaAdapter, ...]:
    with open_gguf(path) as gguf:
        return find_adapters(gguf, lora, cache)


@pytest.mark.parametrize("name", ["llama2", "smollm3", "qwen3", "gemma3", "phi3"])
def test_a_model_with_an_adapter_is_the_merged_model(name: str, tmp_path: Path) -> None:
    model = tiny_models.build(name, num_hidden_layers=2)
    base = write_gguf(model, tmp_path / "base.gguf")
    folder = write_adapter(tmp_path / "adapter", layers_of(model), size=0.1)
    merge(model, folder, 8 / 4)
    merged = logits(write_gguf(model, tmp_path / "merged.gguf"))
    plain, adapted = logits(base), logits(base, found(base, tmp_path / "cache", str(folder)))
    assert np.abs(plain - merged).max() > 0.5
    np.testing.assert_allclose(adapted, merged, rtol=0, atol=2e-3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a model with an output matrix of its own, and its GGUF."""
    model = tiny_models.build("llama2", num_hidden_layers=2)
    return model, write_gguf(model, tmp_path_factory.mktemp("llama") / "base.gguf")


def test_strengths_and_several_adapters(llama: tuple[Any, Path], tmp_path: Path) -> None:
    """Ranks and scalings of layers, the output, the embedding, two adapters at once, and strength 0."""
    model, base = copy.deepcopy(llama[0]), llama[1]
    shapes = layers_of(model, "lm_head", "embed_tokens")
    first = write_adapter(tmp_path / "1", shapes, size=0.1)
    second = write_adapter(
        tmp_path / "2",
        {name: shape for name, shape in shapes.items() if "mlp" in name},
        size=0.1,
        seed=1,
        rank=6,
        alpha=3,
        use_rslora=True,
        rank_pattern={"up_proj": 2},
        alpha_pattern={"layers.1.mlp.down_proj": 9},
    )
    lora = f"{first}:0.5", f"{second}:-1.5"
    merge(model, first, 0.5 * 2)
    merge(model, second, -1.5, scalings={"up_proj": 3 / 2**0.5, "layers.1.mlp.down_proj": 9 / 6**0.5, "": 3 / 6**0.5})
    merged = logits(write_gguf(model, tmp_path / "merged.gguf"))
    np.testing.assert_allclose(logits(base, found(base, tmp_path, *lora)), merged, rtol=0, atol=2e-3)
    assert found(base, tmp_path, f"{first}:0") == ()


def test_experts_of_a_mixture(tmp_path: Path) -> None:
    """Adapters name experts one by one; those without a change stay as they are."""
    model = tiny_models.build("mixtral", num_hidden_layers=1)
    base = write_gguf(model, tmp_path / "base.gguf")
    experts = model.model.layers[0].mlp.experts
    width, inner = experts.gate_up_proj.shape[2], experts.gate_up_proj.shape[1] // 2
    block = "model.layers.0.block_sparse_moe"
    up, down, router = f"{block}.experts.1.w1", f"{block}.experts.3.w2", f"{block}.gate"
    shapes = {up: (inner, width), down: (width, inner), router: (4, width)}
    folder = write_adapter(tmp_path / "adapter", shapes, size=0.3, rank_pattern={"3.w2": 2})
    deltas = dict(deltas_of(folder))
    with torch.no_grad():
        experts.gate_up_proj[1, :inner] += 2 * deltas[up]
        experts.down_proj[3] += 4 * deltas[down]
        model.model.layers[0].mlp.gate.weight += 2 * deltas[router]
    merged = logits(write_gguf(model, tmp_path / "merged.gguf"))
    assert np.abs(logits(base) - merged).max() > 0.1
    np.testing.assert_allclose(logits(base, found(base, tmp_path, str(folder))), merged, rtol=0, atol=2e-3)


def test_an_adapter_is_written_once_and_again_when_it_or_its_file_changes(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    base, shapes = llama[1], layers_of(llama[0])
    folder = write_adapter(tmp_path / "adapter", shapes)
    (adapter,) = found(base, tmp_path, str(folder))
    before = adapter.path.stat().st_ino
    assert found(base, tmp_path, str(folder / "adapter_model.safetensors"))[0].path.stat().st_ino == before
    whole = adapter.path.read_bytes()
    adapter.path.write_bytes(whole[:-100])
    assert found(base, tmp_path, str(folder))[0].path.read_bytes() == whole
    write_adapter(folder, shapes, seed=1)
    assert found(base, tmp_path, str(folder))[0].path != adapter.path


def test_saved_states_belong_to_an_adapter_and_its_strength(llama: tuple[Any, Path], tmp_path: Path) -> None:
    base = llama[1]
    folders = [str(write_adapter(tmp_path / f"{seed}", layers_of(llama[0]), seed=seed)) for seed in (0, 1)]
    identities = []
    for lora in ((), folders[:1], folders[1:], folders, folders[::-1], [f"{folders[0]}:0.5"], [f"{folders[0]}:0"]):
        model = LlamaModel(base, adapters=found(base, tmp_path, *lora))
        identities.append(state_identity(model, [base], LlamaOptions(context=256)))
        model.close()
    assert len(set(identities)) == len(identities) - 1
    assert identities[0] == identities[-1]


def test_conversations_on_disk_are_of_one_adapter(tmp_path: Path) -> None:
    """A process goes on with its own conversation, and not with that of another adapter."""
    path = write_tiny(tmp_path / "m.gguf", quant="q8_0", width=128, ffn=256)
    shapes = {"model.layers.0.mlp.down_proj": (128, 256)}
    lora = [str(write_adapter(tmp_path / f"{seed}", shapes, seed=seed)) for seed in (0, 1)]
    prompt = [3 + i % 400 for i in range(700)]
    cached = []
    for names in ([], lora[:1], lora[1:], lora[:1], []):
        settings = Settings(lora=tuple(names), engine="llama", ctx=1024, prefix_cache_ram=0.01, threads=1)
        loaded = build(
            EngineJob(model=path, settings=settings, prefixes=tmp_path / "prefixes", drafts=True),
            places=Places({"EDGELM_CACHE_DIR": str(tmp_path)}),
        )
        cached.append(asyncio.run(answer_cached(loaded.engine, prompt)))
        loaded.engine.stop(lambda _: None)
        loaded.engine.close()
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 500


async def answer_cached(engine: Engine, prompt: list[int]) -> int:
    """Return how many tokens of a prompt were cached."""
    params = SamplingParams(temperature=0, max_tokens=4)
    events = [event async for event in engine.submit(prompt, params)]
    assert events[-1].stats
    return events[-1].stats.cached_tokens


def test_a_gguf_adapter_is_loaded_as_it_is(llama: tuple[Any, Path], tmp_path: Path) -> None:
    base = llama[1]
    folder = write_adapter(tmp_path / "adapter", layers_of(llama[0]), size=0.1)
    (written,) = found(base, tmp_path, str(folder))
    own = tmp_path / "own.gguf"
    own.write_bytes(written.path.read_bytes())
    (adapter,) = found(base, tmp_path, str(own))
    assert adapter.path == own
    np.testing.assert_array_equal(logits(base, [adapter]), logits(base, [written]))


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": {Q: (128, 32)}}, "as 128 x 32, and that of base.gguf is 128 x 64"),
        ({"shapes": {"model.layers.7.self_attn.q_proj": (128, 64)}}, "layers.7.self_attn.q_proj, which base.gguf does"),
        ({"shapes": {"transformer.h.0.attn": (128, 64)}}, "transformer.h.0.attn, which base.gguf does not have"),
        ({"use_dora": True, "tensors": {f"{PREFIX}{Q}.lora_magnitude_vector": np.ones(128, np.float32)}}, "DoRA"),
        ({"tensors": {f"{PREFIX}lm_head.weight": np.ones((96, 64), np.float32)}}, "replaces lm_head.weight"),
        ({"tensors": {f"{PREFIX}{Q}.lora_A.weight": np.full((4, 64), np.nan, np.float32)}}, "not finite"),
        ({"tensors": {f"{PREFIX}{Q}.lora_A.weight": np.zeros((5, 64), np.float32)}}, "not of rank 4"),
        ({"tensors": {f"{PREFIX}{Q}.lora_A.weight": np.zeros((4, 64, 1), np.float32)}}, "more than two dimensions"),
        ({"tensors": {f"{PREFIX}{Q}.lora_C.weight": np.zeros((4, 64), np.float32)}}, "of a kind that edgelm does not"),
        ({"peft_type": "IA3"}, "of the kind IA3"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4, which changes the model's own weights"),
        ({"alpha": "much"}, "lora_alpha is"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "which is no plain name"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_one_line(
    llama: tuple[Any, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", changes.pop("shapes", {Q: (128, 64)}), **changes)
    with pytest.raises(ModelError) as error:
        found(llama[1], tmp_path, str(folder))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("adapters/*"))


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("qwen3_5", "0.linear_attn.in_proj_qkv", "beside a GGUF; merge it into the model's folder"),
        ("qwen3_5", "0.linear_attn.out_proj", "beside a GGUF; merge it into the model's folder"),
        ("qwen3_5", "3.linear_attn.out_proj", "does not have; give an adapter that was trained on this model"),
        ("qwen3_5", "9.linear_attn.out_proj", "does not have; give an adapter that was trained on this model"),
        ("qwen3_5_moe", "0.linear_attn.in_proj_b", "beside a GGUF; merge it into the model's folder"),
        ("qwen3_5_moe", "0.mlp.shared_expert_gate", "beside a GGUF; merge it into the model's folder"),
    ],
)
def test_a_layer_that_only_merging_can_change_says_so(tmp_path: Path, name: str, layer: str, message: str) -> None:
    base = write_gguf(tiny_models.build(name), tmp_path / "base.gguf")
    folder = write_adapter(tmp_path / "adapter", {f"model.layers.{layer}": (64, 64)})
    with pytest.raises(ModelError) as error:
        found(base, tmp_path, str(folder))
    assert message in str(error.value)


def test_a_cut_file_is_one_line(llama: tuple[Any, Path], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", {Q: (128, 64)})
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="cut short"):
        found(llama[1], tmp_path, str(folder))
    file.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is missing"):
        found(llama[1], tmp_path, str(folder))
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled"):
        found(llama[1], tmp_path, str(folder))


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens"])
def test_a_matrix_that_is_embedding_and_output_at_once(tmp_path: Path, layer: str) -> None:
    """llama.cpp would abort, or compute something else than was trained."""
    base = write_gguf(tiny_models.build("tied", num_hidden_layers=1), tmp_path / "base.gguf")
    with pytest.raises(ModelError, match="the output matrix"):
        found(base, tmp_path, str(write_adapter(tmp_path / "adapter", {layer: (96, 64)})))


@pytest.mark.parametrize(
    ("arch", "tensors", "message"),
    [
        ("qwen2", {}, "is an adapter for qwen2, and base.gguf is llama"),
        ("llama", {"lora_a": (4, 32)}, "does not fit base.gguf"),
        ("llama", {"lora_b": (128, 5)}, "does not fit base.gguf"),
        ("llama", {"lora_b": None}, "has only lora_a"),
        ("llama", {"lora_c": (4, 4)}, "cannot apply the tensor blk.0.attn_q.weight.lora_c"),
        ("llama", {"lora_a": "nan"}, "not finite"),
    ],
)
def test_a_gguf_adapter_that_does_not_fit_is_one_line(
    llama: tuple[Any, Path], tmp_path: Path, arch: str, tensors: dict[str, Any], message: str
) -> None:
    path = tmp_path / "own.gguf"
    writer = GGUFWriter(path, arch)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for part, shape in ({"lora_a": (4, 64), "lora_b": (128, 4)} | tensors).items():
        if shape == "nan":
            writer.add_tensor(f"blk.0.attn_q.weight.{part}", np.full((4, 64), np.nan, np.float32))
        elif shape:
            writer.add_tensor(f"blk.0.attn_q.weight.{part}", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError) as error:
        found(llama[1], tmp_path, str(path))
    assert message in str(error.value)
