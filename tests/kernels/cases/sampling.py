"""The sampling kernels that are compiled; the inputs of tests are made from requests, in tests/engine/sampling."""

from __future__ import annotations

from typing import Any

from tests.kernels.compile_case import CompileCase


def compile_cases() -> list[CompileCase]:
    """Return every kernel, for a vocabulary of 128,256 (63 chunks)."""
    from edgelm.kernels.sampling import kernel as kernels
    from edgelm.kernels.sampling.draw_kernel import draw_kernel

    chunks = {"CHUNK": kernels.CHUNK, "CHUNKS": 64}
    room = {"ROOM": 32}
    capacity = {"CAPACITY": kernels.CAPACITY}
    entries = {"BLOCK": kernels.ENTRIES}
    listed: list[tuple[Any, dict[str, object], int]] = [
        (kernels.prepare_kernel, {"CHUNK": kernels.CHUNK}, 4),
        (kernels.bias_kernel, {**entries}, 4),
        (kernels.penalize_kernel, {**entries}, 4),
        (kernels.limit_kernel, {"CHUNK": kernels.CHUNK}, 4),
        (kernels.weigh_kernel, {**chunks, **room}, 4),
        (kernels.collect_kernel, {**chunks, **capacity}, 4),
        (draw_kernel, {**chunks, **capacity, **room, "TILE": kernels.TILE, "FEW": kernels.FEW}, kernels.DRAW_WARPS),
    ]
    return [_case(fn, constants, num_warps) for fn, constants, num_warps in listed]


# types of pointers, by their names in the kernels
_POINTERS = {
    "logits_ptr": "*bf16",
    "words_ptr": "*i64",
    "floats_ptr": "*fp64",
    "row_ptr": "*fp32",
    "maxima_ptr": "*fp32",
    "bias_ptr": "*fp64",
    "best_ptr": "*i64",
    "sums_ptr": "*i64",
    "raw_sums_ptr": "*i64",
    "tops_ptr": "*i64",
    "answers_ptr": "*i64",
}


def _case(fn: Any, constants: dict[str, object], num_warps: int) -> CompileCase:
    from edgelm.kernels.sampling import kernel as kernels

    names: list[str] = fn.arg_names
    kinds = {name: _POINTERS.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in names}
    return CompileCase(
        name=f"sampling {fn.__name__.removesuffix('_kernel')}",
        fn=fn,
        signature={name: "constexpr" if name in constants else kind for name, kind in kinds.items()},
        constants=constants,
        divisible=tuple(name for name in names if name.endswith(("_ptr", "_stride", "_start", "_vocab"))),
        num_warps=num_warps,
        options=kernels.OPTIONS,
    )
