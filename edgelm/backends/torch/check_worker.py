"""The worker that checks the GPU's kernels: a crash or a hang of one ends it, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import torch
from gguf import GGMLQuantizationType as Quant

from edgelm.backends.gpu_check import NO_NUMBER, Begun, Checked, CheckGpu, OpVerdict
from edgelm.backends.llama.random_gguf import ALL_QUANTS, write_random_gguf
from edgelm.backends.model import open_model
from edgelm.backends.torch.build import DTYPES
from edgelm.backends.torch.executor import device_name
from edgelm.backends.torch.self_check import MAX_LAYERS, check_model
from edgelm.backends.torch.trial import LINKS, chain_is_right, run_trial
from edgelm.base.workers.child import Child, run_job
from edgelm.kernels.choice import PDL, PLAIN_OPS
from edgelm.models.loading.stored import BLOCK_TYPES, PLAIN_TYPES

WIDTH = 2048
CHAIN = f"a chain of {LINKS} kernels"


def check(
    request: CheckGpu,
    child: Child,
    device: torch.device | None = None,
    trial: Callable[[torch.device], None] = run_trial,
    width: int = WIDTH,
) -> None:
    """Run the small kernel, then the ops of the model. Raises EngineError, ModelError.

    `width` is that of the models of all formats, where no model is given.
    """
    from edgelm.kernels.pdl import uses_pdl  # needs Triton

    device = device or torch.device("cuda", 0)
    child.send(Begun("", ""))
    trial(device)
    PLAIN_OPS.update(request.plain)
    quantize: Literal["int4"] | None = "int4" if request.quantize == "int4" else None
    verdicts: dict[tuple[str, str], OpVerdict] = {}
    if uses_pdl():
        child.send(Begun(PDL, CHAIN))
        verdicts[PDL, CHAIN] = _verdict_of_chain(device)
        child.send(Begun("", ""))  # what follows first, making and loading models, is none of it
    with TemporaryDirectory(prefix="edgelm-check-") as folder:
        for path in [request.model] if request.model else _models_of_all_formats(Path(folder), width):
            with open_model(path) as model:
                found = check_model(
                    model,
                    device,
                    DTYPES[device.type],
                    request.modes,
                    quantize=quantize,
                    short=request.short,
                    begins=lambda op, detail: child.send(Begun(op, detail)),
                )
            for verdict in found:
                verdicts.setdefault((verdict.op, verdict.detail), verdict)
    child.send(Checked(device_name(device), tuple(verdicts.values())))


def _verdict_of_chain(device: torch.device) -> OpVerdict:
    """Try kernels that begin early; where that is wrong, launch the ops without."""
    if chain_is_right(device):
        return OpVerdict(PDL, CHAIN)
    PLAIN_OPS.add(PDL)
    return OpVerdict(PDL, CHAIN, right=False, off=NO_NUMBER, error="gives wrong numbers")


class _Shape(NamedTuple):
    """A model without a file of the user."""

    layers: int
    quants: Sequence[Quant]
    ffn: int
    experts: int = 0
    family: Literal["llama", "gemma2"] = "llama"


def _models_of_all_formats(folder: Path, width: int) -> Iterator[Path]:
    """Write models of all formats, and of a single one, whose matrices are fused; without experts, and with them.

    Gemma 2 has norms after each block, and soft caps.
    """
    known = [quant for quant in ALL_QUANTS if quant.name in BLOCK_TYPES or quant.name in PLAIN_TYPES]
    shapes = {
        "all": _Shape(2, known, 2 * width),
        "one": _Shape(1, [Quant.Q4_K], 2 * width),
        "norms after blocks": _Shape(1, [Quant.Q4_K], 2 * width, family="gemma2"),
        "experts": _Shape(MAX_LAYERS, known, max(width // 4, 256), experts=8),
        "experts of one": _Shape(1, [Quant.MXFP4], max(width // 4, 256), experts=8),
    }
    for name, shape in shapes.items():
        path = folder / f"{name}.gguf"
        write_random_gguf(path, width=width, kv_heads=width // 128, **shape._asdict())
        yield path


if __name__ == "__main__":
    sys.exit(run_job({CheckGpu: check}))
