"""A row has the same logits, bit for bit, in every step that decodes or verifies, with Triton's interpreter."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step
from tests.backends.torch.torch_engine import load_gguf, make_executor
from tests.tiny import write_tiny


def test_the_logits_of_a_row_depend_on_no_other_row(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    shape = {"layers": 1, "width": 32, "ffn": 32, "heads": 1, "kv_heads": 1, "head_dim": 32, "vocab_size": 272}
    decoder = load_gguf(write_tiny(tmp_path / "m.gguf", quant="q4_0", **shape), "triton", torch.bfloat16)
    executor = make_executor(decoder, context=32, capacity=32 * 9, max_sequences=9)
    texts = [[rng.randrange(3, 260) for _ in range(2)] for _ in range(9)]
    seqs = [Sequence(i, text, 1, SamplingParams()) for i, text in enumerate(texts)]

    def logits(*chunks: tuple[int, int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Run chunks (sequence, first position, tokens), a row for each token."""
        step = Step(tuple(Chunk(seqs[i], at, texts[i][at : at + n], n, (i,)) for i, at, n in chunks))
        executor.forward(step)
        return executor.logits(step)

    alone = np.concatenate([logits((0, 0, 1)), logits((0, 1, 1))])
    verified = logits(*((i, 0, 2) for i in range(1, 9)), (0, 0, 2))  # 18 rows
    assert np.array_equal(verified[16:], alone), seed
    executor.close()
