"""/metrics and /edgelm/top: what Prometheus reads, over engines that come, go, hang and share a name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgelm.engine.core import SamplingParams, Sequence, Stats
from edgelm.engine.counters import COUNTS, HISTOGRAMS, Counters
from edgelm.library.scan import LocalModel
from edgelm.server.routes import metrics as module
from edgelm.server.routes.metrics import Metrics
from tests.server.fake_engines import until

STATS = Stats(
    prompt_tokens=100,
    cached_tokens=80,
    completion_tokens=11,
    drafted=4,
    accepted=3,
    queue_ms=1000,
    prompt_ms=2000,
    first_token_ms=3000,
    decode_ms=4000,
)


def answered(counters: Counters) -> None:
    """Count one request of 100 tokens, 80 of them cached, and 11 of an answer."""
    seq = Sequence(0, [0] * 100, 100, SamplingParams(), cached=80)
    counters.admitted(seq)
    counters.first_tokens(seq, 1, 3.0)
    counters.more_tokens(10, 4.0)
    counters.draft("ngram", 4, 3)
    counters.ended("stop", STATS)


class FakeEngine(httpx2.AsyncBaseTransport):
    """An engine process behind its socket."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.state = "ready"
        self.hanging: list[str] | None = None  # it hangs, and tells there when a look at it begins and ends
        self.num_asked = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.num_asked += 1
        if self.hanging is not None:
            self.hanging.append("begins")
            try:
                await asyncio.sleep(3600)
            finally:
                self.hanging.append("ends")
        numbers = {"requests": 3, "running": 2, "waiting": 1, "kv_usage": 0.25, "rss_bytes": 2**20}
        return httpx2.Response(200, json=numbers | {"counters": self.counters.copy()})

    def slot(self, name: str) -> FakeSlot:
        client = httpx2.AsyncClient(transport=self, base_url="http://engine")
        model = LocalModel(name, Path(f"/{name}.gguf"))
        return FakeSlot(model, self.state, SimpleNamespace(client=client))


@dataclass(eq=False)
class FakeSlot:
    model: LocalModel
    state: str
    process: Any
    num_loads: int = 1
    num_restarts: int = 0
    footprint: Any = None


class Table:
    """The slots that a test puts into it."""

    before_unload: Any

    def __init__(self) -> None:
        self.slots: list[FakeSlot] = []

    def all_slots(self) -> list[FakeSlot]:
        return list(self.slots)

    def put(self, name: str, engine: FakeEngine) -> None:
        self.slots.append(engine.slot(name))

    async def unload(self) -> None:
        """End the first engine."""
        await self.before_unload(self.slots[0])
        del self.slots[0]


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def metrics(table: Table) -> Metrics:
    return Metrics("http://127.0.0.1:1", table)  # type: ignore[arg-type]


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


async def scraped(metrics: Metrics, **labels: str) -> dict[str, float]:
    """Return the values of one scrape that have these labels."""
    text = metrics.text(await metrics.collect())
    return {name: value for name, own, value in samples(text) if labels.items() <= own.items()}


async def test_the_text_has_vllms_names_and_kinds(metrics: Metrics, table: Table) -> None:
    engine = FakeEngine()
    answered(engine.counters)
    table.put("m", engine)
    metrics.count_request("POST", "/v1/chat/completions", 200)
    families = {family.name: family for family in text_string_to_metric_families(metrics.text(await metrics.collect()))}
    kinds = {name: family.type for name, family in families.items()}
    counters = {f"edgelm:{name.removesuffix('_total')}" for name in [*COUNTS, "request_success_total"]}
    assert kinds == {
        **dict.fromkeys(counters, "counter"),
        **{f"edgelm:{name}": "histogram" for name in HISTOGRAMS},
        "edgelm:num_requests_running": "gauge",
        "edgelm:num_requests_waiting": "gauge",
        "edgelm:kv_cache_usage_perc": "gauge",
        "edgelm:process_resident_memory_bytes": "gauge",
        "edgelm:model_loaded": "gauge",
        "edgelm:model_loads": "counter",
        "edgelm:model_restarts": "counter",
        "edgelm:model_unloads": "counter",
        "edgelm:drafter_drafted_tokens": "counter",
        "edgelm:drafter_accepted_tokens": "counter",
        "edgelm:http_requests": "counter",
    }
    values = await scraped(metrics, model_name="m")
    assert values["edgelm:num_requests_running"] == 2
    assert values["edgelm:kv_cache_usage_perc"] == 0.25
    assert values["edgelm:prompt_tokens_total"] == 100
    assert values["edgelm:generation_tokens_total"] == 11
    assert values["edgelm:prefix_cache_hits_total"] == 80
    assert values["edgelm:spec_decode_num_accepted_tokens_total"] == 3
    assert values["edgelm:e2e_request_latency_seconds_sum"] == 7
    assert (await scraped(metrics, finished_reason="stop")) == {"edgelm:request_success_total": 1}
    assert (await scraped(metrics, handler="/v1/chat/completions", status="200"))["edgelm:http_requests_total"] == 1


async def test_buckets_are_cumulative(metrics: Metrics, table: Table) -> None:
    engine = FakeEngine()
    for waited_s in (0.002, 0.03, 0.03, 9000.0):
        engine.counters.first_tokens(Sequence(0, [0], 1, SamplingParams()), 1, waited_s)
    table.put("m", engine)
    text = metrics.text(await metrics.collect())
    name = "edgelm:time_to_first_token_seconds"
    buckets = {labels["le"]: value for own, labels, value in samples(text) if own == f"{name}_bucket"}
    assert (buckets["0.001"], buckets["0.0025"], buckets["0.04"], buckets["2560.0"], buckets["+Inf"]) == (0, 1, 3, 3, 4)
    assert list(buckets.values()) == sorted(buckets.values())
    assert (await scraped(metrics, model_name="m"))[f"{name}_count"] == 4


async def test_what_an_ended_engine_counted_is_kept_and_added_to(metrics: Metrics, table: Table) -> None:
    first = FakeEngine()
    answered(first.counters)
    table.put("m", first)
    await table.unload()
    values = await scraped(metrics, model_name="m")
    assert values["edgelm:generation_tokens_total"] == 11
    assert values["edgelm:model_loaded"] == 0
    assert "edgelm:num_requests_running" not in values, "nobody tells it"
    second = FakeEngine()
    table.put("m", second)
    assert (await scraped(metrics, model_name="m"))["edgelm:generation_tokens_total"] == 11
    answered(second.counters)
    values = await scraped(metrics, model_name="m")
    assert values["edgelm:generation_tokens_total"] == 22
    assert values["edgelm:time_to_first_token_seconds_count"] == 2
    assert values["edgelm:model_loaded"] == 1
    events = [values[f"edgelm:model_{event}_total"] for event in ("loads", "restarts", "unloads")]
    assert events == [2, 0, 1]
    by_drafter = await scraped(metrics, model_name="m", drafter="ngram")
    assert by_drafter == {"edgelm:drafter_drafted_tokens_total": 8, "edgelm:drafter_accepted_tokens_total": 6}


async def test_a_look_that_ends_late_counts_nothing_backwards(metrics: Metrics) -> None:
    model = module._Model()
    first = Counters()
    answered(first)
    early = first.copy()
    answered(first)
    for copy in (first.copy(), early):
        model.take(copy)
        assert model.numbers().counts["generation_tokens_total"] == 22
    later = [Counters() for _ in range(3 * module.MAX_PROCESSES)]
    for num_later, counters in enumerate(later, 1):
        answered(counters)
        for copy in (counters.copy(), early, first.copy(), later[0].copy()):
            model.take(copy)
        assert model.numbers().counts["generation_tokens_total"] == 22 + 11 * num_later


async def test_two_processes_of_a_model_count_while_one_ends(metrics: Metrics, table: Table) -> None:
    old, new = FakeEngine(), FakeEngine()
    for engine in (old, new):
        table.put("m", engine)
    await metrics.collect()
    answered(old.counters)
    answered(new.counters)
    assert (await scraped(metrics, model_name="m"))["edgelm:generation_tokens_total"] == 22


async def test_an_engine_that_hangs_delays_a_scrape_by_its_limit(
    metrics: Metrics, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [FakeEngine() for _ in range(6)]
    for number, engine in enumerate(engines):
        answered(engine.counters)
        table.put(f"m{number}", engine)
    await metrics.collect()
    assert module.SCRAPE_LIMIT_S <= 1
    monkeypatch.setattr(module, "SCRAPE_LIMIT_S", 0.5)
    looks: list[str] = []
    for engine in engines[1:]:
        engine.hanging = looks
    values = await scraped(metrics, model_name="m1")
    assert looks == ["begins"] * 5 + ["ends"] * 5, "all are asked at the same time"
    assert values["edgelm:generation_tokens_total"] == 11
    assert "edgelm:kv_cache_usage_perc" not in values
    assert (await scraped(metrics, model_name="m0"))["edgelm:kv_cache_usage_perc"] == 0.25


async def test_two_files_of_one_name_are_one_series(metrics: Metrics, table: Table) -> None:
    for _ in range(2):
        engine = FakeEngine()
        answered(engine.counters)
        table.put("m", engine)
    text = metrics.text(await metrics.collect())
    names = [(name, *sorted(labels.items())) for name, labels, _ in samples(text)]
    assert len(names) == len(set(names))
    values = await scraped(metrics, model_name="m")
    assert values["edgelm:generation_tokens_total"] == 22
    assert values["edgelm:num_requests_running"] == 4


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "größe"])
async def test_odd_names_are_read_back(metrics: Metrics, table: Table, name: str) -> None:
    table.put(name, FakeEngine())
    assert (await scraped(metrics, model_name=name))["edgelm:model_loaded"] == 1


async def test_only_a_ready_engine_is_asked(metrics: Metrics, table: Table) -> None:
    engine = FakeEngine()
    engine.state = "starting"
    table.put("m", engine)
    assert (await scraped(metrics, model_name="m"))["edgelm:model_loaded"] == 0
    assert engine.num_asked == 0


async def test_nobody_makes_endless_series(metrics: Metrics) -> None:
    for number in range(50):
        metrics.count_request(f"METHOD{number}", None, 404)
    text = metrics.text(await metrics.collect())
    found = [(labels, value) for name, labels, value in samples(text) if name == "edgelm:http_requests_total"]
    assert found == [({"method": "other", "handler": "other", "status": "404"}, 50)]


async def test_the_numbers_are_read_after_answers_but_not_after_each(
    metrics: Metrics, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.05)
    engine = FakeEngine()
    answered(engine.counters)
    table.put("m", engine)
    for _ in range(100):
        metrics.refresh_soon()
    await until(lambda: engine.num_asked > 0)
    await asyncio.sleep(0.3)
    assert engine.num_asked == 1
    answered(engine.counters)
    metrics.refresh_soon()
    await until(lambda: engine.num_asked == 2)
    await asyncio.sleep(0.1)  # the answer is read
    table.slots.clear()  # it crashed
    assert (await scraped(metrics, model_name="m"))["edgelm:generation_tokens_total"] == 22


async def test_the_document_of_top_has_what_the_text_has(metrics: Metrics, table: Table) -> None:
    engine = FakeEngine()
    answered(engine.counters)
    table.put("m", engine)
    document = metrics.document(await metrics.collect())
    (model,) = document["models"]
    assert (model["model"], model["state"], model["running"], model["waiting"]) == ("m", "ready", 2, 1)
    assert model["counts"]["generation_tokens_total"] == 11
    assert (model["first_tokens"], model["first_token_s"]) == (1, 3.0)
