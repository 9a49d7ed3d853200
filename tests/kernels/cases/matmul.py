"""The layouts, weights and compile cases of `matmul`.

Owns the list of all layouts, and the making of random weights of any of them. Knows nothing of tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgelm.kernels.layout import (
    CHUNK,
    SUPER,
    TILE,
    DenseWeight,
    Layout,
    PackedWeight,
    layout_constants,
    pack_codes,
    pack_scales,
)
from tests.kernels.compile_case import CompileCase

if TYPE_CHECKING:
    from edgelm.kernels.matmul.configs import Config

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("q4_0", 4, 32, "f16", zero=8),
        Layout("q4_1", 4, 32, "f16", offset="min"),
        Layout("q5_0", 5, 32, "f16", zero=16),
        Layout("q5_1", 5, 32, "f16", offset="min"),
        Layout("q8_0", 8, 32, "f16", code="signed"),
        Layout("q4_k", 4, 32, "u8", offset="min"),
        Layout("q5_k", 5, 32, "u8", offset="min"),
        Layout("q6_k", 6, 16, "i8", zero=32),
        Layout("iq4_nl", 4, 32, "f16", code="codebook", codebook=IQ4),
        Layout("iq4_xs", 4, 32, "i8", code="codebook", codebook=IQ4),
        Layout("mxfp4", 4, 32, "e8m0", code="codebook", codebook=MXFP4),
        Layout("awq", 4, 128, "f16", offset="zero"),
        Layout("gptq", 4, 64, "bf16", offset="zero"),
        Layout("int4", 4, 128, "bf16", zero=8),
        Layout("int8", 8, 192, "f32", zero=128),
        Layout("fp8", 8, 128, "f32", code="fp8"),
        Layout("int4_g16", 4, 16, "f16", offset="min"),
        Layout("int6_g16", 6, 16, "f32", zero=32, offset="min"),
        Layout("int5_g64", 5, 64, "bf16", offset="min"),
    )
}

_SIZES = {"f16": 2, "bf16": 2, "f32": 4, "u8": 1, "i8": 1, "e8m0": 1}
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def random_weight(
    layout: Layout, rows: int, columns: int, generator: torch.Generator, *, ordered: bool = False, garbage: bool = True
) -> PackedWeight:
    """Make a weight of any layout, with values about as large as a model's; `ordered`: with an act-order.

    With `garbage` the padding holds random codes, and scales that are NaN where the type has one.
    """
    width = max(CHUNK, layout.group, SUPER if layout.two_level else 0)
    padded_rows, padded_columns = -(-rows // TILE) * TILE, -(-columns // width) * width
    raw = torch.randint(0, 1 << layout.bits, (padded_rows, padded_columns), generator=generator).to(torch.uint8)
    if layout.code == "fp8":
        raw = torch.where((raw & 127) == 127, raw - 1, raw)  # no NaN
    if not garbage:
        raw[rows:] = 0
        raw[:, columns:] = 0
    codes, high = pack_codes(raw, layout.bits, layout.group)
    used = -(-columns // layout.group)
    shape = (padded_rows, padded_columns // layout.group)

    def plane(kind: str, size: float) -> Tensor:
        fill: float
        if kind in ("u8", "i8", "e8m0"):
            low, top, dtype = {
                "u8": (0, 64, torch.uint8),
                "i8": (-128, 128, torch.int8),
                "e8m0": (0, 132, torch.uint8),
            }[kind]
            values = torch.randint(low, top, shape, generator=generator).to(dtype)
            fill = 0 if not garbage else 100
        else:
            values = (torch.randn(shape, generator=generator) * size).to(_DTYPES[kind])
            fill = float("nan") if garbage else 0
        values[rows:] = fill
        values[:, used:] = fill
        return pack_scales(values, layout.per_entry)

    scales = plane(layout.scale, 0.1 / (1 << layout.bits))
    offsets = None
    if layout.offset == "min":
        offsets = plane(layout.scale, 0.05)
    elif layout.offset == "zero":
        zeros = torch.randint(0, 1 << layout.bits, shape, generator=generator).to(torch.uint8)
        offsets = pack_scales(zeros, layout.per_entry)
    supers = None
    if layout.two_level:
        factors = torch.randn((2, padded_rows, padded_columns // SUPER), generator=generator) * 0.002
        factors[:, rows:] = float("nan") if garbage else 0
        parts = [pack_scales(f.to(torch.float16), 1) for f in factors]
        supers = torch.cat(parts if layout.offset == "min" else parts[:1], -1).contiguous()
    order = torch.randperm(columns, generator=generator) if ordered else None
    return PackedWeight(layout, rows, columns, codes, scales, high, offsets, supers, order)


def random_dense(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> DenseWeight:
    """Make a dense weight with values about as large as a model's."""
    return DenseWeight((torch.randn(rows, columns, generator=generator) * 0.05).to(dtype))


TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# by layout, type, rows and columns: the spills on a compute capability where there are more than others have
SPILLS: dict[tuple[str | None, str, int, int], dict[int, int]] = {
    ("int6_g16", "bf16", 8, 4096): {90: 40},
    (None, "bf16", 8, 14336): {80: 9, 86: 18, 89: 18},
}
SPILLS_37: dict[str, dict[int, int]] = {  # the same with Triton 3.7, by what a case's name has behind "matmul"
    "int4_g16 fp16 rows=8 (4, 2, 2, 1)": {90: 21, 120: 32},
    "int4_g16 bf16 rows=8 (4, 2, 2, 1)": {120: 32},
    "int6_g16 fp16 rows=8 (4, 2, 2, 1)": {80: 24, 90: 25, 120: 42},
    "int6_g16 bf16 rows=8 (4, 2, 2, 1)": {80: 43, 86: 31, 89: 31, 90: 48, 120: 46},
    "q4_0 bf16 rows=16 (4, 4, 2, 1)": {90: 32},
    "q8_0 bf16 rows=16 (4, 2, 2, 1) lengths silu HBM": {80: 26},
    "mxfp4 bf16 rows=24 (4, 2, 2, 1) lengths silu": {80: 2},
    "dense bf16 rows=8 (8, 1, 2, 1) norm": {90: 3},
}
NORMS = {"squares": "*fp32", "next_weight": "*fp32", "scaled": "*bf16", "next_squares": "*fp32"}
_POINTERS = {"f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "u8": "*u8", "i8": "*i8", "e8m0": "*u8"}


def compile_cases() -> list[CompileCase]:
    """Return the kernels for the shapes of an 8B model, in all formats, and with norms and gate."""
    from edgelm.kernels.matmul.configs import Config, float32_config
    from edgelm.kernels.matmul.kernel import combine_kernel

    # The instructions that an H200 has time for at 92 % of its bandwidth; for 16 rows of q4_k and q5_k, an H100.
    budgets = {("q4_0", 8): 3.9, ("q4_0", 16): 3.9, ("q4_k", 8): 4.0, ("q4_k", 16): 5.0, ("q8_0", 8): 7.3}
    budgets |= {("q5_k", 8): 5.3, ("q5_k", 16): 6.2, ("q6_k", 8): 5.65, ("q6_k", 16): 5.8, ("q8_0", 16): 7.3}
    cases = [
        compile_case(name, dtype, rows, Config(4, tiles, 2, 1), budget=budgets.get((name, rows)))
        for name in LAYOUTS
        for dtype in ("fp16", "bf16")
        for rows, tiles in ((8, 2), (16, 2))
    ]
    cases += [compile_case(None, dtype, rows, Config(4, 2, 0, 1)) for dtype in ("fp16", "bf16") for rows in (8, 16)]
    for name, layout in LAYOUTS.items():  # programs of four blocks of rows, where they have the registers for it
        if layout.group > 16 or layout.offset == "none":
            cases += [compile_case(name, dtype, 32, Config(4, 2, 2, 1)) for dtype in ("fp16", "bf16")]
    cases += [compile_case(None, dtype, 32, Config(4, 2, 0, 1)) for dtype in ("fp16", "bf16")]
    cases += [
        compile_case(name, "bf16", rows, Config(4, 2, 2, 1), lengths=True, gate="silu")
        for name in ("q4_0", "q4_k", "q5_k", "q8_0", "mxfp4")
        for rows in (24, 32)
    ]
    cases += [  # in float32, which is slow
        compile_case(name, dtype, 16, float32_config(Config(8, 2, 2, 1), False), dense=dense)
        for name, dtype, dense in (("q6_k", "fp32", None), (None, "bf16", "fp16"))
    ]
    cases += [
        compile_case("q4_k", "bf16", 8, Config(8, 1, 2, 4), lengths=True),
        compile_case("q4_k", "bf16", 8, Config(4, 2, 2, 1), lengths=True, gate="silu"),
        compile_case("q4_k", "bf16", 16, Config(4, 2, 2, 1), lengths=True, gate="silu"),
        compile_case("q6_k", "bf16", 8, Config(4, 2, 2, 1), lengths=True),
        compile_case(None, "bf16", 8, Config(4, 2, 0, 1), lengths=True),
        compile_case("q4_0", "bf16", 16, Config(4, 4, 2, 1)),
        compile_case("q4_k", "bf16", 8, Config(4, 2, 0, 1), norm=True),
        compile_case("q4_k", "bf16", 8, Config(8, 1, 2, 4), norm=True),
    ]
    cases += [  # the output of attention and the end of a feed-forward
        compile_case(name, "bf16", rows, Config(8, 1, 2, 1), norm=True, columns=14336)
        for name in ("q4_0", "q4_k", "q6_k", "q8_0", None)
        for rows in (8, 16, 32)
    ]
    cases += [  # two blocks of rows on a GPU without HBM
        compile_case(name, "bf16", 16, Config(8, 2, 2, 1), norm=True) for name in ("q4_k", "q6_k")
    ]
    cases += [  # two blocks of rows on a GPU with HBM
        compile_case(name, "bf16", 16, Config(4, 2, 2, 1), lengths=True, gate="silu", hbm=True)
        for name in ("q4_0", "q4_1", "q4_k", "q8_0", "awq")
    ]
    cases += [  # a weight of few tiles, such as V and the `down` of small models
        compile_case(name, "bf16", rows, Config(16, 1, 2, 1))
        for name in ("q4_k", "q6_k", "q8_0", None)
        for rows in (8, 16, 32)
    ]
    signature = dict.fromkeys(combine_kernel.arg_names, "constexpr")
    signature |= {"partial": "*fp32", "out": "*fp16", "residual_stride": "i32", "eps": "fp32"}
    constants: dict[str, object] = dict.fromkeys(("bias", "residual", "GATE", *NORMS), None)
    constants |= {"N": 4096, "K": 4096, "LIMIT": 0.0, "ALPHA": 0.0, "SPLITS": 4, "BLOCK": 128}
    cases.append(CompileCase("matmul combine", combine_kernel, signature, constants, ("partial", "out")))
    pointers = {"out": "*fp32", "residual": "*fp32", **NORMS}
    constants = {name: value for name, value in constants.items() if name not in pointers}
    aligned = ("partial", *pointers)
    cases.append(CompileCase("matmul combine norm", combine_kernel, signature | pointers, constants, aligned))
    return cases


def compile_case(
    name: str | None,
    dtype: str,
    rows: int,
    config: Config,
    *,
    lengths: bool = False,
    norm: bool = False,
    gate: str | None = None,
    budget: float | None = None,
    dense: str | None = None,
    hbm: bool = False,
    columns: int = 4096,  # with few of them, the assembler unrolls the main loop
) -> CompileCase:
    """Describe `decode` for 4096 rows in a layout (None: dense, of x's type or another), as launched on a GPU.

    `hbm`: as on one with HBM. `lengths`: by which its rows are divided; `norm`: the one behind it, with a residual.
    """
    import triton.language as tl

    from edgelm.kernels.gpu_target import kwidth, triton_version
    from edgelm.kernels.matmul.configs import (
        BLOCKS,
        FEW_REGISTERS,
        LARGE_BLOCKS,
        MANY_WARPS,
        max_registers,
        row_blocks,
        steps_ahead,
    )
    from edgelm.kernels.matmul.kernel import decode_kernel

    layout = LAYOUTS[name] if name else None
    blocks, _ = row_blocks(rows, LARGE_BLOCKS if config.warps > MANY_WARPS else BLOCKS)
    ahead = steps_ahead(config, blocks, config.tiles, layout, hbm=hbm)
    kind = f"*{dtype}"
    common = dtype if dense is None else "fp32"
    registers = max_registers(blocks, TYPES[common], packed=name is not None)
    pointers = {"x": kind, "codes": "*i32" if layout else f"*{dense or dtype}", "out": kind}
    if layout is not None:
        pointers |= _scale_pointers(layout)
    if lengths:
        pointers |= {"squares": "*fp32"}
    if norm:
        pointers |= {"out": "*fp32", "residual": "*fp32"} | {name: NORMS[name] for name in tuple(NORMS)[1:]}
    if config.splits > 1:
        pointers |= {"partial": "*fp32"}
    integers = {"x_stride": "i32", "residual_stride": "i32", "rows": "i32"}
    constants: dict[str, object] = {**layout_constants(layout)}
    optional = {"high", "scales", "offsets", "supers", "bias", "residual", "partial", *NORMS}
    constants |= dict.fromkeys(optional - set(pointers))
    types = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
    constants |= {
        "N": 4096, "K": columns, "CHUNKS": columns // CHUNK, "GATE": gate, "LIMIT": 0.0, "ALPHA": 0.0,
        "ASM": common != "fp32", "DTYPE": types[common], "NW": config.warps, "MT": config.tiles,
        "TT": blocks, "SPLITS": config.splits, "PF": ahead, "KW": kwidth(),
    }  # fmt: skip
    signature = dict.fromkeys(decode_kernel.arg_names, "constexpr") | pointers | integers | {"eps": "fp32"}
    after = (
        f"{' lengths' if lengths else ''}{' norm' if norm else ''}{f' {gate}' if gate else ''}{' HBM' if hbm else ''}"
    )
    title = f"{name or f'dense {dense}'.removesuffix(' None')} {dtype} rows={rows} {tuple(config)}{after}"
    other_spills = SPILLS_37.get(title, {}) if triton_version().startswith("3.7.") else {}
    return CompileCase(
        f"matmul {title}",
        decode_kernel,
        signature,
        constants,
        (*pointers, "x_stride"),
        config.warps,
        {"num_stages": 1} | ({"maxnreg": registers} if registers else {}),
        loop_weights=32 * config.tiles * max(ahead, 1)  # of PF = 2 a loop has two steps
        if layout and common != "fp32"
        else 0,  # the loop of dense rows is unrolled for sm_80
        budget=budget,
        spills=20 if registers == FEW_REGISTERS else 0,
        spills_on=SPILLS.get((name, dtype, rows, columns), {}) | other_spills,
        wide_loads=layout is None or layout.group != 16,  # four lanes read a sector of x together, 8 bytes each
        main=dtype == "fp16" and (name, rows) in (("q4_0", 16), ("q4_k", 8), ("q6_k", 8), (None, 8)),
    )


def _scale_pointers(layout: Layout) -> dict[str, str]:
    def pointer(kind: str) -> str:
        together = {2: "*i16", 4: "*i32"}.get(_SIZES[kind] * layout.per_entry)
        return together if together and layout.per_entry > 1 else _POINTERS[kind]

    pointers = {"scales": pointer(layout.scale)}
    if layout.bits in (5, 6):
        pointers["high"] = "*i32"
    if layout.offset != "none":
        pointers["offsets"] = pointer("u8" if layout.offset == "zero" else layout.scale)
    if layout.two_level:
        pointers["supers"] = "*i32" if layout.offset == "min" else "*fp16"
    return pointers
