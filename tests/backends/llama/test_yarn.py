"""llama.cpp's engine stretches RoPE as the file says, and so as the torch engine does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_models import YARN, build, expected, relative_error, text

F16 = 2e-3  # of a KV cache in 16 bits


@pytest.mark.parametrize("betas", [{}, {"beta_fast": 4.0, "beta_slow": 0.5}])
def test_the_ramp_of_yarn_is_that_of_the_file(betas: dict[str, float], tmp_path: Path) -> None:
    """llama.cpp itself reads these numbers for a few architectures only, and takes 32 and 1 for the others."""
    plain = {**YARN, "beta_fast": 32.0, "truncate": True, "original_max_position_embeddings": 128}
    model = build("qwen3", rope_parameters={**plain, **betas})
    ids = text(60, 3)
    want = expected(model, ids)[-1:]
    if betas:  # they matter in this text
        assert relative_error(expected(build("qwen3", rope_parameters=plain), ids)[-1:], want) > 10 * F16
    native = LlamaModel(write_gguf(model, tmp_path / "m.gguf"), repack=False)
    executor = LlamaExecutor(native, LlamaOptions(context=256, threads=1))
    step = Step((Chunk(Sequence(0, ids, len(ids), SamplingParams()), 0, ids, 1, 0),))
    executor.forward(step)
    got = torch.from_numpy(executor.logits(step).copy())
    executor.close()
    assert relative_error(got, want) < F16
