"""The engine child of `edgelm run`, `bench` and `eval`: loads a model and does one job (its protocol: process.py).

Its events are progress, status, text, result, error. Knows nothing of terminals and flags.
"""

from __future__ import annotations

import sys
from contextlib import aclosing
from functools import partial
from typing import Any

from edgelm.build import Loaded
from edgelm.completion import check_text_size, complete
from edgelm.config import Settings
from edgelm.core import SamplingParams
from edgelm.evaluation.job import evaluate_file
from edgelm.process import Emit, Job, run_child, work_with_engine
from edgelm.speed import SpeedTest, check, measure
from edgelm.text.template_worker import TemplateRunner

MAX_TEMPLATE_BYTES = 100_000  # what a template may add to a prompt


def main() -> int:
    """Do the job that standard input names; return the exit code."""
    return run_child(lambda job, emit: JOBS[job["job"]](job, emit))


async def _run(loaded: Loaded, job: dict[str, Any], emit: Emit) -> None:
    settings = Settings(**job["settings"])
    assert settings.seed is not None
    params = SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        seed=settings.seed,
        stop_ids=loaded.tokenizer.stop_ids,
    )
    prompt = await _prompt_tokens(loaded, job["prompt"], job["raw"])
    text, ids = "", []
    async with aclosing(complete(loaded.engine, loaded.tokenizer, prompt, params, job["stop"])) as deltas:
        async for delta in deltas:
            if delta.text:
                emit(event="text", text=delta.text)
            text += delta.text
            ids += [sample.id for sample in delta.sampled]
            if stats := delta.stats:
                emit(
                    event="result",
                    result={
                        "model": loaded.name,
                        "text": text,
                        "token_ids": ids,
                        "finish_reason": delta.finish_reason,
                        "usage": {
                            "prompt_tokens": stats.prompt_tokens,
                            "cached_tokens": stats.cached_tokens,
                            "completion_tokens": stats.completion_tokens,
                        },
                        "timings": {
                            "queue_ms": round(stats.queue_ms, 3),
                            "prompt_ms": round(stats.prompt_ms, 3),
                            "first_token_ms": round(stats.first_token_ms, 3),
                            "decode_ms": round(stats.decode_ms, 3),
                            "decode_tokens_per_second": round(stats.decode_tokens_per_second, 2),
                        },
                        "speculation": {"drafted": stats.drafted, "accepted": stats.accepted},
                    },
                )


async def _prompt_tokens(loaded: Loaded, text: str, raw: bool) -> list[int]:
    """Return the tokens of a prompt: a user's message in the model's chat template, or the text as it is."""
    check_text_size(text, loaded.engine.info.context)
    if raw or loaded.tokenizer.chat_template is None:
        return loaded.tokenizer.encode(text, special=False, bos=True)
    runner = TemplateRunner(loaded.tokenizer)
    try:
        return await runner.render_tokens(
            [{"role": "user", "content": text}], max_bytes=MAX_TEMPLATE_BYTES + 8 * len(text)
        )
    finally:
        await runner.close()


async def _bench(loaded: Loaded, job: dict[str, Any], emit: Emit) -> None:
    info = loaded.engine.info
    tests = [SpeedTest(**each) for each in job["tests"]]
    if job["defaults"]:
        tests = [each.shortened(info.context) for each in tests]
    for test in tests:
        check(info, test)
    results = []
    for test in tests:
        emit(event="status", text=f"measuring {test.name}")
        runs = await measure(loaded.engine, test, job["repetitions"])
        results.append({"test": test.name, "tokens_per_second": sorted(runs)[len(runs) // 2], "runs": runs})
    emit(
        event="result",
        result={"model": loaded.name, "engine": info.engine, "device": info.device, "results": results},
    )


JOBS: dict[str, Job] = {
    "run": partial(work_with_engine, _run),
    "bench": partial(work_with_engine, _bench),
    "eval": evaluate_file,
}

if __name__ == "__main__":
    sys.exit(main())
