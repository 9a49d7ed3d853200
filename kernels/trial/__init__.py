"""One small product by a kernel of its own, which shows whether kernels can be compiled and run on a device at all."""

from __future__ import annotations

from torch import Tensor

SIZE = 16  # rows and columns


def product(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Write x @ y to `out`, float32; x and y are float16; all are [SIZE, SIZE]. Raises what Triton raises."""
    assert x.shape == y.shape == out.shape == (SIZE, SIZE)
    from edgelm.kernels.trial.kernel import product as run  # Triton is not installed everywhere

    run(x, y, out)
