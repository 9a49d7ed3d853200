"""`edgelm bench`: print prompt and decode speed, as a table or as JSON.

Owns the two sides of a measurement: the engine alone in a worker, and then the process that serves, through a server of
its own. Neither drafts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgelm.base.config import Config, load_config
from edgelm.base.errors import RequestError
from edgelm.base.machine.conditions import Conditions
from edgelm.base.workers.messages import Result
from edgelm.client.local import OwnFront
from edgelm.client.speed import Served
from edgelm.commands.flags import EndpointKey, Flags, Json, MeasuredEndpoint, Model, SettingsOf, Verbose, as_flags
from edgelm.commands.job import StatusLine, reader_may_leave, run_job
from edgelm.commands.running import model_or_served
from edgelm.jobs.speed import BenchJob, SpeedTest
from edgelm.library.local import model_config

ALIKE = 0.03  # a difference of the two sides that is not shown


def bench_model(
    model: Model,
    flags: Annotated[Flags, SettingsOf("bench")],
    prompt: Annotated[list[int] | None, typer.Option("-p", help="Prompt tokens; 0: none. May be repeated.")] = None,
    decode: Annotated[list[int] | None, typer.Option("-n", help="Tokens to decode; 0: none. May be repeated.")] = None,
    parallel: Annotated[list[int] | None, typer.Option("-b", help="Parallel sequences. May be repeated.")] = None,
    repetitions: Annotated[int, typer.Option("-r", min=1, max=100, help="Repetitions of each test.")] = 3,
    picture: Annotated[
        str | None,
        typer.Option(help="Measure a picture too: its tokens and times.", metavar="FILE", show_default=False),
    ] = None,
    *,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Measure the engine alone, without a server before it.")
    ] = False,
    endpoint: MeasuredEndpoint = None,
    api_key: EndpointKey = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure each combination of a length and a number of parallel sequences. Raises EdgeLMError."""
    defaults = not (prompt or decode or parallel)
    prompts, decodes, parallels = prompt or [512], decode or [128], parallel or [1]
    if min([*prompts, *decodes]) < 0 or not 1 <= min(parallels) <= max(parallels) <= 64:
        raise RequestError("-p and -n are 0 or more, -b is 1 to 64")
    lengths = [(length, 0) for length in prompts if length] + [(0, length) for length in decodes if length]
    tests = [SpeedTest(prompt, decode, parallel) for parallel in parallels for prompt, decode in lengths]
    if not tests:
        raise RequestError("there is nothing to measure", "give a -p or -n above 0")
    config = load_config(flags)
    if endpoint or api_key or config.remote_model(model):
        from edgelm.commands.bench_endpoint import bench_endpoint  # most models are here
        from edgelm.commands.endpoints import endpoint_of, require_none

        elsewhere = endpoint_of(model, endpoint, api_key, flags, config)
        require_none({"--picture": picture is not None, "--in-process": in_process}, model)
        with reader_may_leave():
            bench_endpoint(elsewhere, tests, repetitions, as_json=as_json)
        return
    local = model_or_served(model, config)
    settings = replace(model_config(local, config).settings, parallel=max(parallels))
    job = BenchJob(
        model=local.path,
        settings=settings,
        tests=tuple(tests),
        shorten=defaults,
        least_context=0 if defaults else max(test.positions for test in tests),
        repetitions=repetitions,
        picture=Path(picture).absolute() if picture else None,
    )
    with reader_may_leave(), run_job(job, config.places, verbose) as replies:
        result: dict[str, Any] = next(reply for reply in replies if isinstance(reply, Result)).document
    if not in_process:
        result["results"] = asyncio.run(_beside_endpoint(job, config, flags, result))
    shown = {name: result[name] for name in ("model", "engine", "device", "context", "results", "measured")}
    if picture:
        shown["picture"] = result["picture"]
    with reader_may_leave():
        _print(shown | {"through": "engine" if in_process else "endpoint", "drafts": False}, as_json)


async def _beside_endpoint(
    job: BenchJob, config: Config, flags: Mapping[str, object], alone: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the rows of the endpoint, each with that of the engine alone. Raises EdgeLMError."""
    status = StatusLine(sys.stderr.isatty())
    context = alone["context"]
    tests = [test.shortened(context) for test in job.tests] if job.shorten else job.tests
    rows = []
    # A runtime folder of its own: no command of the user finds this server.
    with tempfile.TemporaryDirectory(prefix="edgelm-bench-") as runtime:
        arguments = _serve_arguments(job, config, flags, context)
        front = OwnFront(arguments, config.places.cache / "bench.log", {"EDGELM_RUNTIME_DIR": runtime})
        try:
            status.show("starting the endpoint")
            served = Served(await front.start(), str(job.model), alone["num_vocab"], alone["stop_ids"])
            status.show(f"loading {job.model.name}")
            await served.load()
            for test, engine in zip(tests, alone["results"], strict=True):
                status.show(f"measuring {test.name} through the endpoint")
                runs = await served.measure(test, job.repetitions)
                speed = sorted(runs)[len(runs) // 2]
                rows.append({"test": test.name, "tokens_per_second": speed, "runs": runs, "engine": engine})
        finally:
            status.clear()
            await front.stop()
    return rows


def _serve_arguments(job: BenchJob, config: Config, flags: Mapping[str, object], context: int) -> list[str]:
    """Return the arguments of a server that keeps nothing of what it is asked."""
    given = {name: value for name, value in flags.items() if value is not None}
    own: dict[str, object] = {"ctx": context, "memory": False, "prefix_cache_disk": 0, "host": "127.0.0.1"}
    own["parallel"] = max(config.settings.parallel, job.settings.parallel)
    if config.settings.ollama_port is not None:
        own["ollama_port"] = _free_port()
    return [*(flag for name, value in (given | own).items() for flag in as_flags(name, value)), str(job.model)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    place = "through the endpoint" if result["through"] == "endpoint" else "the engine alone"
    title = f"{result['model']}, {result['engine']} on {result['device']}, {place}, without drafts"
    table = Table(title=escape(title))
    for name in ("test", "tokens/s", "least to most"):
        table.add_column(name, justify="left" if name == "test" else "right")
    differs = any(_differs(row) for row in result["results"])
    if differs:
        table.add_column("engine alone", justify="right")
        table.add_column("of it", justify="right")
    for row in result["results"]:
        runs, speed = row["runs"], row["tokens_per_second"]
        engine = row["engine"]["tokens_per_second"] if differs else 1.0
        beside = [f"{engine:.1f}", f"{speed / engine:.0%}"] if differs else []
        table.add_row(row["test"], f"{speed:.1f}", f"{min(runs):.1f} to {max(runs):.1f}", *beside)
    console = Console()
    console.print(table)
    if picture := result.get("picture"):
        line = f"the picture: {picture['tokens']:,} tokens, prepared in {picture['prepare_ms']:.0f} ms and encoded in "
        line += f"{picture['encode_ms']:.0f} ms; the first token comes after {picture['first_token_ms']:.0f} ms"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(str(Conditions(**result["measured"])), markup=False, highlight=False, soft_wrap=True)


def _differs(row: dict[str, Any]) -> bool:
    """Return whether the endpoint is not as fast as the engine alone, or faster."""
    return "engine" in row and abs(row["tokens_per_second"] / row["engine"]["tokens_per_second"] - 1) > ALIKE
