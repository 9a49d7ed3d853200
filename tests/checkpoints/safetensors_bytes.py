"""Writes safetensors bytes and folders in which any field may be false. The format's own library writes valid ones."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from edgelm.checkpoints.safetensors_parse import DTYPES

Entry = dict[str, Any]
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (24, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.1.input_layernorm.weight": (8,),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.norm.weight": (8,),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 128,
    "vocab_size": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def entries(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, Entry]:
    """Describe tensors that follow each other."""
    described, at = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * DTYPES[dtype].bits // 8
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return described


def file_of(header: dict[str, Any] | bytes | str, data: int | bytes | None = None, length: int | None = None) -> bytes:
    """Return a file; without `data` it has as many bytes as its tensors need."""
    if data is None:
        assert isinstance(header, dict)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        data = max(ends, default=0)
    raw = json.dumps(header).encode() if isinstance(header, dict) else header
    raw = raw.encode() if isinstance(raw, str) else raw
    behind = bytes(i % 251 for i in range(data)) if isinstance(data, int) else data
    return struct.pack("<Q", len(raw) if length is None else length) + raw + behind


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def sharded(shapes: dict[str, tuple[int, ...]], count: int, dtype: str = "BF16") -> dict[str, bytes]:
    """Return the files of a folder, by name: shards with alternating tensors, and their index."""
    files, weight_map = {}, {}
    for i in range(count):
        mine = {name: shape for at, (name, shape) in enumerate(shapes.items()) if at % count == i}
        files[shard_name(i + 1, count)] = file_of(entries(mine, dtype))
        weight_map |= dict.fromkeys(mine, shard_name(i + 1, count))
    index = {"metadata": {"total_size": 1, "more": [{"deep": None}, "}"]}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    return files


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def folder_files(config: dict[str, Any] | None = None, **more: bytes) -> dict[str, bytes]:
    """Return the files of a small model in one file; a name's `__` stands for a dot."""
    files = {"model.safetensors": file_of(entries(SHAPES))}
    files["config.json"] = json.dumps(CONFIG if config is None else config).encode()
    return files | {name.replace("__", "."): data for name, data in more.items()}
