"""The file that llama.cpp is timed with: Llama-3.1-8B as Q4_K_M in shape, with weights at random."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.performance.step import LAYERS


def write_llama_8b(path: Path) -> None:
    """Write the file. Raises ImportError without the gguf package."""
    from gguf import GGMLQuantizationType as Quant

    from tests.bench.random_models import SHAPES, write_model

    wide = {"output"} | {f"blk.{layer}.{name}" for layer in range(0, LAYERS, 2) for name in ("attn_v", "ffn_down")}
    begun = path.with_suffix(".part")
    write_model(begun, SHAPES["llama-8b"], Quant.Q4_K, others=dict.fromkeys(wide, Quant.Q6_K))
    begun.replace(path)
