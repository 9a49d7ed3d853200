"""The commands' names and flags. Each command's work is a module of `commands`, imported when it is called.

Owns the turning of errors into exit codes. Knows nothing of engines, models and files.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer
from typer import exceptions as usage

from edgelm import __version__
from edgelm.commands.flags import (
    Ctx,
    Device,
    Draft,
    Engine,
    GpuLayers,
    Graphs,
    Json,
    Kv,
    Memory,
    Model,
    ModelDirs,
    Quantize,
    Spec,
    Threads,
    Verbose,
)
from edgelm.errors import EdgeLMError, UsageError

app = typer.Typer(
    name="edgelm",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run_cli() -> int:
    """Run the command that `sys.argv` names; return the exit code. KeyboardInterrupt passes through."""
    try:
        code = app(standalone_mode=False)
    except usage.Exit as end:
        return end.exit_code
    except usage.Abort:
        raise KeyboardInterrupt from None
    except usage.TyperException as error:
        print(f"error: {error.format_message().rstrip('.')}; see --help", file=sys.stderr)
        return error.exit_code
    except EdgeLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code if isinstance(code, int) else 0


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"edgelm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="The model: a name, a file, or a folder.", show_default=False)
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Chat with a model of that server.", show_default=False)] = None,
    api_key: Annotated[str | None, typer.Option(help="The key for that server.", show_default=False)] = None,
    ctx: Ctx = None,
    kv: Kv = None,
    threads: Threads = None,
    spec: Spec = None,
    draft: Draft = None,
    engine: Engine = None,
    device: Device = None,
    gpu_layers: GpuLayers = None,
    graphs: Graphs = None,
    quantize: Quantize = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run a language model on your own machine. Without a command: chat with it in the terminal."""
    if context.invoked_subcommand is None:
        from edgelm.commands.chat import open_chat

        flags: dict[str, object] = {"ctx": ctx, "kv": kv, "threads": threads, "spec": spec, "draft": draft}
        flags |= {"engine": engine, "device": device, "gpu_layers": gpu_layers, "graphs": graphs, "quantize": quantize}
        open_chat(endpoint, model, flags, api_key)


@app.command()
def run(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The message, or with --raw the text to continue.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the prompt as it is, without a chat template.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the K likeliest.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among this share.", show_default=False)] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop what is this much less likely.", show_default=False)] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="For an answer that can be repeated: to the letter with --spec off.", show_default=False),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="End there.", show_default=False)] = None,
    ctx: Ctx = None,
    kv: Kv = None,
    threads: Threads = None,
    spec: Spec = None,
    draft: Draft = None,
    memory: Memory = None,
    engine: Engine = None,
    device: Device = None,
    gpu_layers: GpuLayers = None,
    graphs: Graphs = None,
    quantize: Quantize = None,
    as_json: Json = False,
    verbose: Verbose = False,
    model_dirs: ModelDirs = None,
) -> None:
    """Print one answer. The prompt is the argument, standard input, or both in that order."""
    from edgelm.commands.run import run_model

    flags: dict[str, object] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "max_tokens": max_tokens,
        "ctx": ctx,
        "kv": kv,
        "threads": threads,
        "spec": spec,
        "draft": draft,
        "memory": memory,
        "model_dirs": model_dirs,
    }
    flags |= {"engine": engine, "device": device, "gpu_layers": gpu_layers, "graphs": graphs, "quantize": quantize}
    run_model(model, prompt, flags, stop=stop or [], raw=raw, as_json=as_json, verbose=verbose)


@app.command()
def bench(
    model: Model,
    prompt: Annotated[list[int] | None, typer.Option("-p", help="Prompt tokens; 0: none. May be repeated.")] = None,
    decode: Annotated[list[int] | None, typer.Option("-n", help="Tokens to decode; 0: none. May be repeated.")] = None,
    parallel: Annotated[list[int] | None, typer.Option("-b", help="Parallel sequences. May be repeated.")] = None,
    repetitions: Annotated[int, typer.Option("-r", min=1, max=100, help="Times each test is run.")] = 3,
    ctx: Ctx = None,
    kv: Kv = None,
    threads: Threads = None,
    engine: Engine = None,
    device: Device = None,
    gpu_layers: GpuLayers = None,
    graphs: Graphs = None,
    quantize: Quantize = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure prompt speed (pp512 by default) and decode speed (tg128), in tokens per second."""
    from edgelm.commands.bench import bench_model

    flags: dict[str, object] = {"ctx": ctx, "kv": kv, "threads": threads}
    flags |= {"engine": engine, "device": device, "gpu_layers": gpu_layers, "graphs": graphs, "quantize": quantize}
    bench_model(model, flags, prompt, decode, parallel, repetitions, as_json, verbose)


@app.command("eval")
def evaluate(
    model: Model,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text file, of any length.", show_default=False)],
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="The reference: a KV type, other files of the same model; twice for both.", show_default=False
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens that the model sees at a time (512).", show_default=False)
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Overlapping windows, so many tokens apart.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many windows.", show_default=False)] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Do not go on where the last run stopped.")] = False,
    kv: Kv = None,
    threads: Threads = None,
    engine: Engine = None,
    device: Device = None,
    quantize: Quantize = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure how well a model predicts a text, and how far it is from a reference."""
    from edgelm.commands.eval import eval_model

    eval_model(
        model,
        file,
        {"kv": kv, "threads": threads, "engine": engine, "device": device, "quantize": quantize},
        against or [],
        window=window,
        stride=stride,
        limit=limit,
        restart=restart,
        as_json=as_json,
        verbose=verbose,
    )


@app.command()
def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="qwen3:4b, or OWNER/NAME[:QUANT or FILE] of the hub; none: choose from a list.",
            show_default=False,
        ),
    ] = None,
    quant: Annotated[str | None, typer.Option(help="Quantization, such as Q4_K_M.", show_default=False)] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit (main).", show_default=False)] = None,
    connections: Annotated[int, typer.Option(min=1, max=16, help="Files fetched at the same time.")] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would come, and whether it fits.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Take what is here; open no connection.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch a model from the hub. Interrupted, it continues where it was."""
    from edgelm.commands.pull import pull_model

    pull_model(
        model,
        quantization=quant,
        revision=revision,
        connections=connections,
        dry_run=dry_run,
        offline=offline,
        as_json=as_json,
    )


@app.command("list")
def list_(model_dirs: ModelDirs = None, as_json: Json = False) -> None:
    """Show the models that are on this machine."""
    from edgelm.commands.list import list_models

    list_models({"model_dirs": model_dirs}, as_json=as_json)


@app.command()
def show(
    model: Model,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template alone, whole.")] = False,
    model_dirs: ModelDirs = None,
    as_json: Json = False,
) -> None:
    """Show what a model is: architecture, tokenizer, template, licence, tensors, and the memory that it takes."""
    from edgelm.commands.show import show_model

    show_model(model, {"model_dirs": model_dirs}, template=template, as_json=as_json)


@app.command()
def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="As `edgelm list` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove models from the hub's cache, and free what nothing else there uses. Your own files are never removed."""
    from edgelm.commands.rm import remove_models

    raise typer.Exit(remove_models(models, {}, yes=yes, as_json=as_json))


@app.command()
def serve(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="More models to offer.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address (127.0.0.1); others need a key.", show_default=False)
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port (11500); 0: any free one.", show_default=False)] = None,
    api_key: Annotated[str | None, typer.Option(help="What clients must send as a key.", show_default=False)] = None,
    idle_timeout: Annotated[
        float | None, typer.Option(help="Unload a model not used for so many seconds; 0: never.", show_default=False)
    ] = None,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", help="End with the parent.")] = False,
    parallel: Annotated[
        int | None, typer.Option(help="Answers of a model at the same time (8).", show_default=False)
    ] = None,
    prefix_cache_ram: Annotated[
        float | None, typer.Option(help="GiB of memory for idle conversations.", show_default=False)
    ] = None,
    prefix_cache_disk: Annotated[
        float | None, typer.Option(help="GiB on disk for idle conversations (4); 0: none.", show_default=False)
    ] = None,
    prefix_cache_days: Annotated[
        float | None, typer.Option(help="Delete those not used for so many days (30).", show_default=False)
    ] = None,
    ctx: Ctx = None,
    kv: Kv = None,
    threads: Threads = None,
    spec: Spec = None,
    draft: Draft = None,
    memory: Memory = None,
    engine: Engine = None,
    device: Device = None,
    gpu_layers: GpuLayers = None,
    graphs: Graphs = None,
    quantize: Quantize = None,
    as_json: Json = False,
    verbose: Verbose = False,
    model_dirs: ModelDirs = None,
) -> None:
    """Serve the models here to other programs, as OpenAI's API does."""
    from edgelm.commands.serve import serve_models

    flags: dict[str, object] = {"host": host, "port": port, "api_key": api_key, "idle_timeout": idle_timeout}
    flags |= {"parallel": parallel, "ctx": ctx, "kv": kv, "threads": threads, "model_dirs": model_dirs}
    flags |= {"spec": spec, "draft": draft, "memory": memory, "prefix_cache_ram": prefix_cache_ram}
    flags |= {"prefix_cache_disk": prefix_cache_disk, "prefix_cache_days": prefix_cache_days}
    flags |= {"engine": engine, "device": device, "gpu_layers": gpu_layers, "graphs": graphs, "quantize": quantize}
    serve_models(models or [], flags, until_stdin_closes=until_stdin_closes, as_json=as_json, verbose=verbose)


@app.command()
def ps(as_json: Json = False) -> None:
    """Show what a running server holds."""
    from edgelm.commands.ps import show_processes

    show_processes(as_json=as_json)


@app.command()
def plan(
    model: Model,
    ctx: Ctx = None,
    kv: Kv = None,
    threads: Threads = None,
    engine: Engine = None,
    device: Device = None,
    quantize: Quantize = None,
    as_json: Json = False,
) -> None:
    """Show what a model takes on this machine, and which context and KV cache it will get, without loading it."""
    from edgelm.commands.plan import show_plan

    flags = {"ctx": ctx, "kv": kv, "threads": threads, "engine": engine, "device": device, "quantize": quantize}
    show_plan(model, flags, as_json=as_json)


memory_app = typer.Typer(help="What speculation remembers of past answers.", no_args_is_help=True)
app.add_typer(memory_app, name="memory")


@memory_app.command("show")
def show_memory(as_json: Json = False) -> None:
    """Show how much is remembered, since when, and where."""
    from edgelm.commands.memory import show_answers

    show_answers(as_json=as_json)


@memory_app.command("clear")
def clear_memory(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, as_json: Json = False
) -> None:
    """Forget all past answers. Chats are kept: they are elsewhere."""
    from edgelm.commands.memory import clear_answers

    raise typer.Exit(clear_answers(yes=yes, as_json=as_json))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show what this machine can run, and what is wrong with it."""
    from edgelm.commands.doctor import show_health

    raise typer.Exit(show_health(as_json))


@app.command()
def config(as_json: Json = False) -> None:
    """Show all settings, and where each comes from."""
    from edgelm.commands.config import show_config

    show_config(as_json)
