"""The summary of a folder of safetensors, from its config.json and its tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.errors import ModelError
from edgelm.checkpoints.folder import folder_summary
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.checkpoints.summary import ModelSummary
from tests.checkpoints.safetensors_bytes import CONFIG, SHAPES, entries, file_of, folder_files, write_folder

JINJA = b"{{ messages }}"


def summary(folder: Path, files: dict[str, bytes]) -> ModelSummary:
    with open_safetensors(write_folder(folder, files)) as model:
        return folder_summary(model)


def of_config(tmp_path: Path, **changes: Any) -> ModelSummary:
    """Summarize the small model with other values in its configuration; None omits one."""
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    return summary(tmp_path / "model", folder_files(config))


def refusal(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        of_config(tmp_path, **changes)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    return str(caught.value)


def test_a_small_model(tmp_path: Path) -> None:
    files = folder_files(chat_template__jinja=JINJA)
    assert summary(tmp_path / "Small-1B", files) == ModelSummary(
        name="Small-1B",
        architecture="llama",
        parameters=sum(map(math.prod, SHAPES.values())),
        quantization="BF16",
        nbytes=len(files["model.safetensors"]),
        context=128,
        layers=2,
        width=8,
        heads=4,
        kv_heads=[2, 2],
        key_lens=[2, 2],
        value_lens=[2, 2],
        sliding_window=0,
        vocab_size=24,
    )


def test_a_snapshot_of_the_hubs_cache_has_its_repositorys_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--Own--Small-1B" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    assert summary(folder, folder_files()).name == "Small-1B"


def test_old_names_of_the_same_numbers(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 4, "n_positions": 64, "vocab_size": 24}
    result = summary(tmp_path / "gpt2", folder_files(config))
    assert (result.layers, result.width, result.heads, result.context) == (2, 8, 4, 64)
    assert (result.kv_heads, result.key_lens, result.value_lens) == ([4, 4], [2, 2], [2, 2])


def test_the_decoder_of_a_model_that_reads_images(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "hidden_size": 77, "vision_config": {"num_hidden_layers": 9}}
    result = summary(tmp_path / "m", folder_files(config | {"text_config": CONFIG | {"model_type": "gemma3_text"}}))
    assert (result.architecture, result.width, result.layers) == ("gemma3", 8, 2)


@pytest.mark.parametrize(
    ("changes", "kv_heads", "key_len", "value_len"),
    [
        ({}, [2, 2], 2, 2),
        ({"num_key_value_heads": None}, [4, 4], 2, 2),
        ({"head_dim": None}, [2, 2], 2, 2),
        ({"head_dim": 16}, [2, 2], 16, 16),
        ({"multi_query": True}, [1, 1], 2, 2),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, [2, 2], 2, 2),
        ({"num_key_value_heads": [2, 1]}, [2, 1], 2, 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}, [1, 1], 576, 0),
        ({"layer_types": ["linear_attention", "full_attention"]}, [0, 2], 2, 2),
        ({"layer_types": ["conv", "full_attention"]}, [0, 2], 2, 2),
        ({"layer_types": ["sliding_attention", "nobody_knows"]}, [2, 2], 2, 2),
        ({"layers_block_type": ["attention", "mamba"]}, [2, 0], 2, 2),
        ({"full_attention_interval": 2}, [0, 2], 2, 2),
        ({"num_kv_shared_layers": 1}, [2, 0], 2, 2),
        ({"num_attention_heads": None, "num_key_value_heads": None, "model_type": "mamba"}, [0, 0], 2, 2),
        ({"v_head_dim": 3}, [2, 2], 2, 3),
    ],
)
def test_kv_heads_and_head_lengths(
    tmp_path: Path, changes: dict[str, Any], kv_heads: list[int], key_len: int, value_len: int
) -> None:
    result = of_config(tmp_path, **changes)
    assert (result.kv_heads, result.key_lens, result.value_lens) == (kv_heads, [key_len] * 2, [value_len] * 2)
    assert result.kv_bytes_per_token == 2 * sum(kv_heads) * (key_len + value_len)


def test_a_family_may_omit_its_defaults(tmp_path: Path) -> None:
    """As Gemma 3's own files do: the decoder takes the same values."""
    text = {"model_type": "gemma3_text", "hidden_size": 8, "num_hidden_layers": 2, "sliding_window": 1024}
    result = summary(tmp_path / "m", folder_files({"model_type": "gemma3", "text_config": text}))
    assert (result.heads, result.kv_heads, result.key_lens, result.context) == (8, [4, 4], [256, 256], 131_072)
    assert of_config(tmp_path, model_type="mistral", sliding_window=None).sliding_window == 4096


def test_layers_of_gemma_4_differ_in_their_heads(tmp_path: Path) -> None:
    """The last layer never has a window."""
    text = {"model_type": "gemma4_text", "hidden_size": 8, "num_hidden_layers": 2}
    whole = {"num_global_key_value_heads": 2, "attention_k_eq_v": True}
    own = {"per_layer_config": {"0": {"head_dim": 64, "num_key_value_heads": 1}}}
    for options, kv_heads, key_lens in (
        ({}, [4, 4], [256, 512]),
        (whole, [4, 2], [256, 512]),
        (own, [1, 4], [64, 256]),
    ):
        result = summary(tmp_path / "m", folder_files({"model_type": "gemma4", "text_config": text | options}))
        assert (result.kv_heads, result.key_lens, result.value_lens) == (kv_heads, key_lens, key_lens)


def test_the_sliding_window(tmp_path: Path) -> None:
    assert of_config(tmp_path, sliding_window=4096).sliding_window == 4096
    assert of_config(tmp_path, sliding_window=4096, use_sliding_window=False).sliding_window == 0


def packed(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, bytes]:
    """Return files in which tensors hold the first layer's projection; `__` stands for a dot."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != "model.layers.0.self_attn.q_proj.weight"}
    header, at = entries(shapes, "F16"), sum(map(math.prod, shapes.values())) * 2
    for name, (dtype, shape) in tensors.items():
        (entry,) = entries({"x": shape}, dtype).values()
        size = entry["data_offsets"][1]
        full = "model.layers.0.self_attn.q_proj." + name.replace("__", ".")
        header[full] = entry | {"data_offsets": [at, at + size]}
        at += size
    return {"model.safetensors": file_of(header)}


INT4 = {"num_bits": 4, "type": "int"}
SCALES = ("F16", (1, 8))


@pytest.mark.parametrize(
    ("how", "label", "tensors"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ 4-bit", {"qweight": ("I32", (8, 1)), "scales": SCALES}),
        (
            {"quant_method": "gptq", "bits": 4},
            "GPTQ 4-bit",
            {"qweight": ("I32", (1, 8)), "scales": SCALES, "qzeros": ("I32", (1, 1)), "g_idx": ("I32", (8,))},
        ),
        ({"quant_method": "gptq", "bits": 8}, "GPTQ 8-bit", {"qweight": ("I32", (2, 8)), "scales": SCALES}),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": INT4}}},
            "compressed-tensors 4-bit",
            {"weight_packed": ("I32", (8, 1)), "weight_scale": SCALES, "weight_shape": ("I64", (2,))},
        ),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "NVFP4",
            {"weight_packed": ("U8", (8, 4)), "weight_scale": ("F8_E4M3", (8, 1)), "weight_global_scale": ("F32", ())},
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "FP8",
            {"weight": ("F8_E4M3", (8, 8)), "weight_scale": ("F32", ())},
        ),
        ({"quant_method": "fp8"}, "FP8", {"weight": ("F8_E4M3", (8, 8)), "weight_scale_inv": ("F32", (1, 1))}),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "BNB 4-bit",
            {"weight": ("U8", (32, 1)), "weight__absmax": ("F32", (1,)), "weight__quant_map": ("F32", (16,))},
        ),
        ({"quant_method": "mxfp4"}, "MXFP4", {"x_blocks": ("U8", (8, 4)), "x_scales": ("U8", (8, 1))}),
        ({"quant_method": "new"}, "new", {"weight": ("F16", (8, 8))}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quantized_weights_are_counted_as_plain_ones(
    tmp_path: Path, how: dict[str, Any], label: str, tensors: dict[str, Any]
) -> None:
    result = summary(tmp_path / "m", folder_files(CONFIG | {"quantization_config": how}) | packed(**tensors))
    assert result.quantization == label
    assert result.parameters == sum(map(math.prod, SHAPES.values()))


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    quantization = json.dumps({"quantization": {"quant_algo": "NVFP4"}}).encode()
    assert summary(tmp_path / "m", folder_files(hf_quant_config__json=quantization)).quantization == "NVFP4"


@pytest.mark.parametrize(("dtype", "label"), [("F16", "F16"), ("F32", "F32"), ("F8_E4M3", "FP8"), ("BF16", "BF16")])
def test_an_unquantized_model_is_labelled_by_its_largest_type(tmp_path: Path, dtype: str, label: str) -> None:
    files = folder_files() | {"model.safetensors": file_of(entries(SHAPES, dtype))}
    assert summary(tmp_path / "m", files).quantization == label


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, but must be 1 to 512"),
        ({"num_hidden_layers": 513}, "num_hidden_layers is 513, but must be 1 to 512"),
        ({"num_hidden_layers": 10**4000}, "num_hidden_layers is a number of many digits"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is a string"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 3}, "the model has 3 layers, and layer 2 has no tensors"),
        ({"hidden_size": 2**21}, "hidden_size is 2,097,152"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads has 1 entries for 2 layers"),
        ({"num_key_value_heads": [2, "2"]}, "num_key_value_heads contains a string"),
        ({"head_dim": 2**17}, "head_dim is 131,072"),
        ({"max_position_embeddings": 2**28}, "max_position_embeddings is 268,435,456"),
        ({"vocab_size": 2**23}, "vocab_size is 8,388,608"),
        ({"vocab_size": 25}, "vocab_size is 25, and tensor model.embed_tokens.weight has 24 rows"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, but must be 0 to 1"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon is -1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is a string"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, but must be 1 to 1e+15"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 10**400}, "rope_theta is a number of many digits"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"full_attention_interval": 99}, "full_attention_interval is 99"),
        ({"kv_lora_rank": "x"}, "kv_lora_rank is a string"),
        ({"model_type": None, "architectures": None}, "does not say which architecture"),
        ({"model_type": "\x1b", "architectures": []}, "does not say which architecture"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_impossible_values_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    line = refusal(tmp_path, **changes)
    assert line.startswith("config.json")
    assert says in line


def test_a_folder_without_its_configuration(tmp_path: Path) -> None:
    files = folder_files()
    del files["config.json"]
    with pytest.raises(ModelError, match=r"config\.json is missing beside model\.safetensors; download all files"):
        summary(tmp_path / "m", files)


def test_the_first_architecture_names_a_model_without_type(tmp_path: Path) -> None:
    assert of_config(tmp_path, model_type=None).architecture == "LlamaForCausalLM"
