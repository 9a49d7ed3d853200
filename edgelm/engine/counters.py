"""The numbers that an engine counts: tokens, prefix cache, drafts, and the times of its requests.

Owns their names, which are those of vLLM's metrics without its prefix, and the bounds of the histograms. The engine's
thread counts; any thread may take a copy. Knows nothing of HTTP and of Prometheus's text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from itertools import product
from typing import Any

from edgelm.engine.core import FinishReason, Sequence, Stats

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_LONG_S = (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_SECONDS = (*_SHORT_S, *_LONG_S)
_TOKENS = tuple(float(digit * 10**power) for power, digit in product(range(6), (1, 2, 5)))

COUNTS = {
    "prompt_tokens_total": "Prompt tokens of the requests that have their first token.",
    "generation_tokens_total": "Generated tokens.",
    "prefix_cache_queries_total": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens that were found in the prefix cache.",
    "num_preemptions_total": "Times that a running sequence made way: for an older one, or for an editor's.",
    "spec_decode_num_drafts_total": "Drafts that were verified.",
    "spec_decode_num_draft_tokens_total": "Draft tokens that were verified, without those that a grammar forced.",
    "spec_decode_num_accepted_tokens_total": "Draft tokens that were accepted, without those that a grammar forced.",
    "embedding_inputs_total": "Texts whose vectors were computed, and documents that were ranked.",
    "embedding_tokens_total": "Tokens of these texts, and of these documents with their query.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival of a request at its engine to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens; those of one step share its time.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time of a request's tokens after the first.", _SECONDS),
    "e2e_request_latency_seconds": ("From the arrival of a request at its engine to its last token.", _SECONDS),
    "request_queue_time_seconds": ("From the arrival of a request at its engine to its first step.", _SECONDS),
    "request_prefill_time_seconds": ("From the first step of a request to its first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token of a request to its last.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS),
}


class Histogram:
    """How many values lie up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._buckets = [0] * (len(bounds) + 1)  # not cumulative; the last one has no bound
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._buckets[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def copy(self) -> list[float]:
        """Return the buckets, and behind them the sum."""
        return [*self._buckets, self._sum]


class Counters:
    """The counts of one engine since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._finished: Counter[FinishReason] = Counter()
        self._drafted: Counter[str] = Counter()  # tokens, by drafter, as is the next one
        self._accepted: Counter[str] = Counter()
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def admitted(self, seq: Sequence) -> None:
        """Count the first admission of a sequence."""
        self._counts["prefix_cache_queries_total"] += seq.prompt_len
        self._counts["prefix_cache_hits_total"] += seq.cached or 0

    def first_tokens(self, seq: Sequence, num_tokens: int, waited_s: float) -> None:
        """Count the tokens of a sequence's first sampled step."""
        self._counts["prompt_tokens_total"] += seq.prompt_len
        self._counts["generation_tokens_total"] += num_tokens
        self._histograms["time_to_first_token_seconds"].observe(waited_s)

    def more_tokens(self, num_tokens: int, took_s: float) -> None:
        """Count the tokens of a later step, and the time since the step before it."""
        self._counts["generation_tokens_total"] += num_tokens
        self._histograms["inter_token_latency_seconds"].observe(took_s / num_tokens, num_tokens)

    def preempted(self, num_preemptions: int) -> None:
        """Set the number of preemptions so far."""
        self._counts["num_preemptions_total"] = num_preemptions

    def draft(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        """Count a verified draft."""
        self._drafted[drafter] += num_drafted
        self._accepted[drafter] += num_accepted
        self._counts["spec_decode_num_drafts_total"] += 1
        self._counts["spec_decode_num_draft_tokens_total"] += num_drafted
        self._counts["spec_decode_num_accepted_tokens_total"] += num_accepted

    def embedded(self, inputs: Collection[Collection[int]]) -> None:
        """Count the inputs of a request for vectors or a ranking that is complete."""
        self._counts["embedding_inputs_total"] += len(inputs)
        self._counts["embedding_tokens_total"] += sum(map(len, inputs))

    def ended(self, reason: FinishReason, stats: Stats, *, scored: bool = False) -> None:
        """Count a request that ended; its times only if it has a token. A prompt that was `scored` counts here."""
        self._finished[reason] += 1
        if scored:
            self._counts["prompt_tokens_total"] += stats.prompt_tokens
            self._histograms["request_prompt_tokens"].observe(stats.prompt_tokens)
        if not stats.completion_tokens:
            return
        for name, value in {
            "e2e_request_latency_seconds": (stats.first_token_ms + stats.decode_ms) / 1000,
            "request_queue_time_seconds": stats.queue_ms / 1000,
            "request_prefill_time_seconds": stats.prompt_ms / 1000,
            "request_decode_time_seconds": stats.decode_ms / 1000,
            "request_prompt_tokens": stats.prompt_tokens,
            "request_generation_tokens": stats.completion_tokens,
        }.items():
            self._histograms[name].observe(value)
        if stats.completion_tokens > 1:
            per_token_s = stats.decode_ms / 1000 / (stats.completion_tokens - 1)
            self._histograms["request_time_per_output_token_seconds"].observe(per_token_s)

    def answered(self, reason: FinishReason, stats: Stats) -> None:
        """Count an answer that another machine wrote, of which nothing is known before its end."""
        self._counts["prompt_tokens_total"] += stats.prompt_tokens
        self._counts["generation_tokens_total"] += stats.completion_tokens
        self._counts["prefix_cache_queries_total"] += stats.prompt_tokens
        self._counts["prefix_cache_hits_total"] += stats.cached_tokens
        if stats.completion_tokens:
            self._histograms["time_to_first_token_seconds"].observe(stats.first_token_ms / 1000)
        self.ended(reason, stats)

    def copy(self) -> dict[str, Any]:
        """Return all numbers as JSON has them, with the monotonic times of the engine's start and of the copy."""
        return {
            "started": self._started,
            "taken": time.monotonic(),
            "counts": dict(self._counts),
            "finished": dict(self._finished),
            "drafted": dict(self._drafted),
            "accepted": dict(self._accepted),
            "histograms": {name: histogram.copy() for name, histogram in self._histograms.items()},
        }
