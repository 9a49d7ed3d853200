"""Almost right requests to every route of a real front: no answer above 499, no hang, no traceback."""

from __future__ import annotations

import os
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from tests.counts import Count
from tests.server.harness import Front, Watch, figures, serving, until
from tests.server.mutated_requests import FuzzedRequest, fuzzed
from tests.server.stream_forms import check_error, check_lines, check_stream, strict_json

REQUESTS = Count(test=400, soak=20_000)
CONNECTIONS = 6
ANSWER_LIMIT_S = 60.0  # of a machine that is busy with other tests; such an answer takes milliseconds
MAX_HEALTH_S = 5.0
MAX_FRONT_GROWTH_BYTES = 64 * 2**20
MAX_ENGINE_GROWTH_BYTES = 512 * 2**20
MAX_FILES_GROWTH = 8
WARM = 100  # requests before memory is measured first
SHOWN = 30  # failures in the report

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory and open files in /proc")


@dataclass
class Outcomes:
    """The answers to the requests so far. Threads share it."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: tuple[float, int, str] = (0.0, 0, "")
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int, request: FuzzedRequest, kind: str, took_s: float) -> None:
        with self.lock:
            self.statuses[kind] += 1
            self.slowest = max(self.slowest, (took_s, number, f"{request.method} {request.route[:60]}"))

    def fail(self, number: int, request: FuzzedRequest, reason: str) -> None:
        sent = f"{request.method} {request.path[:200]} {request.headers} {request.content[:3000]!r}"
        with self.lock:
            self.failures.append(f"request {number}: {reason[:1500]}\n  sent: {sent}")


@pytest.fixture
def front(own: dict[str, str], tmp_path: Path) -> Iterator[Front]:
    settings = {"EDGELM_PREFIX_CACHE_RAM": "0"}  # kept prefixes would look like a leak
    with serving(own | settings, "starter", log=tmp_path / "log") as running:
        assert running.chat("starter", max_tokens=1).status_code == 200
        yield running


def stored_ids(front: Front) -> list[str]:
    """Store some responses that requests continue."""
    wanted = {"model": "starter", "input": "hi", "max_output_tokens": 2}
    return [front.http.post("/v1/responses", json=wanted).json()["id"] for _ in range(3)]


def ask(client: httpx2.Client, number: int, request: FuzzedRequest, outcomes: Outcomes) -> None:
    """Send a request and check the form of its answer."""
    headers = {name: value.encode("latin-1") for name, value in request.headers.items()}
    begin = time.monotonic()
    try:
        answer = client.request(request.method, request.path, content=request.content, headers=headers)
    except httpx2.HTTPError as error:
        outcomes.fail(number, request, f"no answer: {error!r}")
        return
    outcomes.add(number, request, f"{answer.status_code}", time.monotonic() - begin)
    try:
        check_answer(request, answer)
    except (AssertionError, KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        outcomes.fail(number, request, f"{answer.status_code}, {error!r}: {answer.content[:600]!r}")


def check_answer(request: FuzzedRequest, answer: httpx2.Response) -> None:
    assert answer.status_code < 500
    if request.method == "HEAD":
        assert answer.content == b""
    elif answer.is_redirect:
        assert answer.headers["location"]
    elif answer.status_code >= 400:
        check_error(request.route, answer.content)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        check_stream(request.route, answer.content)
    elif answer.headers["content-type"].startswith("application/x-ndjson"):
        check_lines(request.route, answer.content)
    elif request.route != "/":
        assert isinstance(strict_json(answer.content), list if request.route == "/slots" else dict)


def send(front: Front, seed: int, ids: list[str], numbers: range, outcomes: Outcomes) -> None:
    """Send the requests of these numbers over several connections."""

    def client_thread(mine: range) -> None:
        with httpx2.Client(base_url=front.address, timeout=ANSWER_LIMIT_S, trust_env=False) as client:
            for number in mine:
                ask(client, number, fuzzed(random.Random(f"{seed}:{number}"), ids), outcomes)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(client_thread, [numbers[start::CONNECTIONS] for start in range(CONNECTIONS)]))


@pytest.mark.timeout(Count(test=300, soak=3600))
def test_fuzzed_requests(front: Front) -> None:
    seed = int(os.environ.get("FUZZ_SEED", secrets.randbelow(2**32)))
    print(f"seed {seed} (FUZZ_SEED repeats it)")
    ids, outcomes = stored_ids(front), Outcomes()
    engine = front.ps("starter")["pid"]
    began = time.monotonic()
    with Watch(front) as watch:
        send(front, seed, ids, range(WARM), outcomes)
        before = figures(front, "starter")
        send(front, seed, ids, range(WARM, REQUESTS), outcomes)
    took_s = time.monotonic() - began
    until("no request is open", lambda: front.ps("starter")["requests"] == 0)
    deep = sum(count for status, count in outcomes.statuses.items() if status.startswith("2"))
    print(
        f"{REQUESTS} requests in {took_s:.0f} s: {dict(sorted(outcomes.statuses.items()))}: {deep / REQUESTS:.0%} deep"
    )
    print(f"slowest: {outcomes.slowest}; /health: at most {watch.slowest_s * 1e3:.0f} ms")
    log = front.log.read_text()
    print(log[-3000:])
    assert not outcomes.failures, f"{len(outcomes.failures)} failures:\n" + "\n".join(outcomes.failures[:SHOWN])
    assert "Traceback" not in log
    assert deep > REQUESTS / 2, "most requests are to reach the engine"
    assert front.ps("starter")["pid"] == engine
    watch.check(MAX_HEALTH_S)
    after = figures(front, "starter")
    print(f"before: {before}; after: {after}")
    assert after.front_bytes < before.front_bytes + MAX_FRONT_GROWTH_BYTES
    assert after.engine_bytes < before.engine_bytes + MAX_ENGINE_GROWTH_BYTES
    assert after.front_files <= before.front_files + MAX_FILES_GROWTH
    assert after.engine_files <= before.engine_files + MAX_FILES_GROWTH
