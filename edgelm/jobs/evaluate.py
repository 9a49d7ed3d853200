"""The job of `edgelm eval`: evaluate a model on a text file, alone or against a reference.

Owns the status lines, the states from which an interrupted job continues, and the fields of the result. Knows nothing
of the engines.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from itertools import islice
from typing import Any

from edgelm.backends.build import load_evaluation
from edgelm.backends.reports import reports_to
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine.conditions import Measurement
from edgelm.base.workers.child import Child
from edgelm.base.workers.messages import EvalJob, EvalRestarted, EvalState, Result, Status
from edgelm.engine.core import ExecutorInfo
from edgelm.evaluation.evaluate import NOISE_TOKENS, Evaluation, evaluate
from edgelm.evaluation.scores import Moments, Tally, distinguishable, perplexity
from edgelm.evaluation.text import Cut, TextTokens

STATE_EVERY_S = 0.5
STATUS_EVERY_S = 0.2


def evaluate_file(job: EvalJob, child: Child) -> None:
    """Evaluate the model of a job on its text, from its state on. Raises EdgeLMError."""
    with load_evaluation(job, reports_to(child)) as evaluation:
        _run(job, evaluation, child)


def _run(job: EvalJob, evaluation: Evaluation, child: Child) -> None:
    tokenizer, info = evaluation.tokenizer, evaluation.model.executor.info
    cut = Cut(evaluation.window, job.stride)
    cut.require_stride()
    bos = [token for token in tokenizer.encode("", special=False, bos=True) if token == tokenizer.bos_id]
    text = TextTokens(job.text, tokenizer)
    maker = _engine_name(info)
    if evaluation.reference and (other := _engine_name(evaluation.reference.executor.info)) != maker:
        maker += f", against {other}"
    tally, noise = _initial_tallies(job.state, maker, 2 if evaluation.reference else 1, child)
    progress = _Progress(child, tally.windows, maker)
    measurement = Measurement()
    windows = islice(cut.windows(iter(text), bos), tally.windows, job.limit)
    reference = evaluation.reference.executor if evaluation.reference else None
    child.send(Status("measuring the noise floor"))
    for _ in evaluate(evaluation.model.executor, reference, windows, tally, child.fail, noise=noise):
        total = max(cut.count(text.estimated_tokens, bos), tally.windows)
        progress.report(tally, noise, min(total, job.limit or total))
    if not tally.surprise.count:
        raise _too_short(text, cut)
    measured = asdict(measurement.conditions(info.engine))
    child.send(Result(_result(job, evaluation, cut, tally, noise) | {"measured": measured}))


def _initial_tallies(
    state: dict[str, Any] | None, maker: str, sides: int, child: Child
) -> tuple[Tally, tuple[Tally, ...]]:
    """Return the tally and the noise floors of the state if the same engine and device made it, or else empty ones."""
    fresh = Tally(), tuple(Tally() for _ in range(sides))
    if not state:
        return fresh
    if state["maker"] != maker:
        child.send(EvalRestarted())
        return fresh
    tally = Tally.from_json({name: value for name, value in state.items() if name not in ("maker", "noise")})
    return tally, tuple(Tally.from_json(floor) for floor in state["noise"])


def _engine_name(info: ExecutorInfo) -> str:
    return f"{info.engine} on {info.device}"


def _too_short(text: TextTokens, cut: Cut) -> EdgeLMError:
    if cut.stride is not None:
        return EdgeLMError("the text has no token that could be predicted", "give a longer one")
    return EdgeLMError(
        f"the text has {text.num_tokens:,} tokens, less than one window of {cut.length:,}",
        f"give --stride {cut.length // 2}, which takes any text, a smaller --window, or a longer text",
    )


class _Progress:
    """Reports the progress, at a bounded rate, and the states from which the job can continue."""

    def __init__(self, child: Child, num_done: int, maker: str) -> None:
        self._child = child
        self._engine_name = maker
        self._num_done = num_done  # by the interrupted job
        self._started_at = self._status_at = self._state_at = time.monotonic()
        self._measures_noise = True

    def report(self, tally: Tally, noise: tuple[Tally, ...], total: int) -> None:
        """Report that one more window is done, of about `total`."""
        now = time.monotonic()
        if self._measures_noise:  # these windows take longer than the others
            self._started_at, self._num_done = now, tally.windows
            self._measures_noise = any(floor.divergence.count < NOISE_TOKENS for floor in noise)
        if now - self._status_at >= STATUS_EVERY_S and tally.windows > self._num_done:
            left_s = (now - self._started_at) / (tally.windows - self._num_done) * (total - tally.windows)
            line = f"window {tally.windows:,} of about {total:,}, perplexity {perplexity(tally.surprise):.3f}"
            self._child.send(Status(f"{line}, {_duration(left_s)} left"))
            self._status_at = now
        if now - self._state_at >= STATE_EVERY_S:
            state = tally.to_json() | {"maker": self._engine_name, "noise": [floor.to_json() for floor in noise]}
            self._child.send(EvalState(state, total))
            self._state_at = now


def _result(job: EvalJob, evaluation: Evaluation, cut: Cut, tally: Tally, noise: tuple[Tally, ...]) -> dict[str, Any]:
    comparison: dict[str, Any] = _comparison(tally) if evaluation.reference else dict.fromkeys(_comparison(Tally()))
    comparison["distinguishable"] = None
    info, against = evaluation.model.executor.info, None
    if evaluation.reference:
        floors = [floor.divergence.mean for floor in noise]
        comparison["distinguishable"] = distinguishable(tally.divergence.mean, *floors)
    if job.against and evaluation.reference:
        against = {
            "model": evaluation.reference.name,
            "file": job.against.model.name,
            "kv": job.against.kv,
            "engine": evaluation.reference.executor.info.engine,
            "device": evaluation.reference.executor.info.device,
            "flash_attention": evaluation.reference.flash,
            **_likelihood(tally.reference_surprise),
            "noise_floor": _noise_floor(noise[1]),
        }
    return {
        "model": evaluation.model.name,
        "engine": info.engine,
        "device": info.device,
        "flash_attention": evaluation.model.flash,
        "file": job.model.name,
        "kv": job.kv,
        "tokens": tally.surprise.count,
        **_likelihood(tally.surprise),
        **comparison,
        "noise_floor": _noise_floor(noise[0]),
        "against": against,
        "windows": tally.windows,
        "window": cut.length,
        "stride": cut.stride,
    }


def _noise_floor(tally: Tally) -> dict[str, float]:
    """Return the fields of a side's divergence from itself."""
    return {"tokens": tally.divergence.count, **_comparison(tally)}


def _likelihood(surprise: Moments) -> dict[str, float]:
    value = perplexity(surprise)
    return {"perplexity": value, "stderr": value * surprise.error, "nats_per_token": surprise.mean}


def _comparison(tally: Tally) -> dict[str, float]:
    """Return the fields of a comparison; without a reference they are null."""
    count = max(tally.divergence.count, 1)
    agreement = tally.same_top / count
    return {
        "mean_kl": tally.divergence.mean,
        "mean_kl_stderr": tally.divergence.error,
        "p99_kl": tally.divergence_quantile(0.99) if tally.divergence.count else 0.0,
        "max_kl": tally.max_divergence,
        "top1_agreement": agreement,
        "top1_stderr": math.sqrt(agreement * (1 - agreement) / max(count - 1, 1)),
        "log_perplexity_difference": tally.difference.mean,
        "log_perplexity_difference_stderr": tally.difference.error,
    }


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"
