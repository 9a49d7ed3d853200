"""The promises of a plan hold for every model and every machine."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.backends.llama.memory import LlamaMemory
from edgelm.backends.plan import MIN_CONTEXT, MachineMemory, Plan, plan
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.kv_modes import LLAMA_KV
from edgelm.base.machine.memory import USABLE
from edgelm.checkpoints.summary import ModelFacts
from tests.counts import Count
from tests.library.model_shapes import dense_model

GIB = 2**30
EXAMPLES = Count(test=200, soak=4_000)
MODES = list(LLAMA_KV)

models = st.builds(
    dense_model,
    layers=st.integers(1, 64),
    width=st.sampled_from([64, 576, 2048, 8192]),
    heads=st.sampled_from([2, 8, 64]),
    kv_heads=st.sampled_from([1, 2]),
    head_len=st.sampled_from([32, 48, 64, 80, 128, 256]),
    vocab_size=st.integers(300, 200_000),
    context=st.sampled_from([200, 2048, 8192, 131_072]),
    tied=st.booleans(),
)
free_memory = st.integers(0, 64 * 2**10).map(lambda mib: mib * 2**20)


def planned(model: ModelFacts, free: float, *, least_context: int = 0, **flags: object) -> Plan:
    memory = LlamaMemory(model, sequences=8, copied_types={"Q4_0"}, repeatable=flags.get("repeatable") is True)
    machine = MachineMemory(free_bytes=int(free), cores=4, read_bytes_per_s=30e9)
    return plan(model, Settings(**flags), machine, memory, least_context=least_context, with_options=True)


@settings(max_examples=EXAMPLES)
@given(models, free_memory, st.sampled_from([None, 100, 2048]), st.sampled_from(["auto", "f16", "int8"]))
def test_what_is_chosen_fits_or_an_error_says_why_not(model: ModelFacts, free: int, ctx: int | None, kv: str) -> None:
    if (ctx or 0) > model.summary.context or (kv == "int8" and model.summary.key_lens[0] % 32):
        return
    result = planned(model, free, ctx=ctx, kv=kv)
    for option in result.options:
        assert option.fits == (option.total_bytes <= USABLE * free)
        assert option.total_bytes == result.weights.resident + option.kv_bytes + option.workspace_bytes
    if result.chosen is None:
        with pytest.raises(ModelError, match=r"needs .* GiB of memory with --ctx \d+ --kv \w+, .* GiB are free"):
            result.require()
        return
    chosen = result.require()
    assert chosen.fits
    assert chosen.total_bytes + result.snapshot_bytes <= USABLE * free
    assert chosen.context == ctx if ctx else chosen.context <= model.summary.context
    assert kv in ("auto", chosen.kv)


@settings(max_examples=EXAMPLES)
@given(models, free_memory, st.sampled_from([None, 2048]), st.sampled_from(["auto", "f16"]))
def test_what_an_error_proposes_would_work(model: ModelFacts, free: int, ctx: int | None, kv: str) -> None:
    if (ctx or 0) > model.summary.context:
        return
    result = planned(model, free, ctx=ctx, kv=kv)
    if result.refusal is None:
        return
    proposal = re.search(r"--ctx (\d+) --kv (\w+) would fit", result.refusal.hint)
    if proposal:
        assert planned(model, free, ctx=int(proposal[1]), kv=proposal[2]).require().fits
    else:
        assert planned(model, free, ctx=min(256, model.summary.context)).chosen is None


@settings(max_examples=EXAMPLES)
@given(models, free_memory, st.integers(0, 16 * 2**10))
def test_more_memory_never_gives_less(model: ModelFacts, free: int, more_mib: int) -> None:
    def rank(result: Plan) -> tuple[int, int]:
        chosen = result.chosen
        return (chosen.context, -MODES.index(chosen.kv)) if chosen else (0, 0)

    assert rank(planned(model, free)) <= rank(planned(model, free + more_mib * 2**20))


@settings(max_examples=EXAMPLES)
@given(models)
def test_longer_contexts_and_more_exact_caches_take_more(model: ModelFacts) -> None:
    by_mode: dict[str, list[tuple[int, int]]] = {}
    for option in planned(model, 64 * GIB).options:
        by_mode.setdefault(option.kv, []).append((option.context, option.kv_bytes))
    for sizes in by_mode.values():
        assert sizes == sorted(sizes)
    totals = [[size for _, size in by_mode[kv]] for kv in MODES if kv in by_mode]
    for exact, smaller in pairwise(totals):
        assert all(a > b for a, b in zip(exact, smaller, strict=True))


def test_memory_asks_first_for_a_smaller_cache_then_for_less_context() -> None:
    model = dense_model(layers=48, kv_heads=32)
    chosen = [planned(model, free / 10 * GIB).chosen for free in range(15, 160)]
    order = list(dict.fromkeys((option.context, option.kv) for option in chosen if option))
    assert order[-4:] == [(8192, kv) for kv in reversed(MODES)]
    assert order == sorted(order, key=lambda pair: (pair[0], -MODES.index(pair[1])))
    assert len(order) > 6


@pytest.mark.parametrize(("head_len", "modes"), [(64, MODES), (256, MODES), (48, ["f16"]), (80, ["f16"])])
def test_heads_that_are_no_multiple_of_a_block_are_kept_in_f16(head_len: int, modes: list[str]) -> None:
    model = dense_model(head_len=head_len)
    result = planned(model, 64 * GIB)
    assert list(result.kv_bytes_per_token) == modes
    assert list(dict.fromkeys(option.kv for option in result.options)) == modes
    if "int8" not in modes:
        with pytest.raises(
            ModelError, match=f"--kv int8 needs key heads of a multiple of 32 numbers, this model's have {head_len}"
        ):
            planned(model, 64 * GIB, kv="int8")


def test_a_context_for_every_model_is_at_most_that_of_one() -> None:
    model = dense_model(context=4096)
    chosen = planned(model, 16 * GIB, ctx=32_768, ctx_is_default=True)
    assert chosen.require().context == 4096
    assert chosen.note == "the context is 4,096 tokens, not the 32,768 of ctx: the model was made for no more"
    assert chosen.footprint("cpu").note == chosen.note
    with pytest.raises(EdgeLMError, match="more than the 4,096"):
        planned(model, 16 * GIB, ctx=32_768)
    long = dense_model(context=1_000_000)
    exact = planned(long, 16 * GIB, ctx=8192, ctx_is_default=True)
    assert (exact.require().context, exact.note) == (8192, "")
    short = planned(long, 8 * GIB, ctx=1_000_000, ctx_is_default=True)
    assert MIN_CONTEXT <= short.require().context < 1_000_000
    assert short.note.endswith("of ctx: more does not fit")
    assert planned(long, 8 * GIB, ctx=1_000_000).chosen is None


def test_what_is_asked_for_is_kept() -> None:
    model = dense_model(context=32_768)
    chosen = planned(model, 16 * GIB, ctx=12_345, kv="k8v4", threads=7)
    assert (chosen.require().context, chosen.require().kv, chosen.threads) == (12_345, "k8v4", 7)
    assert planned(model, 16 * GIB).threads == 4
    assert planned(model, 16 * GIB, least_context=20_000).require().context == 20_000
    assert planned(model, 16 * GIB, least_context=10**6).require().context == 32_768
    with pytest.raises(EdgeLMError, match="more than the 32,768"):
        planned(model, 16 * GIB, ctx=32_769)


def test_a_container_of_a_gigabyte_gets_what_fits_it_and_says_so() -> None:
    """The limit of a control group arrives as less free memory: nothing of the machine itself is asked."""
    model = dense_model()
    assert planned(model, 64 * GIB).require().context == 8192
    limited = planned(model, 1.35 * GIB)
    assert limited.require().total_bytes < 1.35 * GIB
    assert (limited.require().context, limited.require().kv) != (8192, "f16")
    assert "fit" in limited.reason
    assert planned(model, 0).refusal is not None


def test_kv_bytes_per_token_are_the_known_ones() -> None:
    result = planned(dense_model(layers=16, kv_heads=8, head_len=64), 64 * GIB)
    values = 16 * 8 * 64
    assert result.kv_bytes_per_token == {
        "f16": values * 4,
        "k8v16": values * (34 / 32 + 2),
        "int8": values * 2 * 34 / 32,
        "k8v4": values * (34 + 18) / 32,
    }


def test_a_mixture_is_as_fast_as_the_experts_that_a_token_uses() -> None:
    dense = planned(dense_model(ffn=1024), 64 * GIB)
    mixture = planned(dense_model(ffn=1024, experts=32, experts_used=2), 64 * GIB)
    assert mixture.weights.resident > 5 * dense.weights.resident
    assert dense.weights.read_per_token < mixture.weights.read_per_token < 2 * dense.weights.read_per_token


def test_the_speed_falls_with_the_context_and_is_not_invented() -> None:
    model = dense_model()
    result = planned(model, 64 * GIB)
    assert result.tokens_per_second is not None
    assert 0 < result.tokens_per_second[1] < result.tokens_per_second[0]
    unmeasured = MachineMemory(free_bytes=64 * GIB, cores=1)
    assert plan(model, Settings(), unmeasured, LlamaMemory(model, sequences=8)).tokens_per_second is None


def test_attention_that_costs_more_in_a_long_context_is_counted() -> None:
    """Measured on a 135M and two cores: 1.97 times the step of f16, 2,048 tokens deep."""
    model = dense_model(layers=30, width=576, heads=9, kv_heads=3, head_len=64, context=2048)
    speeds = {kv: planned(model, 64 * GIB, kv=kv).tokens_per_second for kv in ("f16", "int8")}
    exact, small = speeds["f16"], speeds["int8"]
    assert exact
    assert small
    assert small[0] == exact[0]
    assert small[1] < 0.8 * exact[1]


def test_repeatable_answers_have_caches_of_their_own_with_keys_of_8_bits() -> None:
    model = dense_model()
    shared, own = planned(model, 64 * GIB, kv="k8v16", ctx=1024), planned(model, 64 * GIB, repeatable=True, ctx=1024)
    assert own.require().kv == "k8v16"
    assert own.require().kv_bytes == 8 * shared.require().kv_bytes
    assert {option.kv for option in own.options} == {"k8v16", "int8", "k8v4"}
    with pytest.raises(ModelError, match="--kv f16 is not repeatable") as refused:
        planned(model, 64 * GIB, repeatable=True, kv="f16")
    assert refused.value.hint == "use --kv k8v16"
    with pytest.raises(ModelError, match="--repeatable needs another KV cache") as refused:
        planned(dense_model(head_len=80), 64 * GIB, repeatable=True)
    assert refused.value.hint == "omit --repeatable"
