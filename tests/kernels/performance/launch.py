"""One launch of a compiled kernel with its arguments.

Owns the word. Knows nothing of how the launch is timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel compiled for one GPU, and what it is launched with.

    `args` has the kernel's parameters by name, constexprs left out: integers, floats and tensors of torch.empty at the
    real shapes. Integers that the kernel reads from memory (block tables, lengths) must have real values. `warm` names
    the tensors that lie in the L2 cache at the start, since the kernel before wrote them; all others come from DRAM.
    """

    compiled: Any  # Triton's CompiledKernel for that GPU's sm; its metadata has num_warps and shared
    grid: tuple[int, int, int]
    args: dict[str, object]
    warm: frozenset[str] = frozenset()
