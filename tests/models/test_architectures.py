"""Every family equals transformers on the same safetensors: whole prompts, chunks, single steps, and batches."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import edgelm.kernels.matmul
import edgelm.models.decoder
from edgelm.base.errors import ModelError
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.models.config import read_config
from edgelm.models.decoder import Decoder
from edgelm.models.loading.decoder import load
from edgelm.models.loading.sources import FolderSource
from tests.models.tiny_models import (
    MODELS,
    Session,
    build,
    built,
    expected,
    mean_relative_error,
    relative_error,
    stacked_experts,
    text,
    write,
)

OMITTED = "omitted"  # stands for a key that is not in the file
LENGTH = 41  # more than one block and more than three windows
F32, F16, BF16 = 1e-4, 2e-3, 2e-2
# States carry each rounding on, and with experts some tokens go elsewhere: transformers in bfloat16 is 0.062
# (gemma4_moe) and 0.102 (qwen3_5_moe) away from itself.
LIMITS = {"gemma4_moe": 6e-2, "qwen3_5": 5e-2, "qwen3_5_moe": 0.1}  # of bfloat16, in place of BF16


def decoder_of(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    """Load a folder like the engine."""
    settings = json.loads((folder / "config.json").read_text())
    with open_safetensors(folder) as model:
        return load(
            read_config(settings),
            FolderSource(model, settings),
            "cpu",
            dtype,
            "reference",
            **{"context": LENGTH, **options},
        )


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def folder(name: str) -> Path:
        return write(built(name), tmp_path_factory.mktemp(name))

    return folder


@pytest.fixture(scope="session")
def decoders(folders: Any) -> Any:
    return cache(lambda name: decoder_of(folders(name)))


@pytest.mark.parametrize("name", MODELS)
def test_prompt(name: str, decoders: Any) -> None:
    session = Session(decoders(name))
    ids = text(LENGTH, 1)
    assert relative_error(session.run({0: ids})[0], expected(built(name), ids)) < F32


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_single_steps(name: str, decoders: Any) -> None:
    session = Session(decoders(name))
    ids = text(LENGTH, 2)
    parts, at = [], 0
    for size in (19, 3, 17, 1, 1):
        parts.append(session.run({0: ids[at : at + size]})[0])
        at += size
    assert at == LENGTH
    assert relative_error(torch.cat(parts), expected(built(name), ids)) < F32


@pytest.mark.parametrize("name", MODELS)
def test_two_sequences_in_a_batch(name: str, decoders: Any) -> None:
    session = Session(decoders(name))
    texts = {3: text(LENGTH, 3), 5: text(14, 4)}
    first = session.run({5: texts[5][:9], 3: texts[3][:38]})
    second = session.run({3: texts[3][38:], 5: texts[5][9:]})
    for sequence, ids in texts.items():
        got = torch.cat([first[sequence], second[sequence]])
        assert relative_error(got, expected(built(name), ids)) < F32


@pytest.mark.parametrize("name", ["ministral3", "granite", "gemma4", "gemma4_moe", "qwen3_5", "qwen3_5_moe"])
def test_greedy_text(name: str, folders: Any) -> None:
    """64 tokens, one after the other, are those that transformers finds the most likely."""
    session, ids = Session(decoder_of(folders(name), context=96)), text(8, 12)
    row = session.run({0: ids})[0][-1]
    for _ in range(64):
        ids.append(int(row.argmax()))
        row = session.run({0: ids[-1:]})[0][-1]
    assert ids[8:] == expected(built(name), ids)[7:-1].argmax(-1).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgelm.kernels.matmul, "ROWS", 16)  # more rows are a prompt, where norms are ops of their own
    session = Session(decoder_of(folders(name), torch.bfloat16), cache_dtype=torch.bfloat16)
    ids = text(LENGTH, 5)
    got = torch.cat([session.run({0: ids[:30]})[0], session.run({0: ids[30:]})[0]])
    assert mean_relative_error(got, expected(built(name), ids)) < LIMITS.get(name, BF16)


@pytest.mark.parametrize("name", ["llama3", "phi3", "qwen3_moe", "gpt_oss", "gemma4_moe", "qwen3_5_moe"])
def test_a_feed_forward_size_that_is_no_multiple_of_a_tile(name: str, tmp_path: Path) -> None:
    """Gate and up cannot alternate by tiles then: they stay two matrices."""
    experts = {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 88} if name.endswith("_moe") else {}
    model = build(name, intermediate_size=88, **experts)
    ids = text(20, 9)
    got = Session(decoder_of(write(model, tmp_path))).run({0: ids})[0]
    assert relative_error(got, expected(model, ids)) < F32


@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen3_moe", "gpt_oss", "qwen3_5", "qwen3_5_moe"])
def test_padding_changes_nothing(name: str, decoders: Any) -> None:
    decoder = decoders(name)
    plain, padded = Session(decoder), Session(decoder)
    chunks = {0: text(9, 1), 1: text(2, 2)}
    want, got = plain.run(chunks), padded.run(chunks, padding=3)
    more = {0: [7], 1: [8]}
    want_more, got_more = plain.run(more), padded.run(more, padding=2)
    for sequence in chunks:
        assert relative_error(got[sequence], want[sequence]) < F32
        assert relative_error(got_more[sequence], want_more[sequence]) < F32


@pytest.mark.parametrize(
    ("name", "per_layer", "ends"),
    [
        ("llama3", 6, 4),
        ("qwen3", 6, 4),
        ("gemma3", 8, 3),
        ("ministral3", 6, 4),
        ("granite", 6, 4),
        ("gemma4", 8, 4),
        ("gemma4_moe", 12, 4),
    ],
)
def test_ops_of_a_step(name: str, per_layer: int, ends: int, decoders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op is one kernel if a step has few rows; with CUDA graphs, a small step costs their number."""
    decoder = decoders(name)
    session = Session(decoder)
    session.run({0: text(5, 1)})
    called: list[str] = []
    ops = (
        "embedding",
        "matmul",
        "matmul_and_norm",
        "write_kv",
        "attention",
        "rms_norm",
        "add_rms_norm",
        "gated",
        "softcap",
    )
    for op in ops:
        plain = getattr(edgelm.models.decoder, op)

        def counted(*args: Any, plain: Any = plain, op: str = op, **options: Any) -> Any:
            called.append(op)
            return plain(*args, **options)

        monkeypatch.setattr(edgelm.models.decoder, op, counted)
    session.run({0: [5]})
    assert len(called) == per_layer * len(decoder.config.layers) + ends, called


# Attention writes nothing to rows of padding, so later matmuls read whatever was there: the interpreter warns.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_triton_kernels(tmp_path: Path) -> None:
    """The same decoder on interpreted kernels: decoding, with padding rows and sequences."""
    model = build("qwen3", head_dim=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    settings = json.loads((write(model, tmp_path) / "config.json").read_text())
    logits = {}
    for implementation in ("reference", "triton"):
        with open_safetensors(tmp_path) as files:
            source = FolderSource(files, settings)
            decoder = load(read_config(settings), source, "cpu", torch.float16, implementation, context=LENGTH)
        session = Session(decoder, cache_dtype=torch.float16)
        logits[implementation] = torch.cat([*session.run({0: [5, 6], 1: [7]}, padding=1).values()])
    assert mean_relative_error(logits["triton"], logits["reference"]) < F16


def test_longrope_of_a_long_context(folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids = text(150, 6)  # with a context of more than 128 positions, the long factors are used
    caplog.set_level("INFO")
    decoder_of(folders("phi3"), context=128)
    assert "with a context of 128, RoPE has the short factors; the short ones hold up to 128" in caplog.text
    session = Session(decoder_of(folders("phi3"), context=256))
    assert "with a context of 256, RoPE has the long factors" in caplog.text
    assert relative_error(session.run({0: ids})[0], expected(built("phi3"), ids)) < F32


def test_old_and_new_names_of_the_same_settings(folders: Any) -> None:
    """Files of transformers before 5 have rope_theta and rope_scaling, and no layer_types."""
    settings = json.loads((folders("gemma3") / "config.json").read_text())
    old = {key: value for key, value in settings.items() if key not in ("rope_parameters", "layer_types")}
    old |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 6,
    }
    assert read_config(old) == read_config(settings)


@pytest.mark.parametrize(
    ("name", "outer", "prefix"),
    [
        ("gemma3", "gemma3", "language_model."),
        ("gemma3", "gemma3", "model.language_model."),
        ("ministral3", "mistral3", "language_model."),
        ("mistral", "mistral3", "model.language_model."),
        ("gemma4", "gemma4", "model.language_model."),
        ("qwen3_5", "qwen3_5", "model.language_model."),
        ("qwen3_5_moe", "qwen3_5_moe", "model.language_model."),
    ],
)
def test_a_language_model_inside_a_larger_one(name: str, outer: str, prefix: str, folders: Any, tmp_path: Path) -> None:
    tensors = load_file(folders(name) / "model.safetensors")
    renamed = {
        prefix + name.removeprefix("model." * prefix.startswith("model.")): tensor for name, tensor in tensors.items()
    }
    renamed["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = torch.zeros(3, 3)
    save_file(renamed, tmp_path / "model.safetensors")
    settings = json.loads((folders(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": outer, "text_config": settings}))
    ids = text(20, 7)
    got = Session(decoder_of(tmp_path)).run({0: ids})[0]
    assert relative_error(got, expected(built(name), ids)) < F32


def test_stacked_experts(folders: Any, tmp_path: Path) -> None:
    """All experts of a layer in two tensors, as the files of Qwen 3.5 have them."""
    tensors = load_file(folders("qwen3_5_moe") / "model.safetensors")
    stacked = stacked_experts(tensors)
    assert len(stacked) < len(tensors)
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders("qwen3_5_moe") / "config.json").read_text())
    ids = text(20, 7)
    got = Session(decoder_of(tmp_path)).run({0: ids})[0]
    assert relative_error(got, expected(built("qwen3_5_moe"), ids)) < F32


def changed(folder: Path, source: Path, *, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """Copy a model with other tensors and other keys of its config.json; None omits one."""
    stored = load_file(source / "model.safetensors") | (tensors or {})
    save_file({name: value for name, value in stored.items() if value is not None}, folder / "model.safetensors")
    settings = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in settings.items() if value != OMITTED}))
    return folder


def of_transformers(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the logits of transformers for the files as they are."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return expected(transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval(), ids)


@pytest.mark.parametrize(
    ("name", "sizes", "keys"),
    [
        ("mistral", {"head_dim": 16}, {"head_dim": OMITTED}),
        ("gpt_oss", {}, {"rope_parameters": OMITTED}),
        ("gpt_oss", {}, {"rope_parameters": None}),
        ("gpt_oss", {}, {"rope_parameters": OMITTED, "rope_scaling": None, "rope_theta": 150_000.0}),
        ("gpt_oss", {}, {"rope_parameters": OMITTED, "rope_theta": 10_000.0}),
        (
            "smollm3",
            {"no_rope_layers": [1, 0, 1, 0]},
            {
                "no_rope_layers": OMITTED,
                "no_rope_layer_interval": 2,
                "layer_types": OMITTED,
                "use_sliding_window": True,
                "sliding_window": 8,
            },
        ),
    ],
)
def test_a_config_that_omits_defaults(name: str, sizes: Any, keys: Any, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    folder = changed(tmp_path, write(build(name, **sizes), tmp_path / "whole"), **keys)
    ids = text(LENGTH, 11)
    assert relative_error(Session(decoder_of(folder)).run({0: ids})[0], of_transformers(folder, ids)) < F32


def test_two_different_ends_that_the_config_ties(folders: Any, tmp_path: Path, caplog: Any) -> None:
    """Both are used, as in transformers, and a warning says so."""
    output = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) / 8
    folder = changed(tmp_path, folders("tied"), tensors={"lm_head.weight": output})
    ids = text(20, 8)
    got = Session(decoder_of(folder)).run({0: ids})[0]
    assert relative_error(got, of_transformers(folder, ids)) < F32
    assert relative_error(got, expected(built("tied"), ids)) > 10 * F32
    assert "ties lm_head.weight to model.embed_tokens.weight, but they differ: both are used" in caplog.text


def test_two_equal_ends_are_one_matrix_in_memory(folders: Any, tmp_path: Path, caplog: Any) -> None:
    embedding = load_file(folders("tied") / "model.safetensors")["model.embed_tokens.weight"]
    weights = decoder_of(changed(tmp_path, folders("tied"), tensors={"lm_head.weight": embedding.clone()})).weights
    assert weights.output.weight is weights.embedding
    assert not caplog.text


@pytest.mark.parametrize("missing", ["lm_head", "model.embed_tokens"])
def test_a_missing_end_that_the_config_does_not_tie_is_refused(missing: str, folders: Any, tmp_path: Path) -> None:
    """Where transformers computes with random numbers, and says so."""
    folder = changed(tmp_path, folders("llama2"), tensors={f"{missing}.weight": None})
    with pytest.raises(ModelError, match=f"no tensor {missing}.weight, and its config.json does not tie") as error:
        decoder_of(folder)
    assert "tie_word_embeddings" in error.value.hint


def test_only_the_output_matrix_is_stored(folders: Any, tmp_path: Path) -> None:
    tensors = load_file(folders("tied") / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders("tied") / "config.json").read_text())
    ids = text(20, 8)
    assert relative_error(Session(decoder_of(tmp_path)).run({0: ids})[0], expected(built("tied"), ids)) < F32


@pytest.mark.parametrize(
    "extra", ["model.layers.1.self_attn.gate_proj.weight", "model.layers.0.self_attn.q_norm.weight"]
)
def test_an_unknown_tensor_is_refused(extra: str, folders: Any, tmp_path: Path) -> None:
    tensors = load_file(folders("llama2") / "model.safetensors")
    save_file({**tensors, extra: torch.ones(64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders("llama2") / "config.json").read_text())
    with pytest.raises(ModelError, match=f"Llama with a tensor {extra} is not supported"):
        decoder_of(tmp_path)


def test_a_tensor_of_another_size_is_refused(folders: Any, tmp_path: Path) -> None:
    tensors = load_file(folders("llama2") / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders("llama2") / "config.json").read_text())
    with pytest.raises(ModelError, match=r"k_proj\.weight is 32 x 64, but must be 64 x 64"):
        decoder_of(tmp_path)


def test_a_missing_tensor_is_named(folders: Any, tmp_path: Path) -> None:
    tensors = load_file(folders("qwen3") / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders("qwen3") / "config.json").read_text())
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.2\.self_attn\.k_norm\.weight"):
        decoder_of(tmp_path)
