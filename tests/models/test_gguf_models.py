"""GGUF models of every family and quantization compute the same as transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

import edgelm.models
from edgelm.backends.llama.api import start_backend
from edgelm.backends.llama.binding import L
from edgelm.base.errors import ModelError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.models.config import read_config
from edgelm.models.decoder import Decoder, FeedForward
from edgelm.models.loading.decoder import load
from edgelm.models.loading.sources import GGUFSource
from tests.models.tiny_gguf import quantize_model, write_gguf
from tests.models.tiny_models import (
    LLAMA3,
    LONGROPE,
    YARN,
    Session,
    build,
    expected,
    mean_relative_error,
    relative_error,
    text,
)
from tests.real_data import data_file, with_model

LENGTH = 41
LLAMA_CONTEXT = 256  # the shortest of llama.cpp
F32 = 1e-4
GELU = 4e-3  # llama.cpp's GELU is a table of float16
# values without a GGUF key are those that llama.cpp assumes
MODELS: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3": {"rope_parameters": LLAMA3, "mlp_bias": False},
    "tied": {},
    "ministral3": {},
    "granite": {},
    "mixtral": {},
    "smollm3": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"rope_parameters": {**YARN, "beta_fast": 32.0, "truncate": True}},
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gemma4": {},
    "gemma4_moe": {},
    "qwen3_5": {"linear_key_head_dim": 32},
    "qwen3_5_moe": {"linear_key_head_dim": 32},
    "phi3": {
        "sliding_window": None,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": LLAMA_CONTEXT,
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": LLAMA_CONTEXT},
    },
    "gpt_oss": {"rope_parameters": {**YARN, "beta_fast": 32.0, "truncate": True}},
}


def decoder_of(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    with open_gguf(path) as gguf:
        return load(read_config(gguf.metadata), GGUFSource(gguf), "cpu", dtype, "reference", **options)


@cache
def built(name: str) -> Any:
    return build(name, **MODELS[name])


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gguf")

    @cache
    def file(name: str) -> Path:
        return write_gguf(built(name), folder / f"{name}.gguf")

    return file


@contextmanager
def llama_model(path: Path) -> Iterator[Any]:
    start_backend()
    params = L.llama_model_default_params()
    params.use_extra_bufts = False  # plain float32, not repacked
    model = L.llama_model_load_from_file(str(path).encode(), params)
    assert model
    try:
        yield model
    finally:
        L.llama_model_free(model)


def llama_logits(path: Path, ids: list[int], context: int = LLAMA_CONTEXT) -> Tensor:
    """Return llama.cpp's logits of all rows, with a cache of float32."""
    with llama_model(path) as model:
        params = L.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_outputs_max = context
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 0
        params.type_k = params.type_v = 0
        params.swa_full = True
        state = L.llama_init_from_model(model, params)
        assert state
        batch = L.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert L.llama_decode(state, batch) == 0
        vocab_size = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
        logits = np.ctypeslib.as_array(L.llama_get_logits(state), (len(ids), vocab_size)).copy()
        L.llama_batch_free(batch)
        L.llama_free(state)
    return torch.from_numpy(logits)


@pytest.mark.parametrize("name", MODELS)
def test_family(name: str, files: Any) -> None:
    ids = text(LENGTH, 1)
    session = Session(decoder_of(files(name), context=LLAMA_CONTEXT))
    got = torch.cat([session.run({0: ids[:30]})[0], session.run({0: ids[30:]})[0]])
    assert relative_error(got, expected(built(name), ids)) < F32
    assert relative_error(got, llama_logits(files(name), ids)) < (GELU if name.startswith("gemma") else F32)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_greedy_text(name: str, files: Any) -> None:
    """64 tokens, one after the other, are those that llama.cpp finds the most likely."""
    session, ids = Session(decoder_of(files(name), context=LLAMA_CONTEXT)), text(8, 12)
    row = session.run({0: ids})[0][-1]
    for _ in range(64):
        ids.append(int(row.argmax()))
        row = session.run({0: ids[-1:]})[0][-1]
    assert ids[8:] == llama_logits(files(name), ids)[7:-1].argmax(-1).tolist()


def test_longrope_of_a_long_context(files: Any) -> None:
    ids = text(LENGTH, 5)  # the factors depend on the context, not on the prompt
    got = Session(decoder_of(files("phi3"), context=2 * LLAMA_CONTEXT)).run({0: ids})[0]
    assert relative_error(got, llama_logits(files("phi3"), ids, 2 * LLAMA_CONTEXT)) < F32
    assert relative_error(got, expected(built("phi3"), ids)) > 0.01


def mixed(name: str) -> GGMLQuantizationType:
    """Several formats in one layer, as in files of llama.cpp, so that q, k, v and gate, up cannot all be fused."""
    for part, kind in (("attn_v", "Q8_0"), ("ffn_up", "Q5_0"), ("ffn_down", "F16"), ("output", "BF16")):
        if part in name:
            return GGMLQuantizationType[kind]
    return GGMLQuantizationType.Q4_0


KINDS = {
    **{kind: (lambda _, kind=kind: GGMLQuantizationType[kind]) for kind in ("F16", "Q8_0", "Q4_0", "Q4_1", "MXFP4")},
    "mixed": mixed,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama3", kind) for kind in KINDS), *((name, "mixed") for name in ("phi3", "qwen3_moe")), ("gpt_oss", "MXFP4")],
)
def test_quantized(name: str, kind: str, tmp_path: Path) -> None:
    ids = text(20, 2)
    path = write_gguf(built(name), tmp_path / "model.gguf", KINDS[kind])
    got = Session(decoder_of(path, context=LLAMA_CONTEXT)).run({0: ids})[0]
    assert relative_error(got, expected(quantize_model(built(name), KINDS[kind]), ids)) < F32


def test_fused_where_formats_are_equal(tmp_path: Path) -> None:
    same = decoder_of(write_gguf(built("llama2"), tmp_path / "same.gguf", KINDS["Q4_0"])).weights.layers[0]
    other = decoder_of(write_gguf(built("llama2"), tmp_path / "mixed.gguf", mixed)).weights.layers[0]
    assert [linear.sizes for linear in same.attention.qkv] == [(128, 64, 64)]
    assert [linear.sizes for linear in other.attention.qkv] == [(128, 64), (64,)]
    assert isinstance(same.feed, FeedForward)
    assert isinstance(other.feed, FeedForward)
    assert (len(same.feed.gate_up), len(other.feed.gate_up)) == (1, 2)


def test_only_the_output_matrix_is_there(tmp_path: Path) -> None:
    ids = text(20, 3)
    path = write_gguf(built("tied"), tmp_path / "model.gguf", renamed={"token_embd.weight": "output.weight"})
    decoder = decoder_of(path)
    assert relative_error(Session(decoder).run({0: ids})[0], expected(built("tied"), ids)) < F32
    assert decoder.weights.embedding is decoder.weights.output.weight


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        built("qwen3"), tmp_path / "model.gguf", renamed={"blk.1.ffn_up.weight": "blk.1.ffn_gate_shexp.weight"}
    )
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.ffn_up\.weight"):
        decoder_of(path)
    path = write_gguf(built("llama3"), tmp_path / "other.gguf", renamed={"blk.1.attn_q.bias": "blk.1.attn_qq.bias"})
    with pytest.raises(ModelError, match=r"Llama with a tensor blk\.1\.attn_qq\.bias is not supported"):
        decoder_of(path)


def test_weights_have_the_dtype_of_activations_and_norms_are_float32(tmp_path: Path) -> None:
    decoder = decoder_of(write_gguf(built("llama2"), tmp_path / "model.gguf"), torch.bfloat16)
    assert decoder.weights.embedding.data.dtype == torch.bfloat16
    assert decoder.weights.norm.weight.dtype == torch.float32


# for the last two, llama.cpp rounds activations to 8 bits: 254 steps up to a block's largest, in about 30 products
REAL = {
    "BabyLlama-tok361-f32.gguf": F32,
    "stories260K-v3-f32.gguf": F32,
    "BabyLlama-tok361-Q8_0.gguf": 0.03,
    "BabyLlama-tok361-Q4_0.gguf": 0.03,
}


@pytest.mark.parametrize("name", with_model(REAL))
def test_trained_models_as_llama_cpp(name: str) -> None:
    compare_with_llama(data_file(f"models/{name}"), REAL[name])


def test_the_starter_as_llama_cpp() -> None:
    compare_with_llama(Path(edgelm.models.__file__).parent / "starter" / "starter.gguf", 0.03)


def compare_with_llama(path: Path, tolerance: float) -> None:
    ids = [1, *text(LENGTH, 4)]
    got = Session(decoder_of(path, context=LLAMA_CONTEXT)).run({0: ids})[0]
    assert mean_relative_error(got, llama_logits(path, ids)) < tolerance
