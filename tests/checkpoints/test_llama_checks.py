"""Files that would abort llama.cpp or give NaN are refused before it opens them; valid models of many families are not.

Each refused case was seen to do it: llama-cpp-python 0.3.36, in a child of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGUFValueType as V

from edgelm.base.errors import ModelError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.llama_checks import check_for_llama
from tests.checkpoints.gguf_bytes import RawGGUF, RawTensor
from tests.checkpoints.small_models import DENSE, FAMILIES, FFN, LLAMA, NORM, VOCAB, Dims, key, model, tensor
from tests.real_data import data_files
from tests.tiny import write_tiny

QWEN = model("qwen3", [LLAMA] * 2, rope__dimension_count=8)


def check(tmp_path: Path, raw: RawGGUF) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.to_bytes())
    with open_gguf(path) as gguf:
        check_for_llama(gguf)


def refusal(tmp_path: Path, raw: RawGGUF) -> str:
    with pytest.raises(ModelError) as caught:
        check(tmp_path, raw)
    line = str(caught.value)
    assert line.startswith("model.gguf ")
    assert line.isprintable()
    return line


@pytest.mark.parametrize("name", FAMILIES)
def test_a_valid_model_is_not_refused(tmp_path: Path, name: str) -> None:
    check(tmp_path, FAMILIES[name])


@pytest.mark.parametrize("options", [{}, {"arch": "qwen3"}, {"quant": "q4_0"}, {"quant": "f16", "kv_heads": 4}])
def test_a_tiny_model_is_not_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with open_gguf(write_tiny(tmp_path / "model.gguf", **options)) as gguf:
        check_for_llama(gguf)


def test_real_models_are_not_refused() -> None:
    for path in data_files("models", ".gguf"):
        if "unsupported" not in path.name:
            with open_gguf(path) as gguf:
                check_for_llama(gguf)


def test_a_vocabulary_is_not_a_model(tmp_path: Path) -> None:
    with open_gguf(write_tiny(tmp_path / "tiny.gguf", vocab_only=True)) as gguf:
        with pytest.raises(ModelError) as caught:
            check_for_llama(gguf)
        assert str(caught.value) == "tiny.gguf holds only a vocabulary, no weights; name the file of a whole model"
    for path in data_files("vocab", ".gguf"):
        with open_gguf(path) as gguf, pytest.raises(ModelError, match="holds only a vocabulary"):
            check_for_llama(gguf)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"block_count": 0}, "qwen3.block_count is 0, but must be 1 to 512"),
        ({"block_count": 513}, "qwen3.block_count is 513"),
        ({"block_count": None}, "qwen3.block_count is missing"),
        ({"block_count": "2"}, "qwen3.block_count is a string"),
        ({"block_count": True}, "qwen3.block_count is true"),
        ({"block_count": 3}, "qwen3.block_count is 3, and block 2 has no tensors"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "qwen3.attention.layer_norm_rms_epsilon is nan"),
        ({"attention.layer_norm_rms_epsilon": -1e-5}, "qwen3.attention.layer_norm_rms_epsilon is -1e-05"),
        ({"attention.layer_norm_epsilon": 1e9}, "layer_norm_epsilon is 1e+09, but must be 0 to 1"),
        ({"rope.freq_base": 0.0}, "qwen3.rope.freq_base is 0, but must be 1 or more"),
        ({"rope.freq_base": 4.6e-44}, "qwen3.rope.freq_base is 4.62428e-44"),
        ({"rope.freq_base": math.nan}, "qwen3.rope.freq_base is nan"),
        ({"rope.scaling.factor": math.inf}, "qwen3.rope.scaling.factor is inf"),
        ({"rope.scaling.type": "xxx"}, "qwen3.rope.scaling.type must be one of none, linear"),
        ({"rope.scaling.type": 3}, "qwen3.rope.scaling.type must be one of none, linear"),
        ({"rope.dimension_count": 6}, "6 numbers of a head are rotated, and it has 8"),
        ({"rope.dimension_count": 7}, "7 numbers of a head are rotated, which must be even"),
        ({"rope.dimension_count": 10}, "qwen3.rope.dimension_count is 10, but must be 0 to 8"),
        ({"context_length": 0}, "qwen3.context_length is 0"),
        ({"context_length": 2**31}, "qwen3.context_length is 2,147,483,648"),
        ({"vocab_size": 0}, "qwen3.vocab_size is 0"),
        ({"embedding_length": 0}, "qwen3.embedding_length is 0"),
        (
            {"attention.head_count": 0, "attention.key_length": 8},
            "tensor blk.0.attn_q.weight is 32 x 32, but must have 0 rows",
        ),
        ({"attention.head_count": 3}, "3 attention heads cannot share 2 key-value heads"),
        ({"attention.head_count_kv": [2, 0]}, "tensor blk.1.attn_k.weight is 32 x 16, but must have 0 rows"),
        ({"attention.head_count_kv": [2, 1]}, "tensor blk.1.attn_k.weight is 32 x 16, but must have 8 rows"),
        ({"attention.head_count_kv": [2]}, "qwen3.attention.head_count_kv has 1 entries for 2 layers"),
        ({"attention.head_count_kv": [2.0, 2.0]}, "qwen3.attention.head_count_kv contains 2.0"),
        ({"attention.key_length": 0}, "qwen3.attention.key_length is 0"),
        ({"attention.value_length": 16}, "tensor blk.0.attn_v.weight is 32 x 16, but must have 32 rows"),
        ({"expert_count": 4}, "0 of 4 experts are used"),
        ({"expert_used_count": 4}, "4 of 0 experts are used"),
        ({"expert_count": 4, "expert_used_count": 5}, "5 of 4 experts are used"),
        ({"expert_count": 1025, "expert_used_count": 5}, "qwen3.expert_count is 1,025"),
        ({"expert_group_count": 1}, "it has groups of experts and no experts"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_group_count": 3}, "0 of 3 groups of 8 experts are used"),
        ({"nextn_predict_layers": 3}, "qwen3.nextn_predict_layers is 3, but must be 0 to 2"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_metadata_that_kills_llama_cpp_is_refused(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    changes = {f"qwen3.{name}": None if value is None else key(value) for name, value in keys.items()}
    assert says in refusal(tmp_path, QWEN.with_keys(**changes))


@pytest.mark.parametrize("architecture", ["mistral3", "granite", "smollm3"])
def test_a_head_of_which_llama_cpp_asserts_that_all_is_rotated(tmp_path: Path, architecture: str) -> None:
    check(tmp_path, model(architecture, [LLAMA] * 2, rope__dimension_count=8))
    part = model(architecture, [LLAMA] * 2, rope__dimension_count=6)
    assert "6 numbers of a head are rotated, and it has 8" in refusal(tmp_path, part)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (None, "holds no vocabulary"),
        (key("abc"), "its vocabulary is not a list of strings"),
        (key([1, 2, 3]), "its vocabulary is not a list of strings"),
        ((V.ARRAY, (V.STRING, [])), "its vocabulary has 0 tokens"),
        (key(["a", "b"]), "its vocabulary has 2 tokens, its embedding 24"),
        (key([f"token {i % 23}" for i in range(VOCAB)]), "its vocabulary has the token b'token 0' twice"),
        (key([f"nul\0{i}" for i in range(VOCAB)]), "its vocabulary has the token b'nul' twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_vocabulary_that_kills_llama_cpp_is_refused(tmp_path: Path, tokens: Any, says: str) -> None:
    assert says in refusal(tmp_path, QWEN.with_keys(tokenizer__ggml__tokens=tokens))


def test_empty_tokens_are_not_repetitions(tmp_path: Path) -> None:
    check(tmp_path, QWEN.with_keys(tokenizer__ggml__tokens=key([""] * VOCAB)))


def test_byte_tokens_in_a_vocabulary_of_words_are_refused(tmp_path: Path) -> None:
    kinds = (V.ARRAY, (V.INT32, [6] * VOCAB))
    check(tmp_path, QWEN.with_keys(tokenizer__ggml__token_type=kinds))
    bert = QWEN.with_keys(tokenizer__ggml__token_type=kinds, tokenizer__ggml__model=key("bert"))
    assert "is of the kind bert and has byte tokens" in refusal(tmp_path, bert)


def with_type(raw: RawGGUF, name: str, kind: int) -> RawGGUF:
    return replace(raw, tensors=[tensor(t.name, t.dims, kind) if t.name == name else t for t in raw.tensors])


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("output_norm.weight", 1, "tensor output_norm.weight is F16, but llama.cpp needs F32"),
        ("blk.1.attn_norm.weight", 30, "tensor blk.1.attn_norm.weight is BF16, but llama.cpp needs F32"),
        ("blk.1.ffn_norm.weight", 8, "tensor blk.1.ffn_norm.weight is Q8_0, but llama.cpp needs F32"),
        ("token_embd.weight", 26, "tensor token_embd.weight is I32, which is not a type for weights"),
        ("blk.0.ffn_up.weight", 28, "tensor blk.0.ffn_up.weight is F64, which is not a type for weights"),
        ("blk.0.attn_q.weight", 24, "tensor blk.0.attn_q.weight is I8, which is not a type for weights"),
        ("blk.0.ffn_down.weight", 9, "tensor blk.0.ffn_down.weight is Q8_1, which is not a type for weights"),
    ],
)
def test_a_tensor_of_a_type_that_crashes_is_refused(tmp_path: Path, name: str, kind: int, says: str) -> None:
    assert says in refusal(tmp_path, with_type(QWEN, name, kind))


@pytest.mark.parametrize("kind", [0, 1, 2, 8, 20, 30, 42])
def test_a_matrix_may_be_quantized(tmp_path: Path, kind: int) -> None:
    check(tmp_path, with_type(QWEN, "blk.0.ffn_down.weight" if FFN % 64 == 0 else "", kind))


def test_data_that_is_not_aligned_for_llama_cpp_is_refused(tmp_path: Path) -> None:
    line = set()
    for i in range(32):  # the header's length decides where the data starts
        raw = replace(QWEN.with_keys(general__alignment=key(8), pad=key("x" * i)), alignment=8)
        try:
            check(tmp_path, raw)
            line.add("fine")
        except ModelError as error:
            line.add(error.message.split(":")[1])
    assert line == {"fine", " tensor token_embd.weight is not aligned to 32 bytes"}


@pytest.mark.parametrize(
    "name",
    "token_embd output_norm blk.1.attn_norm blk.0.attn_q blk.1.attn_k blk.0.attn_v blk.1.attn_output blk.0.ffn_norm "
    "blk.1.ffn_up blk.0.ffn_down".split(),
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    raw = replace(QWEN, tensors=[t for t in QWEN.tensors if t.name != f"{name}.weight"])
    assert f"tensor {name}.weight is missing" in refusal(tmp_path, raw)


def test_a_missing_block_is_named_in_any_known_family(tmp_path: Path) -> None:
    blocks: list[dict[str, Dims]] = [NORM | DENSE, {}, NORM | DENSE]
    assert "falcon.block_count is 3, and block 1 has no tensors" in refusal(tmp_path, model("falcon", blocks))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"general.type": "adapter"}, "model.gguf is an adapter (LoRA), not a whole model"),
        ({"general.type": "mmproj"}, "model.gguf is the part of a model that reads images or sound"),
        ({"general.architecture": "clip"}, "model.gguf is the part of a model that reads images or sound"),
        ({"general.architecture": 5}, "model.gguf does not say which architecture it has"),
        ({"general.architecture": "a b\n"}, "model.gguf does not say which architecture it has"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_files_that_are_not_models_are_described(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, QWEN.with_keys(**{name: key(value) for name, value in keys.items()}))


def test_a_bias_of_an_expert_may_have_any_type(tmp_path: Path) -> None:
    raw = replace(QWEN, tensors=[*QWEN.tensors, tensor("blk.0.ffn_up_exps.bias", (32, 4), 1)])
    check(tmp_path, raw)
    raw = replace(QWEN, tensors=[*QWEN.tensors, RawTensor("blk.0.attn_q.bias", (32,), 1, bytes(64))])
    assert "tensor blk.0.attn_q.bias is F16, but llama.cpp needs F32" in refusal(tmp_path, raw)
