"""The size that a file may have: as users write it, and as this machine's memory allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.backends.llama.memory import LlamaMemory
from edgelm.backends.plan import MachineMemory, plan
from edgelm.base.config import DEFAULT_CONTEXT, Settings
from edgelm.base.errors import ModelError, UsageError
from edgelm.making.quantization.file_size import fitting_bytes, parse_budget
from tests.library.model_shapes import dense_model

GIB = 2**30
MODEL = dense_model(
    layers=32, width=4096, heads=32, kv_heads=8, head_len=128, vocab_size=128_000, context=131_072, tied=False
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4.5GiB", 4.5 * GIB),
        ("4.5 GiB", 4.5 * GIB),
        ("4500MB", 4500e6),
        (" 700mib ", 700 * 2**20),
        ("0.5tb", 5e11),
        ("4.5bpw", 4.5 * 8e9 / 8),
        ("4 bits", 4 * 8e9 / 8),
    ],
)
def test_sizes(text: str, nbytes: float) -> None:
    assert parse_budget(text, 8 * 10**9) == nbytes


@pytest.mark.parametrize(
    "text", ["", "4.5", "GiB", "-4GiB", "0GiB", "4,5GiB", "nan GiB", "64bpw", "9e9GiB", "4.5 GiB x"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"4\.5GiB"):
        parse_budget(text, 8 * 10**9)


@settings(max_examples=30)
@given(st.integers(1, 64 * 2**10))
def test_weights_of_that_size_run_here_with_the_usual_context_and_larger_ones_do_not(free_mib: int) -> None:
    machine = MachineMemory(free_bytes=free_mib * 2**20, cores=4)
    memory = LlamaMemory(MODEL, sequences=Settings().parallel)
    planned = plan(MODEL, Settings(), machine, memory).chosen
    runs = planned is not None and (planned.kv, planned.context) == ("f16", DEFAULT_CONTEXT)
    try:
        fits = memory.weights.resident <= fitting_bytes(MODEL, Settings(), machine)
    except ModelError:
        fits = False
    assert fits == runs


def test_a_context_that_alone_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="beside its weights"):
        fitting_bytes(MODEL, Settings(ctx=131_072), MachineMemory(free_bytes=4 * GIB, cores=4))
