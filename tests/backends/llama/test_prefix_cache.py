"""The prefix cache on real llama.cpp: whatever was kept, lost or damaged, an answer is the one without a cache.

One request at a time, answers are equal token by token. Where several run together, llama.cpp puts tokens into cells
that others left, and adds in another order (docs/experiments.md): there, where an answer goes another way, its token
must have been all but the best one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions, state_identity
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.snapshot_files import Bounds, SnapshotFolder
from edgelm.backends.snapshots import SnapshotStore
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Event, ExecutorInfo, Sampled, SamplingParams, Sequence
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.save_points import ANSWER_START_LEN
from edgelm.engine.scheduler import Scheduler
from tests.counts import Count
from tests.odd_models import Odd, write_odd
from tests.tiny import write_tiny

HISTORIES = Count(test=8, soak=200)
ODD_HISTORIES = Count(test=3, soak=60)  # for each architecture
LENGTH = 14  # actions of a history
RAM_BYTES = 400_000
DISK_BYTES = 1_500_000
VOCAB = range(3, 500)
NEAR = 0.3  # of a log-probability: the order of cells was seen to change logits by 0.17; other tokens are 4 apart


class Process:
    """What one engine process has: a model, its cache, and perhaps a folder that outlives it."""

    def __init__(self, path: Path, root: Path | None, ram_bytes: int = RAM_BYTES, **options: object) -> None:
        self.model = LlamaModel(path)
        parsed = LlamaOptions(**{"context": 1024, "kv": "int8", "max_tokens": 128} | options)
        bounds = Bounds(DISK_BYTES, 3600)
        folder = SnapshotFolder(root, state_identity(self.model, [path], parsed), bounds) if root else None
        self.store = SnapshotStore(ram_bytes, folder)
        self.executor = LlamaExecutor(self.model, parsed, self.store)
        self.kv = SlotKV(self.executor.info, ram_bytes, self.store, min_stored_len=64)
        clock = StepClock()
        self.engine = Engine(self.executor, Scheduler(self.executor.info, self.kv, clock), clock).start()

    def answer(self, prompt: list[int], params: SamplingParams, cache_namespace: str = "") -> tuple[list[int], int]:
        """Return the answer, and how much of the prompt was cached."""
        return self.answers([(prompt, params)], cache_namespace)[0]

    def answers(
        self, requests: list[tuple[list[int], SamplingParams]], cache_namespace: str = ""
    ) -> list[tuple[list[int], int]]:
        async def one(prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
            events: list[Event] = [
                event async for event in self.engine.submit(prompt, params, cache_namespace=cache_namespace)
            ]
            stats = events[-1].stats
            assert stats
            return [sample.id for event in events for sample in event.sampled], stats.cached_tokens

        async def together() -> list[tuple[list[int], int]]:
            return list(await asyncio.gather(*(one(*request) for request in requests)))

        return asyncio.run(together())

    def close(self) -> None:
        self.engine.close()


@contextlib.contextmanager
def process(*args: object, **options: object) -> Iterator[Process]:
    running = Process(*args, **options)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.close()


class Uncached(SlotKV):
    """Keeps nothing that is not running."""

    def __init__(self, info: ExecutorInfo) -> None:
        super().__init__(info, 0)

    def release(self, seq: Sequence, resumes: bool = False) -> None:
        seq.computed = 0
        super().release(seq, resumes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "m.gguf", quant="q8_0", width=128, ffn=256)


@contextlib.contextmanager
def uncached(path: Path, kv: str = "int8") -> Iterator[Engine]:
    executor = LlamaExecutor(LlamaModel(path), LlamaOptions(context=1024, kv=kv, max_tokens=128))
    clock = StepClock()
    engine = Engine(executor, Scheduler(executor.info, Uncached(executor.info), clock), clock).start()
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[Engine]:
    with uncached(tiny) as engine:
        yield engine


def events_of(engine: Engine, prompt: list[int], params: SamplingParams) -> list[Event]:
    async def run() -> list[Event]:
        return [event async for event in engine.submit(prompt, params)]

    return asyncio.run(run())


def plain_samples(engine: Engine, prompt: list[int], params: SamplingParams) -> list[Sampled]:
    return [sample for event in events_of(engine, prompt, params) for sample in event.sampled]


def plain_answer(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [sample.id for sample in plain_samples(engine, prompt, params)]


class History:
    """Turns, branches, retries, cancelled answers, new processes and damaged files, at random."""

    def __init__(self, seed: int, tiny: Path, root: Path, plain: Engine, kv: str = "int8") -> None:
        self.rng = random.Random(seed)
        self.tiny, self.root, self.plain, self.kv = tiny, root, plain, kv
        self.chats: list[tuple[list[int], int]] = []  # tokens, and how many of them were the prompt
        self.process = Process(tiny, root, kv=kv)
        self.together = self.rng.random() < 0.5
        self.exact = not self.together and kv == "int8"
        self.cached = self.ties = 0
        self.restarts = self.damaged = 0

    def run(self) -> None:
        systems = [self.rng.choices(VOCAB, k=self.rng.randint(20, 200)) for _ in range(2)]
        try:
            for _ in range(LENGTH):
                action = self.rng.choice(["new", "turn", "turn", "turn", "branch", "retry", "other", "together"])
                if action == "other":
                    self.disturb()
                elif action == "together" and self.together:
                    system = self.rng.choice(systems)
                    self.check([system + self.rng.choices(VOCAB, k=self.rng.randint(1, 30)) for _ in range(4)])
                else:
                    self.check([self.prompt(action, systems)])
                self.check_bounds()
        finally:
            self.process.close()

    def prompt(self, action: str, systems: list[list[int]]) -> list[int]:
        if action == "new" or not self.chats:
            return self.rng.choice(systems) + self.rng.choices(VOCAB, k=self.rng.randint(1, 60))
        tokens, prompt_len = self.rng.choice(self.chats)
        if action == "turn":
            return tokens + self.rng.choices(VOCAB, k=self.rng.randint(1, 60))
        if action == "branch":
            return tokens[: self.rng.randint(1, len(tokens))] + self.rng.choices(VOCAB, k=9)
        return tokens[:prompt_len]

    def check(self, prompts: list[list[int]]) -> None:
        params = SamplingParams(
            temperature=self.rng.choice([0.0, 0.8]) if self.exact else 0.0,
            seed=self.rng.randrange(99),
            max_tokens=self.rng.randint(1, 30),
        )
        prompts = [prompt for prompt in prompts if len(prompt) < 900]
        answers = self.process.answers([(prompt, params) for prompt in prompts])
        for prompt, (answer, cached) in zip(prompts, answers, strict=True):
            expected = plain_answer(self.plain, prompt, params)
            if not self.exact and answer != expected:
                self.check_ties(prompt, answer, expected)
            else:
                assert answer == expected
            self.cached += cached
            self.chats.append((prompt + answer, len(prompt)))

    def check_ties(self, prompt: list[int], answer: list[int], expected: list[int]) -> None:
        """Check that an answer leaves the expected one only where two tokens are all but equally likely."""
        while answer != expected:
            at = next(i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b)
            params = SamplingParams(temperature=0.0, max_tokens=1, num_logprobs=20)
            (best,) = plain_samples(self.plain, prompt + answer[:at], params)
            likely = dict(best.top)
            assert best.logprob is not None
            assert best.logprob - likely.get(answer[at], -99.0) < NEAR, (best, answer[at])
            self.ties += 1
            prompt, answer = prompt + answer[: at + 1], answer[at + 1 :]
            params = SamplingParams(temperature=0.0, max_tokens=max(len(answer), 1))
            expected = plain_answer(self.plain, prompt, params) if answer else []

    def disturb(self) -> None:
        """Go on in a new process; damage a file before, or while the process has read the folder already."""
        if self.rng.random() < 0.7:
            self.process.close()
            self.restarts += 1
            self.damage()
            self.process = Process(self.tiny, self.root, kv=self.kv)
        if self.rng.random() < 0.5:
            self.process.store.files()
            self.damage()

    def damage(self) -> None:
        files = sorted(self.root.rglob("*.kv"))
        if not files or self.rng.random() < 0.3:
            return
        path = self.rng.choice(files)
        data = bytearray(path.read_bytes() or b"?")
        match self.rng.choice(["flip", "cut", "empty", "gone"]):
            case "flip":
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            case "cut":
                del data[self.rng.randrange(len(data)) :]
            case "empty":
                data.clear()
            case _:
                path.unlink()
                return
        path.write_bytes(data)
        self.damaged += 1

    def check_bounds(self) -> None:
        assert self.process.store.num_bytes <= RAM_BYTES
        assert sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file()) <= DISK_BYTES


def test_random_histories_answer_as_without_a_cache(tiny: Path, tmp_path: Path, plain: Engine) -> None:
    cached = restarts = damaged = ties = 0
    for number in range(HISTORIES):
        seed = random.SystemRandom().randrange(2**32)
        print("seed", seed)
        history = History(seed, tiny, tmp_path / str(number), plain)
        history.run()
        cached, restarts, damaged = cached + history.cached, restarts + history.restarts, damaged + history.damaged
        ties += history.ties
    print(
        f"{int(HISTORIES)} histories: {cached:,} tokens cached, {restarts} new processes, {damaged} damaged files, "
        f"{ties} ties that the order of cells decided otherwise"
    )
    assert cached > 200 * HISTORIES
    assert restarts


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "mamba"])
def test_random_histories_on_caches_of_other_kinds(arch: Odd, tmp_path: Path) -> None:
    """A sliding window, a hybrid and a recurrent cache: none can be cut."""
    path = write_odd(tmp_path / f"{arch}.gguf", arch)
    cached = ties = 0
    with uncached(path, "f16") as plain:
        for number in range(ODD_HISTORIES):
            seed = random.SystemRandom().randrange(2**32)
            print("seed", seed)
            history = History(seed, path, tmp_path / str(number), plain, "f16")
            history.run()
            cached, ties = cached + history.cached, ties + history.ties
    print(f"{arch}: {int(ODD_HISTORIES)} histories: {cached:,} tokens cached, {ties} ties decided otherwise")
    assert cached > 0


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "mamba"])
def test_a_conversation_goes_on_where_it_ended_or_at_a_state_that_was_saved_before(arch: Odd, tmp_path: Path) -> None:
    path = write_odd(tmp_path / f"{arch}.gguf", arch)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    first, start = random.Random(1).choices(VOCAB, k=200), 200 - ANSWER_START_LEN
    with process(path, tmp_path / "prefixes", 4_000_000, kv="f16") as one:
        answer, _ = one.answer(first, params)
        chat = first + answer
        assert one.answer([*chat, 5, 6], params)[1] == len(chat) - 1, "the next turn"
        assert one.answer(first, params) == (answer, start), "a retry"
        assert one.answer([*first[:100], 7, 8], params)[1] == 0, "a branch where none was before"
    with process(path, tmp_path / "prefixes", 4_000_000, kv="f16") as other:
        assert other.answer([*chat, 5, 6, 9, 9, 9, 9, 9, 9, 9, 9, 9], params)[1] == len(chat) - 1, "another process"


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "mamba"])
def test_a_tool_loop_on_a_cache_that_cannot_be_cut_computes_what_is_new(arch: Odd, tmp_path: Path) -> None:
    """From the third turn on, at least 95 % of a prompt is cached, and answers are those without a cache.

    Another chunking rounds otherwise, which may turn a greedy answer; a state that does not fit turns all.
    """
    path = write_odd(tmp_path / f"{arch}.gguf", arch)
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    params = SamplingParams(temperature=0.0, max_tokens=24)
    system, shares, equal = rng.choices(VOCAB, k=300), list[float](), list[bool]()
    with process(path, None, 32_000_000, kv="f16") as one, uncached(path, "f16") as plain:

        def ask(prompt: list[int]) -> tuple[list[int], float]:
            answer, cached = one.answer(prompt, params)
            equal.append(answer[:8] == plain_answer(plain, prompt, params)[:8])
            return answer, cached / len(prompt)

        prompt = system + rng.choices(VOCAB, k=80)
        question = prompt
        for _ in range(6):
            answer, share = ask(prompt)
            shares.append(share)
            prompt = prompt + answer + rng.choices(VOCAB, k=12)
        assert min(shares[2:]) >= 0.95, shares
        assert ask(question[:-3] + rng.choices(VOCAB, k=40))[1] >= 0.85, "a template that omits the thoughts"
        assert ask(system + rng.choices(VOCAB, k=100))[1] == 0
        assert ask(system + rng.choices(VOCAB, k=100))[1] >= 0.75, "another conversation with the system prompt"
        assert sum(equal) >= len(equal) - 2, f"seed {seed}"


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "mamba"])
def test_a_chat_is_reopened_in_a_new_process_whatever_its_cache(arch: Odd, tmp_path: Path) -> None:
    path = write_odd(tmp_path / f"{arch}.gguf", arch)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    first = random.Random(1).choices(VOCAB, k=200)
    with process(path, tmp_path / "prefixes", kv="f16") as one:
        answer, _ = one.answer(first, params)
    with process(path, tmp_path / "prefixes", kv="f16") as other:
        assert other.answer([*first, *answer, 5, 6], params)[1] == len(first) + len(answer) - 1


@pytest.mark.parametrize("arch", ["lfm2", "qwen35"])
def test_a_cut_at_any_of_the_last_tokens_costs_nothing_and_changes_nothing(arch: Odd, tmp_path: Path) -> None:
    """The states go back; a wrong one changes log-probabilities by whole numbers."""
    path = write_odd(tmp_path / f"{arch}.gguf", arch)
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    params = SamplingParams(temperature=0.0, max_tokens=1, num_logprobs=3)
    with process(path, None, 0, kv="f16", rollback=3) as one, uncached(path, "f16") as plain:
        for kept in (197, 198, 199):
            prompt = rng.choices(VOCAB, k=200)
            one.answer(prompt, params)
            other = [*prompt[:kept], prompt[kept] + 1, *rng.choices(VOCAB, k=5)]
            events = events_of(one.engine, other, params)
            assert events[-1].stats
            assert events[-1].stats.cached_tokens == kept
            (cut,), (whole,) = events[-1].sampled, plain_samples(plain, other, params)
            assert cut.logprob == pytest.approx(whole.logprob, abs=0.01), f"seed {seed}, {kept} kept"


def test_another_kv_type_or_model_finds_nothing(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", quant="q8_0", width=128, ffn=256, seed=1)
    prompt, params = random.Random(1).choices(VOCAB, k=200), SamplingParams(temperature=0.0, max_tokens=4)
    for path, kv, cached in ((tiny, "int8", 0), (tiny, "int8", 199), (tiny, "f16", 0), (other, "int8", 0)):
        with process(path, tmp_path / "prefixes", kv=kv) as running:
            assert running.answer(prompt, params)[1] == cached, (path, kv)


def test_a_state_that_llama_cpp_does_not_take_is_computed_again_and_deleted(tiny: Path, tmp_path: Path) -> None:
    """Its checksum is right: a build or a file that lies about itself costs one computation, and no request."""
    prompt, params = random.Random(1).choices(VOCAB, k=200), SamplingParams(temperature=0.0, max_tokens=4)
    root = tmp_path / "prefixes"
    with process(tiny, root) as one:
        expected, _ = one.answer(prompt, params)
    with process(tiny, root) as other:
        folder = other.store._folder
        assert folder
        (file,) = folder.files()
        folder.remove([file.name])
        folder.write(file.tokens, file.cache_namespace, np.frombuffer(b"nonsense" * 100, np.uint8))
        assert other.answer(prompt, params)[0] == expected
        assert not list(root.rglob("*.kv"))
        assert other.answer(prompt, params) == (expected, 199)
