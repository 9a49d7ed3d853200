"""Engines that are killed while drafts run: the next one answers as if nothing had been, from the prefixes on disk.

The module is the engine's process too: python -m tests.backends.llama.test_draft_kills MODEL FOLDER reads a request a
line, a JSON list of tokens and the number of tokens to answer, and prints each token as it comes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import edgelm.backends.llama.build as build_module
import edgelm.engine.engine as engine_module
from edgelm.backends.build import build
from edgelm.base.config import Settings
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import SamplingParams
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from tests.backends.llama.test_speculation import quantized
from tests.counts import Count
from tests.odd_models import Odd
from tests.server.harness import until

KILLS = Count(test=4, soak=200)  # of all architectures
ARCHS: tuple[Odd, ...] = ("qwen35", "lfm2")
OTHERS = 0.015  # weight of all tokens but the last: drafts are right most of the time
CONTEXT = 1024
QUESTION, ANSWER = 300, 40  # tokens of the first question, which is worth a file; and of an answer


def engine_process(model: Path, folder: Path) -> None:
    """Answer requests, with the drafts of a model whose rows cost next to nothing; each pause writes all prefixes."""
    places = Places({f"EDGELM_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "CACHE")})
    flush_idle = Scheduler.flush_idle
    costs = StepCosts([Measured(1, 0, 0.010), Measured(64, 0, 0.0163)])
    settings = Settings(threads=1, ctx=CONTEXT, kv="int8", parallel=2)
    with (
        patch.object(build_module, "measured_clock", lambda *_: StepClock(costs)),
        patch.object(StepClock, "observe", lambda *_: None),
        patch.object(MtpDrafter, "_step_cost", lambda _: 0.01),
        patch.object(engine_module, "FLUSH_IDLE_AFTER_S", 0.0),
        patch.object(Scheduler, "flush_idle", lambda scheduler, ends: flush_idle(scheduler, ends=True)),
    ):
        job = EngineJob(model=model, settings=settings, prefixes=folder / "prefixes", drafts=True)
        loaded = build(job, places=places)

        async def answer(tokens: list[int], count: int) -> None:
            stats: Any = None
            async for event in loaded.engine.submit(tokens, SamplingParams(temperature=0, max_tokens=count)):
                for sample in event.sampled:
                    print(sample.id, flush=True)
                stats = event.stats
            print(f"cached {stats.cached_tokens} accepted {stats.accepted}", flush=True)

        for line in sys.stdin:
            asyncio.run(answer(*json.loads(line)))
        loaded.engine.close()


class Process:
    """An engine's process."""

    def __init__(self, model: Path, folder: Path) -> None:
        command = [sys.executable, "-m", __name__, str(model), str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def ask(self, tokens: list[int], most: int = 10**9) -> tuple[list[int], dict[str, int]]:
        """Return the answer, or its first tokens, and what was cached and accepted."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([tokens, ANSWER]) + "\n")
        self._process.stdin.flush()
        answer: list[int] = []
        while len(answer) < most:
            words = self._process.stdout.readline().split()
            if len(words) > 1:
                return answer, {words[0]: int(words[1]), words[2]: int(words[3])}
            answer.append(int(words[0]))
        return answer, {}

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def close(self) -> None:
        self._process.communicate()


def plain_answers(model: Path) -> Any:
    """Return an engine without drafts and without a disk, as a context that gives a function from prompt to answer."""

    @contextmanager
    def running() -> Any:
        job = EngineJob(model=model, settings=Settings(threads=1, ctx=CONTEXT, kv="int8", prefix_cache_ram=0.0))
        loaded = build(job)

        async def answer(tokens: list[int]) -> list[int]:
            stream = loaded.engine.submit(tokens, SamplingParams(temperature=0, max_tokens=ANSWER))
            return [sample.id async for event in stream for sample in event.sampled]

        try:
            yield lambda tokens: asyncio.run(answer(tokens))
        finally:
            loaded.engine.close()

    return running()


def stored(folder: Path) -> set[tuple[str, int]]:
    """Return the files of prefixes, and the times at which they were written."""
    return {(path.name, path.stat().st_mtime_ns) for path in folder.rglob("*.kv")}


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_left_of_a_killed_engine_is_right(arch: Odd, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    model = quantized(tmp_path, arch, 5, heads=OTHERS if arch == "qwen35" else None)
    cached = accepted = 0
    with plain_answers(model) as expected:
        past: list[int] = []
        for _ in range(KILLS // len(ARCHS)):
            if not past or len(past) + 2 * ANSWER + 8 > CONTEXT:
                past = [rng.randrange(3, 500) for _ in range(QUESTION)]
            process, before = Process(model, tmp_path), stored(tmp_path)
            try:
                answer, facts = process.ask(past)
                assert answer == expected(past)
                cached, accepted = cached + facts["cached"], accepted + facts["accepted"]
                if rng.random() < 0.7:  # or else it may be killed while it writes
                    until("the conversation is on the disk", lambda: stored(tmp_path) != before)  # noqa: B023 - used at once
                past = [*past, *answer, *(rng.randrange(3, 500) for _ in range(4))]
                begun, _ = process.ask(past, most=rng.randint(1, ANSWER - 1))
                assert begun == expected(past)[: len(begun)]
            finally:
                process.kill()
        process = Process(model, tmp_path)
        assert process.ask(past)[0] == expected(past)
        process.close()
    assert not [file for file in tmp_path.rglob("*.kv.*") if file.stat().st_size == 0]
    print(f"{KILLS // len(ARCHS)} kills of {arch}: {cached} tokens from the disk, {accepted} drafted tokens accepted")
    assert cached
    if arch == "qwen35" or KILLS >= 100:  # a random lfm2 repeats itself little: of a few answers, perhaps none
        assert accepted > KILLS // 4


if __name__ == "__main__":
    os.environ.setdefault("HOME", sys.argv[2])
    engine_process(Path(sys.argv[1]), Path(sys.argv[2]))
