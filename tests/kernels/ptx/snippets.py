"""A few instructions on words, for the emulator's own tests.

Owns the text around them: their inputs come from tensors, a row of each to a thread, and their outputs go back the same
way. Knows nothing of what the instructions do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tests.kernels.ptx.handwritten import run

Words = NDArray[np.uint64]


def tensor_of(array: NDArray[np.generic]) -> torch.Tensor:
    """Return the memory of an array as bytes of a tensor."""
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).copy())


def compute(instructions: str, inputs: Sequence[Words], outputs: str = "b64") -> Words:
    """Run instructions on 64-bit words: %rd10, %rd11, ... (low halves %r10, ..., low quarters %rs10, ...) to %rd30.

    `outputs` is the type of the result: it is in %rd30, %r30, %rs30 or %p1.
    """
    lanes = max(32, -(-len(inputs[0]) // 32) * 32)
    padded = [np.resize(words, lanes) for words in inputs]
    out = torch.zeros(lanes, dtype=torch.int64)
    lines = ["mul.wide.u32 %rd9, %r0, 8;"]
    for at in range(len(inputs)):
        lines += [f"add.s64 %rd8, %rd{at}, %rd9;", f"ld.global.b64 %rd{10 + at}, [%rd8];"]
        lines += [f"cvt.u32.u64 %r{10 + at}, %rd{10 + at};", f"cvt.u16.u64 %rs{10 + at}, %rd{10 + at};"]
    lines.append(instructions)
    lines += {
        "b64": [],
        "b32": ["cvt.u64.u32 %rd30, %r30;"],
        "b16": ["cvt.u64.u16 %rd30, %rs19;"],
        "pred": ["selp.b64 %rd30, 1, 0, %p1;"],
    }[outputs]
    lines += [f"add.s64 %rd8, %rd{len(inputs)}, %rd9;", "st.global.b64 [%rd8], %rd30;"]
    # At most 1,024 threads, as on a GPU.
    assert lanes <= 1024
    run("\n".join(lines), [*map(tensor_of, padded), out], warps=lanes // 32)
    return out.numpy().view(np.uint64)[: len(inputs[0])]
