"""The emulated cases of the ops on the KV cache: write_kv and attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import torch

from edgelm.kernels.attention import launch
from edgelm.kernels.cache import FORMATS
from tests.kernels import test_attention, test_write_kv
from tests.kernels.cases import attention as attention_cases
from tests.kernels.cases import write_kv as write_cases
from tests.kernels.emulated.case import CAPABILITIES, EmulatedCase
from tests.kernels.emulated.outcome import Outcome, equal, within, worst
from tests.kernels.seeds import generator

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Attend = attention_cases.Case
MAIN_OF_KV = {name: (CAPABILITIES[-1 - at % len(CAPABILITIES)],) for at, name in enumerate(FORMATS)}


def cases() -> Iterator[EmulatedCase]:
    """Yield the cases of both ops."""
    for case in write_cases.CASES:
        main = MAIN_OF_KV[case.format] if case.head_dim == 64 else ()
        dtype = str(case.dtype).removeprefix("torch.")
        yield EmulatedCase("write_kv", dtype, case.tokens, case.name, partial(_write, case), kv=case.format, main=main)
    long = Attend("int8", 64, 2, 1, (2,), (600,), sinks=True, dtype=BF16)
    yield EmulatedCase("attention", "bfloat16", 2, f"{long.name} by chunk", partial(_by_chunk, long), kv="int8")
    for case, split in _attention():
        main = ()
        if case in _LLAMA[:5] and case.query_lens == (1, 3):
            main = MAIN_OF_KV[case.format]
        elif case.format == "int8" and case in _LLAMA and case.query_lens == (18, 2):
            main = (90,)
        detail = f"{case.name}{' split' if split else ''}"
        dtype = str(case.dtype).removeprefix("torch.")
        rows = max(case.query_lens)
        yield EmulatedCase("attention", dtype, rows, detail, partial(_attend, case, split), kv=case.format, main=main)


# as models run it: bf16 activations, heads of 64 and 128, a float16 cache; decoding with a draft beside it, prompts
_LLAMA = [
    *(Attend(name, 64, 4, 1, (1, 3), (300, 70), dtype=BF16) for name in FORMATS),
    *(Attend(name, 128, 2, 1, (2,), (45,), dtype=BF16) for name in FORMATS),
    *(Attend(name, 64, 4, 1, (18, 2), (70, 40), dtype=BF16) for name in FORMATS),
    *(Attend(name, 128, 2, 1, (20,), (50,), dtype=F16) for name in FORMATS),
    *(Attend(name, 64, 2, 1, (20,), (200,), dtype=BF16) for name in FORMATS),  # several tiles of tokens
    *(Attend(name, 128, 2, 1, (20,), (300,), dtype=BF16) for name in FORMATS),
    *(Attend(name, 64, 2, 2, (17, 1), (60, 40), 30, 4.0, sinks=True, dtype=BF16) for name in FORMATS),
    *(Attend(name, 64, 2, 1, (2,), (60,), 30, 4.0, sinks=True, dtype=BF16) for name in FORMATS),
]
_SPLIT = [Attend(name, 64, 2, 1, (17,), (140,), 0, 0.0, sinks=True, dtype=BF16) for name in FORMATS]


def _attention() -> Iterator[tuple[Attend, bool]]:
    """Yield the cases, and whether the context of their prompts is shared by several programs."""
    for case in dict.fromkeys([*_LLAMA, *attention_cases.TRITON_CASES, *attention_cases.LONG_TRITON_CASES]):
        yield case, False
    for case in _SPLIT:
        yield case, True


def _write(case: write_cases.Case, seed: int) -> Outcome:
    """Write entries over random bytes: every byte of the cache is that of the reference."""
    g = generator(seed)
    given = write_cases.inputs(case, g)
    test_write_kv.poison(given.cache, g)
    expected = given._replace(cache=test_write_kv.copied(given.cache))
    rows = [(test_write_kv.run(given, "triton"), test_write_kv.run(expected, "reference"))]
    planes = [(plane, expected.cache.planes[name]) for name, plane in given.cache.planes.items()]
    # codes of a poisoned cache are no numbers: they are compared as bytes
    codes = [tuple(part.view(torch.uint8) for part in pair) for pair in planes]
    return worst([*(equal(*pair) for pair in rows), *(equal(*pair) for pair in codes)])


def _by_chunk(case: Attend, seed: int) -> Outcome:
    """Add up one chunk of the context at a time, as with long contexts several."""
    with patch.object(launch, "AT_ONCE", 1):
        return _attend(case, False, seed)


def _attend(case: Attend, split: bool, seed: int) -> Outcome:
    given = attention_cases.inputs(case, generator(seed))
    with patch.object(launch, "MIN_SPLIT", 64 if split else launch.MIN_SPLIT):
        got = test_attention.run(case, given, "triton")
    return within(got, test_attention.exact(case, given), test_attention.bound(case, given))
