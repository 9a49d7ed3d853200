"""More models than fit, on real engines: no request is lost or refused, and their memory stays under the limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.bench_models import run, write_models
from tests.counts import Count

MODELS = Count(test=3, soak=10)
FIT = Count(test=2, soak=3)
REQUESTS = Count(test=8, soak=200)
CLIENTS = Count(test=2, soak=4)
WIDTH = Count(test=256, soak=1024)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of processes is read from /proc")
@pytest.mark.timeout(Count(test=300, soak=3600))
def test_requests_in_random_order_on_a_budget(own: dict[str, str], tmp_path: Path) -> None:
    models = write_models(tmp_path, MODELS, WIDTH)
    outcome = run(models, own, requests=REQUESTS, clients=CLIENTS, fit=FIT, log=tmp_path / "log")
    print(outcome.text())
    assert not outcome.errors
    assert [status for status, _ in outcome.answers] == [200] * REQUESTS
    assert outcome.most <= outcome.budget
    assert len(outcome.engines) >= MODELS
