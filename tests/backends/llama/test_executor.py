"""The llama executor against a plain loop over llama.cpp: the same tokens, whatever else runs or ran before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgelm.backends.llama.api import native_log
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.memory import micro_batch
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.placement import Placement
from edgelm.base.errors import DeviceError, EngineError, ModelError, SnapshotError
from edgelm.engine.clock import StepClock
from edgelm.engine.core import (
    Chunk,
    Copy,
    Drop,
    ExecutorInfo,
    Load,
    Op,
    Sampled,
    SamplingParams,
    Save,
    Sequence,
    Step,
    Trim,
)
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import Slot, SlotKV
from edgelm.engine.scheduler import Scheduler
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


class Retiring(SlotKV):
    """Never uses a slot twice, and leaves its cells where they are.

    Attention adds in the order of cells, and llama.cpp puts later tokens into cells that were freed: then the sums, and
    with quantized weights the logits, differ (50 of 60 rows were equal). Without freed cells they are bit-equal.
    """

    def __init__(self, info: ExecutorInfo, snapshot_bytes: int) -> None:
        super().__init__(info, snapshot_bytes=0)

    def release(self, seq: Sequence, resumes: bool = False) -> None:
        slot = seq.kv
        super().release(seq, resumes)
        assert isinstance(slot, Slot)
        slot.seq, slot.idle_tokens = Sequence(-1, [], 0, SamplingParams()), []

    def take_ops(self) -> tuple[Op, ...]:
        return tuple(op for op in super().take_ops() if isinstance(op, Copy))


@contextmanager
def running(
    path: Path, *, drafter: object = None, bookkeeper: type[SlotKV] = SlotKV, **options: object
) -> Iterator[tuple[LlamaModel, Engine]]:
    model = LlamaModel(path)
    executor = LlamaExecutor(model, LlamaOptions(**{"context": 1024, "threads": 2} | options))
    clock = StepClock()
    scheduler = Scheduler(executor.info, bookkeeper(executor.info, 2**28), clock, drafter)
    engine = Engine(executor, scheduler, clock).start()
    try:
        yield model, engine
    finally:
        engine.close()


async def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [sample.id async for event in engine.submit(prompt, params) for sample in event.sampled]


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]], together: bool) -> list[list[int]]:
    async def all_of_them() -> list[list[int]]:
        if together:
            return list(await asyncio.gather(*(answer(engine, *request) for request in requests)))
        return [await answer(engine, *request) for request in requests]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("name", with_model(REAL))
@pytest.mark.parametrize("flash", [False, True])
def test_greedy_text_equals_a_plain_loop(name: str, flash: bool) -> None:
    with running(data_file(f"models/{name}"), context=256, flash=flash) as (model, engine):
        prompt = tokenize(model.native, "Once upon a time, there was a little")
        bare = BareLoop(model.native, 256, flash=flash)
        expected = bare.greedy(prompt, 60)
        bare.close()
        assert answers(engine, [(prompt, SamplingParams(temperature=0, max_tokens=60))], False) == [expected]


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_32_concurrent_requests_equal_the_same_one_at_a_time(tmp_path: Path, quant: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    path = write_tiny(tmp_path / "m.gguf", quant=quant, width=128, ffn=256, seed=seed % 1000)
    requests = []
    system = [rng.randrange(3, 500) for _ in range(70)]
    for i in range(32):
        prompt = [rng.randrange(3, 500) for _ in range(rng.choice([1, 2, 5, 17, 60, 200]))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=rng.randrange(2**64),
            max_tokens=rng.randrange(1, 40),
        )
        requests.append((system + prompt if i % 3 == 0 else prompt, params))
    # Flash attention and q8_0 KV: the setting for which llama.cpp is invariant in the shape of batches.
    options = {"kv": "int8", "bookkeeper": Retiring, "context": 8192, "max_sequences": 64, "max_tokens": 64}
    with running(path, **options) as (_, engine):
        alone = answers(engine, requests, together=False)
    with running(path, **options) as (_, engine):
        assert answers(engine, requests, together=True) == alone


class Oracle(SimpleDrafter):
    """A drafter that knows what will come, and is wrong now and then."""

    def __init__(self, futures: dict[tuple[int, ...], list[int]]) -> None:
        self.futures = futures
        self.rng = random.Random(1)
        self.seen: list[tuple[int, int]] = []

    def propose(self, seq: Sequence, marginal_cost: list[float], forced: tuple[int, ...] = ()) -> list[int]:
        future = self.futures[tuple(seq.tokens[: seq.prompt_len])][seq.completion_len :]
        draft = future[: self.rng.randrange(0, 6)]
        return [(token + 1) % 500 if self.rng.random() < 0.2 else token for token in draft][: len(marginal_cost)]

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self.seen.append((drafted, accepted))


def test_drafts_change_no_token(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant="q8_0", width=128, ffn=256)
    rng = random.Random(3)
    requests = [
        (
            [rng.randrange(3, 500) for _ in range(20)],
            SamplingParams(temperature=t, seed=i, max_tokens=40, repetition_penalty=p, frequency_penalty=p - 1),
        )
        for i, (t, p) in enumerate([(0.0, 1.0), (0.8, 1.0), (0.9, 1.3)])
    ]
    with running(path, kv="int8") as (_, engine):
        plain = answers(engine, requests, together=False)
    oracle = Oracle({tuple(prompt): tokens for (prompt, _), tokens in zip(requests, plain, strict=True)})
    with running(path, kv="int8", drafter=oracle) as (_, engine):
        assert answers(engine, requests, together=False) == plain
    assert sum(accepted for _, accepted in oracle.seen) > 40
    assert any(accepted < drafted for drafted, accepted in oracle.seen)


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LlamaExecutor]:
    model = LlamaModel(write_tiny(tmp_path / "m.gguf", quant="q8_0", width=128, ffn=256))
    executor = LlamaExecutor(model, LlamaOptions(context=512, kv="int8", max_tokens=64))
    yield executor
    executor.close()


def chunk(tokens: list[int], start: int, slot: int, rows: int = 1, **params: object) -> Chunk:
    params = {"temperature": 0} | params
    return Chunk(Sequence(0, [0] * start + tokens, 1, SamplingParams(**params)), start, tokens, rows, slot)


def row(executor: LlamaExecutor, *chunks: Chunk, ops: tuple[object, ...] = ()) -> np.ndarray:
    step = Step(chunks, ops)
    executor.forward(step)
    return executor.logits(step).copy()


PROMPT = list(range(10, 40))


def test_copy_trim_save_and_load_give_the_logits_of_a_fresh_run(executor: LlamaExecutor) -> None:
    fresh = row(executor, chunk(PROMPT, 0, 0), ops=())
    row(executor, chunk([5, 6], 30, 0))
    copied = row(executor, chunk(PROMPT[20:], 20, 1), ops=(Copy(0, 1, 20),))
    trimmed = row(executor, chunk(PROMPT[20:], 20, 0), ops=(Save(0, 7), Trim(0, 20)))
    loaded = row(executor, chunk(PROMPT[29:], 29, 2), ops=(Trim(0, 0), Trim(1, 0), Load(7, 2), Trim(2, 29)))
    again = row(executor, chunk(PROMPT, 0, 0), ops=(Drop(7), Trim(2, 0)))
    for logits in (copied, trimmed, loaded, again):
        np.testing.assert_array_equal(logits, fresh)
    with pytest.raises(SnapshotError):
        executor.forward(Step((), (Load(7, 3),)))


def test_only_sampled_rows_have_logits(executor: LlamaExecutor) -> None:
    both = row(executor, chunk(PROMPT, 0, 0, rows=3), chunk(PROMPT[:9], 0, 1, rows=0), chunk([4], 0, 2))
    assert both.shape == (4, 512)
    executor.forward(Step((), (Trim(0, 0), Trim(1, 0), Trim(2, 0))))
    for i, length in enumerate((28, 29, 30)):
        alone = row(executor, chunk(PROMPT[:length], 0, 0), ops=(Trim(0, 0),))
        np.testing.assert_array_equal(alone[0], both[i])


def test_sampling_stops_at_the_first_token_that_differs_from_the_draft(executor: LlamaExecutor) -> None:
    best = row(executor, chunk(PROMPT, 0, 0)).argmax(axis=1)
    step = Step((chunk([*PROMPT, int(best[0]), 500, 501], 0, 1, rows=4),))
    executor.forward(step)
    (samples,) = executor.sample(step, None).read()
    assert samples[0] == Sampled(int(best[0]))
    assert len(samples) == 2
    assert samples[1].id != 500


def test_masks_allow_only_their_tokens(executor: LlamaExecutor) -> None:
    step = Step((chunk(PROMPT, 0, 0, temperature=1.0),))
    executor.forward(step)
    mask = np.zeros((1, 16), np.int32)
    mask[0, 4] = 1 << 9
    assert executor.sample(step, mask).read() == [[Sampled(4 * 32 + 9)]]


def test_a_refused_op_is_an_error_and_not_the_end(executor: LlamaExecutor) -> None:
    for at in range(8):
        row(executor, chunk(PROMPT * 2, 60 * at, 0))
    with pytest.raises(EngineError, match="no room"):
        executor.forward(Step((chunk(PROMPT * 2, 0, 1),)))
    assert np.isfinite(row(executor, chunk([3], 0, 1), ops=(Trim(0, 0),))).all()


@pytest.mark.parametrize(
    ("result", "line"), [(-3, ""), (0, "ggml_metal_synchronize: error: command buffer 0 failed\n")]
)
def test_a_gpu_that_failed_ends_the_engine(tmp_path: Path, monkeypatch, result: int, line: str) -> None:
    """Metal's state stays failed: each later step of the process would fail, or give the logits of an earlier one."""
    decode = L.llama_decode

    def failing(context: object, batch: object) -> int:
        done = decode(context, batch)
        if line:
            native_log.add(4, line)  # GGML_LOG_LEVEL_ERROR
        return result or done

    with running(write_tiny(tmp_path / "m.gguf")) as (model, engine):
        lost: list[DeviceError] = []
        engine.when_lost = lost.append
        params = SamplingParams(temperature=0, max_tokens=3)
        assert len(answers(engine, [([1, 2, 3], params)], False)[0]) == 3
        monkeypatch.setattr(L, "llama_decode", failing)
        if result:
            with pytest.raises(EngineError):  # the processor has no such state
                answers(engine, [([1, 2, 4], params)], False)
            assert not lost
        model.placement = Placement(("MTL0",), (1,))
        with pytest.raises(DeviceError, match=str(result) if result else "command buffer"):
            answers(engine, [([1, 2, 5], params)], False)
        assert len(lost) == 1


def test_quantized_heads_of_odd_size_are_refused_before_llama_cpp_computes_nan(tmp_path: Path) -> None:
    model = LlamaModel(write_tiny(tmp_path / "m.gguf", head_dim=48))
    try:
        with pytest.raises(ModelError, match="multiple of 32"):
            LlamaExecutor(model, LlamaOptions(context=256, kv="k8v16"))
    finally:
        model.close()


def test_logits_that_are_not_numbers_fail_the_request_only(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", nan_logits=True)
    with running(path) as (_, engine):
        for _ in range(2):  # the engine stays usable
            with pytest.raises(EngineError, match="not numbers"):
                asyncio.run(answer(engine, PROMPT, SamplingParams(temperature=0, max_tokens=3)))


def test_loading_reports_progress_and_can_be_cancelled(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    shares: list[float] = []

    def watch(share: float) -> bool:
        shares.append(share)
        return True

    LlamaModel(path, progress=watch).close()
    assert shares == sorted(shares)
    assert shares[-1] == 1
    with pytest.raises(ModelError, match="cancelled"):
        LlamaModel(path, progress=lambda share: False)


def test_the_micro_batch_bounds_the_scores_of_attention() -> None:
    assert micro_batch(32768, 32, flash=True) == 512
    assert micro_batch(32768, 32, flash=False) == 64
    assert micro_batch(2048, 32, flash=False) == 512
