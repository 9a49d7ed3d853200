"""The torch engine's heads that predict several tokens: they are llama.cpp's and change no answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgelm.backends import build as choice_module
from edgelm.backends.followed_heads import HEADS_WINDOW
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.torch import heads as heads_module
from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.backends.torch.memory import TorchMemory
from edgelm.base.config import Settings
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
from tests.models.tiny_models import build, write
from tests.odd_models import write_odd

CONTEXT = 512
OTHERS = 0.015  # weight of all tokens but the last: the head is right most of the time
DRAWS = Count(test=400, soak=20_000)
Loaded = tuple[Decoder, NextHead]


def load_both(path: Path, implementation: str = "reference") -> Loaded:
    with open_gguf(path) as gguf:
        decoder = load(read_config(gguf.metadata), GGUFSource(gguf), "cpu", torch.float32, "reference")
        decoder.implementation = implementation  # of the head alone: interpreted kernels take long
        head = load_next_head(decoder, GGUFSource(gguf), CONTEXT)
        decoder.implementation = "reference"
    assert head
    return decoder, head


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
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
    facts: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "max_tokens": 4}
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
    assert {len(before) for before, _ in tested} >= {0, 1, 2}
    executor = executor_of(model)
    for before, counter in tested:
        tokens, params = [*prompt, *before], SamplingParams(**facts)
        fed = Fed(executor, 0)
        fed.compute(tokens)
        distribution = exact(fed.logits[0], params, tokens, [], None)
        expected = dict(zip(distribution.ids, np.diff(distribution.ends, prepend=0.0).tolist(), strict=True))
        assert not set(counter) - set(expected), "a token was sampled that the distribution does not hold"
        statistic, freedom = chi_square(counter, expected)
        assert statistic < critical(freedom), f"after {before}: {counter} against {expected}"


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
def test_a_draft_is_llama_cpp_s(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = write_odd(tmp_path / "m.gguf", "qwen35", 3, heads=1.0)
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
            if token != other:
                assert chance == pytest.approx(also, rel=0.1), "two tokens are about as likely"
                break
            assert chance == pytest.approx(also, rel=0.1)
            num_equal += 1
    llama.close()
    assert num_equal >= 16


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


def test_the_heads_begin_anew_in_long_texts_and_after_a_pause(model: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    max_len = 3 * HEADS_WINDOW
    monkeypatch.setattr(heads_module, "HEADS_LEN", max_len + HEADS_WINDOW)
    rng = random.Random(1)
    executor = executor_of(model)
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


def test_nothing_is_drafted_without_hidden_states(model: Loaded) -> None:
    executor = executor_of(model)
    assert executor.heads
    fed = Fed(executor, 0)
    assert executor.heads.first(5, [1, 2]) == (NOT_A_TOKEN, 0.0), "a sequence that never began"
    fed.compute([9, 8, 7])
    assert fed.heads.first(0, [9, 8, 7, 6, 5]) == (NOT_A_TOKEN, 0.0), "a token that was not computed"


def test_no_hidden_state_of_a_sequence_that_is_not_followed_is_copied(model: Loaded) -> None:
    heads: Any = executor_of(model).heads
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
def test_interpreted_kernels_draft_the_same(tmp_path: Path) -> None:
    path = write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=1.0)
    drafts = []
    for implementation in ("reference", "triton"):
        fed = Fed(executor_of(load_both(path, implementation), sequences=1), 0)
        fed.compute(list(range(20, 22)))
        drafts.append(fed.draft(9, count=2))
    for (token, chance), (same, also) in zip(*drafts, strict=True):
        assert (token, chance) == (same, pytest.approx(also, rel=1e-3))


# -- safetensors -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose head transformers ignores."""
    path = write(build("qwen3_5", mtp_num_hidden_layers=1), tmp_path_factory.mktemp("folder"))
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    attending = {name: tensor for name, tensor in tensors.items() if ".layers.3." in name}
    head = {f"mtp.layers.0.{name.split('.layers.3.')[1]}": tensor for name, tensor in attending.items()}
    head |= dict.fromkeys(("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"), torch.zeros(64))
    head |= {"mtp.pre_fc_norm_hidden.weight": torch.zeros(64), "mtp.fc.weight": torch.zeros(64, 128)}
    tensors |= {
        name: torch.randn(tensor.shape, generator=generator) * (0.3 if "norm" in name else tensor.shape[-1] ** -0.5)
        for name, tensor in head.items()
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def predicted(folder: Path, config: Any, hidden: torch.Tensor, ids: list[int], embedding: torch.Tensor) -> torch.Tensor:
    """Return the head's states by the modules of transformers: those of `ids` beside the hidden states before them."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    tensors = load_file(folder / "model.safetensors")

    def norm(name: str) -> Any:
        module = modeling.Qwen3_5RMSNorm(64, eps=config.rms_norm_eps)
        module.weight.data = tensors[f"mtp.{name}.weight"]
        return module

    layer = modeling.Qwen3_5DecoderLayer(config, 3).eval()
    layer.load_state_dict({k.removeprefix("mtp.layers.0."): v for k, v in tensors.items() if "mtp.layers" in k})
    sides = norm("pre_fc_norm_embedding")(embedding[torch.tensor(ids)]), norm("pre_fc_norm_hidden")(hidden)
    x = (torch.cat(sides, 1) @ tensors["mtp.fc.weight"].T)[None]
    positions = torch.arange(len(ids))[None]
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
    rotary = modeling.Qwen3_5TextRotaryEmbedding(config)(x, positions)
    out = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
    out = out[0] if isinstance(out, tuple) else out
    return norm("norm")(out.reshape(len(ids), -1))


def test_the_head_of_a_folder_is_transformers_layer(folder: Path) -> None:
    import transformers

    with open_safetensors(folder) as files:
        config = transformers.AutoConfig.from_pretrained(folder)
        settings = config.to_dict()
        assert folder_facts(files).mtp_heads == 1
        decoder = load(read_config(settings), FolderSource(files, settings), "cpu", torch.float32, "reference")
        head = load_next_head(decoder, FolderSource(files, settings), CONTEXT)
    assert head
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [5, 17, 80, 33, 41, 9, 60]
    with torch.no_grad():
        hidden = reference.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        want = predicted(folder, config, hidden, ids[1:], reference.model.embed_tokens.weight)
        logits = reference.lm_head(want[-1])
    fed = Fed(executor_of((decoder, head)), 0)
    fed.compute(ids[:-1])
    (token, chance), *_ = fed.draft(ids[-1], count=1)
    best = torch.softmax(logits.double(), 0).max(0)
    assert (token, chance) == (int(best.indices), pytest.approx(float(best.values), rel=1e-3))


# -- the whole engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "drafts"), [("auto", True), ("mtp", True), ("ngram", False)])
def test_settings_say_whether_heads_draft_and_counters_who_drafted(
    draft: str, drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgelm.backends.torch.build.measured_clock", lambda *_: StepClock(COSTS))
    monkeypatch.setattr(StepClock, "plain_s", lambda _: 1.0)
    monkeypatch.setattr("edgelm.engine.speculation.throttle.TRIAL_RATE", 1.0)
    path = write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=0.0)
    places = Places({f"EDGELM_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "CACHE", "RUNTIME")})
    settings = Settings(threads=1, ctx=512, engine="torch", device="cpu", memory=False, draft=draft)
    loaded = choice_module.build(EngineJob(model=path, settings=settings, drafts=True), places=places)
    try:
        answers(loaded.engine, [([7, 300, 41], SamplingParams(temperature=0, max_tokens=60))], together=False)
        assert (loaded.engine.counters.copy()["drafted"].get("mtp", 0) > 0) is drafts
    finally:
        loaded.engine.close()


COSTS = StepCosts([Measured(1, 0, 0.010), Measured(64, 0, 0.0163)])


def test_the_cache_of_the_head_is_planned(tmp_path: Path) -> None:
    path = write_odd(tmp_path / "m.gguf", "qwen35", 5, heads=0.0)
    with open_gguf(path) as gguf:
        facts = model_facts(gguf)
    executor = executor_of(load_both(path), sequences=4)
    sizes = [TorchMemory(facts, sequences=4, device="cpu", heads=on).kv_bytes("f16", CONTEXT) for on in (False, True)]
    heads: Any = executor.heads
    held = sum(plane.nbytes for cache in heads._caches for plane in cache.planes.values()) + heads._hidden.nbytes
    assert held <= sizes[1] - sizes[0] <= 1.3 * held
