"""`edgelm bench`: print prompt and decode speed, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgelm.commands.job import reader_may_leave, run_job
from edgelm.config import load_config
from edgelm.errors import RequestError
from edgelm.jobs.speed import BenchJob, SpeedTest
from edgelm.library.local import model_config, runnable_model
from edgelm.workers.messages import Result


def bench_model(
    model: str,
    flags: Mapping[str, object],
    prompts: list[int] | None,
    decodes: list[int] | None,
    parallels: list[int] | None,
    repetitions: int,
    as_json: bool,
    verbose: bool,
) -> None:
    """Measure each combination of a length and a number of parallel sequences. Raises EdgeLMError."""
    defaults = not (prompts or decodes or parallels)
    prompts, decodes, parallels = prompts or [512], decodes or [128], parallels or [1]
    if min([*prompts, *decodes]) < 0 or not 1 <= min(parallels) <= max(parallels) <= 64:
        raise RequestError("-p and -n are 0 or more, -b is 1 to 64")
    lengths = [(length, 0) for length in prompts if length] + [(0, length) for length in decodes if length]
    tests = [SpeedTest(prompt, decode, parallel) for parallel in parallels for prompt, decode in lengths]
    if not tests:
        raise RequestError("there is nothing to measure", "give a -p or -n above 0")
    config = load_config(flags)
    local = runnable_model(model, config)
    settings = replace(model_config(local, config).settings, parallel=max(parallels))
    job = BenchJob(
        model=local.path,
        settings=settings,
        tests=tuple(tests),
        shorten=defaults,
        least_context=0 if defaults else max(test.positions for test in tests),
        repetitions=repetitions,
    )
    with reader_may_leave(), run_job(job, config.places, verbose) as replies:
        for reply in replies:
            if isinstance(reply, Result):
                _print(reply.document, as_json)


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    table = Table(title=escape(f"{result['model']}, {result['engine']} on {result['device']}"))
    table.add_column("test")
    table.add_column("tokens/s", justify="right")
    table.add_column("least to most", justify="right")
    for row in result["results"]:
        runs = row["runs"]
        table.add_row(row["test"], f"{row['tokens_per_second']:.1f}", f"{min(runs):.1f} to {max(runs):.1f}")
    Console().print(table)
