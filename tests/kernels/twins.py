"""On a GPU: inline assembly and its plain twin give the same bits, case by case.

python -m tests.kernels.twins [--ops OP...]    Each case of the benchmark runs as it is, and again with ASM=False in
every kernel, on equal inputs. The results are compared byte for byte, and so are the inputs, which an op may write to.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.kernels.benchmark import BenchCase, bench_cases, make_inputs, tensors_of

SEED = 20
LARGE = ("4096x4096", "len=1024")  # compared besides all tiny cases


@contextmanager
def plain_kernels(kernel: type) -> Iterator[Counter[str]]:
    """Launch every kernel of this class (Triton's JITFunction) without assembly; yield their launches by name."""
    run: Callable[..., Any] = kernel.run
    changed: Counter[str] = Counter()

    def run_plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("ASM"):
            kwargs["ASM"] = False
            changed[self.__name__] += 1
        return run(self, *args, **kwargs)

    kernel.run = run_plain
    try:
        yield changed
    finally:
        kernel.run = run


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same bytes, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def difference(case: BenchCase, device: torch.device, kernel: type) -> tuple[str, int]:
    """Return the difference as text, and the number of launches that had a twin."""
    inputs, same = make_inputs(case.work, device, SEED), make_inputs(case.work, device, SEED)
    with_assembly = case.compared(inputs, case.work.run(inputs, "triton"))
    with plain_kernels(kernel) as changed:
        without = case.compared(same, case.work.run(same, "triton"))
    pairs = zip(tensors_of((with_assembly, inputs)), tensors_of((without, same)), strict=True)
    faults = [f"tensor {at} differs" for at, pair in enumerate(pairs) if not same_bits(*pair)]
    return ", ".join(faults), changed.total()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.twins", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", nargs="+", help="only these ops")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: assembly cannot run")
        return 1
    from triton.runtime.jit import JITFunction

    device = torch.device("cuda", torch.cuda.current_device())
    large = [case for case in bench_cases(options.ops, False) if case.shape.endswith(LARGE)]
    faults = 0
    for case in [*bench_cases(options.ops, True), *large]:
        try:
            wrong, launches = difference(case, device, JITFunction)
        except Exception as error:  # noqa: BLE001 - the other cases are still compared
            wrong, launches = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", 0
        faults += bool(wrong)
        print(f"{case.name:<64} {launches} launches without assembly: {wrong or 'the same bits'}", flush=True)
    print(f"{faults} cases differ")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
