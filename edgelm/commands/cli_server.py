"""The names and flags of the commands about a server: serve, share, launch, load, unload, ps, top, watch and service.

cli.py has the other commands, and lists these among them. The work of a command is a module of `commands`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from edgelm.commands.flags import Flags, Json, Model, Verbose, with_settings


@with_settings("serve")
def serve(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="More models to offer.")] = None,
    ask_key: Annotated[bool, typer.Option("--ask-key", help="Ask here for a key that clients must send.")] = False,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
    until_unused: Annotated[bool, typer.Option("--until-unused", hidden=True)] = False,
    as_json: Json = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Serve the models here to other programs, in the dialects of OpenAI and Anthropic."""
    from edgelm.commands.serve import serve_models

    serve_models(
        models or [],
        flags,
        ask_key=ask_key,
        until_stdin_closes=until_stdin_closes,
        until_unused=until_unused,
        as_json=as_json,
        verbose=verbose,
    )


@with_settings("serve")
def share(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="More models to offer.")] = None,
    with_key: Annotated[
        bool, typer.Option("--with-key", help="Show the key, also in the QR code: who sees it can use it.")
    ] = False,
    qr: Annotated[bool, typer.Option("--qr/--no-qr", help="Show the address as a QR code.")] = True,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Serve the models here to phones and computers of this network: with a key and TLS, which it makes."""
    from edgelm.commands.share import share_models

    share_models(models or [], flags, with_key=with_key, qr=qr, verbose=verbose)


def launch(
    agent: Annotated[
        str | None, typer.Argument(metavar="AGENT", help="None: show which there are.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Arguments of the agent.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model: a name, a file, or a folder.", show_default=False)
    ] = None,
    ctx: Annotated[
        int | None, typer.Option(min=1, help="Tokens of context (default: as the agent needs).", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="Show the command and the environment; start nothing.")] = False,
    write: Annotated[
        bool, typer.Option("--config", help="Write the model into the agent's own files; start nothing.")
    ] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Put the agent's files back as they were before --config.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a coding agent on a model of this machine: Claude Code, Codex, OpenCode and others."""
    from edgelm.commands.launch.command import Mode, launch_agent, show_agents

    if agent is None:
        show_agents(as_json=as_json)
        return
    modes: dict[Mode, bool] = {"print": show, "config": write, "restore": restore}
    launch_agent(agent, arguments or [], modes, model=model, ctx=ctx, as_json=as_json)


def load(
    model: Model,
    keep_alive: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Unload it after so long without a request: 90, 5m, 1h; -1: never."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Load a model into a running server."""
    from edgelm.commands.load import load_model

    load_model(model, keep_alive, as_json=as_json)


def unload(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As `edgelm ps` shows it.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Unload all models.")] = False,
    as_json: Json = False,
) -> None:
    """Unload a model of a running server."""
    from edgelm.commands.load import unload_models

    unload_models(model, every=every, as_json=as_json)


def ps(as_json: Json = False) -> None:
    """Show the models that a running server has loaded."""
    from edgelm.commands.ps import show_processes

    show_processes(as_json=as_json)


def top(
    endpoint: Annotated[str | None, typer.Option(help="Another edgelm server.", show_default=False)] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="The key for that server; others see it: EDGELM_API_KEY is better.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, over one second.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a running server: requests, speed, cache hits, drafts and memory of each model. q quits.

    RUN and WAIT are requests, TTFT is the time to the first token, HITS the share of prompt tokens that were cached, KV
    the used share of the KV cache, DRAFTS the share of draft tokens that were accepted; means are of the last minute.
    """
    from edgelm.commands.top import show_top

    show_top(endpoint, api_key, once=once, as_json=as_json)


def watch(
    model: Annotated[
        str | None, typer.Argument(help="A loaded model; without it, the first.", show_default=False)
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Another edgelm server.", show_default=False)] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="The key for that server; others see it: EDGELM_API_KEY is better.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Watch the steps of a running engine: prompts, drafts, tokens and the KV cache. q quits.

    Space stops and goes on; the arrow keys go back over the last 500 steps. Texts and probabilities are shown of your
    own requests, of others the counts.
    """
    from edgelm.commands.watch import watch_server

    watch_server(model, endpoint, api_key, as_json=as_json)


service_app = typer.Typer(help="The server as a service, which other programs find at any time.", no_args_is_help=True)


@service_app.command("install")
@with_settings("service")
def install_service(
    linger: Annotated[bool, typer.Option("--linger", help="Keep it after log-out (systemd).")] = False,
    show: Annotated[bool, typer.Option("--print", help="Show the files; write and start nothing.")] = False,
    *,
    flags: Flags,
) -> None:
    """Start `edgelm serve` with each log-in, or with the first request. Settings and keys are those of config.toml."""
    from edgelm.commands.service.command import install_service

    install_service(flags, linger=linger, show=show)


@service_app.command("remove")
def remove_service() -> None:
    """End the service and remove its files."""
    from edgelm.commands.service.command import remove_service

    remove_service()


@service_app.command("status")
def show_service(as_json: Json = False) -> None:
    """Show whether the service is installed and runs."""
    from edgelm.commands.service.command import show_service

    raise typer.Exit(show_service(as_json=as_json))


@service_app.command("logs")
def show_logs(
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, max=100_000, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new ones.")] = False,
) -> None:
    """Show the service's log."""
    from edgelm.commands.service.command import show_logs

    show_logs(lines, follow=follow)
