"""The torch engine's heads that predict several tokens: they are llama.cpp's and change no answer."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from edgelm.backends import build as choice_module
from edgelm.backends.drafting import NO_HEADS
from edgelm.backends.followed_heads import HEADS_WINDOW
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.model import LoadedModel, open_heads, open_model
from edgelm.backends.plan import MachineMemory, Option, Plan
from edgelm.backends.reports import Reports
from edgelm.backends.torch import build as torch_build
from edgelm.backends.torch import heads as heads_module
from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.backends.torch.memory import TorchMemory, TorchPlan, plan_for_torch
from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.checkpoints.folder import folder_facts
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.checkpoints.summary import model_facts
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import NOT_A_TOKEN, Chunk, SamplingParams, Sequence, StateSpan, Step
from edgelm.engine.engine import Engine
from edgelm.engine.kv_paged import PagedKV
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from edgelm.kernels.cache import BLOCK_LEN
from edgelm.models.config import read_config
from edgelm.models.decoder import Decoder
from edgelm.models.loading.decoder import load, load_next_head
from edgelm.models.loading.sources import FolderSource, GGUFSource
from edgelm.models.next_head import NextHead
from tests import odd_models
from tests.backends.llama.test_speculation import chi_square, critical
from tests.backends.torch.test_device import fake_cuda, give_graphs  # noqa: F401 - a fixture
from tests.backends.torch.test_executor import answer, answers, requests_of
from tests.counts import Count
from tests.engine.sampling.slow import exact
from tests.models.tiny_models import add_head, build, stacked_experts, write
from tests.odd_models import WIDTH, Odd, write_odd

CONTEXT = 512
OTHERS = 0.015  # weight of all tokens but the last: the head is right most of the time
DRAWS = Count(test=400, soak=20_000)
ARCHS: tuple[Odd, ...] = ("qwen35", "qwen35moe")  # dense, and with experts, also in the head
Loaded = tuple[Decoder, NextHead]


def load_both(path: Path, implementation: str = "reference", beside: Path | None = None) -> Loaded:
    with open_gguf(path) as gguf, open_gguf(beside or path) as heads:
        decoder = load(read_config(gguf.metadata), GGUFSource(gguf), "cpu", torch.float32, "reference")
        decoder.implementation = implementation  # of the head alone: interpreted kernels take long
        head = load_next_head(decoder, read_config(heads.metadata), GGUFSource(heads), CONTEXT)
        decoder.implementation = "reference"
    assert head
    return decoder, head


@pytest.fixture(scope="module", params=ARCHS)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Loaded:
    return load_both(write_odd(tmp_path_factory.mktemp("heads") / "m.gguf", request.param, 5, heads=OTHERS))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_both(write_odd(tmp_path_factory.mktemp("heads") / "m.gguf", "qwen35", 5, heads=OTHERS))


@pytest.fixture
def random_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no norm be the same as another."""
    weights = odd_models._weights

    def other(name: str, shape: tuple[int, ...], rng: Any) -> Any:
        return 1 + 0.4 * rng.standard_normal(shape).astype(np.float32) if "norm" in name else weights(name, shape, rng)

    monkeypatch.setattr(odd_models, "_weights", other)


class Counting(MtpDrafter):
    """Counts its tokens."""

    drafted = accepted = 0

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        super().observe(seq, drafted, accepted)
        self.drafted += drafted
        self.accepted += accepted


def executor_of(loaded: Loaded, sequences: int = 8, **options: Any) -> TorchExecutor:
    decoder, head = loaded
    sizes = {"context": CONTEXT, "capacity": sequences * CONTEXT, "max_sequences": sequences}
    return TorchExecutor(decoder, TorchOptions(**sizes | options), head=head)


@contextmanager
def running(loaded: Loaded, *, heads: bool, **options: Any) -> Iterator[tuple[Engine, Counting, TorchExecutor]]:
    """Run an engine that drafts by heads wherever it can: a row more costs a hundredth of a step."""
    executor = executor_of(loaded, **options)
    assert executor.heads
    drafter = Counting(executor.heads, lambda: 1.0)
    clock = StepClock(StepCosts([Measured(1, 0, 0.010), Measured(64, 0, 0.0163)]))
    paged = PagedKV(executor.info, executor.info.block_len)
    engine = Engine(executor, Scheduler(executor.info, paged, clock, drafter if heads else None), clock).start()
    try:
        yield engine, drafter, executor
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepClock, "observe", lambda *_: None)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("runs_ahead", "kv"), [(False, "f16"), (True, "int8")])
def test_answers_are_the_same_with_heads_and_without(together: bool, runs_ahead: bool, kv: str, model: Loaded) -> None:
    """Also in a small cache, where few run at a time, and behind saved states of prefixes."""
    requests = requests_of(5, 12)
    with running(model, heads=False, kv=kv) as (engine, _, _):
        plain = answers(engine, requests, together=False)
    with running(model, heads=True, kv=kv, runs_ahead=runs_ahead, max_tokens=48, capacity=640) as (engine, drafter, _):
        for _ in range(2):
            assert answers(engine, requests, together) == plain
    assert drafter.accepted > len(requests)
    assert drafter.accepted < drafter.drafted


def test_sampled_tokens_have_the_model_s_own_distribution(model: Loaded) -> None:
    prompt = [7, 300, 41, 260]
    temperature = 1.4 if model[0].config.experts else 0.7  # its tokens are nearly certain
    facts: dict[str, Any] = {"temperature": temperature, "top_k": 6, "max_tokens": 4}
    counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    with running(model, heads=True) as (engine, drafter, _):

        async def draw_all() -> None:
            free = asyncio.Semaphore(8)

            async def draw(seed: int) -> None:  # fixed seeds: the test passes always or never
                async with free:
                    tokens = await answer(engine, prompt, SamplingParams(seed=seed, **facts))
                for at in range(len(tokens)):
                    counts[tuple(tokens[:at])][tokens[at]] += 1

            await asyncio.gather(*map(draw, range(DRAWS)))

        asyncio.run(draw_all())
    assert drafter.accepted > 0.2 * DRAWS
    assert drafter.drafted - drafter.accepted > 0.2 * DRAWS
    tested = [(before, counter) for before, counter in counts.items() if counter.total() >= 100]
    depths = set()
    executor = executor_of(model)
    for before, counter in tested:
        tokens, params = [*prompt, *before], SamplingParams(**facts)
        fed = Fed(executor, 0)
        fed.compute(tokens)
        distribution = exact(fed.logits[0], params, tokens, [], None)
        expected = dict(zip(distribution.ids, np.diff(distribution.ends, prepend=0.0).tolist(), strict=True))
        assert not set(counter) - set(expected), "a token was sampled that the distribution does not hold"
        statistic, freedom = chi_square(counter, expected)
        if freedom:  # else one token is nearly certain
            assert statistic < critical(freedom), f"after {before}: {counter} against {expected}"
            depths.add(len(before))
    assert depths >= {0, 1, 2}


# -- the heads alone ---------------------------------------------------------------------------------------------------


class Fed:
    """One sequence that an executor computes chunk by chunk."""

    def __init__(self, executor: Any, number: int, slot: int = 0) -> None:
        self.executor, self.slot = executor, slot
        self.seq = Sequence(number, [], 0, SamplingParams())
        self.logits = np.empty(0)
        self.state = 0
        if self.heads:
            self.heads.begin(number)

    @property
    def heads(self) -> Any:
        return self.executor.heads

    def compute(self, tokens: list[int], draft: list[int] | None = None) -> None:
        """Compute tokens behind those before, and perhaps a draft that is then rejected."""
        start = len(self.seq.tokens)
        self.seq.tokens += tokens
        rows = 1 if draft is None else 1 + len(draft)
        if isinstance(self.executor, TorchExecutor):
            blocks = CONTEXT // BLOCK_LEN
            kv: Any = tuple(range(self.slot * blocks, (self.slot + 1) * blocks))
            goal = start + len(tokens)
            span = StateSpan(self.slot, self.state, goal)
            self.state = goal
        else:
            kv, span = self.slot, None
        step = Step((Chunk(self.seq, start, tokens + (draft or []), rows, kv, span),))
        self.executor.forward(step)
        self.logits = self.executor.logits(step).copy()

    def draft(self, last: int, count: int = 3) -> list[tuple[int, float]]:
        results = [self.heads.first(self.seq.id, [*self.seq.tokens, last])]
        while len(results) < count:
            results.append(self.heads.next(self.seq.id, results[-1][0]))
        return results


@pytest.mark.usefixtures("random_norms")
@pytest.mark.parametrize("arch", ARCHS)
def test_a_draft_is_llama_cpp_s(arch: Odd, tmp_path: Path) -> None:
    rng = random.Random(7)
    path = write_odd(tmp_path / "m.gguf", arch, 3, heads=1.0, router=GGMLQuantizationType.F32)
    executor = executor_of(load_both(path))
    llama = LlamaExecutor(
        LlamaModel(path, heads=True), LlamaOptions(context=1024, kv="f16", threads=1, rollback=3, heads=True)
    )
    num_equal = 0
    for number in range(8):
        tokens = [rng.randrange(3, 500) for _ in range(rng.randint(3, 60))]
        last = rng.randrange(3, 500)
        drafts = []
        for slot, each in enumerate((executor, llama)):
            fed = Fed(each, number, number if slot else 0)
            fed.compute(tokens)
            drafts.append(fed.draft(last))
            fed.heads.end(number)
        for (token, chance), (other, also) in zip(*drafts, strict=True):
            assert chance == pytest.approx(also, rel=0.01)
            if token != other:  # two are about as likely
                break
            num_equal += 1
    llama.close()
    assert num_equal >= 20


def test_a_draft_depends_on_the_tokens_alone(tmp_path: Path) -> None:
    """Whatever was rejected, or drafted and dropped, or computed in other chunks: the hidden states are the same."""
    executor = executor_of(load_both(write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=1.0)))
    rng = random.Random(3)
    for number in range(0, 12, 2):
        tokens = [rng.randrange(3, 500) for _ in range(rng.randint(18, HEADS_WINDOW - 4))]
        last = rng.randrange(3, 500)
        one, other = Fed(executor, number, 0), Fed(executor, number + 1, 1)
        one.compute(tokens)
        at = rng.randint(5, 15)
        other.compute(tokens[:at])
        while at < len(tokens):
            if rng.random() < 0.7:
                other.draft(tokens[at])
            draft = [rng.randrange(3, 500) for _ in range(3)] if rng.random() < 0.5 else []
            other.compute(tokens[at : at + 1], draft)
            at += 1
        for (token, chance), (same, also) in zip(one.draft(last), other.draft(last), strict=True):
            assert (token, chance) == (same, pytest.approx(also, rel=0.02))
        for fed in (one, other):
            fed.heads.end(fed.seq.id)


def test_the_heads_begin_anew_in_long_texts_and_after_a_pause(dense: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    max_len = 3 * HEADS_WINDOW
    monkeypatch.setattr(heads_module, "HEADS_LEN", max_len + HEADS_WINDOW)
    rng = random.Random(1)
    executor = executor_of(dense)
    fed = Fed(executor, 0)
    fed.compute([rng.randrange(3, 500) for _ in range(300)])
    begins = []
    for length in range(300, 418):
        if length not in range(311, 350):
            assert fed.draft(7, count=1)[0][0] != NOT_A_TOKEN
            begins.append(fed.heads._followed[0].begin)
            assert length - begins[-1] < max_len
        fed.compute([rng.randrange(3, 500)], [])
    anew = [300, 350, 350 + max_len - HEADS_WINDOW + 1]
    assert list(dict.fromkeys(begins)) == [length - HEADS_WINDOW + 1 for length in anew]


def test_nothing_is_drafted_without_hidden_states(dense: Loaded) -> None:
    executor = executor_of(dense)
    assert executor.heads
    fed = Fed(executor, 0)
    assert executor.heads.first(5, [1, 2]) == (NOT_A_TOKEN, 0.0), "a sequence that never began"
    fed.compute([9, 8, 7])
    assert fed.heads.first(0, [9, 8, 7, 6, 5]) == (NOT_A_TOKEN, 0.0), "a token that was not computed"


def test_no_hidden_state_of_a_sequence_that_is_not_followed_is_copied(dense: Loaded) -> None:
    heads: Any = executor_of(dense).heads
    heads.begin(0)
    heads._hidden = None  # a copy would fail
    heads.take(Step((Chunk(Sequence(1, [5] * 40, 40, SamplingParams()), 0, [5] * 40, 1, (0, 1)),)))


@pytest.mark.usefixtures("fake_cuda")
def test_hidden_states_come_out_of_graphs(tmp_path: Path) -> None:
    loaded = load_both(write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=1.0))
    drafts = []
    for graphed in (False, True):
        executor = executor_of(loaded, max_tokens=64)
        if graphed:
            give_graphs(executor)
        fed = Fed(executor, 0)
        fed.compute(list(range(20, 32)))
        drafts.append(fed.draft(9))
        fed.compute([9], [8, 7, 6])
        drafts[-1] += fed.draft(40)
    for (token, chance), (same, also) in zip(*drafts, strict=True):
        assert (token, chance) == (same, pytest.approx(also, rel=1e-3))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("arch", ARCHS)
def test_interpreted_kernels_draft_the_same(arch: Odd, tmp_path: Path) -> None:
    path = write_odd(tmp_path / "m.gguf", arch, 5, heads=1.0)
    drafts = []
    for implementation in ("reference", "triton"):
        fed = Fed(executor_of(load_both(path, implementation), sequences=1), 0)
        fed.compute(list(range(20, 22)))
        drafts.append(fed.draft(9, count=2))
    for (token, chance), (same, also) in zip(*drafts, strict=True):
        assert (token, chance) == (same, pytest.approx(also, rel=1e-3))


# -- safetensors -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["dense", "experts", "stacked experts"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder whose head transformers ignores; of the hub's mixtures some have the experts in two tensors."""
    name = "qwen3_5" if request.param == "dense" else "qwen3_5_moe"
    path = write(build(name, mtp_num_hidden_layers=1), tmp_path_factory.mktemp("folder"))
    add_head(path, stacked=request.param == "stacked experts")
    return path


def predicted(folder: Path, config: Any, hidden: torch.Tensor, ids: list[int], embedding: torch.Tensor) -> torch.Tensor:
    """Return the head's states by the modules of transformers: those of `ids` beside the hidden states before them."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as with_experts

    tensors = load_file(folder / "model.safetensors")

    def norm(name: str) -> Any:
        module = modeling.Qwen3_5RMSNorm(64, eps=config.rms_norm_eps)
        module.weight.data = tensors[f"mtp.{name}.weight"]
        return module

    is_dense = config.model_type == "qwen3_5_text"
    layer = (modeling.Qwen3_5DecoderLayer if is_dense else with_experts.Qwen3_5MoeDecoderLayer)(config, 3).eval()
    own = {name.removeprefix("mtp.layers.0."): values for name, values in tensors.items() if "mtp.layers" in name}
    layer.load_state_dict(stacked_experts(own))
    sides = norm("pre_fc_norm_embedding")(embedding[torch.tensor(ids)]), norm("pre_fc_norm_hidden")(hidden)
    x = (torch.cat(sides, 1) @ tensors["mtp.fc.weight"].T)[None]
    positions = torch.arange(len(ids))[None]
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
    rotary = modeling.Qwen3_5TextRotaryEmbedding(config)(x, positions)
    out = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
    out = out[0] if isinstance(out, tuple) else out
    return norm("norm")(out.reshape(len(ids), -1))


def load_folder(folder: Path) -> Loaded:
    """Return the decoder and the head of a folder."""
    import transformers

    settings = transformers.AutoConfig.from_pretrained(folder).to_dict()
    with open_safetensors(folder) as files:
        assert folder_facts(files).mtp_heads == 1
        config, source = read_config(settings), FolderSource(files, settings)
        decoder = load(config, source, "cpu", torch.float32, "reference")
        head = load_next_head(decoder, config, source, CONTEXT)
    assert head
    return decoder, head


def test_the_head_of_a_folder_is_transformers_layer(folder: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [5, 17, 80, 33, 41, 9, 60]
    with torch.no_grad():
        hidden = reference.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        want = predicted(folder, config, hidden, ids[1:], reference.model.embed_tokens.weight)
        logits = reference.lm_head(want[-1])
    fed = Fed(executor_of(load_folder(folder)), 0)
    fed.compute(ids[:-1])
    (token, chance), *_ = fed.draft(ids[-1], count=1)
    best = torch.softmax(logits.double(), 0).max(0)
    assert (token, chance) == (int(best.indices), pytest.approx(float(best.values), rel=1e-3))


# -- the whole engine --------------------------------------------------------------------------------------------------


def built(model: Path, folder: Path, **settings: Any) -> LoadedModel:
    places = Places({f"EDGELM_{name}_DIR": str(folder / name) for name in ("CONFIG", "DATA", "CACHE", "RUNTIME")})
    chosen = Settings(threads=1, ctx=512, engine="torch", device="cpu", memory=False, **settings)
    return choice_module.build(EngineJob(model=model, settings=chosen, drafts=True), places=places)


def drafted_by_heads(loaded: LoadedModel) -> int:
    """Return how many tokens the heads draft for an answer; close the engine."""
    try:
        answers(loaded.engine, [([7, 300, 41], SamplingParams(temperature=0, max_tokens=60))], together=False)
        return loaded.engine.counters.copy()["drafted"].get("mtp", 0)
    finally:
        loaded.engine.close()


@pytest.fixture
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.backends.torch.build.measured_clock", lambda *_: StepClock(COSTS))
    monkeypatch.setattr(StepClock, "token_s", lambda _: 1.0)
    monkeypatch.setattr("edgelm.engine.speculation.throttle.TRIAL_RATE", 1.0)


@pytest.mark.usefixtures("drafts_pay")
@pytest.mark.parametrize(("draft", "drafts"), [("auto", True), ("mtp", True), ("ngram", False)])
def test_settings_say_whether_heads_draft_and_counters_who_drafted(draft: str, drafts: bool, tmp_path: Path) -> None:
    path = write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=0.0)
    assert (drafted_by_heads(built(path, tmp_path, draft=draft)) > 0) is drafts


@pytest.mark.usefixtures("drafts_pay")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("named", [False, True])
def test_heads_in_a_file_beside_a_model_draft(arch: Odd, named: bool, tmp_path: Path) -> None:
    model = write_odd(tmp_path / "m.gguf", arch, 5, heads=0.0, part="model")
    heads = write_odd(tmp_path / ("drafts.gguf" if named else "mtp-m.gguf"), arch, 5, heads=0.0, part="heads")
    loaded = built(model, tmp_path, draft=str(heads) if named else "mtp")
    alone = built(model, tmp_path, draft="ngram")
    assert loaded.footprint
    assert alone.footprint
    assert loaded.footprint.total_bytes > alone.footprint.total_bytes
    assert drafted_by_heads(loaded) > 0
    assert drafted_by_heads(alone) == 0


def test_heads_of_another_model_and_those_that_lack_a_matrix_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = write_odd(tmp_path / "m.gguf", "qwen35", 5, part="model")
    heads = write_odd(tmp_path / "mtp-m.gguf", "qwen35moe", 5, heads=0.0, part="heads")
    assert drafted_by_heads(built(model, tmp_path, draft="mtp")) == 0
    assert "mtp-m.gguf does not hold the heads of this model" in caplog.text
    with pytest.raises(ModelError, match=r"mtp-m\.gguf does not hold the heads of this model"):
        built(model, tmp_path, draft=str(heads))
    write_odd(heads, "qwen35", 5, heads=0.0, part="heads", drop="ffn_up")
    assert drafted_by_heads(built(model, tmp_path, draft="mtp")) == 0
    assert "the heads of mtp-m.gguf do not draft: the model has no tensor blk.4.ffn_up.weight" in caplog.text


@pytest.mark.parametrize("settings", [Settings(), Settings(ctx=2048)])
def test_a_head_whose_memory_cannot_be_allocated_costs_no_context(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, head = load_both(write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=1.0))
    heads, held, said = [head], weakref.ref(head), list[str]()
    del head

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("edgelm.backends.torch.executor.TorchHeads", fail)
    option, reports = Option("f16", 2048, 0, 0, 0, fits=True), Reports(notify=said.append)
    gc.disable()  # the weights must be free without the garbage collector
    try:
        executor = torch_build._executor(decoder, settings, option, "m", 256, reports=reports, load_head=heads.pop)
        assert held() is None
    finally:
        gc.enable()
    assert (executor.info.context, executor.heads) == (2048, None)
    assert said == ["the heads of m do not draft: there is no memory for them"]


def test_the_last_line_says_why_heads_do_not_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line replaces the one before it: that there are no heads would hide that there is no memory for them."""
    caplog.set_level("INFO", "edgelm.backends")
    plan = torch_build._plan

    def without_head(*arguments: Any) -> TorchPlan:
        planned = plan(*arguments)
        return planned._replace(plan=replace(planned.plan, heads=False))

    monkeypatch.setattr(torch_build, "_plan", without_head)
    built(write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=0.0), tmp_path, draft="mtp").engine.close()
    assert "the heads of m.gguf do not draft: there is no memory for them" in caplog.text
    assert NO_HEADS not in caplog.text


@pytest.mark.usefixtures("random_norms")
@pytest.mark.parametrize("arch", ARCHS)
def test_heads_in_a_file_of_their_own_draft_the_same(arch: Odd, tmp_path: Path) -> None:
    whole = write_odd(tmp_path / "m.gguf", arch, 5, heads=1.0)
    model = write_odd(tmp_path / "n.gguf", arch, 5, heads=1.0, part="model")
    beside = write_odd(tmp_path / "mtp-n.gguf", arch, 5, heads=1.0, part="heads")
    drafts = []
    for loaded in (load_both(whole), load_both(model, beside=beside)):
        fed = Fed(executor_of(loaded), 0)
        fed.compute(list(range(20, 45)))
        drafts.append(fed.draft(9))
    assert drafts[0] == drafts[1]


COSTS = StepCosts([Measured(1, 0, 0.010), Measured(64, 0, 0.0163)])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("apart", [False, True])
def test_the_memory_of_the_head_is_planned(arch: Odd, apart: bool, tmp_path: Path) -> None:
    path = write_odd(tmp_path / "m.gguf", arch, 5, heads=0.0, part="model" if apart else "all")
    beside = write_odd(tmp_path / "mtp-m.gguf", arch, 5, heads=0.0, part="heads") if apart else None
    with open_model(path) as opened, open_heads(opened, beside) as model:
        facts = model.facts
    loaded = load_both(path, beside=beside)
    executor = executor_of(loaded, sequences=4)
    without, with_head = (TorchMemory(facts, sequences=4, device="cpu", heads=on) for on in (False, True))
    heads: Any = executor.heads
    held = sum(plane.nbytes for cache in heads._caches for plane in cache.planes.values()) + heads._hidden.nbytes
    assert held <= with_head.kv_bytes("f16", CONTEXT) - without.kv_bytes("f16", CONTEXT) <= 1.3 * held
    tensors = [tensor for tensor in facts.tensors if ".4." in tensor.name]
    own = sum(tensor.nbytes for tensor in tensors)
    rest = sum(tensor.nbytes for tensor in facts.tensors) - own
    assert without.weights.resident == pytest.approx(rest, rel=0.01)
    assert with_head.weights.resident - without.weights.resident == pytest.approx(own, rel=0.01)
    assert own > 4 * WIDTH * WIDTH


def test_a_head_beside_a_model_is_planned_in_place_of_its_own(tmp_path: Path) -> None:
    path = write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=0.0)
    beside = write_odd(tmp_path / "drafts.gguf", "qwen35", 5, heads=0.0, part="heads")
    with open_model(path) as opened, open_heads(opened, beside) as model:
        for on in (False, True):
            own, both = (TorchMemory(one.facts, sequences=4, heads=on).weights for one in (opened, model))
            assert own == both


def test_a_head_drafts_only_where_that_costs_none_of_the_cache(tmp_path: Path) -> None:
    path = write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=0.0)
    with open_gguf(path) as gguf:
        facts = model_facts(gguf)

    def planned(free: int) -> Plan:
        return plan_for_torch(facts, None, Settings(), MachineMemory(free_bytes=free, cores=1), "cuda").plan

    def choice(plan: Plan) -> tuple[str, int]:
        return (plan.chosen.kv, plan.chosen.context) if plan.chosen else ("", 0)

    whole = planned(2**34)
    assert whole.heads
    frees = range(2**28, 2**34)
    least = bisect_left(frees, True, key=lambda free: choice(planned(free)) == choice(whole))
    assert choice(planned(frees[least])) == choice(whole)
    assert not planned(frees[least]).heads
