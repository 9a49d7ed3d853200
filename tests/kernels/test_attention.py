"""Attention over the cache: reference and kernels against float64, and rows that are equal in every bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from edgelm.kernels.attention import VERIFY_LEN, attention, launch
from edgelm.kernels.attention import decode_kernel as kernels
from edgelm.kernels.cache import BLOCK_LEN, FORMATS, allocate
from edgelm.kernels.cache.order import token_column
from edgelm.kernels.choice import NoKernelError
from edgelm.kernels.write_kv import write_kv
from tests.counts import Count
from tests.kernels.attention_bounds import bound, exact
from tests.kernels.cases.attention import (
    LONG_TRITON_CASES,
    REFERENCE_CASES,
    TRITON_CASES,
    Case,
    Inputs,
    inputs,
    poison,
    unseen,
)
from tests.kernels.seeds import SEED, generator

LONGEST = Count(test=1_000, soak=40_000)
RANDOM_CASES = Count(test=4, soak=100)


def run(case: Case, given: Inputs, implementation: str, **changed) -> Tensor:
    """Return the rows of all sequences in float32."""
    arguments = {
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": given.sinks,
        "max_query_len": max(case.query_lens),
        "out_dtype": torch.float32,
        "implementation": implementation,
    }
    q, cache, block_tables, query_start_loc, seq_lens, _ = given
    return attention(q, cache, block_tables, query_start_loc, seq_lens, **(arguments | changed))[
        : int(query_start_loc[-1])
    ]


def assert_near(got: Tensor, expected: Tensor, limit: Tensor) -> None:
    off = (got.double() - expected).abs()
    assert bool((off <= limit).all()), f"off by {(off / limit).nan_to_num(math.inf).max():.3g} bounds"  # so is NaN


def check(case: Case, implementation: str, seed: int) -> None:
    given = inputs(case, generator(seed))
    got = run(case, given, implementation)
    assert_near(got, exact(case, given), bound(case, given))


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("case", REFERENCE_CASES, ids=lambda case: case.name)
def test_the_reference_is_attention(case, seed):
    check(case, "reference", seed)


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("name", FORMATS)
def test_the_reference_at_length(name, seed):
    check(Case(name, 64, 4, 1, (1, 2), (LONGEST, 2)), "reference", seed)


@pytest.mark.parametrize("seed", range(SEED, SEED + RANDOM_CASES))
def test_the_reference_on_ragged_batches(seed):
    check(random_case(seed, torch.float32, 200, 40), "reference", seed)


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("case", TRITON_CASES + LONG_TRITON_CASES[: Count(test=0, soak=99)], ids=lambda case: case.name)
def test_the_kernels_are_attention(case, seed):
    check(case, "triton", seed)


@pytest.mark.skipif(not Count(test=0, soak=1), reason="many minutes: with --soak")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(SEED, SEED + RANDOM_CASES))
def test_the_kernels_on_ragged_batches(seed):
    check(random_case(seed, torch.float16 if seed % 2 else torch.float32, 300, 20), "triton", seed)


def random_case(seed: int, dtype: torch.dtype, longest: int, most: int) -> Case:
    random = generator(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=random))]

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=random))

    seq_lens = [pick(0, 1, 31, 32, 33, number(1, longest)) for _ in range(number(1, 4))]
    query_lens = [min(pick(0, 1, 1, number(1, 16), number(1, most)), length) for length in seq_lens]
    query_lens[0], seq_lens[0] = max(query_lens[0], 1), max(seq_lens[0], 1)
    return Case(
        pick(*FORMATS),
        pick(16, 64, 80, 96, 128, 256),
        pick(1, 3, 4, 8),
        pick(1, 2),
        tuple(query_lens),
        tuple(seq_lens),
        window=pick(0, 0, 1, 32, number(1, longest)),
        softcap=pick(0.0, 0.0, 4.0),
        sinks=pick(False, True),
        dtype=dtype,
    )


# -- decode and verify give the same bits ------------------------------------------------------------------------------


def of_rows(given: Inputs, rows: slice, seq_lens: list[int], block_tables: Tensor) -> Inputs:
    """Return the inputs for some rows of a sequence, or for several sequences with a row each."""
    q = torch.cat([given.q[rows], given.q[-1:]])
    query_lens = [1] * len(seq_lens) if len(seq_lens) == q.shape[0] - 1 else [q.shape[0] - 1]
    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
    return given._replace(
        q=q,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
    )


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize(
    "case",
    [  # the eight rows are on both sides of a chunk's end
        Case("int8", 32, 3, 1, (8,), (260,), dtype=torch.float16),
        Case("k6v4", 32, 1, 1, (8,), (260,), window=65, sinks=True, dtype=torch.bfloat16),
        Case("f16", 32, 1, 1, (8,), (260,), window=40, dtype=torch.float16),
    ][: Count(test=2, soak=3)],
    ids=lambda case: case.name,
)
def test_a_row_is_the_same_alone_and_among_others(case, seed, monkeypatch):
    # The interpreter's products are BLAS', which on some processors adds in another order for another number of rows.
    monkeypatch.setattr(interpreter.np, "matmul", exact_matmul)
    given = inputs(case, generator(seed))
    many = run(case, given, "triton", max_query_len=VERIFY_LEN)
    first = case.seq_lens[0] - case.query_lens[0]
    monkeypatch.setattr(launch, "num_sms", lambda _: 1)  # with another number of programs too:
    monkeypatch.setattr(launch, "WAVES", 1)  # one, which takes all tiles of a chunk
    assert torch.equal(run(case, given, "triton", max_query_len=VERIFY_LEN), many)
    alone = of_rows(given, slice(6, 7), [first + 7], given.block_tables)
    assert torch.equal(run(case, alone, "triton", max_query_len=1)[0], many[6])
    block_tables = given.block_tables.expand(2, -1).contiguous()
    ragged = of_rows(given, slice(3, 5), [first + 4, first + 5], block_tables)
    assert torch.equal(run(case, ragged, "triton", max_query_len=1), many[3:5])


def test_programs_of_several_turns_leave_out_no_chunk(monkeypatch):
    case = Case("int8", 32, 1, 1, (1, 1), (1_600, 300), dtype=torch.float16)  # seven chunks and two
    given = inputs(case, generator(SEED))
    at_once = run(case, given, "triton", max_query_len=1)
    monkeypatch.setattr(launch, "WAVES", 1)
    for programs in (2, 3):
        monkeypatch.setattr(launch, "num_sms", lambda _, programs=programs: programs)
        assert torch.equal(run(case, given, "triton", max_query_len=1), at_once)


def exact_matmul(a, b, dtype=None, _matmul=np.matmul):
    """Round each product once: the order in which its terms are added does not show."""
    return _matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype or np.result_type(a, b))


@pytest.mark.parametrize("seed", [SEED])
def test_a_decoded_row_is_the_same_beside_a_prompt(seed):
    case = Case("int8", 32, 2, 1, (17, 1), (17, 40), dtype=torch.float16)
    given = inputs(case, generator(seed))
    alone = of_rows(given, slice(17, 18), [40], given.block_tables[1:])
    assert torch.equal(run(case, alone, "triton", max_query_len=1)[0], run(case, given, "triton")[17])


def test_less_scratch_changes_nothing(monkeypatch):
    case = Case("int8", 32, 1, 1, (1, 2, 0, 1, 1), (5, 40, 0, 33, 1), dtype=torch.float16)
    given = inputs(case, generator(SEED))
    together = run(case, given, "triton")
    row_bytes = 34 * 4  # of one head and one chunk
    monkeypatch.setattr(launch, "MAX_SCRATCH", 4 * row_bytes)
    assert [launch.seqs_per_launch(row_bytes, 5, query_len, 5) for query_len in (1, 2, 5)] == [4, 2, 1]
    assert launch.seqs_per_launch(1 << 30, 16, 16, 5) == 1
    assert torch.equal(run(case, given, "triton"), together)


@pytest.mark.parametrize("fitting", [3, 16, 45, 63, 64, 100, 496, 511, 512, 4096])
def test_no_step_has_more_scratch_than_the_largest(fitting):
    row_bytes = launch.MAX_SCRATCH // fitting
    for num_seqs in (1, 2, 3, 5, 31, 32, 33, 60, 64):

        def rows(num_tokens, query_len, count):
            some = min(launch.seqs_per_launch(row_bytes, num_tokens, query_len, count), count)
            return min(num_tokens, some * query_len)

        largest = rows(1024, VERIFY_LEN, num_seqs)
        for count in range(1, num_seqs + 1):
            for query_len in range(1, VERIFY_LEN + 1):
                assert rows(count * query_len, query_len, count) <= largest
            assert rows(1024, VERIFY_LEN, count) <= largest  # prompts


def test_more_sequences_than_a_launch_takes():
    num = launch.MAX_SEQS + 1
    case = Case("int8", 32, 1, 1, (*[0] * 31, 1, 1), (*[0] * 31, 9, 7))
    assert len(case.query_lens) == num
    check(case, "triton", SEED)


def test_absent_sequences_take_no_program_from_existing_ones():
    """A graph has room for many sequences; a single one in it gets as many programs as without the room."""
    case = Case("int8", 32, 1, 2, (1,), (270,), dtype=torch.float16)
    given = inputs(case, generator(SEED))
    padded = given._replace(
        block_tables=torch.cat(
            [given.block_tables, given.block_tables.new_full((7, given.block_tables.shape[1]), -77)]
        ),
        query_start_loc=torch.cat([given.query_start_loc, given.query_start_loc[-1:].expand(7)]),
        seq_lens=torch.cat([given.seq_lens, given.seq_lens.new_zeros(7)]),
    )
    grids = grids_of(lambda: run(case, padded, "triton", max_query_len=VERIFY_LEN))
    assert grids == {"attend_chunks": (2, 8), "combine_chunks": (2, 2, 1)}  # num_sms is 4 without a GPU; q has 2 rows
    assert torch.equal(run(case, padded, "triton", max_query_len=VERIFY_LEN), run(case, given, "triton"))


@pytest.mark.parametrize("kv", ["f16", "k6v4"])
def test_prompts_alone_launch_no_kernel_of_few_rows(kv: str):
    case = Case(kv, 32, 1, 2, (20, 17), (300, 17), dtype=torch.float16)
    given = inputs(case, generator(SEED))
    assert set(grids_of(lambda: run(case, given, "triton", only_prompts=True))) == {"attend_tiles"}
    assert set(grids_of(lambda: run(case, given, "triton"))) == {"attend_tiles", "attend_chunks", "combine_chunks"}
    assert torch.equal(run(case, given, "triton", only_prompts=True), run(case, given, "triton"))
    few = Case(kv, 32, 1, 2, (20, 16), (300, 17), dtype=torch.float16)
    with pytest.raises(AssertionError):
        run(few, inputs(few, generator(SEED)), "reference", only_prompts=True)


def grids_of(work: Callable[[], object]) -> dict[str, tuple[int, ...]]:
    """Return the grid of each kernel that `work` launches."""
    from triton.runtime.interpreter import InterpretedFunction

    grids = {}

    def run_kernel(kernel, *_, grid, **__):
        grids[kernel.fn.__name__] = grid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run_kernel)
        work()
    return grids


# -- prompts on split contexts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("f16", 32, 1, 1, (1, 17, 0, 17), (3, 140, 0, 70), sinks=True, dtype=torch.float16),
        Case("k6v4", 32, 1, 1, (17,), (150,), window=70, softcap=4.0),
    ],
    ids=lambda case: case.name,
)
def test_prompts_on_a_long_context_are_shared(case, monkeypatch):
    monkeypatch.setattr(launch, "MIN_SPLIT", 64)
    given = inputs(case, generator(SEED))
    assert launch.num_splits(3, 1, 320) == 5
    assert len(grids_of(lambda: run(case, given, "triton"))) == 3
    check(case, "triton", SEED)


def test_a_question_about_a_long_context_fills_a_gpu():
    """32 tokens with 4 query heads per KV head are two tiles; with 8 KV heads only 16 programs, for 132 processors."""
    assert launch.num_splits(3, 8, 131072) * 3 * 8 >= 240
    assert launch.num_splits(3, 8, 1024) == 2
    assert launch.num_splits(32 + 1, 8, 131072) == 1  # 512 tokens with 4 query heads per KV head


@pytest.mark.parametrize("case", [Case("int8", 32), Case("k6v4", 32, 1, 1, (17,), (17,))], ids=lambda case: case.name)
def test_a_q_beyond_float16(case):
    case = case._replace(dtype=torch.bfloat16)
    given = inputs(case, generator(SEED))
    large = given._replace(q=given.q * 2.0**16)
    got = run(case, large, "triton", scale=case.head_dim**-0.5 * 2.0**-16)
    assert_near(got, exact(case, given), bound(case, given))


def test_chunks_tile_the_positions():
    ends = torch.cat([torch.arange(0, 10_000), torch.randint(0, 2**21, (2_000,), generator=generator(SEED))])
    positions = torch.cat([ends, torch.tensor([16_383, 16_384, 49_151, 49_152, 114_687, 114_688])]).int()
    positions = positions[: positions.numel() // 2 * 2]
    chunks, begins, following = (torch.empty_like(positions) for _ in range(3))
    _chunks_of[1,](positions, chunks, begins, following, positions.numel(), size=16_384)
    assert bool(((begins <= positions) & (positions < following)).all())
    assert bool((begins % (4 * BLOCK_LEN) == 0).all())
    assert chunks.tolist() == [launch.num_chunks(position + 1) - 1 for position in positions.tolist()]


def _chunks_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def chunks_of(positions, chunks, begins, following, num, size: tl.constexpr):
        i = tl.arange(0, size)
        chunk = kernels.chunk_of(tl.load(positions + i, mask=i < num, other=0))
        tl.store(chunks + i, chunk, mask=i < num)
        tl.store(begins + i, kernels.chunk_start(chunk), mask=i < num)
        tl.store(following + i, kernels.chunk_start(chunk + 1), mask=i < num)

    return chunks_of


_chunks_of = _chunks_kernel()


# -- memory that is read and written -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_query_len", [1, 20])
def test_only_rows_of_sequences_are_written(max_query_len, monkeypatch):
    case = Case("int8", 32, 1, 1, (1,), (3,))
    given = inputs(case, generator(SEED))
    q = torch.cat([given.q, given.q])
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: torch.full(_flat(shape), torch.nan, **kwargs))
    out = attention(q, *given[1:5], scale=1.0, max_query_len=max_query_len, implementation="triton")
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()


def _flat(shape):
    return tuple(shape[0]) if len(shape) == 1 else shape


class Guarded:
    """Replaces torch.empty: its memory is NaN, between margins of NaN that must not change."""

    MARGIN = 1 << 16

    def __init__(self):
        self.wholes = []

    def empty(self, *shape, dtype=torch.float32, device="cpu"):
        size = math.prod(_flat(shape))
        whole = torch.full((size + 2 * self.MARGIN,), torch.nan, dtype=dtype)
        self.wholes.append(whole)
        return whole[self.MARGIN : self.MARGIN + size].view(_flat(shape))

    def assert_unharmed(self):
        for whole in self.wholes:
            assert whole[: self.MARGIN].isnan().all()
            assert whole[-self.MARGIN :].isnan().all()


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "max_query_len"),
    [
        ((5, 1, 2), (258, 40, 33), 2),  # draft rows, in a launch for fewer
        ((17, 1, 2), (40, 1, 33), 1),  # a prompt, in a launch without prompts
        ((18, 3), (40, 33), 17),  # a prompt that is longer than the launch allows
    ],
)
def test_rows_beyond_the_most_are_not_written(query_lens, seq_lens, max_query_len, monkeypatch):
    case = Case("int8", 32, 2, 1, query_lens, seq_lens)
    given = inputs(case, generator(SEED))
    whole = run(case, given, "reference")
    guarded = Guarded()
    monkeypatch.setattr(torch, "empty", guarded.empty)
    got = run(case, given, "triton", max_query_len=max_query_len)
    guarded.assert_unharmed()
    inside = torch.cat([torch.arange(count) < max_query_len for count in query_lens])
    assert_near(got[inside], whole[inside].double(), 2 * bound(case, given)[inside])
    assert got[~inside].isnan().all()


@pytest.mark.parametrize("wrong", ["length below the rows", "length beyond the table", "start beyond q", "negative"])
def test_invalid_lengths_harm_no_other_sequence(wrong, monkeypatch):
    case = Case("int8", 32, 1, 1, (2, 3), (33, 40))
    given = inputs(case, generator(SEED))
    expected = run(case, given, "triton")
    query_start_loc, seq_lens = given.query_start_loc.clone(), given.seq_lens.clone()
    if wrong == "length below the rows":
        seq_lens[1] = 2
    elif wrong == "length beyond the table":
        seq_lens[1] = 100_000
    elif wrong == "negative":
        seq_lens[1] = -1
    else:
        query_start_loc[2] = 1000
    guarded = Guarded()
    monkeypatch.setattr(torch, "empty", guarded.empty)
    q, cache, block_tables = given[:3]
    arguments = {"scale": 32**-0.5, "max_query_len": 16, "implementation": "triton"}
    got = attention(q[:-1], cache, block_tables, query_start_loc, seq_lens, **arguments)
    guarded.assert_unharmed()
    assert torch.equal(got[:2], expected[:2])


@pytest.mark.parametrize(("count", "length"), [(8, 40), (16, 300), (100, 128)])
def test_decreasing_starts_cause_no_write_outside(count, length, monkeypatch):
    """Sequences that claim the same tokens have more rows in all than there is room for."""
    monkeypatch.setattr(launch, "MIN_SPLIT", 16)
    given = inputs(Case("f16", 32, 1, 1, (count,), (length,)), generator(SEED))
    query_start_loc = torch.tensor([0, count, 0, count], dtype=torch.int32)
    seq_lens, block_tables = given.seq_lens.expand(3).contiguous(), given.block_tables.expand(3, -1).contiguous()
    guarded = Guarded()
    monkeypatch.setattr(torch, "empty", guarded.empty)
    arguments = {"scale": 32**-0.5, "max_query_len": max(count, 16), "implementation": "triton"}
    with np.errstate(invalid="ignore"):  # parts that were never written are added up
        attention(given.q, given.cache, block_tables, query_start_loc, seq_lens, **arguments)
    guarded.assert_unharmed()


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("count", "length", "window", "split"),
    [(1, 40, 0, False), (3, 130, 0, False), (3, 70, 37, False), (17, 70, 0, False), (17, 130, 40, True)],
)
def test_a_row_knows_nothing_of_what_it_does_not_see(name, count, length, window, split, implementation, monkeypatch):
    """Later draft tokens, positions before its window, and other sequences' leftovers in its blocks are NaN or inf."""
    if split:
        monkeypatch.setattr(launch, "MIN_SPLIT", 64)
    case = Case(name, 32, 1, 1, (count,), (length,), window=window, dtype=torch.float16)
    given = inputs(case, generator(SEED))
    clean = run(case, given, implementation)
    row = count // 2
    position = case.seq_lens[0] - count + row
    seen = range(max(position - window + 1, 0) if window else 0, position + 1)
    free = unseen(given, 0, seen)
    alike = torch.arange(BLOCK_LEN) % 2 == position % 2
    poison(given.cache, free & alike, torch.inf)
    poison(given.cache, free & ~alike, torch.nan)
    with np.errstate(invalid="ignore"):  # the interpreter multiplies inf by 0
        got = run(case, given, implementation)
    assert torch.equal(got[row], clean[row])
    if row + 1 < count:
        assert got[row + 1].isnan().any()  # it sees the poison


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("count", [3, 17])
def test_an_inf_among_the_values_reaches_the_rows_that_see_it(count, implementation):
    case = Case("f16", 32, 1, 1, (count,), (40,), dtype=torch.float16)
    given = inputs(case, generator(SEED))
    clean = run(case, given, implementation)
    column = token_column(torch.tensor(39 % BLOCK_LEN), nibbles=False)
    given.cache.values[given.block_tables[0, 39 // BLOCK_LEN].long(), :, :, column] = torch.inf
    with np.errstate(invalid="ignore"):
        got = run(case, given, implementation)
    assert torch.equal(got[:-1], clean[:-1])
    assert not got[-1].isfinite().any()


def test_no_rows_at_all():
    given = inputs(Case("int8", 32, 1, 1, (1,), (3,)), generator(SEED))
    nothing = given._replace(q=given.q[:0], query_start_loc=torch.zeros(2, dtype=torch.int32))
    for implementation in ("reference", "triton"):
        assert attention(*nothing[:5], scale=1.0, max_query_len=1, implementation=implementation).shape == (0, 1, 32)


def test_the_reasons_of_a_refusal_are_listed():
    cache = allocate(FORMATS["int8"], 1, 1, 72, "cpu")
    block_tables, query_start_loc = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    q = torch.zeros(1, 1, 72)
    with pytest.raises(NoKernelError, match="heads of 72"):
        attention(
            q,
            cache,
            block_tables,
            query_start_loc,
            query_start_loc[1:],
            scale=1.0,
            max_query_len=1,
            implementation="triton",
        )


# -- errors of quantized caches ----------------------------------------------------------------------------------------


def of_format(name: str, dtype16: torch.dtype, keys: Tensor, values: Tensor, q: Tensor) -> Tensor:
    """Return the attention of one row over keys and values that are stored in a format."""
    length, num_kv_heads, head_dim = keys.shape
    cache = allocate(FORMATS[name], -(-length // BLOCK_LEN), num_kv_heads, head_dim, "cpu", dtype16)
    at = torch.arange(length)
    write_kv(keys, keys, values, at.int(), at, cache, rope=None, implementation="reference")
    block_tables = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
    query_start_loc, seq_lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    arguments = {"scale": head_dim**-0.5, "max_query_len": 1, "implementation": "reference"}
    return attention(q[None], cache, block_tables, query_start_loc, seq_lens, **arguments)


def test_the_error_of_each_format():
    """Print the error of each format against exact storage; a rotation helps if a few dimensions of K are large."""
    random = generator(20)
    keys, values = torch.randn(2, 600, 1, 128, generator=random)
    q = torch.randn(16, 128, generator=random)
    outliers = keys.clone()
    outliers[..., [7, 50, 100]] *= 12.0
    exactly = [of_format("f16", torch.float32, k, values, q) for k in (keys, outliers)]
    errors = {}
    print(f"\n{'format':8} {'bits':>5} {'gaussian K':>12} {'outliers in K':>14}")
    for name, kv_format in FORMATS.items():
        stored_as = [of_format(name, torch.float16, k, values, q) for k in (keys, outliers)]
        errors[name] = [float((a - b).norm() / b.norm()) for a, b in zip(stored_as, exactly, strict=True)]
        bits = kv_format.bytes_per_token(1, 128) * 8 / 256
        print(f"{name:8} {bits:5.2f} {errors[name][0]:12.5f} {errors[name][1]:14.5f}")
    for column in (0, 1):
        assert errors["f16"][column] < 2e-3 < errors["int8"][column] < errors["k8v4"][column]
    assert errors["int8"][0] < errors["fp8"][0] < errors["k8v4"][0] < errors["k6v4"][0] < 0.25
    assert math.isfinite(errors["k6v4"][1])
