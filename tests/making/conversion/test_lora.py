"""LoRA adapters merged into weights: plain W + scaling * B @ A, whatever rows come at a time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgelm.base.errors import ModelError
from edgelm.checkpoints.adapter import open_adapter
from edgelm.making.conversion.lora import Merge, open_merge
from tests.adapters import PREFIX, write_adapter

Array = NDArray[np.float32]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
EMBEDDING = "model.embed_tokens"
SHAPES = {
    f"{UP}.weight": (24, 16),
    f"{DOWN}.weight": (16, 24),
    f"{EMBEDDING}.weight": (40, 16),
    "lm_head.weight": (40, 16),
}


def weights() -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def merged(
    folders: list[Path], *, rows: int = 5, scales: list[float] | None = None, prefix: str = ""
) -> dict[str, Array]:
    """Return all weights after merging, some rows at a time; `prefix` is that of the folder's names."""
    adapters = [open_adapter(folder) for folder in folders]
    merge = Merge(adapters, {prefix + name: shape for name, shape in SHAPES.items()}, scales)
    result = {
        name: np.concatenate(
            [merge(prefix + name, array[first : first + rows], first) for first in range(0, len(array), rows)]
        )
        for name, array in weights().items()
    }
    merge.require_used(prefix + name for name in SHAPES)
    for adapter in adapters:
        adapter.close()
    return result


def delta(folder: Path, module: str) -> Array:
    """Return B @ A of a layer, in the shape of its weight."""
    tensors = load_file(folder / "adapter_model.safetensors")
    if module == EMBEDDING:
        return (tensors[f"{PREFIX}{module}.lora_embedding_B"] @ tensors[f"{PREFIX}{module}.lora_embedding_A"]).T
    return tensors[f"{PREFIX}{module}.lora_B.weight"] @ tensors[f"{PREFIX}{module}.lora_A.weight"]


def shapes(*modules: str) -> dict[str, tuple[int, int]]:
    return {module: SHAPES[f"{module}.weight"] for module in modules}


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_b_times_a_is_added(tmp_path: Path, rows: int, prefix: str) -> None:
    folder = write_adapter(tmp_path / "a", shapes(UP, DOWN, EMBEDDING, "lm_head"), rank=4, alpha=6)
    result = merged([folder], rows=rows, prefix=prefix)
    for name, array in weights().items():
        expected = array + 1.5 * delta(folder, name.removesuffix(".weight"))
        np.testing.assert_allclose(result[name], expected, rtol=0, atol=1e-6)


def test_scalings_of_layers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"^model.layers.0.mlp.down_proj": 10}}
    folder = write_adapter(tmp_path / "a", shapes(UP, DOWN), rank=4, alpha=8, use_rslora=True, **options)
    result, before = merged([folder], scales=[0.5]), weights()
    for module, scaling in ((UP, 8 / 2**0.5), (DOWN, 10 / 2)):
        expected = before[f"{module}.weight"] + 0.5 * scaling * delta(folder, module)
        np.testing.assert_allclose(result[f"{module}.weight"], expected, rtol=0, atol=2e-6)


def test_several_adapters_in_order_and_dora(tmp_path: Path) -> None:
    """DoRA gives the rows of W + B @ A their lengths, so it matters which adapter is merged first."""
    lengths = np.arange(1, 25, dtype=np.float32)
    magnitude = {f"{PREFIX}{UP}.lora_magnitude_vector": lengths}
    first = write_adapter(tmp_path / "1", shapes(UP), use_dora=True, tensors=magnitude)
    second = write_adapter(tmp_path / "2", shapes(UP), seed=1)
    changed = weights()[f"{UP}.weight"] + 2 * delta(first, UP)
    changed *= (lengths / np.linalg.norm(changed, axis=1))[:, None]
    np.testing.assert_allclose(merged([first, second])[f"{UP}.weight"], changed + 2 * delta(second, UP), atol=1e-5)
    assert not np.allclose(merged([second, first])[f"{UP}.weight"], changed + 2 * delta(second, UP), atol=1e-2)


def test_tensors_that_were_trained_whole(tmp_path: Path) -> None:
    own = np.full((40, 16), 0.25, np.float32)
    folder = write_adapter(tmp_path / "a", shapes(UP), tensors={f"{PREFIX}lm_head.weight": own})
    np.testing.assert_array_equal(merged([folder])["lm_head.weight"], own)
    with pytest.raises(ModelError, match="has no scale"):
        merged([folder], scales=[0.5])


def test_numbers_of_16_bits(tmp_path: Path) -> None:
    """Adapters are trained in BF16, too, which numpy does not have."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    folder = write_adapter(tmp_path / "a", shapes(UP))
    file = folder / "adapter_model.safetensors"
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_torch(file).items()}
    save_torch(rounded, file)
    b, a = (rounded[f"{PREFIX}{UP}.lora_{part}.weight"].float().numpy() for part in "BA")
    np.testing.assert_allclose(merged([folder])[f"{UP}.weight"], weights()[f"{UP}.weight"] + 2 * b @ a, atol=1e-6)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"model.layers.1.mlp.up_proj": (24, 16)}, "model.layers.1.mlp.up_proj.weight, which this model does not have"),
        ({UP: (24, 8)}, "up_proj.weight as 24 x 8, and this model's is 24 x 16"),
    ],
)
def test_an_adapter_of_another_model_is_one_line_before_any_work(
    tmp_path: Path, modules: dict[str, tuple[int, int]], message: str
) -> None:
    with open_adapter(write_adapter(tmp_path / "a", modules)) as adapter, pytest.raises(ModelError) as error:
        Merge([adapter], SHAPES)
    assert message in str(error.value)


def test_an_embedding_that_is_the_output_too_is_refused(tmp_path: Path) -> None:
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    folder = write_adapter(tmp_path / "a", shapes(EMBEDDING))
    with open_adapter(folder) as adapter, pytest.raises(ModelError, match="the output matrix of this model, too"):
        Merge([adapter], tied)


def test_a_tensor_that_the_conversion_does_not_read_is_an_error(tmp_path: Path) -> None:
    with open_adapter(write_adapter(tmp_path / "a", shapes(UP, DOWN))) as adapter:
        merge = Merge([adapter], SHAPES)
        assert merge.names == {f"{UP}.weight", f"{DOWN}.weight"}
        merge.require_used(SHAPES)
        with pytest.raises(ModelError, match=r"changes model.layers.0.mlp.down_proj.weight, which has no place"):
            merge.require_used([f"{UP}.weight"])


def test_adapters_for_a_folder(tmp_path: Path) -> None:
    """The key stands for the content of the adapters and their strengths."""
    (tmp_path / "model").mkdir()
    save_file(weights(), tmp_path / "model" / "model.safetensors")
    first, second = (str(write_adapter(tmp_path / f"{seed}", shapes(UP), seed=seed)) for seed in (0, 1))
    keys = []
    for lora in ([first], [f"{first}:0.5"], [first, second], [second, first], [second], [f"{first}:1"]):
        with ExitStack() as resources:
            keys.append(open_merge(lora, tmp_path / "model", resources).key)
    assert len(set(keys)) == 5
    assert keys[0] == keys[-1]
    with ExitStack() as resources, pytest.raises(ModelError, match="only an adapter of PEFT's can be merged"):
        open_merge(["a.gguf"], tmp_path / "model", resources)


def test_biases_that_were_trained(tmp_path: Path) -> None:
    """A vector may come as a matrix of one column."""
    own = np.arange(8, dtype=np.float32)
    bias = "model.layers.0.self_attn.q_proj.bias"
    with open_adapter(write_adapter(tmp_path / "a", {}, tensors={f"{PREFIX}{bias}": own}, bias="all")) as adapter:
        merge = Merge([adapter], {bias: (8,)})
        np.testing.assert_array_equal(merge(bias, np.zeros(3, np.float32), 2), own[2:5])
        np.testing.assert_array_equal(merge(bias, np.zeros((3, 1), np.float32), 2), own[2:5, None])
