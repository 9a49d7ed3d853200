"""The job of the engine child behind `edgelm eval`: a text file in, progress and figures out.

Owns what a person is told on the way and the result's fields. Its events are progress, status, state (a tally from
which the same job goes on later), restarted (the state is of no use, since another engine made it) and result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from edgelm.build import choose
from edgelm.build.opened import open_model
from edgelm.config import Settings
from edgelm.errors import EdgeLMError
from edgelm.evaluation.evaluate import evaluate
from edgelm.evaluation.load import Contenders, Source, load_contenders
from edgelm.evaluation.tally import Moments, Tally
from edgelm.evaluation.text import TextTokens
from edgelm.evaluation.windows import Cut
from edgelm.executors.cores import usable_cores
from edgelm.executors.engine_choice import EngineChoice

STATE_EVERY_S = 0.5
STATUS_EVERY_S = 0.2
MAX_LOG = 700.0  # e to more is no float

Emit = Callable[..., None]


def evaluate_file(job: dict[str, Any], emit: Emit) -> None:
    """Evaluate the model of a job on its text, from its state on. Raises EdgeLMError."""

    def progress(share: float) -> bool:
        emit(event="progress", share=round(share, 3))
        return True

    model = Source(Path(job["model"]), job["kv"])
    reference = Source(Path(job["against"]["model"]), job["against"]["kv"]) if job["against"] else None
    settings = Settings(**job["settings"])
    choice = _choose([model, *([reference] if reference else [])], settings)
    if choice.engine == "torch":
        from edgelm.evaluation.load_torch import load_torch_contenders  # it imports torch

        loaded = load_torch_contenders(
            model, reference, settings, device=choice.device, window=job["window"], progress=progress
        )
    else:
        loaded = load_contenders(
            model,
            reference,
            window=job["window"],
            threads=settings.threads or usable_cores().physical,
            repack=job["repack"],
            progress=progress,
        )
    with loaded as contenders:
        _run(job, contenders, emit)


def _choose(sources: Sequence[Source], settings: Settings) -> EngineChoice:
    """Choose one engine for both sides: that of the torch engine where one of them needs it."""
    choices = _choices(sources, settings)
    if len({each.engine for each in choices}) > 1:
        choices = _choices(sources, replace(settings, engine="torch"))
    return next((each for each in choices if each.device == "cpu"), choices[0])


def _choices(sources: Sequence[Source], settings: Settings) -> list[EngineChoice]:
    choices = []
    for path in dict.fromkeys(each.path for each in sources):
        with open_model(path) as opened:
            choices.append(choose(opened, settings))
    return choices


def _run(job: dict[str, Any], contenders: Contenders, emit: Emit) -> None:
    tokenizer = contenders.tokenizer
    cut = Cut(contenders.window, job["stride"])
    bos = [token for token in tokenizer.encode("", special=False, bos=True) if token == tokenizer.bos_id]
    _check_stride(cut)
    text = TextTokens(Path(job["text"]), tokenizer)
    info = contenders.model.executor.info
    tally = _begun(job["state"], f"{info.engine} on {info.device}", emit)
    shown = _Progress(emit, tally.windows, f"{info.engine} on {info.device}")
    windows = islice(cut.windows(iter(text), bos), tally.windows, job["limit"])
    reference = contenders.reference.executor if contenders.reference else None
    for _ in evaluate(contenders.model.executor, reference, windows, tally):
        total = max(cut.count(text.likely_tokens, bos), tally.windows)
        shown.window(tally, min(total, job["limit"] or total))
    if not tally.surprise.count:
        raise _too_short(text, cut)
    emit(event="result", result=_result(job, contenders, cut, tally))


def _begun(state: dict[str, Any] | None, maker: str, emit: Emit) -> Tally:
    """Return the tally to go on with: that of the state, if the same engine and device made it."""
    if not state:
        return Tally()
    if state["maker"] != maker:
        emit(event="restarted")
        return Tally()
    return Tally.from_json({name: value for name, value in state.items() if name != "maker"})


def _check_stride(cut: Cut) -> None:
    most = cut.length - 1
    if cut.stride is not None and not 1 <= cut.stride <= most:
        raise EdgeLMError(f"--stride is {cut.stride:,}", f"give 1 to {most}, less than the window of {cut.length}")


def _too_short(text: TextTokens, cut: Cut) -> EdgeLMError:
    if cut.stride is not None:
        return EdgeLMError("the text has no token that could be predicted", "give a longer one")
    return EdgeLMError(
        f"the text has {text.num_tokens:,} tokens, less than one window of {cut.length:,}",
        f"give --stride {cut.length // 2}, which takes any text, a smaller --window, or a longer text",
    )


class _Progress:
    """Tells where the work is, not too often, and from what it can go on."""

    def __init__(self, emit: Emit, done: int, maker: str) -> None:
        self._emit = emit
        self._maker = maker
        self._done = done
        self._began = self._status = self._state = time.monotonic()

    def window(self, tally: Tally, total: int) -> None:
        """Report that one more window is done, of about `total`."""
        now = time.monotonic()
        if now - self._status >= STATUS_EVERY_S:
            left = (now - self._began) / (tally.windows - self._done) * (total - tally.windows)
            told = f"window {tally.windows:,} of about {total:,}, perplexity {_perplexity(tally.surprise):.3f}"
            self._emit(event="status", text=f"{told}, {_duration(left)} left")
            self._status = now
        if now - self._state >= STATE_EVERY_S:
            self._emit(event="state", state=tally.to_json() | {"maker": self._maker}, total=total)
            self._state = now


def _result(job: dict[str, Any], contenders: Contenders, cut: Cut, tally: Tally) -> dict[str, Any]:
    compared = _compared(tally) if contenders.reference else dict.fromkeys(_compared(Tally()))
    info = contenders.model.executor.info
    return {
        "model": contenders.model.name,
        "engine": info.engine,
        "device": info.device,
        "file": Path(job["model"]).name,
        "kv": job["kv"],
        "tokens": tally.surprise.count,
        **_likelihood(tally.surprise),
        **compared,
        "against": contenders.reference
        and {
            "model": contenders.reference.name,
            "file": Path(job["against"]["model"]).name,
            "kv": job["against"]["kv"],
            **_likelihood(tally.reference_surprise),
        },
        "windows": tally.windows,
        "window": cut.length,
        "stride": cut.stride,
    }


def _likelihood(surprise: Moments) -> dict[str, float]:
    perplexity = _perplexity(surprise)
    return {"perplexity": perplexity, "stderr": perplexity * surprise.error, "nats_per_token": surprise.mean}


def _compared(tally: Tally) -> dict[str, float]:
    """Return the fields of a comparison; they are null without one."""
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


def _perplexity(surprise: Moments) -> float:
    """Return e to the mean surprise: Jelinek and others, Perplexity, a measure of difficulty of tasks (1977)."""
    return math.exp(min(surprise.mean, MAX_LOG))


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"
