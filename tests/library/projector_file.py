"""Writes a projector by its header, with weights of zeros: enough for what is read before native code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, LlamaFileType


def write_projector(path: Path, *, width: int = 64, architecture: str = "clip", **values: Any) -> Path:
    """Write a projector for a model with this hidden size; `values` replace keys of `clip.vision`, None leaves out."""
    writer = GGUFWriter(path, architecture)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "gemma3")
    sizes = {"image_size": 28, "patch_size": 14, "embedding_length": 32, "feed_forward_length": 48, "block_count": 1}
    for name, value in {**sizes, "projection_dim": width, "attention.head_count": 2, **values}.items():
        if value is not None:
            writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    writer.add_tensor("v.patch_embd.weight", np.zeros((32, 3, 14, 14), np.float16))
    writer.add_tensor("mm.input_projection.weight", np.zeros((32, width), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
