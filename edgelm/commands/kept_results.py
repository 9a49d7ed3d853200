"""Kept results of `edgelm eval` in words, for `edgelm show` and the preview of `edgelm pull`.

Owns the words and the JSON. Which results are kept, and of which weights, is decided in evaluation/kept.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgelm.evaluation.kept import KeptModel, KeptResult
from edgelm.library.names import shown

MAX_SHOWN = 4


def result_lines(model: KeptModel | None) -> Iterator[str]:
    """Yield what was measured of a model, the newest first: a line for each text, and one for the speed."""
    if model is None:
        return
    for result in model.results[:MAX_SHOWN]:
        yield f"{distance_text(result)}; on {shown(result.text)}, {result.at[:10]}"
    if len(model.results) > MAX_SHOWN:
        yield f"and {len(model.results) - MAX_SHOWN} more: --json"
    if line := speed_text(model):
        yield line


def distance_text(result: KeptResult) -> str:
    """Return the quality in words: "99.1 % same next token as starter-F32, KL 0.002, perplexity 5.13"."""
    figures = result.figures
    perplexity = f"perplexity {figures['perplexity']:.4g}"
    if figures["mean_kl"] is None:
        return f"{perplexity} ({figures['kv']} cache)"
    noise = " (noise)" if figures.get("distinguishable") is False else ""  # before 0.6 it was not measured
    same = f"{figures['top1_agreement']:.1%}".replace("%", " %")
    return f"{same} same next token as {reference_text(figures)}, KL {figures['mean_kl']:.2g}{noise}, {perplexity}"


def reference_text(figures: dict[str, Any]) -> str:
    """Return the name of the reference, and what else differs from the model."""
    against = figures["against"]
    parts = [shown(against["file"].removesuffix(".gguf"))]
    if against["kv"] != figures["kv"]:
        parts.append(f"with {against['kv']} instead of {figures['kv']}")
    if against.get("engine", figures["engine"]) != figures["engine"]:
        parts.append(f"on {against['engine']}")
    return " ".join(parts)


def speed_text(model: KeptModel) -> str:
    """Return the newest speed in words; empty: it was not measured."""
    if not model.speeds:
        return ""
    speed = model.speeds[0]
    rates = f"{speed.decode:,.4g} tokens/s, prompts {speed.prompt:,.4g} tokens/s"
    return f"{rates}; {speed.engine} on {shown(speed.device)}, {speed.at[:10]}"


def results_document(model: KeptModel | None) -> list[dict[str, Any]]:
    """Return the results for `--json`."""
    results = model.results if model else ()
    return [{"at": result.at, "text": result.text, **result.figures} for result in results]


def speeds_document(model: KeptModel | None) -> list[dict[str, Any]]:
    """Return the speeds for `--json`."""
    return [
        {
            "at": speed.at,
            "engine": speed.engine,
            "device": speed.device,
            "kv": speed.kv,
            "prompt_tokens_per_second": speed.prompt,
            "decode_tokens_per_second": speed.decode,
        }
        for speed in (model.speeds if model else ())
    ]
