"""Whole models through emulated kernels: their tokens are those of the reference on the CPU.

    python -m tests.kernels.emulated.models [--main] [--capability N...] [--only WORD...]

Each line of JSON is one model with one KV format on one architecture. Two sequences run through the project's own
executor: prompts in chunks and beside each other, decoding, LAST tokens, drafts of which one is wrong; one is greedy,
the other sampled with a temperature and penalties. Equal launches run once. The exit code is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch

from edgelm.kernels.cache import FORMATS
from tests.kernels.benchmark import tensors_of
from tests.kernels.emulated.case import filled_memory, launched_late
from tests.kernels.emulated.clear_answers import Errors, errors, reference
from tests.kernels.emulated.memory import collecting_by_hand
from tests.kernels.emulated.outcome import Outcome
from tests.kernels.emulated.walks import FAMILIES, ModelCase, Trace, decoder_of, walk

ARCHITECTURES = (90, 89)
MAIN = (("mixture", "int8", 90),)  # a Llama but for its feed-forward block; half a minute each, so the others are soak
TIMES = 3  # the error that is allowed, in those that the reference makes by computing in bfloat16


class ModelResult(NamedTuple):
    """The result of emulating a model."""

    case: ModelCase
    capability: int
    fault: str
    tokens: list[list[int]]
    errors: Errors
    bounds: Errors
    product: Outcome  # the worst of the products with the output matrix
    launches: int
    replayed: int  # launches of them that were equal to earlier ones and did not run again
    instructions: int
    kernels: tuple[str, ...]
    seconds: float


def emulate(case: ModelCase, capability: int, **options: Any) -> ModelResult:
    """Run a model on an emulated GPU and compare it with the reference."""
    from tests.kernels.ptx.errors import EmulatorError
    from tests.kernels.ptx.launch import Emulated

    seeds, answer, expected, rounding = reference(case)
    began = time.perf_counter()
    fault, got = "", Trace([[], []])
    weights = tensors_of(decoder_of(case.family, "triton", torch.bfloat16).weights)
    versions = [weight._version for weight in weights]
    with Emulated(capability, weights=weights, **options) as gpu, filled_memory():
        try:
            got = walk(case, seeds, "triton", answer)
        except EmulatorError as error:
            fault = f"{type(error).__name__}: {error}"
    assert versions == [weight._version for weight in weights], "torch has written a weight"
    off, bounds = errors(got, expected), Errors(TIMES * rounding.mean, TIMES * rounding.largest)
    product = max(got.products, default=Outcome(float("inf"), 0.0, "no logits"), key=lambda outcome: outcome.difference)
    faults = [fault, *(outcome.fault for outcome in got.products)]
    faults += [f"{kernel} is launched without PDL" for kernel in launched_late(gpu)]
    if not fault and got.tokens != expected.tokens:
        faults.append(f"tokens {got.tokens}, not {expected.tokens}")
    if off.mean > bounds.mean or off.largest > bounds.largest:
        faults.append(f"logits are off by {off}, allowed is {bounds}")
    return ModelResult(
        case,
        capability,
        "; ".join(filter(None, faults)),
        got.tokens,
        off,
        bounds,
        product,
        len(gpu.launches),
        sum(launch.replayed for launch in gpu.launches),
        sum(launch.instructions for launch in gpu.launches if not launch.replayed),
        tuple(dict.fromkeys(launch.kernel for launch in gpu.launches)),
        time.perf_counter() - began,
    )


def cases() -> list[ModelCase]:
    return [ModelCase(family, kv) for family in FAMILIES for kv in FORMATS]


def fields(result: ModelResult) -> dict[str, Any]:
    """Return a result as JSON has it."""
    values = result._asdict() | {"case": result.case.name, "product": result.product.difference}
    return values | {"product_bound": result.product.bound, "seconds": round(result.seconds, 1)}


def main(arguments: Seq[str] | None = None) -> int:
    assert "TRITON_INTERPRET" not in os.environ, "kernels that are interpreted are not compiled"
    from tests.kernels.ptx.launch import forget
    from tests.kernels.ptx.replay import Launches

    parser = argparse.ArgumentParser(prog="python -m tests.kernels.emulated.models", description=(__doc__ or "")[:80])
    parser.add_argument("--main", action="store_true", help="only the models of every test run")
    parser.add_argument("--capability", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--only", nargs="+", metavar="WORD")
    options = parser.parse_args(arguments)
    faults = 0
    for case in cases():
        if options.only and not any(word in case.name for word in options.only):
            continue
        known = Launches()
        forget()
        for capability in options.capability:
            if options.main and (*case, capability) not in MAIN:
                continue
            result = emulate(case, capability, known=known)
            faults += bool(result.fault)
            print(json.dumps(fields(result)), flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    with collecting_by_hand():
        status = main()
    sys.exit(status)
