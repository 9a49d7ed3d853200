"""The names and flags of the commands. The work of a command is a module of `commands`, imported when it is called.

Owns the exit code of an error. The commands about a server are in cli_server.py, those about chats in
cli_chats.py, those that make and judge models in cli_making.py. Knows nothing of engines, models and files.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from typing import Annotated

import typer
from typer import exceptions as usage

from edgelm import __version__
from edgelm.base.errors import USAGE_EXIT_CODE, EdgeLMError, UsageError, one_line
from edgelm.commands.cli_chats import chats_app
from edgelm.commands.cli_making import convert, evaluate, quantize
from edgelm.commands.cli_server import launch, load, ps, serve, service_app, top, unload, watch
from edgelm.commands.flags import Flags, Json, Model, Verbose, Yes, with_fields, with_settings
from edgelm.commands.run_options import RunOptions
from edgelm.jobs.embed_request import Format

app = typer.Typer(
    name="edgelm", pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
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
        print(f"error: {one_line(error.format_message()).rstrip('.')}; {_usage_hint()}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's own end: the reader, such as `head`, has enough
            return 0
        raise
    except EdgeLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE if isinstance(error, UsageError) else 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code if isinstance(code, int) else 0


def _usage_hint() -> str:
    """Return what helps: `--` before a message that looks like a flag."""
    arguments = sys.argv[1:]
    like_flags = [word for word in arguments if word.startswith("-") and (" " in word or word[1:2].isdigit())]
    if like_flags and "--" not in arguments:
        return f"a text that begins with - stands behind --: -- {shlex.quote(one_line(like_flags[0]))}"
    return "see --help"


def _print_version(requested: bool) -> None:
    if requested:
        print(f"edgelm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
@with_settings("chat")
def _main(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="The model: a name, a file, or a folder.", show_default=False)
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Chat with a model of that server.", show_default=False)] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="The key for that server; others see it: EDGELM_API_KEY is better.", show_default=False),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="New chats begin with this preset.", show_default=False)
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Chat in plain lines: for a screen reader, or an Emacs shell.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    *,
    flags: Flags,
) -> None:
    """Run a language model on your own machine. Without a command: chat with it in the terminal."""
    if context.invoked_subcommand is None:
        from edgelm.commands.chat import open_chat

        open_chat(endpoint, model, flags, api_key, preset=preset, plain=plain)


@app.command()
@with_settings("run")
@with_fields(RunOptions, "options")
def run(
    model: Annotated[
        str | None,
        typer.Argument(help="starter, qwen3:4b, OWNER/NAME:QUANT, or a path; not needed with -c.", show_default=False),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PICTURE]… [PROMPT]",
            help="Files of pictures, - for one on standard input; the message, or with --raw the text to continue.",
            show_default=False,
        ),
    ] = None,
    *,
    options: RunOptions,
    as_json: Json = False,
    verbose: Verbose = False,
    flags: Flags,
) -> None:
    """Print one answer. The prompt is the argument, standard input, or both in that order."""
    from edgelm.commands.run import run_model

    run_model([*filter(None, [model]), *(prompt or [])], options, flags, as_json=as_json, verbose=verbose)


@app.command()
@with_settings("bench")
def bench(
    model: Model,
    prompt: Annotated[list[int] | None, typer.Option("-p", help="Prompt tokens; 0: none. May be repeated.")] = None,
    decode: Annotated[list[int] | None, typer.Option("-n", help="Tokens to decode; 0: none. May be repeated.")] = None,
    parallel: Annotated[list[int] | None, typer.Option("-b", help="Parallel sequences. May be repeated.")] = None,
    repetitions: Annotated[int, typer.Option("-r", min=1, max=100, help="Repetitions of each test.")] = 3,
    picture: Annotated[
        str | None,
        typer.Option(help="Measure a picture too: its tokens and times.", metavar="FILE", show_default=False),
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Measure the engine alone, without a server before it.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Measure prompt speed (pp512 by default) and decode speed (tg128) through the endpoint, in tokens per second."""
    from edgelm.commands.bench import bench_model

    bench_model(
        model,
        flags,
        prompt,
        decode,
        parallel,
        repetitions,
        picture,
        in_process=in_process,
        as_json=as_json,
        verbose=verbose,
    )


@app.command()
@with_settings("embed")
def embed(
    model: Model,
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]…", help="Texts; - is standard input, a text in each line.", show_default=False),
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="A file with a text in each line.", metavar="FILE", show_default=False)
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="A table, lines of JSON, or a matrix for numpy.", show_default=False),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the first N numbers.", show_default=False)
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="Print how similar the texts are to the first one.")
    ] = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Print the vectors (embeddings) of texts."""
    from edgelm.commands.embed import embed_texts

    embed_texts(
        model,
        text or [],
        flags,
        file=file,
        form=form,
        dimensions=dimensions,
        truncate=truncate,
        similarity=similarity,
        verbose=verbose,
    )


app.command("eval")(evaluate)
app.command()(convert)
app.command()(quantize)


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
    connections: Annotated[int, typer.Option(min=1, max=16, help="Connections at the same time, to one file too.")] = 4,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the files that are here, and replace damaged ones.")
    ] = False,
    mmproj: Annotated[
        bool, typer.Option("--mmproj/--no-mmproj", help="With the projector of a model that reads pictures.")
    ] = True,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="With the file of the heads that draft.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files, and whether the model fits.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Use the files on this disk; open no connection.")] = False,
    as_json: Json = False,
) -> None:
    """Download a model from the hub. An interrupted download resumes where it stopped."""
    from edgelm.commands.pull import pull_model

    pull_model(
        model,
        quantization=quant,
        revision=revision,
        connections=connections,
        verify=verify,
        mmproj=mmproj,
        mtp=mtp,
        dry_run=dry_run,
        offline=offline,
        as_json=as_json,
    )


@app.command("list")
@with_settings("list")
def list_(as_json: Json = False, *, flags: Flags) -> None:
    """Show the models on this machine."""
    from edgelm.commands.list import list_models

    list_models(flags, as_json=as_json)


@app.command()
@with_settings("show")
def show(
    model: Model,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template alone.")] = False,
    as_json: Json = False,
    *,
    flags: Flags,
) -> None:
    """Show a model's architecture, tokenizer, template, licence and tensors, and the memory that it takes."""
    from edgelm.commands.show import show_model

    show_model(model, flags, template=template, as_json=as_json)


@app.command()
def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="As `edgelm list` shows it.")],
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Remove only downloads that are not finished.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove models from the hub's cache, with all bytes that nothing else uses. Your own files are never removed."""
    from edgelm.commands.rm import remove_models

    raise typer.Exit(remove_models(models, {}, unfinished_only=unfinished, yes=yes, as_json=as_json))


for _command in (serve, launch, load, unload, ps, top, watch):  # the help lists them here
    app.command()(_command)
app.add_typer(service_app, name="service")


@app.command()
@with_settings("plan")
def plan(model: Model, as_json: Json = False, *, flags: Flags) -> None:
    """Show what a model takes on this machine, and which context and KV cache it will get, without loading it."""
    from edgelm.commands.plan import show_plan

    show_plan(model, flags, as_json=as_json)


app.add_typer(chats_app, name="chats")

memory_app = typer.Typer(help="Past answers that speculation remembers.", no_args_is_help=True)
app.add_typer(memory_app, name="memory")


@memory_app.command("show")
def show_memory(as_json: Json = False) -> None:
    """Show how much is remembered, since when, and where."""
    from edgelm.commands.memory import show_answers

    show_answers(as_json=as_json)


@memory_app.command("clear")
def clear_memory(yes: Yes = False, as_json: Json = False) -> None:
    """Forget all past answers. Chats are kept: they are elsewhere."""
    from edgelm.commands.memory import clear_answers

    raise typer.Exit(clear_answers(yes=yes, as_json=as_json))


@app.command("help")
def help_(
    topic: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC]", help="A topic, or words to look for; none: all topics.", show_default=False),
    ] = None,
) -> None:
    """Explain how to use edgelm, by topic: start, chat, models, memory, serve, troubleshooting and others."""
    from edgelm.commands.help import show_help

    show_help(topic or [])


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="with --gpu: the model to check")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="check our kernels on this GPU, and write a report")] = False,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="with --gpu: where the report goes")] = None,
    as_json: Json = False,
) -> None:
    """Show what this machine can run, and what is wrong with it."""
    if gpu:
        from edgelm.commands.doctor_gpu import check_gpu

        raise typer.Exit(check_gpu(model, out))
    if model or out:
        raise UsageError("edgelm doctor takes a model and --out only with --gpu", "add --gpu")
    from edgelm.commands.doctor import show_health

    raise typer.Exit(show_health(as_json))


@app.command()
def config(as_json: Json = False) -> None:
    """Show all settings, and where each comes from."""
    from edgelm.commands.config import show_config

    show_config(as_json)
