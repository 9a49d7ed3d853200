"""The worker that checks the GPU's kernels: a crash or a hang of one ends it, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType as Quant

from edgelm.backends.gpu_check import NO_NUMBER, Begun, Checked, CheckGpu, Counted, OpVerdict
from edgelm.backends.llama.random_gguf import ALL_QUANTS, Family, write_random_gguf
from edgelm.backends.model import open_heads, open_model
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
    verdicts: dict[tuple[str, str], OpVerdict] = {}
    if uses_pdl():
        child.send(Begun(PDL, CHAIN))
        verdicts[PDL, CHAIN] = _verdict_of_chain(device)
        child.send(Begun("", ""))  # what follows first, making and loading models, is none of it
    with TemporaryDirectory(prefix="edgelm-check-") as folder:
        paths = [request.model] if request.model else _models_of_all_formats(Path(folder), width)
        for number, path in enumerate(paths, 1):
            count = partial(_send_count, child, number, 1 if request.model else len(SHAPES))
            with open_model(path) as model, open_heads(model, request.heads) as drafting:
                found = check_model(
                    drafting,
                    device,
                    DTYPES[device.type],
                    request.modes,
                    quantize=request.quantize,
                    short=request.short,
                    counts=count,
                    begins=lambda op, detail: child.send(Begun(op, detail)),
                )
            for verdict in found:
                verdicts.setdefault((verdict.op, verdict.detail), verdict)
    child.send(Checked(device_name(device), tuple(verdicts.values())))


def _send_count(child: Child, model: int, models: int, kernels: int) -> None:
    child.send(Counted(kernels, model, models))


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
    experts: int = 0
    family: Family = "llama"


KNOWN = [quant for quant in ALL_QUANTS if quant.name in BLOCK_TYPES or quant.name in PLAIN_TYPES]
SHAPES = {
    "all": _Shape(2, KNOWN),
    "one": _Shape(1, [Quant.Q4_K]),
    "norms after blocks": _Shape(1, [Quant.Q4_K], family="gemma2"),
    "gated delta nets": _Shape(2, [Quant.Q4_K], family="qwen35"),
    "experts": _Shape(MAX_LAYERS, KNOWN, experts=8),
    "experts of one": _Shape(1, [Quant.MXFP4], experts=8),
}


def _models_of_all_formats(folder: Path, width: int) -> Iterator[Path]:
    """Write models of all formats, and of a single one, whose matrices are fused; without experts, and with them.

    Gemma 2 has norms after each block, and soft caps. Qwen 3.5 has gates of heads, and states.
    """
    for name, shape in SHAPES.items():
        path, ffn = folder / f"{name}.gguf", max(width // 4, 256) if shape.experts else 2 * width
        write_random_gguf(path, width=width, kv_heads=width // 128, ffn=ffn, **shape._asdict())
        yield path


if __name__ == "__main__":
    sys.exit(run_job({CheckGpu: check}))
