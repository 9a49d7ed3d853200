"""The torch executor on the CPU: it has llama.cpp's tokens, alone and beside or after other requests."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.torch.batch import Bucket
from edgelm.backends.torch.executor import TorchExecutor
from edgelm.base.errors import RequestError
from edgelm.engine.core import LAST, NOT_A_TOKEN, Chunk, Sampled, SamplingParams, Sequence, Step
from edgelm.engine.engine import Engine
from edgelm.engine.step_times import measure_steps
from edgelm.kernels.cache import FORMATS
from edgelm.models.decoder import Decoder
from tests.backends.torch.rounding import Rows, assert_equal_but_for_rounding, recording
from tests.backends.torch.torch_engine import load_gguf, make_executor, running
from tests.bare import BareLoop, tokenize
from tests.engine.fake import SimpleDrafter
from tests.real_data import data_file, with_model
from tests.tiny import write_tiny

REAL = (
    "stories260K-v3-f32.gguf",
    "BabyLlama-tok361-f32.gguf",
    "BabyLlama-tok361-Q8_0.gguf",
    "BabyLlama-tok361-Q4_0.gguf",
)
STARTER = Path(__file__).resolve().parents[3] / "models" / "starter" / "starter.gguf"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", quant="f32", width=64, ffn=128, head_dim=32)
    return load_gguf(path)


@pytest.fixture
def executor(decoder: Decoder) -> TorchExecutor:
    return make_executor(decoder, context=128, capacity=256)


async def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [sample.id async for event in engine.submit(prompt, params) for sample in event.sampled]


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]], together: bool) -> list[list[int]]:
    async def all_of_them() -> list[list[int]]:
        if together:
            return list(await asyncio.gather(*(answer(engine, *request) for request in requests)))
        return [await answer(engine, *request) for request in requests]

    return asyncio.run(all_of_them())


def llama_text(path: Path, text: str, count: int) -> tuple[list[int], list[int]]:
    """Return a prompt's tokens and llama.cpp's greedy answer, from a plain loop."""
    model = LlamaModel(path, repack=False)
    prompt = tokenize(model.native, text)
    bare = BareLoop(model.native, 256)
    expected = bare.greedy(prompt, count)
    bare.close()
    model.close()
    return prompt, expected


class KnownAnswer(SimpleDrafter):
    """A drafter that proposes a known answer, so that verification needs few steps."""

    def __init__(self, answer: list[int], most: int) -> None:
        self.answer = answer
        self.most = most

    def propose(self, seq: Sequence, marginal_cost: list[float], forced: tuple[int, ...] = ()) -> list[int]:
        done = seq.completion_len
        return self.answer[done : done + self.most][: len(marginal_cost)]


def assert_same_greedy(decoder: Decoder, prompt: list[int], expected: list[int], most: int, context: int = 256) -> None:
    params = SamplingParams(temperature=0, max_tokens=len(expected))
    with running(decoder, drafter=KnownAnswer(expected, most) if most else None, context=context) as engine:
        assert answers(engine, [(prompt, params)], False) == [expected]


@pytest.mark.parametrize("name", with_model(REAL))
def test_greedy_text_equals_llama_cpp(name: str) -> None:
    """Decode the smallest model token by token; the others verify llama.cpp's answer as a draft."""
    path = data_file(f"models/{name}")
    prompt, expected = llama_text(path, "Once upon a time, there was a little", 60)
    assert_same_greedy(load_gguf(path), prompt, expected, most=0 if name.startswith("stories") else 15)


def test_the_starter_answers_as_with_llama_cpp() -> None:
    prompt, expected = llama_text(STARTER, "What can edgelm do?", 60)
    assert_same_greedy(load_gguf(STARTER), prompt, expected, most=15)


# Attention writes nothing to rows of padding, so later matmuls read whatever was there: the interpreter warns.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_interpreted_kernels_give_the_same_text(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant="q8_0", layers=1, width=64, ffn=64, heads=1, kv_heads=1, head_dim=64)
    prompt = list(range(10, 15))
    params = SamplingParams(temperature=0, max_tokens=8)
    with running(load_gguf(path), context=64) as engine:
        (expected,) = answers(engine, [(prompt, params)], False)
    assert_same_greedy(load_gguf(path, "triton"), prompt, expected, most=3, context=64)


def requests_of(
    seed: int, count: int, penalties: tuple[float, ...] = (1.0, 1.2)
) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    system = [rng.randrange(3, 500) for _ in range(70)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(3, 500) for _ in range(rng.choice([1, 2, 5, 17, 40]))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice(penalties),
            seed=rng.randrange(2**64),
            max_tokens=rng.randrange(1, 24),
        )
        requests.append((system + prompt if i % 3 == 0 else prompt, params))
    return requests


@pytest.mark.parametrize("kv", FORMATS)
def test_concurrent_and_earlier_requests_change_no_token(decoder: Decoder, kv: str) -> None:
    """With few blocks, prefixes are evicted and sequences preempted; each answer equals that of a new engine."""
    seed = random.randrange(2**32)
    print("seed", seed)
    requests = requests_of(seed, 10)
    alone, alone_rows, rows = [], Rows(), Rows()
    for request in requests:
        with running(decoder, context=192, kv=kv, kind=recording(alone_rows)) as engine:
            alone += answers(engine, [request], False)
    options = {"capacity": 384, "max_sequences": 4, "max_tokens": 48}
    with running(decoder, context=192, kv=kv, kind=recording(rows), **options) as engine:
        for _ in range(2):  # the second time with cached prefixes
            got = answers(engine, requests, together=True)
            assert_equal_but_for_rounding(requests, (alone, alone_rows), (got, rows))


@pytest.mark.parametrize("kv", FORMATS)
def test_one_step_ahead_changes_no_token(decoder: Decoder, kv: str) -> None:
    """The executor uses sampled tokens before the host reads them, while requests end, fail and are admitted."""
    seed = random.randrange(2**32)
    print("seed", seed)
    requests = requests_of(seed, 12, penalties=(1.0,) * 11 + (1.2,))  # a penalty needs the token on the host
    alone_rows, rows = Rows(), Rows()
    with running(decoder, context=192, kv=kv, kind=recording(alone_rows)) as engine:
        alone = answers(engine, requests, False)
    num_ahead = 0

    class Watched(recording(rows)):  # type: ignore[misc]
        def forward(self, step: Step) -> None:
            nonlocal num_ahead
            num_ahead += any(chunk.tokens == [LAST] for chunk in step.chunks)
            super().forward(step)

    with running(decoder, context=192, kv=kv, capacity=512, max_sequences=4, runs_ahead=True, kind=Watched) as engine:
        for together in (True, False):
            got = answers(engine, requests, together)
            assert_equal_but_for_rounding(requests, (alone, alone_rows), (got, rows))
    assert num_ahead > 0


def test_a_last_token_is_found_in_its_row(decoder: Decoder) -> None:
    """Some of the sequences remain, in another order than their rows, beside one with a draft."""
    executors = [make_executor(decoder, context=64, capacity=256, runs_ahead=ahead) for ahead in (True, False)]
    seqs = [Sequence(i, [20 + i] * 4, 4, SamplingParams(temperature=0)) for i in range(3)]
    draft = Sequence(7, [9, 9, 9], 1, SamplingParams(temperature=0))
    prompts = [Chunk(seq, 0, seq.tokens, 1, (i,)) for i, seq in enumerate(seqs)]
    first = Step((prompts[0], Chunk(draft, 0, [9, 9, 9], 3, (5,)), *prompts[1:]))
    logits = []
    for executor in executors:
        executor.forward(first)
        sampled = {
            c.seq.id: rows[0].id for c, rows in zip(first.chunks, executor.sample(first, None).read(), strict=True)
        }
        ahead = executor.info.runs_ahead
        step = Step(tuple(Chunk(seqs[i], 4, [LAST if ahead else sampled[i]], 1, (i,)) for i in (2, 0)))
        executor.forward(step)
        logits.append(executor.logits(step).copy())
    np.testing.assert_array_equal(*logits)


def test_token_0_is_run_after_logits_of_nan(decoder: Decoder) -> None:
    """The sequence fails once the host knows; until then, no row outside of the embedding is read."""
    executor = make_executor(decoder, context=64, capacity=64, runs_ahead=True)
    first = Step((chunk([5, 6], 0, (0,)),))
    executor.forward(first)
    executor._logits = torch.full_like(executor._logits, torch.nan)
    assert executor.sample(first, None).read() == [[Sampled(NOT_A_TOKEN)]]
    step = Step((Chunk(first.chunks[0].seq, 2, [LAST], 1, (0,)),))
    executor.forward(step)
    got = executor.logits(step).copy()
    executor.forward(Step((chunk([0], 2, (0,)),)))
    np.testing.assert_array_equal(got, executor.logits(step))


class Oracle(SimpleDrafter):
    """A drafter that knows the future, and is sometimes wrong."""

    def __init__(self, futures: dict[tuple[int, ...], list[int]]) -> None:
        self.futures = futures
        self.rng = random.Random(1)
        self.accepted = 0

    def propose(self, seq: Sequence, marginal_cost: list[float], forced: tuple[int, ...] = ()) -> list[int]:
        future = self.futures[tuple(seq.tokens[: seq.prompt_len])][seq.completion_len :]
        draft = future[: self.rng.randrange(0, 6)]
        return [(token + 1) % 500 if self.rng.random() < 0.2 else token for token in draft][: len(marginal_cost)]

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self.accepted += accepted


@pytest.mark.parametrize("kv", ["f16", "int8", "k6v4"])
def test_drafts_change_no_token(decoder: Decoder, kv: str) -> None:
    requests = requests_of(5, 8)
    with running(decoder, context=192, kv=kv) as engine:
        expected = answers(engine, requests, False)
    futures = {tuple(prompt): text for (prompt, _), text in zip(requests, expected, strict=True)}
    drafter = Oracle(futures)
    with running(decoder, context=192, kv=kv, drafter=drafter) as engine:
        assert answers(engine, requests, True) == expected
    assert drafter.accepted > 10


# -- the executor alone ------------------------------------------------------------------------------------------------


def chunk(tokens: list[int], start: int, block_table: tuple[int, ...], rows: int = 1, **params: object) -> Chunk:
    seq = Sequence(0, [0] * start + tokens, 1, SamplingParams(**params))  # type: ignore[arg-type]
    return Chunk(seq, start, tokens, rows, block_table)


def test_a_shared_block_is_read_and_not_written(executor: TorchExecutor) -> None:
    tokens = [7 + i for i in range(40)]
    step = Step((chunk(tokens, 0, (3, 5)),))
    executor.forward(step)
    whole = executor.logits(step).copy()
    step = Step((chunk(tokens[32:], 32, (3, 6)), chunk(tokens[32:], 32, (3, 0), rows=8)))  # both after block 3
    executor.forward(step)
    shared = executor.logits(step)
    np.testing.assert_allclose(shared[0], whole[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(shared[8], whole[0], rtol=1e-4, atol=1e-5)
    assert len(shared) == 9


def test_padding_changes_nothing(executor: TorchExecutor) -> None:
    """A CUDA graph runs a step padded to a bucket; leftovers in the buffers must not matter."""
    prompt = Step((chunk(list(range(20, 60)), 0, (1, 2), rows=0), chunk(list(range(9)), 0, (4,), rows=0)))
    executor.forward(prompt)
    step = Step((chunk([77], 40, (1, 2)), chunk([5, 6, 7], 9, (4,), rows=3)))
    executor.forward(step)
    plain = executor.logits(step).copy()
    with torch.inference_mode():
        bucket = Bucket(tokens=16, sequences=8, rows=16, max_query_len=16)
        executor._buffers.fill(step, bucket)
        padded = executor._run(executor._buffers.views(bucket))
    np.testing.assert_allclose(padded[:4].numpy(), plain, rtol=1e-4, atol=1e-5)
    after = Step((chunk([78], 41, (1, 2)),))
    executor.forward(after)  # would read entries written by padding
    fresh = make_executor(executor._decoder, context=128, capacity=256)
    whole = Step((chunk([*range(20, 60), 77, 78], 0, (0, 1)),))
    fresh.forward(whole)
    np.testing.assert_allclose(executor.logits(after)[0], fresh.logits(whole)[0], rtol=1e-3, atol=1e-4)


def test_masks_allow_only_their_tokens(executor: TorchExecutor) -> None:
    step = Step((chunk([5, 6], 0, (0,)), chunk([8], 0, (1,), temperature=1.5)))
    executor.forward(step)
    masks = np.zeros((2, -(-executor.info.num_vocab // 32)), np.int32)
    masks[0, 300 // 32] = 1 << 300 % 32
    masks[1, 17 // 32] = 1 << 17 % 32
    assert [[sample.id for sample in rows] for rows in executor.sample(step, masks).read()] == [[300], [17]]


def test_log_probabilities_are_those_of_the_logits(executor: TorchExecutor) -> None:
    step = Step((chunk([5, 6], 0, (0,), num_logprobs=3, temperature=0.0),))
    executor.forward(step)
    logits = executor.logits(step)[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    sampled = executor.sample(step, None).read()[0][0]
    assert sampled.id == int(np.argmax(logits))
    assert sampled.logprob == pytest.approx(logprobs.max(), abs=1e-5)
    assert [token for token, _ in sampled.top] == list(np.argsort(-logits)[:3])


def test_the_cost_of_rows_can_be_measured(executor: TorchExecutor) -> None:
    points = measure_steps(executor, [(1, 8), (4, 8), (2, 64)], 30)
    assert [(rows, depth) for rows, depth, _ in points] == [(1, 8), (4, 8), (2, 64)]
    assert all(seconds > 0 for _, _, seconds in points)


def test_a_request_longer_than_the_context_is_refused(decoder: Decoder) -> None:
    with running(decoder, context=64) as engine, pytest.raises(RequestError):
        answers(engine, [(list(range(3, 80)), SamplingParams())], False)


@pytest.mark.parametrize("kv", FORMATS)
def test_the_cache_has_the_reported_size(decoder: Decoder, kv: str) -> None:
    executor = make_executor(decoder, context=64, capacity=128, kv=kv)
    held = sum(plane.nbytes for cache in executor._caches for plane in cache.planes.values())
    assert held == executor.info.kv_bytes_per_token * executor.info.capacity
