"""The summary of a model: what `list` shows, and the size of its KV cache."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from edgelm.base.errors import ModelError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import ModelSummary, model_facts, model_summary
from tests.checkpoints.gguf_bytes import RawGGUF
from tests.checkpoints.small_models import FAMILIES, LLAMA, MAMBA, WIDTH, key, model, tensor
from tests.real_data import data_file, vocabulary
from tests.tiny import write_tiny


def summary(tmp_path: Path, raw: RawGGUF) -> ModelSummary:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.to_bytes())
    with open_gguf(path) as gguf:
        return model_summary(gguf)


def test_a_model_with_all_its_keys(tmp_path: Path) -> None:
    raw = model("llama", [LLAMA] * 2, attention__key_length=8, attention__value_length=8, attention__sliding_window=9)
    raw = raw.with_keys(
        general__name=key(" A model "), general__file_type=key(15), tokenizer__chat_template=key("{{x}}")
    )
    result = summary(tmp_path, raw)
    assert result == ModelSummary(
        name="A model",
        architecture="llama",
        parameters=sum(math.prod(t.dims) for t in raw.tensors),
        quantization="Q4_K_M",
        nbytes=(tmp_path / "model.gguf").stat().st_size,
        context=128,
        layers=2,
        width=WIDTH,
        heads=4,
        kv_heads=[2, 2],
        key_lens=[8, 8],
        value_lens=[8, 8],
        sliding_window=9,
        vocab_size=24,
    )
    assert result.kv_bytes_per_token == 2 * 2 * (8 + 8) * 2  # layers, heads, key and value, two bytes


def test_what_attention_does_besides(tmp_path: Path) -> None:
    plain = summary(tmp_path, model("llama", [LLAMA] * 2))
    assert (plain.attention_softcap, plain.attention_sinks) == (0.0, False)
    capped = summary(tmp_path, model("llama", [LLAMA] * 2, attn_logit_softcapping=30.0))
    assert capped.attention_softcap == 30.0
    assert summary(tmp_path, model("gemma2", [LLAMA] * 2)).attention_softcap == 50.0
    sinks = model("gpt-oss", [LLAMA, LLAMA | {"attn_sinks": (4,)}])
    assert summary(tmp_path, sinks).attention_sinks


def test_missing_keys_have_defaults(tmp_path: Path) -> None:
    raw = model("llama", [LLAMA] * 2, context_length=None, attention__head_count_kv=None)
    result = summary(tmp_path, raw)
    assert (result.name, result.context) == ("model", 0)
    assert (result.kv_heads, result.key_lens, result.value_lens) == ([4, 4], [8, 8], [8, 8])


@pytest.mark.parametrize(
    ("family", "kv_heads", "kv_bytes"),
    [
        ("llama", [2, 2], 2 * 2 * 16 * 2),
        ("lfm2", [0, 2, 0], 2 * 16 * 2),
        ("mamba", [0, 0], 0),
        ("qwen3next", [0, 0, 0, 2], 2 * 16 * 2),
        ("gemma3n", [2, 2, 0, 0], 2 * 2 * 16 * 2),
        ("deepseek2", [1, 1], 2 * 24 * 2),  # the values are part of the keys
        ("deci", [2, 0, 0], 2 * 16 * 2),
        ("glm4moe without its last block", [2, 2, 0], 2 * 2 * 16 * 2),
        ("bert", [0, 0], 0),  # every token attends to all others, so nothing is kept
    ],
)
def test_only_layers_that_keep_keys_count(tmp_path: Path, family: str, kv_heads: list[int], kv_bytes: int) -> None:
    result = summary(tmp_path, FAMILIES[family])
    assert result.kv_heads == kv_heads
    assert result.kv_bytes_per_token == kv_bytes


def test_of_nemotron_only_layers_without_keys_and_feed_forward_are_recurrent(tmp_path: Path) -> None:
    """llama.cpp keeps a state for these: in other families recurrent layers have a feed-forward part, too."""
    keys = {"ssm__conv_kernel": 4, "ssm__inner_size": 64, "ssm__state_size": 16, "ssm__group_count": 1}
    sizes = []
    for feeds in ([0, 32, 0, 0], [0, 32, 32, 0]):
        raw = model(
            "nemotron_h_moe", [MAMBA] * 4, attention__head_count_kv=[0, 0, 0, 2], **keys, feed_forward_length=feeds
        )
        path = tmp_path / "model.gguf"
        path.write_bytes(raw.to_bytes())
        with open_gguf(path) as gguf:
            sizes.append(model_facts(gguf).state_bytes)
    state = 4 * (3 * (64 + 2 * 16) + 64 * 16)
    assert sizes == [2 * state, state]


def test_layers_with_a_window_may_have_heads_of_their_own_length(tmp_path: Path) -> None:
    raw = model(
        "gemma4",
        [LLAMA] * 3,
        attention__key_length=8,
        attention__value_length=8,
        attention__key_length_swa=4,
        attention__value_length_swa=4,
        attention__sliding_window_pattern=[True, True, False],
    )
    result = summary(tmp_path, raw)
    assert (result.key_lens, result.value_lens) == ([4, 4, 8], [4, 4, 8])
    assert result.kv_bytes_per_token == 2 * (8 + 8 + 16) * 2


@pytest.mark.parametrize(("file_type", "label"), [(0, "F32"), (1, "F16"), (7, "Q8_0"), (32, "BF16"), (38, "MXFP4_MOE")])
def test_the_quantization_is_that_of_the_file_type(tmp_path: Path, file_type: int, label: str) -> None:
    assert summary(tmp_path, FAMILIES["llama"].with_keys(general__file_type=key(file_type))).quantization == label


@pytest.mark.parametrize("file_type", [None, key(99999), key(1024), key("x")])
def test_without_a_file_type_most_bytes_decide(tmp_path: Path, file_type: object) -> None:
    raw = FAMILIES["llama"]
    raw = replace(
        raw,
        tensors=[
            tensor(str(t.name), t.dims, 8 if "ffn" in str(t.name) and len(t.dims) > 1 else 0) for t in raw.tensors
        ],
    )
    sizes: dict[int, int] = {0: 0, 8: 0}
    for t in raw.tensors:
        sizes[t.type] += len(t.data)
    expected = "Q8_0" if sizes[8] > sizes[0] else "F32"
    assert summary(tmp_path, raw.with_keys(general__file_type=file_type)).quantization == expected  # type: ignore[arg-type]


def test_impossible_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"llama\.block_count is 4,294,967,295"):
        summary(tmp_path, FAMILIES["llama"].with_keys(llama__block_count=key(2**32 - 1)))


def test_tiny_and_real_models(tmp_path: Path) -> None:
    with open_gguf(write_tiny(tmp_path / "tiny.gguf", quant="q8_0", layers=3)) as gguf:
        tiny = model_summary(gguf)
    assert (tiny.quantization, tiny.layers, tiny.vocab_size, tiny.context) == ("Q8_0", 3, 512, 2048)
    with open_gguf(data_file("models/stories260K-v3-f32.gguf")) as gguf:
        stories = model_summary(gguf)
    assert (stories.name, stories.parameters, stories.quantization) == ("stories260K", 260032, "F32")
    assert stories.kv_bytes_per_token == 5 * 4 * (8 + 8) * 2
    with open_gguf(vocabulary("qwen2")) as gguf:
        assert model_summary(gguf).vocab_size == 151936
