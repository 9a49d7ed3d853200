"""`write_kv`: the kernel writes the bytes of the reference, and nothing else in the cache changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Generator, Tensor

from edgelm.kernels.cache import BLOCK_LEN, FORMATS, LayerCache, allocate, read
from edgelm.kernels.cache.quantize import CodeKind, encode, rotate
from edgelm.kernels.choice import NoKernelError
from edgelm.kernels.rope import apply_rope
from edgelm.kernels.write_kv import write_kv
from tests.counts import Count
from tests.kernels.cases.write_kv import CASES, Case, Inputs, inputs

REPEATS = Count(test=1, soak=20)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def poison(cache: LayerCache, generator: Generator) -> None:
    """Fill all planes with random bytes."""
    for plane in cache.planes.values():
        stored = plane.view(torch.uint8)
        stored[:] = torch.randint(0, 256, stored.shape, dtype=torch.uint8, generator=generator)


def copied(cache: LayerCache) -> LayerCache:
    planes = {name: plane.clone() for name, plane in cache.planes.items()}
    return LayerCache(cache.format, cache.num_kv_heads, cache.head_dim, **planes)


def run(given: Inputs, implementation: str, out_dtype: torch.dtype | None = None) -> Tensor:
    return write_kv(
        *given[:6],
        rope=given.rope,
        q_norm=given.q_norm,
        k_norm=given.k_norm,
        v_norm=given.v_norm,
        eps=1e-5,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def rounded_down(x: Tensor) -> Tensor:
    """Return float32 as bfloat16, rounded towards zero as in Triton's interpreter; GPUs round to nearest."""
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.fixture
def several_heads_from_5_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give programs several heads for fewer tokens than on a GPU, since a program takes the interpreter 20 ms."""
    monkeypatch.setattr("edgelm.kernels.write_kv.kernel.FEW_TOKENS", 4)


@pytest.mark.usefixtures("nan_in_new_memory", "several_heads_from_5_tokens_on")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_writes_the_bytes_of_the_reference(case: Case, generator: Generator):
    for _ in range(REPEATS):
        given = inputs(case, generator)
        poison(given.cache, generator)
        expected = given._replace(cache=copied(given.cache))
        exact = run(expected, "reference", torch.float32)
        assert torch.equal(run(given, "triton", torch.float32), exact)
        for name, plane in given.cache.planes.items():
            reference_plane = expected.cache.planes[name]
            if plane.dtype == torch.bfloat16:
                wide = given._replace(cache=allocate(given.cache.format, *_size(given.cache), torch.float32))
                run(wide, "reference")
                written = given.slot_mapping[given.slot_mapping >= 0]
                keys, values = read(wide.cache, torch.arange(wide.cache.num_blocks), wide.cache.num_blocks * BLOCK_LEN)
                got = read(given.cache, torch.arange(wide.cache.num_blocks), wide.cache.num_blocks * BLOCK_LEN)
                for stored, value in zip(got, (keys, values), strict=True):
                    nearest, down = value[written].bfloat16().float(), rounded_down(value[written]).float()
                    assert ((stored[written] == nearest) | (stored[written] == down)).all()
            else:
                assert same_bytes(plane, reference_plane), name


def _size(cache: LayerCache) -> tuple[int, int, int, str]:
    return cache.num_blocks, cache.num_kv_heads, cache.head_dim, "cpu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_result_has_the_type_of_q_and_is_not_rotated_by_hadamard(dtype: torch.dtype, generator: Generator):
    given = inputs(Case("k6v4", 64, 2, 1, 3, "neox", dtype=dtype), generator)
    exact = run(given, "reference", torch.float32)
    assert given.rope is not None
    assert torch.equal(exact, apply_rope(given.q, given.positions, given.rope))
    assert torch.equal(run(given, "reference"), exact.to(dtype))
    out = run(given, "triton")
    assert out.dtype == dtype
    assert out.is_contiguous()
    nearest, down = exact.to(dtype), rounded_down(exact).to(dtype)
    assert ((out == nearest) | (out == down)).all() if dtype == torch.bfloat16 else torch.equal(out, nearest)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_only_the_entries_of_its_tokens_change(name: str, implementation: str, head_dim: int, generator: Generator):
    given = inputs(Case(name, head_dim, 2, 3, 2, "neox"), generator)
    cache = given.cache
    poison(cache, generator)
    before = copied(cache)
    run(given, implementation)
    blocks, length = torch.arange(cache.num_blocks), cache.num_blocks * BLOCK_LEN
    others = torch.ones(length, dtype=torch.bool)
    others[given.slot_mapping] = False
    for now, then in zip(read(cache, blocks, length), read(before, blocks, length), strict=True):
        assert same_bytes(now[others].contiguous(), then[others].contiguous())
    changed = 0
    for key, plane in cache.planes.items():
        changed += int((plane.view(torch.uint8) != before.planes[key].view(torch.uint8)).sum())
    size = len(given.slot_mapping) * cache.format.bytes_per_token(cache.num_kv_heads, head_dim)
    assert 0.5 * size < changed <= size


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", ["f16", "int8", "k6v4"])
def test_tokens_without_a_slot_are_not_written(name: str, implementation: str, generator: Generator):
    given = inputs(Case(name, 32, 2, 1, 3), generator)
    poison(given.cache, generator)
    before = copied(given.cache)
    out = run(given._replace(slot_mapping=torch.tensor([-1, -32, -5])), implementation)
    assert all(same_bytes(plane, before.planes[name]) for name, plane in given.cache.planes.items())
    assert torch.equal(out, run(given, "reference"))


@pytest.mark.usefixtures("several_heads_from_5_tokens_on")
@pytest.mark.parametrize("name", FORMATS)
def test_an_entry_does_not_depend_on_the_others_of_its_batch(name: str, generator: Generator):
    """Programs have one head for few tokens, and several for many."""
    given = inputs(Case(name, 32, 3, 2, 5, norm=True), generator)
    together, apart = copied(given.cache), copied(given.cache)
    queries = run(given._replace(cache=together), "triton")
    few = Inputs(*(tensor[3:5] for tensor in given[:5]), apart, given.rope, given.q_norm, given.k_norm)
    assert torch.equal(run(few, "triton"), queries[3:5])
    blocks, length = torch.arange(apart.num_blocks), apart.num_blocks * BLOCK_LEN
    for many, one in zip(read(together, blocks, length), read(apart, blocks, length), strict=True):
        assert torch.equal(many[few.slot_mapping], one[few.slot_mapping])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_views_of_one_tensor_and_copies_are_stored_alike(implementation: str, generator: Generator):
    given = inputs(Case("k8v4", 32, 3, 2, 4), generator)
    assert not given.k.is_contiguous()
    copy = given._replace(
        q=given.q.contiguous(), k=given.k.contiguous(), v=given.v.contiguous(), cache=copied(given.cache)
    )
    assert torch.equal(run(given, implementation), run(copy, implementation))
    assert all(same_bytes(plane, copy.cache.planes[name]) for name, plane in given.cache.planes.items())


def test_the_norm_is_that_of_each_head(generator: Generator):
    given = inputs(Case("f16", 64, 3, 2, 4, "none", norm=True, dtype=torch.float32), generator)
    assert given.q_norm is not None
    wide = given.q.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * given.q_norm.double()
    # The mean, the root, its inverse and two products are rounded, each by half a unit in the last place
    limit = 6 * 2.0**-24 * expected.abs()
    assert ((run(given, "reference") - expected).abs() <= limit).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [8, 24])
def test_the_reference_takes_any_multiple_of_8(name: str, head_dim: int, generator: Generator):
    given = inputs(Case(name, head_dim, 2, 1, 3, dtype=torch.float32), generator)
    with pytest.raises(NoKernelError, match=f"head size {head_dim} is not one of 16, 32, 64"):
        run(given, "triton")
    run(given, "reference")
    keys, _ = read(given.cache, torch.arange(4), 4 * BLOCK_LEN)
    assert given.rope is not None
    expected = apply_rope(given.k, given.positions, given.rope)[0]
    error = {"f16": 2.0**-11, "int8": 0.5 / 127, "fp8": 2.0**-4, "k8v4": 0.5 / 127, "k6v4": 32**0.5 / 64}[name]
    assert (keys[given.slot_mapping[0]] - expected).abs().max() <= expected.abs().max() * error * 1.02


def test_rotation_adds_in_the_order_of_the_reference(generator: Generator):
    """Another order changes last bits, and rounding to codes nearly always hides them."""
    from tests.kernels.cache_kernels import rotated

    x = torch.randn(4, 128, generator=generator)
    assert torch.equal(rotated(x), rotate(x))


@pytest.mark.parametrize("in_pairs", [False, True])  # as for Triton before 3.9
@pytest.mark.parametrize(("kind", "reach"), [("int8", 127), ("fp8", 448), ("int6", 32), ("int4", 8)])
def test_codes_are_those_of_the_reference(
    kind: CodeKind, reach: int, in_pairs: bool, generator: Generator, monkeypatch: pytest.MonkeyPatch
):
    """Cover what random rows rarely have: halves, numbers far below the largest one, two largest numbers."""
    from tests.kernels.cache_kernels import quantized

    monkeypatch.setattr("edgelm.kernels.cache.kernel.IN_PAIRS", in_pairs)
    x = torch.zeros(8, 64)  # the first row stays zeros
    if kind == "fp8":
        exact = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        halves = torch.cat([exact[:1], (exact[1:] + exact[:-1]) / 2])
    else:
        halves = torch.arange(-16, 16, 0.5)
    x[1] = halves.clamp(0.5 - reach, reach - 0.5)
    x[1, ::32] = reach  # the scale of each group is 1
    x[2] = -x[1]
    x[3:] = torch.randn(5, 64, generator=generator) * 2.0 ** torch.randint(-20, 1, (5, 64), generator=generator)
    x[4, 1::32] = -x[4].abs().amax()
    x[4, 30::32] = x[4].abs().amax()
    x[5] *= 2.0**-20  # the scale is a denormal float16, or 0
    codes, scales = quantized(x, kind)
    reference_codes, reference_scales = encode(x, kind)
    assert torch.equal(scales, reference_scales)
    assert torch.equal(codes, reference_codes)


PTX = """
from tests.kernels.compile_case import compile_for
from tests.kernels.cases.write_kv import compile_cases
print(next(compile_for(case, 80).asm["ptx"] for case in compile_cases() if "int8" in case.name and "norm" in case.name))
"""


def test_compiled_code_rounds_each_operation_as_the_reference_does():
    """No float32 operation is fused or approximate, and none flushes small numbers to zero."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PTX], env=environment, capture_output=True, text=True, check=True)
    pattern = r"\b(?:fma|mad|mul|add|sub|div|sqrt|rsqrt|rcp|sin|cos)\.[\w.]*f(?:32|64)\b"
    operations = set(re.findall(pattern, done.stdout))
    assert {"mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= operations
    assert operations <= {f"{name}.rn.f{bits}" for name in ("mul", "add", "sub", "div", "sqrt") for bits in (32, 64)}


def test_no_tokens_need_no_launch():
    cache = allocate(FORMATS["int8"], 1, 2, 32, "cpu")
    none = torch.zeros(0, 2, 32)
    at = torch.zeros(0, dtype=torch.int32)
    out = write_kv(none, none, none, at, at.long(), cache, rope=None, implementation="triton")
    assert out.shape == (0, 2, 32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot_mapping": torch.zeros(2, dtype=torch.int32)},  # too small for an offset
        {"slot_mapping": torch.zeros(4, dtype=torch.int64)[::2]},
        {"positions": torch.zeros(2, dtype=torch.int64)},
        {"positions": torch.zeros(4, dtype=torch.int32)[::2]},
        {"k_norm": torch.ones(32).half()},
        {"q_norm": torch.ones(64)[::2]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_tensors_that_a_kernel_would_misread_are_refused(wrong: dict[str, Tensor], generator: Generator):
    given = inputs(Case("int8", 32, 2, 1, 2, norm=True), generator)
    with pytest.raises(AssertionError):
        run(given._replace(**wrong), "triton")


def test_strides_within_a_head_are_refused():
    cache = allocate(FORMATS["int8"], 1, 2, 32, "cpu")
    transposed = torch.zeros(1, 32, 2).transpose(1, 2)
    with pytest.raises(AssertionError):
        write_kv(transposed, transposed, transposed, torch.zeros(1), torch.zeros(1).long(), cache, rope=None)
