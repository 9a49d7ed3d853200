"""Engines and fronts that die: nobody waits for ever, nothing is left behind, the next request works."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx2
import openai
import pytest

from edgelm.server.proxy import ENDING_S
from tests.counts import Count
from tests.server.harness import ENDLESS, LIMIT_S, Front, body, processes, processes_of, serving, until

KILLS = Count(test=4, soak=20)
CLIENTS = Count(test=3, soak=6)
KINDS = ("edgelm serve", "engine_process", "template_worker", "grammar_worker")  # in their command lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def test_an_engine_killed_in_the_middle_of_a_stream(front: Front) -> None:
    events = front.events("long", max_tokens=100_000, **ENDLESS)
    for _ in range(5):
        assert "choices" in next(events)
    os.kill(front.ps("long")["pid"], signal.SIGKILL)
    rest = list(events)
    assert all("choices" in event for event in rest[:-1])
    assert rest[-1]["error"]["code"] == "engine_died"
    assert "SIGKILL" in rest[-1]["error"]["message"]
    answer = front.chat("long", **ENDLESS)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_the_official_client_tells_of_it(front: Front) -> None:
    headers = {"Prefer": "wait"}
    with openai.OpenAI(
        base_url=f"{front.address}/v1", api_key="any", timeout=LIMIT_S, default_headers=headers
    ) as client:
        wanted = body("long", "hello", max_tokens=100_000)
        chunks = client.chat.completions.create(**wanted, stream=True, extra_body=ENDLESS)
        assert next(chunks).choices
        os.kill(front.ps("long")["pid"], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="SIGKILL") as caught:
            list(chunks)
        assert caught.value.code == "engine_died"
        again = client.chat.completions.create(**wanted | {"max_tokens": 4}, extra_body=ENDLESS)
        assert again.usage.completion_tokens == 4


def test_an_engine_killed_while_it_answers_at_once(front: Front) -> None:
    front.chat("long")
    pid = front.ps("long")["pid"]
    answers: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: answers.append(front.chat("long", max_tokens=100_000, **ENDLESS)))
    asking.start()
    until("the engine has the request", lambda: front.ps("long")["requests"] == 1)
    time.sleep(2 * ENDING_S)  # the front would send it to another engine otherwise
    os.kill(pid, signal.SIGABRT)
    asking.join(LIMIT_S)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "engine_died"
    assert "SIGABRT" in answers[0].json()["error"]["message"]
    assert answers[0].headers["retry-after"]


def test_a_request_right_after_a_kill_is_answered(front: Front) -> None:
    """The front cannot know of it yet, and the dying process may still take a connection."""
    for _ in range(KILLS):
        front.chat("tiny")
        process = front.ps("tiny")["pid"]
        os.kill(process, signal.SIGKILL)
        until("the kernel has ended it", lambda: process not in processes())  # noqa: B023 - used at once
        answer = front.chat("tiny")
        assert answer.status_code == 200, answer.text


def test_an_engine_that_died_is_started_again_unasked(front: Front) -> None:
    front.chat("tiny")
    before = front.ps("tiny")["pid"]
    os.kill(before, signal.SIGKILL)
    until("another engine", lambda: front.ps("tiny")["pid"] not in (before, None))
    after = until("it is ready", lambda: (now := front.ps("tiny"))["state"] == "ready" and now)
    assert after["error"] is None


def test_kills_under_load(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    """Every request ends in an answer or an error in OpenAI's shape, whatever moment its engine dies at."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with serving(own, models / "long.gguf", log=tmp_path / "log") as front:
        outcomes: Counter[str] = Counter()
        stopping = threading.Event()

        def ask(seed: int) -> None:
            rng = random.Random(seed)
            while not stopping.is_set():
                outcomes[outcome(front, rng)] += 1

        clients = [threading.Thread(target=ask, args=(rng.randrange(2**32),)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        engines = set()
        for _ in range(KILLS):
            state = until("the engine is ready", lambda: (now := front.ps("long")) and now["state"] == "ready" and now)
            engines.add(state["pid"])
            time.sleep(rng.uniform(0, 0.4))
            os.kill(state["pid"], signal.SIGKILL)
            until("another engine", lambda: front.ps("long")["pid"] != state["pid"])  # noqa: B023 - used at once
            assert front.chat("long", max_tokens=4, **ENDLESS).status_code == 200
        stopping.set()
        for client in clients:
            client.join(LIMIT_S)
            assert not client.is_alive()
        print(dict(outcomes), "engines", len(engines))
        assert len(engines) == KILLS
        assert outcomes.keys() <= {"answer", "error", "error event"}
        assert outcomes["answer"]
        assert outcomes["error"] + outcomes["error event"]
        until("one of each is left", lambda: sorted(kinds_of(own)) == sorted(KINDS))
        assert front.end() == 0
        until("no process is left", lambda: not processes_of(own))


def kinds_of(environment: dict[str, str]) -> list[str]:
    """Return what the living processes of a test are."""
    commands = processes_of(environment).values()
    return [next((kind for kind in KINDS if kind in command), command) for command in commands]


def outcome(front: Front, rng: random.Random) -> str:
    """Ask once, and return how it ended."""
    fields = {"max_tokens": rng.choice([1, 50, 2000]), **ENDLESS}
    if rng.random() < 0.3:
        answer = front.chat("long", **fields)
        assert answer.status_code == 200 or answer.json()["error"]["code"] in ("engine_died", "model_failed")
        return "answer" if answer.status_code == 200 else "error"
    wanted = body("long", "hello", stream=True, **fields)
    with front.http.stream("POST", "/v1/chat/completions", json=wanted, headers={"prefer": "wait"}) as answer:
        text = answer.read().decode()
    if answer.status_code != 200:
        return "error"
    events = text.split("\n\n")
    assert events.pop() == ""
    if events[-1] == "data: [DONE]":
        return "answer"
    assert '"error"' in events[-1], events[-1]
    return "error event"


def test_engines_end_with_a_front_that_is_killed(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(own, models / "long.gguf", log=tmp_path / "log") as front:
        events = front.events("long", max_tokens=100_000, **ENDLESS)
        next(events)
        engine = front.ps("long")["pid"]
        assert engine in processes_of(own)
        front.process.kill()
        until("no process is left", lambda: not processes_of(own))
        with pytest.raises(httpx2.TransportError):
            list(events)
    with serving(own, log=tmp_path / "log") as front:
        folders = [path.name for path in Path(own["EDGELM_RUNTIME_DIR"]).glob("engines-*")]
        assert len(folders) == 1, "what the killed one left is removed"
