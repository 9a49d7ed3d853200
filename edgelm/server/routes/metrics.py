"""The metrics of a front and its engines: GET /metrics for Prometheus, GET /edgelm/top for `edgelm top`.

Owns what the front counts itself, and the last numbers of every engine: those of one that ended are kept. The names
are vLLM's, with `edgelm:` in place of `vllm:`, where they mean the same. A look wakes no model and keeps none loaded.
The text is written by hand: prometheus_client takes 20 to 30 ms to import, and counts in its own process only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgelm import __version__
from edgelm.engine.counters import COUNTS, HISTOGRAMS
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.engines.table import EngineTable
from edgelm.server.remotes.models import Remotes

PREFIX = "edgelm:"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SCRAPE_LIMIT_S = 1.0  # for all engines together
REFRESH_S = 0.5  # least time between two looks at the engines after answers
MAX_PROCESSES = 8  # of one model that may still tell numbers, the ending ones too
DRAFTERS = {
    "drafted": "Draft tokens that were verified, by who drafted them: ngram, mtp or model.",
    "accepted": "Draft tokens that were accepted, by who drafted them.",
}
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Labels = dict[str, str]
Sample = tuple[str, Labels, float]  # what follows the family's name, the labels, the value


@dataclass(slots=True)
class Numbers:
    """The counters of one model, of all processes that it had."""

    counts: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)  # tokens, by drafter, as is the next one
    accepted: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, list[float]] = field(default_factory=dict)  # buckets, and behind them the sum

    @classmethod
    def of(cls, copy: dict[str, Any]) -> Numbers:
        """Return the numbers of a copy of an engine's counters."""
        counters = {name: Counter(copy[name]) for name in ("counts", "finished", "drafted", "accepted")}
        return cls(**counters, histograms=copy["histograms"])

    def add(self, other: Numbers) -> None:
        self.counts.update(other.counts)
        self.finished.update(other.finished)
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)
        for name, more in other.histograms.items():
            own = self.histograms.get(name, [0] * len(more))
            self.histograms[name] = [one + two for one, two in zip(own, more, strict=True)]


class _Model:
    """One model: the counters of all processes that it had, and how many these were."""

    def __init__(self) -> None:
        self.loads = self.restarts = self.unloads = 0  # of slots that are gone
        self._ended = Numbers()  # of processes that started up to `_ended_start`
        self._ended_start = 0.0
        self._last: dict[float, tuple[float, Numbers]] = {}  # by the start of a process: time of the copy, its numbers

    def take(self, copy: dict[str, Any]) -> None:
        """Take a copy of the counters of a process, unless a later one is known: nothing may count backwards."""
        started, taken = copy["started"], copy["taken"]
        known, _ = self._last.get(started, (0.0, None))
        if taken <= known or started <= self._ended_start:
            return
        self._last[started] = taken, Numbers.of(copy)
        if len(self._last) > MAX_PROCESSES:
            self._ended_start = min(self._last)
            self._ended.add(self._last.pop(self._ended_start)[1])

    def numbers(self) -> Numbers:
        total = Numbers()
        for numbers in (self._ended, *(numbers for _, numbers in self._last.values())):
            total.add(numbers)
        return total


@dataclass(slots=True)
class ModelMetrics:
    """The numbers of one model; those that change up and down are None while its engine does not tell them."""

    name: str
    state: str  # of its engine
    numbers: Numbers
    loads: int
    restarts: int
    unloads: int
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    rss_bytes: int | None = None
    gpu_bytes: int | None = None  # predicted

    def add(self, slot: EngineSlot, answer: dict[str, Any] | None) -> None:
        """Add the numbers of one of its engines: two may share a name, or one ends while the next begins."""
        if self.state != "ready":
            self.state = slot.state
        self.loads += slot.num_loads
        self.restarts += slot.num_restarts
        if slot.footprint and slot.footprint.gpu_bytes:
            self.gpu_bytes = (self.gpu_bytes or 0) + slot.footprint.gpu_bytes
        if answer is not None:
            self.running = (self.running or 0) + answer["running"]
            self.waiting = (self.waiting or 0) + answer["waiting"]
            self.rss_bytes = (self.rss_bytes or 0) + answer["rss_bytes"]
            self.kv_usage = max(self.kv_usage or 0.0, answer["kv_usage"])


class Metrics:
    """Counts the requests of a front, and collects the numbers of its engines."""

    def __init__(self, address: str, table: EngineTable, remotes: Remotes | None = None) -> None:
        self._address = address
        self._remotes = remotes or Remotes()
        self._table = table
        self._started = time.monotonic()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._models: defaultdict[str, _Model] = defaultdict(_Model)  # by name
        self._gone: WeakSet[EngineSlot] = WeakSet()  # whose numbers are in `_models`
        table.before_unload = self.last_look
        self._refreshing: asyncio.Task[None] | None = None
        self._stale = False  # a request ended since the engines' numbers were read

    # -- what the front knows --------------------------------------------------------------------------------------

    def count_request(self, method: str, route: str | None, status: int) -> None:
        """Count an answered request. Unknown routes and methods are counted together, so that nobody makes more."""
        self._requests[method if method in METHODS else "other", route or "other", status] += 1

    def refresh_soon(self) -> None:
        """Read the engines' numbers after an answer: its engine may crash or be unloaded."""
        self._stale = True
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        while self._stale:
            self._stale = False
            await self.collect()
            await asyncio.sleep(REFRESH_S)

    # -- what the engines know -------------------------------------------------------------------------------------

    async def collect(self) -> list[ModelMetrics]:
        """Return the numbers of all models that had an engine, by name. An engine that hangs costs SCRAPE_LIMIT_S."""
        asked = self._table.all_slots()
        answers = await asyncio.gather(*map(self._look, asked))
        models = {
            name: ModelMetrics(name, "unloaded", model.numbers(), model.loads, model.restarts, model.unloads)
            for name, model in sorted(self._models.items())
        }
        for slot, answer in zip(asked, answers, strict=True):
            if slot not in self._gone:
                models[slot.model.name].add(slot, answer)
        return [*models.values(), *self._of_remotes()]

    def _of_remotes(self) -> Iterator[ModelMetrics]:
        """Yield the numbers of the models that other servers run."""
        for model in self._remotes.models:
            numbers = ModelMetrics(model.name, model.state, Numbers.of(model.counters.copy()), 0, 0, 0)
            numbers.running, numbers.waiting = model.num_running, model.num_waiting
            yield numbers

    async def last_look(self, slot: EngineSlot) -> None:
        """Take over the numbers of an engine that is about to end."""
        was_ready = slot.state == "ready"
        await self._look(slot)
        if slot not in self._gone:
            self._gone.add(slot)
            model = self._models[slot.model.name]
            model.loads += slot.num_loads
            model.restarts += slot.num_restarts
            model.unloads += was_ready

    async def _look(self, slot: EngineSlot) -> dict[str, Any] | None:
        """Return the numbers of an engine now, and keep its counters."""
        model = self._models[slot.model.name]
        answer = await _ask(slot)
        if answer is not None:
            model.take(answer["counters"])
        return answer

    # -- routes ----------------------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """Return the routes."""

        async def metrics(_: Request) -> Response:
            return Response(self.text(await self.collect()), headers={"content-type": MEDIA_TYPE})

        async def top(_: Request) -> Response:
            return JSONResponse(self.document(await self.collect()))

        return [Route("/metrics", metrics), Route("/edgelm/top", top)]

    def document(self, models: list[ModelMetrics]) -> dict[str, Any]:
        """Return the numbers as JSON has them."""
        return {
            "version": __version__,
            "address": self._address,
            "time": time.monotonic(),
            "uptime_s": round(time.monotonic() - self._started, 3),
            "requests": self._requests.total(),
            "models": [
                {
                    "model": model.name,
                    "state": model.state,
                    "running": model.running,
                    "waiting": model.waiting,
                    "kv_usage": model.kv_usage,
                    "rss_bytes": model.rss_bytes,
                    "gpu_bytes": model.gpu_bytes,
                    "counts": dict.fromkeys(COUNTS, 0) | dict(model.numbers.counts),
                    "finished": dict(model.numbers.finished),
                    "first_tokens": sum(_first_token_times(model)[:-1]),
                    "first_token_s": _first_token_times(model)[-1],
                }
                for model in models
            ],
        }

    def text(self, models: list[ModelMetrics]) -> str:
        """Return the numbers in Prometheus's text format."""
        return "".join(self._lines(models))

    def _lines(self, models: list[ModelMetrics]) -> Iterator[str]:
        def gauge(name: str, meaning: str, values: Iterable[tuple[str, float | None]]) -> Iterator[str]:
            samples = [("", {"model_name": model}, value) for model, value in values if value is not None]
            return _family(name, "gauge", meaning, samples)

        yield from gauge("num_requests_running", "Requests that run.", ((m.name, m.running) for m in models))
        yield from gauge("num_requests_waiting", "Requests that wait to run.", ((m.name, m.waiting) for m in models))
        yield from gauge(
            "kv_cache_usage_perc",
            "Share of the KV cache that running sequences hold, 0 to 1.",
            ((m.name, m.kv_usage) for m in models),
        )
        yield from gauge(
            "process_resident_memory_bytes",
            "Resident memory of the model's process.",
            ((m.name, m.rss_bytes) for m in models),
        )
        yield from gauge("model_loaded", "1: the model is loaded.", ((m.name, m.state == "ready") for m in models))
        events = {
            "model_loads_total": ("Processes of a model that were ready, restarts included.", "loads"),
            "model_restarts_total": ("Processes of a model that were started again after a crash.", "restarts"),
            "model_unloads_total": ("Processes of a model that were ended.", "unloads"),
        }
        for name, (meaning, attribute) in events.items():
            numbers = [("", {"model_name": model.name}, float(getattr(model, attribute))) for model in models]
            yield from _family(name, "counter", meaning, numbers)
        for name, meaning in COUNTS.items():
            samples = [("", {"model_name": model.name}, float(model.numbers.counts[name])) for model in models]
            yield from _family(name, "counter", meaning, samples)
        yield from _family(
            "request_success_total",
            "counter",
            "Requests that ended, by the reason.",
            [
                ("", {"model_name": model.name, "finished_reason": reason}, float(count))
                for model in models
                for reason, count in sorted(model.numbers.finished.items())
            ],
        )
        for name, meaning in DRAFTERS.items():
            tokens = [
                ("", {"model_name": model.name, "drafter": drafter}, float(count))
                for model in models
                for drafter, count in sorted(getattr(model.numbers, name).items())
            ]
            yield from _family(f"drafter_{name}_tokens_total", "counter", meaning, tokens)
        for name, (meaning, bounds) in HISTOGRAMS.items():
            histogram = [
                sample
                for model in models
                if name in model.numbers.histograms
                for sample in _histogram({"model_name": model.name}, bounds, model.numbers.histograms[name])
            ]
            yield from _family(name, "histogram", meaning, histogram)
        yield from _family(
            "http_requests_total",
            "counter",
            "Requests to the server by route and status; 499: the client left.",
            [
                ("", {"method": method, "handler": route, "status": str(status)}, float(count))
                for (method, route, status), count in sorted(self._requests.items())
            ],
        )


def _first_token_times(model: ModelMetrics) -> list[float]:
    return model.numbers.histograms.get("time_to_first_token_seconds", [0.0])


async def _ask(slot: EngineSlot) -> dict[str, Any] | None:
    """Return the numbers of an engine; None: there is none, or it does not answer in time."""
    if slot.process is None or slot.state != "ready":
        return None
    try:
        async with asyncio.timeout(SCRAPE_LIMIT_S):
            answer: dict[str, Any] = (await slot.process.client.get("/stats")).json()
    except (TimeoutError, httpx2.HTTPError, ValueError):
        return None
    return answer if "counters" in answer else None  # an error: it is ending


def _histogram(labels: Labels, bounds: tuple[float, ...], numbers: list[float]) -> Iterator[Sample]:
    *buckets, total = numbers
    cumulative = list(accumulate(buckets))
    for bound, count in zip([*map(str, bounds), "+Inf"], cumulative, strict=True):
        yield "_bucket", labels | {"le": bound}, count
    yield "_sum", labels, total
    yield "_count", labels, cumulative[-1]


def _family(name: str, kind: str, meaning: str, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the lines of one metric."""
    yield f"# HELP {PREFIX}{name} {meaning}\n# TYPE {PREFIX}{name} {kind}\n"
    for suffix, labels, value in samples:
        written = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{PREFIX}{name}{suffix}{{{written}}} {float(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
