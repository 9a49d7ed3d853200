"""Models with states beside their KV, on the CPU: answers are llama.cpp's, whatever ran before, beside, or ahead."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from edgelm.backends.llama.model import LlamaModel
from edgelm.engine.core import Event, SamplingParams, Sequence
from edgelm.engine.engine import Engine
from edgelm.models.decoder import Decoder
from tests.backends.torch.test_executor import KnownAnswer, answers
from tests.backends.torch.torch_engine import load_gguf, make_executor, running
from tests.bare import BareLoop
from tests.odd_models import write_odd

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_odd(tmp_path_factory.mktemp("tiny") / "m.gguf", "qwen35", 3)


@pytest.fixture(scope="module")
def decoder(path: Path) -> Decoder:
    return load_gguf(path)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def known(path: Path) -> dict[int, tuple[list[int], list[int]]]:
    """Prompts by their length, and llama.cpp's greedy answers, from a plain loop."""
    model = LlamaModel(path, repack=False)
    bare = BareLoop(model.native, 256)
    found = {}
    for length in (5, 40, 100):
        prompt = prompt_of(length, length)
        found[length] = prompt, bare.greedy(prompt, 64)
    bare.close()
    model.close()
    return found


class WrongInTheMiddle(KnownAnswer):
    """Drafts of a known answer, of which a random number of tokens is right."""

    def propose(self, seq: Sequence, marginal_cost: list[float], forced: tuple[int, ...] = ()) -> list[int]:
        draft = super().propose(seq, marginal_cost, forced)
        right = random.randint(0, len(draft))
        return [token if place < right else (token + 1) % 500 for place, token in enumerate(draft)]


def last_event(engine: Engine, prompt: list[int]) -> tuple[list[int], Event]:
    async def collect() -> tuple[list[int], Event]:
        events = [event async for event in engine.submit(prompt, GREEDY)]
        return [sample.id for event in events for sample in event.sampled], events[-1]

    return asyncio.run(collect())


def test_greedy_text_equals_llama_cpp(decoder: Decoder, known: dict[int, tuple[list[int], list[int]]]) -> None:
    with running(decoder, capacity=1024, max_sequences=4, max_tokens=48) as engine:
        assert answers(engine, [(prompt, GREEDY) for prompt, _ in known.values()], together=True) == [
            answer for _, answer in known.values()
        ]


@pytest.mark.parametrize("length", [5, 40, 100])
def test_wrong_drafts_change_nothing(
    length: int, decoder: Decoder, known: dict[int, tuple[list[int], list[int]]]
) -> None:
    prompt, answer = known[length]
    with running(decoder, drafter=WrongInTheMiddle(answer, 12), max_tokens=48) as engine:
        for _ in range(2):  # the second time behind the saved state of a prefix
            got, last = last_event(engine, prompt)
            assert got == answer
            assert last.stats
            assert 0 < last.stats.accepted < last.stats.drafted


def test_the_next_turn_begins_behind_the_last_block(
    decoder: Decoder, known: dict[int, tuple[list[int], list[int]]]
) -> None:
    prompt, answer = known[40]
    turn = prompt + answer + prompt_of(9, 1)
    with running(decoder, max_sequences=2) as engine:
        want, first = last_event(engine, turn)
    with running(decoder, max_sequences=2) as engine:
        assert last_event(engine, prompt)[0] == answer
        got, last = last_event(engine, turn)
        again, retry = last_event(engine, turn)
    assert got == again == want
    assert first.stats
    assert last.stats
    assert retry.stats
    assert (first.stats.cached_tokens, last.stats.cached_tokens) == (0, 96)  # of 104, whole blocks of 32
    assert retry.stats.cached_tokens >= 64  # where a retry goes on


def test_a_shared_prefix_is_saved_where_prompts_differ(decoder: Decoder) -> None:
    system = prompt_of(96, 2)
    with running(decoder, max_sequences=2, context=512) as engine:
        cached = []
        for seed in range(3):
            _, last = last_event(engine, system + prompt_of(80, 10 + seed))
            assert last.stats
            cached.append(last.stats.cached_tokens)
    assert cached == [0, 0, 96]  # the second prompt shows where they differ


def test_states_are_counted(decoder: Decoder) -> None:
    info = make_executor(decoder, max_sequences=2).info
    assert info.num_states == 6
    assert info.can_trim
