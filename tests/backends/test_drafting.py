"""Drafting in a built engine: its data is kept, the settings apply, a draft model must fit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.backends.build import build
from edgelm.backends.drafting import NO_HEADS, require_same_vocabulary, throttled
from edgelm.backends.llama import build as build_module
from edgelm.backends.llama.buffers import LlamaBuffers
from edgelm.backends.llama.memory import LlamaMemory
from edgelm.backends.model import LoadedModel
from edgelm.backends.plan import Plan
from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.places import Places
from edgelm.base.sampling import DraftChoice, SamplingParams
from edgelm.base.workers.messages import EngineJob
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import model_facts
from edgelm.engine.clock import DecodeStep, Measured, StepClock, StepCosts
from edgelm.engine.core import CompletedSamples, Masks, Sampled, Sequence, Stats, Step
from edgelm.engine.speculation import model_drafter, mtp_drafter, throttle
from edgelm.engine.speculation.model_drafter import ModelDrafter
from edgelm.engine.watch import StepRecord
from tests.engine.fake import SimpleDrafter, info
from tests.odd_models import HEAD, KV_HEADS, Odd, write_odd
from tests.tiny import write_tiny

PROMPT = [7, 300, 41, 260, 33, 9, 120]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    names = ("CONFIG", "DATA", "CACHE", "RUNTIME")
    return Places({f"EDGELM_{name}_DIR": str(tmp_path / name.lower()) for name in names})


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row more cost a hundredth of a step, however busy this machine is."""
    costs = [Measured(1, 0, 0.010), Measured(64, 0, 0.0163)]
    monkeypatch.setattr(build_module, "measured_clock", lambda *_: StepClock(StepCosts(costs)))
    monkeypatch.setattr(StepClock, "observe", lambda *_: None)
    for module in (throttle, mtp_drafter):  # nor does drafting take time
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "m.gguf", quant="q8_0", width=128, ffn=256, endless=True)


def built(path: Path, places: Places | None, **settings: object) -> LoadedModel:
    return build(
        EngineJob(
            model=path,
            settings=Settings(**{"threads": 1, "ctx": 512, "kv": "int8"} | settings),
            drafts=places is not None,
        ),
        places=places,
    )


def ask(loaded: LoadedModel, count: int = 100, draft: DraftChoice = "auto", **where: object) -> tuple[list[int], Stats]:
    params = SamplingParams(temperature=0, max_tokens=count, draft=draft)

    async def answer() -> tuple[list[int], Stats]:
        ids, stats = [], None
        async for event in loaded.engine.submit(PROMPT, params, **where):
            ids += [sample.id for sample in event.sampled]
            stats = event.stats
        assert stats
        return ids, stats

    return asyncio.run(answer())


def ask_new(path: Path, places: Places | None, **settings: object) -> tuple[list[int], Stats]:
    """Ask in an engine of its own."""
    loaded = built(path, places, **settings)
    try:
        return ask(loaded)
    finally:
        loaded.engine.close()


def test_an_answer_that_comes_again_in_another_process_is_drafted(model: Path, places: Places) -> None:
    first, _ = ask_new(model, places)
    second, stats = ask_new(model, places)
    assert second == first
    assert stats.accepted > 30


def test_without_memory_nothing_of_the_answer_is_kept(model: Path, places: Places) -> None:
    ask_new(model, places, memory=False)
    assert not (places.data / "memory").exists()


def test_off_is_off(model: Path, places: Places) -> None:
    ask_new(model, places)
    _, stats = ask_new(model, places, spec="off")
    assert stats.drafted == 0
    before = sorted(places.cache.rglob("*"))
    ask_new(model, None)
    assert sorted(places.cache.rglob("*")) == before


def test_the_older_spelling_of_off_and_the_new_one_are_off(model: Path, places: Places) -> None:
    ask_new(model, places)
    assert ask_new(model, places, draft="off")[1].drafted == 0
    assert ask_new(model, places, draft="ngram")[1].accepted > 30


def test_a_model_without_heads_drafts_nothing_by_them_and_says_so(
    model: Path, places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    ask_new(model, places)
    assert ask_new(model, places, draft="mtp")[1].drafted == 0
    assert NO_HEADS in caplog.text


@pytest.mark.parametrize(("draft", "drafted"), [("auto", True), ("ngram", True), ("mtp", False), ("off", False)])
def test_a_request_may_choose_who_drafts(model: Path, places: Places, draft: DraftChoice, drafted: bool) -> None:
    ask_new(model, places)
    loaded = built(model, places)
    try:
        assert bool(ask(loaded, draft=draft)[1].drafted) is drafted
    finally:
        loaded.engine.close()


def test_a_number_bounds_each_draft(model: Path, places: Places) -> None:
    first, _ = ask_new(model, places, spec="2")
    second, stats = ask_new(model, places, spec="2")
    assert second == first
    assert 0 < stats.accepted <= 66  # of 100 tokens, in steps of at most three


def test_a_drafter_that_loses_does_not_stop_another(places: Places) -> None:
    class Constant(SimpleDrafter):
        def __init__(self, token: int) -> None:
            self.token = token

        def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
            return [self.token] * (4 if len(seq.tokens) % 2 == self.token else 0)

    clock = StepClock(StepCosts([Measured(1, 0, 0.01), Measured(64, 0, 0.02)]))
    clock.last = DecodeStep(1, 5, 0.02, 0.01)
    drafter = throttled({"ngram": Constant(0), "model": Constant(1)}, clock, Settings(), places.cache / "proof")
    seq = Sequence(0, [1], 1, SamplingParams())
    drafter.begin(seq)
    drafted = []
    for _ in range(40):
        draft = drafter.propose(seq, [0.1] * 8)
        if draft:
            drafter.observe(seq, 4, 4 * draft[0])  # the first one is never right
        drafted.append(draft[:1])
        seq.tokens.append(1)
    assert drafted.count([0]) == 3
    assert drafted.count([1]) == 20


class Follows:
    """A draft model that is always right: behind each token comes the next number. It reads 500 tokens a second."""

    def __init__(self, now: list[float]) -> None:
        self.info = info(num_vocab=10_000, context=5_000, capacity=5_000)
        self.now = now
        self.last = 0

    def forward(self, step: Step) -> None:
        self.now[0] += 0.002 * step.num_tokens
        for chunk in step.chunks:
            self.last = chunk.tokens[-1]

    def sample(self, step: Step, _: Masks | None) -> CompletedSamples:
        return CompletedSamples([[Sampled(self.last + 1, -0.05)]])


def test_a_long_prompt_that_a_draft_model_reads_stops_no_draft_behind_it(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Booked as a loss, 600 tokens made each request pause before its first draft, and again before all were read."""
    now = [0.0]
    for module in (throttle, model_drafter):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = StepClock(StepCosts([Measured(1, 0, 0.15), Measured(11, 0, 0.3)]))
    small: Any = Follows(now)
    drafters = {"model": ModelDrafter(small, clock.token_s)}
    drafter = throttled(drafters, clock, Settings(), places.cache / "proof")
    seq = Sequence(0, list(range(1, 601)), 600, SamplingParams())
    drafter.begin(seq)
    drafted = 0
    while len(seq.tokens) < 700:
        draft = drafter.propose(seq, clock.marginal_cost(1, 0, 1, 8))
        clock.last = DecodeStep(1, 1 + len(draft), 0.15 + 0.015 * len(draft), 0.15)
        clock.num_steps += 1
        seq.tokens += range(seq.tokens[-1] + 1, seq.tokens[-1] + 2 + len(draft))
        if draft:
            drafter.observe(seq, len(draft), len(draft))
        drafted += len(draft)
    assert drafted > 60


def test_what_one_owner_was_answered_drafts_for_no_other(model: Path, places: Places) -> None:
    loaded = built(model, places)
    ask(loaded, cache_namespace="a")
    _, other = ask(loaded, cache_namespace="b")
    _, same = ask(loaded, cache_namespace="a")
    loaded.engine.close()
    assert same.accepted > other.accepted


def test_what_was_said_before_the_context_is_drafted_from(model: Path, places: Places) -> None:
    answer, _ = ask_new(model, None)
    loaded = built(model, places, memory=False)
    _, stats = ask(loaded, past=[*PROMPT, *answer])
    loaded.engine.close()
    assert stats.accepted > 30


def test_a_draft_model_drafts(model: Path, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepClock, "token_s", lambda _: 1.0)  # the model drafts for itself, which is no faster
    plain, _ = ask_new(model, None)
    drafted, stats = ask_new(model, places, memory=False, draft=str(model))
    assert drafted == plain
    assert stats.accepted > 30


@pytest.mark.parametrize("other", [{"vocab_size": 1024}, {"vocab_size": 500, "seed": 9}])
def test_a_draft_model_of_another_vocabulary_is_refused(
    model: Path, places: Places, tmp_path: Path, other: dict[str, object]
) -> None:
    small = write_tiny(tmp_path / "small.gguf", **other)
    with pytest.raises(ModelError, match=r"small\.gguf cannot draft for this model: it has another vocabulary"):
        built(model, places, draft=str(small))


def test_a_draft_model_that_is_not_there_is_one_line(model: Path, places: Places, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        built(model, places, draft=str(tmp_path / "none.gguf"))


def test_the_draft_model_s_memory_is_taken_into_account(
    model: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_context = build_module.plan_context

    def reserved(ctx: int) -> int:
        plans: list[Plan] = []

        def spy(*arguments: Any, **options: Any) -> Plan:
            plans.append(plan_context(*arguments, **options))
            return plans[-1]

        monkeypatch.setattr(build_module, "plan_context", spy)
        built(model, places, draft=str(model), ctx=ctx).engine.close()
        (planned,) = plans
        return planned.require().draft_bytes

    short, long = reserved(256), reserved(2048)
    assert short > model.stat().st_size
    assert long > short, "its cache is as long as the model's"


def test_a_draft_model_that_does_not_fit_beside_the_model_is_refused(
    model: Path, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = write_tiny(tmp_path / "large.gguf", layers=24, width=512, ffn=2048)  # beside it: 350 MB
    monkeypatch.setattr(build_module, "available_memory_bytes", lambda: 300 * 2**20)
    built(model, places).engine.close()
    monkeypatch.setattr(build_module, "LlamaModel", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ModelError, match=r"tiny .* with the draft model tiny .* needs .* GiB") as caught:
        built(model, places, draft=str(large))
    assert "omit --draft" in caught.value.hint


# -- recurrent layers --------------------------------------------------------------------------------------------------


def test_a_model_with_recurrent_layers_drafts_too(tmp_path: Path, places: Places) -> None:
    hybrid = write_odd(tmp_path / "lfm2.gguf", "lfm2")
    first, _ = ask_new(hybrid, places)
    second, stats = ask_new(hybrid, places)
    assert second[: len(first) // 4] == first[: len(first) // 4]
    assert stats.accepted > 0


def test_one_line_says_that_a_model_cannot_draft(
    tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mamba = write_odd(tmp_path / "mamba.gguf", "mamba")
    _, stats = ask_new(mamba, places)
    assert "nothing is drafted: llama.cpp cannot take tokens back in a model of mamba" in caplog.text
    assert not stats.drafted
    caplog.clear()
    ask_new(mamba, places, spec="off")
    assert "drafted" not in caplog.text
    hybrid = write_odd(tmp_path / "lfm2.gguf", "lfm2")
    plan = build_module.plan
    monkeypatch.setattr(build_module, "plan", lambda *args, **more: replace(plan(*args, **more), preferred=False))
    ask_new(hybrid, places)
    assert "nothing is drafted: there is no memory for the states" in caplog.text


def test_the_states_that_drafts_go_back_to_are_planned(tmp_path: Path) -> None:
    path = write_odd(tmp_path / "lfm2.gguf", "lfm2")
    with open_gguf(path) as gguf:
        facts = model_facts(gguf)
    with_drafts, without = (
        build_module.plan_context(path, facts, Settings(spec=spec, ctx=512)) for spec in ("auto", "off")
    )
    assert (with_drafts.rollback, without.rollback) == (build_module.ROLLBACK_LEN, 0)
    more = with_drafts.require().kv_bytes - without.require().kv_bytes
    assert more == facts.state_bytes * build_module.ROLLBACK_LEN * Settings().parallel > 0


class Words:
    """A vocabulary of texts; "<…>" is a control token."""

    def __init__(self, *texts: str, stop_ids: tuple[int, ...] = ()) -> None:
        self.texts = texts
        self.num_tokens = len(texts)
        self.stop_ids = frozenset(stop_ids)

    def piece(self, token: int) -> bytes:
        return b"" if self.texts[token].startswith("<") else self.texts[token].encode()

    def text_of(self, token: int) -> str:
        return self.texts[token]


@pytest.mark.parametrize(
    ("small", "same"),
    [
        (Words("a", "b", "<end>", stop_ids=(2,)), True),
        (Words("a", "b", "<end>", "<pad>", stop_ids=(2, 3)), True),  # a GGUF and a folder name other ends and padding
        (Words("a", "b"), True),
        (Words("a", "c", "<end>", stop_ids=(2,)), False),
        (Words("a", "b", "<user>", stop_ids=(2,)), False),
    ],
)
def test_a_vocabulary_is_the_same_if_each_token_is(small: Words, same: bool) -> None:
    large: Any = Words("a", "b", "<end>", stop_ids=(2,))
    with nullcontext() if same else pytest.raises(ModelError, match="it has another vocabulary"):
        require_same_vocabulary(large, small, "s")  # type: ignore[arg-type]


# -- heads ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_odd(tmp_path_factory.mktemp("models") / "heads.gguf", "qwen35", heads=0.0)


def who_drafted(loaded: LoadedModel, **params: Any) -> tuple[set[str], int]:
    """Return who drafted for an answer, as those who watch see, and how many tokens were accepted."""

    async def answer() -> tuple[set[str], int]:
        watcher = loaded.engine.watch()
        stream = loaded.engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=60, **params))
        stats = [event.stats async for event in stream][-1]
        _, records = await watcher.take()
        watcher.close()
        assert stats
        steps = [record for record in records if isinstance(record, StepRecord)]
        return {chunk.drafted_by for step in steps for chunk in step.chunks if chunk.drafted}, stats.accepted

    return asyncio.run(answer())


@pytest.mark.parametrize(
    ("settings", "request_draft", "drafters"),
    [
        ({"draft": "mtp"}, "auto", {"mtp"}),
        ({"draft": "ngram"}, "auto", {"ngram"}),
        ({"draft": "off"}, "auto", set()),
        ({}, "mtp", {"mtp"}),
        ({}, "ngram", {"ngram"}),
        ({}, "off", set()),
    ],
)
def test_the_heads_of_a_model_draft_where_they_may(
    with_heads: Path, places: Places, settings: dict[str, Any], request_draft: DraftChoice, drafters: set[str]
) -> None:
    loaded = built(with_heads, places, parallel=1, **settings)
    try:
        who_drafted(loaded)
        seen, accepted = who_drafted(loaded, draft=request_draft)
    finally:
        loaded.engine.close()
    assert seen == drafters
    assert bool(accepted) is bool(drafters)


def test_texts_draft_first_and_heads_elsewhere(
    with_heads: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "TRIAL_RATE", 1.0)
    loaded = built(with_heads, places, parallel=1, memory=False)
    try:
        seen, accepted = who_drafted(loaded)
    finally:
        loaded.engine.close()
    assert seen == {"mtp", "ngram"}
    assert accepted > 20


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("named", [False, True])
def test_heads_in_a_file_beside_a_model_draft(
    arch: Odd, named: bool, tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "TRIAL_RATE", 1.0)
    model = write_odd(tmp_path / "m.gguf", arch, heads=0.0, part="model")
    heads = write_odd(tmp_path / ("drafts.gguf" if named else "mtp-m.gguf"), arch, heads=0.0, part="heads")
    loaded = built(model, places, parallel=1, memory=False, draft=str(heads) if named else "mtp")
    try:
        seen, accepted = who_drafted(loaded)
    finally:
        loaded.engine.close()
    assert "mtp" in seen
    assert accepted
    assert loaded.footprint.total_bytes > built_footprint(model, places)


def built_footprint(model: Path, places: Places) -> int:
    loaded = built(model, places, parallel=1, draft="ngram")
    loaded.engine.close()
    return loaded.footprint.total_bytes


def test_heads_that_do_not_fit_are_told_or_refused(
    tmp_path: Path, places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_odd(tmp_path / "m.gguf", "qwen35", part="model")
    heads = write_odd(tmp_path / "mtp-m.gguf", "qwen35moe", heads=0.0, part="heads")
    built(model, places).engine.close()
    assert "mtp-m.gguf does not hold the heads of this model: it has qwen35moe of width 64" in caplog.text
    with pytest.raises(ModelError, match=r"mtp-m\.gguf does not hold the heads of this model"):
        built(model, places, draft=str(heads))
    with pytest.raises(ModelError, match=r"mtp-m\.gguf holds only the heads that draft for a model"):
        built(heads, places)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("has_heads_api", False, "this build of llama.cpp cannot run heads"),
        ("rollback_len", 0, "llama.cpp cannot take tokens back in a model of qwen35"),
        ("may_use_heads", False, "there is no memory for them"),
    ],
)
def test_heads_that_do_not_draft_say_the_reason(
    name: str,
    value: int,
    reason: str,
    tmp_path: Path,
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = write_odd(tmp_path / "m.gguf", "qwen35", heads=0.0, part="model")
    write_odd(tmp_path / "mtp-m.gguf", "qwen35", heads=0.0, part="heads")
    monkeypatch.setattr(build_module, name, lambda *_: value)
    built(model, places, draft="mtp").engine.close()
    assert f"the heads of mtp-m.gguf do not draft: {reason}" in caplog.text
    assert NO_HEADS not in caplog.text


def test_the_cache_of_the_heads_is_planned(with_heads: Path) -> None:
    with open_gguf(with_heads) as gguf:
        facts = model_facts(gguf)
    assert facts.mtp_heads == 1
    settings = Settings(ctx=2048, kv="f16")
    plans = {
        draft: build_module.plan_context(with_heads, facts, replace(settings, draft=draft))
        for draft in ("auto", "ngram")
    }
    assert (plans["auto"].heads, plans["ngram"].heads) == (True, False)
    more = plans["auto"].require().kv_bytes - plans["ngram"].require().kv_bytes
    assert more == 2048 * 2 * 2 * KV_HEADS * HEAD, "one layer: keys and values of two bytes"
    own = {}
    for heads in (False, True):
        with LlamaBuffers(with_heads, facts.summary, sequences=2, heads=with_heads if heads else None) as buffers:
            own[heads] = buffers("f16", 2048)
        estimated = LlamaMemory(facts, sequences=2, heads=heads).estimated_buffers("f16", 2048)
        assert own[heads].kv == pytest.approx(estimated.kv, rel=0.02), "llama.cpp says the same"
    assert own[True].compute > own[False].compute


def test_a_file_that_lacks_the_layer_it_names_has_no_heads(tmp_path: Path) -> None:
    path = write_odd(tmp_path / "m.gguf", "qwen35", heads=0.0, drop="nextn")
    with open_gguf(path) as gguf:
        assert model_facts(gguf).mtp_heads == 0
