"""`edgelm bench`: prompt and decode speed as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgelm.commands.choice import chosen_model
from edgelm.commands.job import reader_may_leave, run_job
from edgelm.config import load_config
from edgelm.errors import RequestError
from edgelm.speed import SpeedTest


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
    """Measure each combination of lengths and parallel sequences. Raises EdgeLMError."""
    defaults = not (prompts or decodes or parallels)
    prompts, decodes, parallels = prompts or [512], decodes or [128], parallels or [1]
    if min([*prompts, *decodes]) < 0 or not 1 <= min(parallels) <= max(parallels) <= 64:
        raise RequestError("-p and -n are 0 or more, -b is 1 to 64")
    lengths = [(length, 0) for length in prompts if length] + [(0, length) for length in decodes if length]
    tests = [SpeedTest(prompt, decode, parallel) for parallel in parallels for prompt, decode in lengths]
    if not tests:
        raise RequestError("there is nothing to measure", "give a -p or -n above 0")
    config = load_config(flags)
    settings = replace(config.settings, parallel=max(parallels))
    job = {
        "job": "bench",
        "tests": [asdict(test) for test in tests],
        "defaults": defaults,
        "least_context": 0 if defaults else max(test.positions for test in tests),
        "repetitions": repetitions,
    }
    with reader_may_leave(), run_job(job, chosen_model(model, config).path, settings, config.places, verbose) as events:
        for event in events:
            if event["event"] == "result":
                _print(event["result"], as_json)


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    table = Table(title=escape(f"{result['model']}, {result['engine']} on {result['device']}"))
    table.add_column("test")
    table.add_column("tokens/s", justify="right")
    table.add_column("least to most", justify="right")
    for each in result["results"]:
        runs = each["runs"]
        table.add_row(each["test"], f"{each['tokens_per_second']:.1f}", f"{min(runs):.1f} to {max(runs):.1f}")
    Console().print(table)
