"""Files that were made for Ollama's own engine: told from others by their headers, and refused with what to pull."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from edgelm.backends.model import open_model
from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.llama_checks import require_model
from edgelm.checkpoints.ollama_format import is_ollamas_own
from edgelm.jobs.reader import describe, read_details
from edgelm.library import ollama_format
from tests.odd_models import write_odd
from tests.tiny import write_tiny

MODEL = "application/vnd.ollama.image.model"
Keys = Mapping[str, Any]
EYES = "v.blk.0.attn_q.weight"
SECTIONS = "qwen35.rope.dimension_sections"


def write_own(path: Path, architecture: str, tensors: tuple[str, ...] = (), **keys: Any) -> Path:
    """Write the tiny model under another architecture, with more tensors and keys; a key that is None is left out."""
    source = GGUFReader(write_tiny(path.with_suffix(".tiny")))
    writer = GGUFWriter(path, architecture)
    for name, field in source.fields.items():
        key = name.replace("llama.", f"{architecture}.", 1)
        if name.startswith("GGUF.") or name == "general.architecture" or key in keys:
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, value)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for name in tensors:
        writer.add_tensor(name, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(root: Path, name: str, file: Path) -> Path:
    """Put a file into a store as `ollama pull` does; return its blob."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    file.rename(blob)
    family, tag = name.split(":")
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / family / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"layers": [{"mediaType": MODEL, "digest": f"sha256:{digest}"}]}))
    return blob


@pytest.mark.parametrize(
    ("architecture", "tensors", "keys"),
    [
        ("llama", (EYES,), {}),
        ("llama4", ("mm.linear_1.weight",), {}),
        ("gemma4", ("a.conv1d.0.weight",), {}),
        ("qwen35", ("mtp.fc.weight",), {SECTIONS: [11, 11, 10, 0]}),
        ("qwen35", (), {SECTIONS: [11, 11, 10]}),
        ("qwen35", ("blk.0.ssm_dt",), {SECTIONS: [11, 11, 10, 0]}),
        ("qwen3vl", (), {}),
        ("qwen3next", ("blk.0.ssm_dt",), {}),
        ("gemma3", (), {"gemma3.attention.layer_norm_rms_epsilon": None}),
        ("gemma3", ("dense.0.weight",), {}),
        ("gemma3n", ("per_layer_token_embd.weight",), {}),
        ("gemma4", (), {"tokenizer.ggml.model": "llama"}),
        ("mistral3", (), {"mistral3.rope.scaling.beta_fast": 32.0}),
        ("lfm2", (), {}),
        ("laguna", ("blk.0.attn_g.weight",), {}),
        ("nemotron_h_moe", ("blk.1.ffn_latent_in.weight",), {}),
        ("bert", (), {"tokenizer.ggml.precompiled_charsmap": ["A", "B"]}),
        ("gptoss", (), {}),
        ("glm4moelite", (), {}),
        ("olmo3", (), {}),
        ("qwen25vl", (), {}),
    ],
)
def test_a_file_for_ollamas_engine_is_recognized(
    tmp_path: Path, architecture: str, tensors: tuple[str, ...], keys: Keys
) -> None:
    path = write_own(tmp_path / "m.gguf", architecture, tensors, **keys)
    with open_gguf(path) as gguf:
        assert is_ollamas_own(gguf)
        with pytest.raises(ModelError, match=r"m\.gguf is made for Ollama's own engine"):
            require_model(gguf)
    with pytest.raises(ModelError, match="made for Ollama's own engine"), open_model(path):
        pass


@pytest.mark.parametrize("architecture", ["gemma3", "mamba", "lfm2", "qwen35", "qwen35moe", "nemotron_h"])
def test_a_file_for_llama_cpp_is_not_taken_for_one(tmp_path: Path, architecture: Any) -> None:
    heads = 0.0 if architecture.startswith("qwen35") else None
    with open_gguf(write_odd(tmp_path / "m.gguf", architecture, heads=heads)) as gguf:
        assert not is_ollamas_own(gguf)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [("qwen3", {}), ("mistral3", {}), ("gemma4", {"tokenizer.ggml.model": "gemma4"}), ("gpt-oss", {}), ("llama4", {})],
)
def test_nor_is_one_of_another_family(tmp_path: Path, architecture: str, keys: Keys) -> None:
    with open_gguf(write_own(tmp_path / "m.gguf", architecture, **keys)) as gguf:
        assert not is_ollamas_own(gguf)


def test_the_part_that_sees_is_none(tmp_path: Path) -> None:
    with open_gguf(write_own(tmp_path / "m.gguf", "clip", (EYES,))) as gguf:
        assert not is_ollamas_own(gguf)


@pytest.mark.parametrize(
    ("name", "architecture", "parameters", "pulled"),
    [
        ("gemma3:latest", "gemma3", 3.9e9, "gemma3:4b"),
        ("gemma3:27b-it-q4_K_M", "gemma3", 27e9, "gemma3:27b"),
        ("gpt-oss:120b", "gptoss", 116e9, "gpt-oss:120b"),
        ("qwen3.5:latest", "qwen35", 9.1e9, "qwen3.5:9b"),
        ("qwen3.6:27b", "qwen35", 27e9, "qwen3.6:27b"),
        ("qwen3-vl:8b", "qwen3vl", 8.2e9, "qwen3-vl:8b"),
        ("ministral-3:8b", "mistral3", 8.4e9, "ministral3:8b"),
        ("olmo-3:7b", "olmo3", 7.3e9, "olmo3:7b"),
        ("glm-4.7-flash:latest", "glm4moelite", 30e9, "glm4.7:flash"),
        ("embeddinggemma:latest", "gemma3", 0.3e9, "embeddinggemma:300m"),
        ("qwen2.5vl:7b", "qwen25vl", 7.6e9, None),
        ("llama4:scout", "llama4", 108e9, None),
        ("gemma3:1t", "gemma3", 1e12, None),
    ],
)
def test_the_error_has_the_catalogues_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, architecture: str, parameters: float, pulled: str | None
) -> None:
    blob = stored(tmp_path, name, write_own(tmp_path / "m.gguf", architecture, (EYES,)))
    monkeypatch.setattr(ollama_format, "num_text_parameters", lambda _: parameters)
    with pytest.raises(ModelError) as caught, open_model(blob):
        pass
    short = name.removesuffix(":latest")
    assert caught.value.message == f"ollama:{short} is made for Ollama's own engine"
    assert caught.value.hint == (
        f"edgelm pull {pulled} has it for llama.cpp" if pulled else "take a GGUF of it that was made for llama.cpp"
    )


def test_lists_and_details_mark_the_file(tmp_path: Path) -> None:
    blob = stored(tmp_path, "gpt-oss:20b", write_own(tmp_path / "m.gguf", "gptoss"))
    assert describe(blob)["problem"].startswith("ollama:gpt-oss:20b is made for Ollama's own engine: ")
    assert "made for Ollama's own engine" in read_details(blob, Settings())["problem"]
