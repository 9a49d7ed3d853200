"""`edgelm launch`: start a coding agent on a model of this machine, or show how it would be started."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table

from edgelm.base.atomic import atomic_write
from edgelm.base.config import Config, load_config
from edgelm.base.errors import EdgeLMError, ModelError, UsageError
from edgelm.base.runtime import FrontRecord, agents_run, note_agent
from edgelm.commands.flags import Json
from edgelm.commands.launch.agents import AGENTS, LEAST_CONTEXT, Agent, find_agent
from edgelm.commands.launch.server import (
    NO_KEY,
    Loaded,
    awake_front,
    end_front,
    load,
    loaded_context,
    loaded_models,
    lone_start,
    past_proxies,
    running_front,
    start_front,
)
from edgelm.commands.launch.setups import Setup, Target
from edgelm.commands.running import model_or_served, served_name
from edgelm.commands.service.systemd import socket_address
from edgelm.library.local import model_config, runnable_model, runs_here
from edgelm.library.names import shown
from edgelm.library.readers import Detail, read_each
from edgelm.library.scan import LocalModel, installed

Mode = Literal["print", "config", "restore"]
VERSION_LIMIT_S = 15.0
MAX_CHOICES = 30
MAX_FOLDER_LEN = 80
LONGER = "use a model that was made for a longer context"
KEY_IN_SHELL = "$EDGELM_API_KEY"  # stands for the key in what --print shows


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of a model's files that an agent depends on."""

    trained: int  # tokens of context; 0: unknown
    takes_tools: bool


def show_agents(*, as_json: bool) -> None:
    """Print the agents: whether each is installed, its version, what it speaks, and how to install it."""
    with ThreadPoolExecutor() as pool:  # some take a second to say their version
        versions = list(pool.map(_version, AGENTS))
    if as_json:
        rows = [
            {"agent": agent.name, "title": agent.title, "installed": version is not None, "version": version or None}
            | {"speaks": agent.dialect, "install": agent.install}
            for agent, version in zip(AGENTS, versions, strict=True)
        ]
        print(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("AGENT", "SPEAKS", "INSTALLED"):
        table.add_column(title, no_wrap=True, overflow="ignore")  # lines to copy
    for agent, version in zip(AGENTS, versions, strict=True):
        here = f"no: {agent.install}" if version is None else version or "yes"
        table.add_row(agent.name, agent.dialect, here)
    Console(highlight=False, markup=False).print(table)
    print("start one with `edgelm launch AGENT --model MODEL`; its own arguments follow `--`")


def launch_agent(
    agent: Annotated[
        str | None, typer.Argument(metavar="AGENT", help="None: show which there are.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Arguments of the agent.", show_default=False)
    ] = None,
    *,
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
    """Replace this process by an agent on a model, or show the agents, or do what the mode says. Raises EdgeLMError."""
    if agent is None:
        show_agents(as_json=as_json)
        return
    modes: dict[Mode, bool] = {"print": show, "config": write, "restore": restore}
    given = [mode for mode, is_given in modes.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} exclude each other")
    _launch(find_agent(agent), arguments or [], given[0] if given else None, model=model, ctx=ctx, as_json=as_json)


def _launch(
    agent: Agent, arguments: list[str], mode: Mode | None, *, model: str | None, ctx: int | None, as_json: bool
) -> None:
    config = load_config({})
    if mode == "restore":
        _restore(agent, config)
        return
    if mode is None:
        _require_installed(agent)
    front = running_front(config.places, config.library)
    local = model_or_served(model, config) if model else _choose_model(config, front, ask=mode is None)
    _check_name(local)
    config = model_config(local, config)
    facts = _read_facts(local, config)
    if mode is None:
        _check_model(agent, local, facts)
        loaded = _load(agent, local, facts, config, ctx)
        _check_context(agent, local, loaded.context, facts, config)
        target = _target(agent, config, loaded.front.address, loaded.model, loaded.context)
        _become(agent, target, arguments, loaded.front, config)
    if mode == "config" and front is not None and front.of == "launch":
        front = None  # it ends, and a later server may have another port
    target = _expected_target(agent, local, facts, config, front, ctx, in_files=mode == "config")
    if mode == "config":
        _configure(agent, target, config, front)
    else:
        _print(agent, target, arguments, _key(front, config), config, as_json=as_json)


def _version(agent: Agent) -> str | None:
    """Return the version that an agent prints, "" if it prints none; None: it is not installed."""
    program = shutil.which(agent.command)
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=VERSION_LIMIT_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"\d+\.\d+[\w.+-]*", done.stdout + done.stderr)
    return match[0] if match else ""


def _require_installed(agent: Agent) -> None:
    if shutil.which(agent.command) is None:
        raise EdgeLMError(f"{agent.title} is not installed: there is no program `{agent.command}`", agent.install)


def _choose_model(config: Config, front: FrontRecord | None, *, ask: bool) -> LocalModel:
    """Return the model that is loaded, or the only one; let the user choose among several. Raises EdgeLMError."""
    models = [model for model in installed(config.places.hub, [], config.model_folders) if runs_here(model)]
    if front is not None and (loaded := loaded_models(front)):
        recent = min(loaded, key=lambda entry: float(entry["idle_s"]))
        here = next((model for model in models if str(model.path) == recent["path"]), None)
        return here or runnable_model(recent["path"], config)
    if len(models) == 1:
        return models[0]
    names = [shown(model.name) for model in models]
    if not models:
        raise EdgeLMError("there is no model on this machine", "edgelm pull shows some")
    if not ask or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise EdgeLMError("there are several models", f"add --model: {', '.join(names[:MAX_CHOICES])}")
    for number, listed in enumerate(names[:MAX_CHOICES], 1):
        print(f"{number:>3}  {listed}", file=sys.stderr)
    print("Model (a number): ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not answer.isdecimal() or not 1 <= int(answer) <= min(len(models), MAX_CHOICES):
        raise EdgeLMError("no model was chosen", "add --model")
    return models[int(answer) - 1]


def _read_facts(model: LocalModel, config: Config) -> Facts:
    (details,) = read_each([Detail(model.path, config.settings.without_keys)])
    if "error" in details:
        raise ModelError(f"{shown(model.name)} cannot be read: {details['error']}")
    template = details["template"] or ""
    return Facts(details["context"] or 0, re.search(r"\btools\b", template) is not None)


def _check_name(model: LocalModel) -> None:
    """Raise ModelError for a path that is no text: neither a request nor an agent's file can name it."""
    try:
        str(model.path).encode()
    except UnicodeEncodeError:
        raise ModelError(f"the path {str(model.path)!a} is not UTF-8", "rename the file") from None


def _check_model(agent: Agent, model: LocalModel, facts: Facts) -> None:
    """Raise ModelError for a model that cannot serve an agent, whatever the settings are."""
    if 0 < facts.trained < agent.least:
        raise ModelError(_too_short(agent, model, facts.trained), LONGER)
    if agent.needs_tools and not facts.takes_tools:
        raise ModelError(
            _no_tools(agent, model), "use a model whose template takes tools, as `edgelm show MODEL` tells"
        )


def _check_context(agent: Agent, model: LocalModel, context: int, facts: Facts, config: Config) -> None:
    """Raise EdgeLMError if the loaded context is too short; warn below what is advised."""
    if context < agent.least:
        raise EdgeLMError(_too_short(agent, model, context), _advice(agent, facts, config))
    if context < agent.advised:
        _warn(f"{agent.title} works better with {agent.advised:,} tokens of context, and there are {context:,}")


def _too_short(agent: Agent, model: LocalModel, context: int) -> str:
    return f"{shown(model.name)} has {context:,} tokens of context here, and {agent.title} needs {agent.least:,}"


def _no_tools(agent: Agent, model: LocalModel) -> str:
    return f"the chat template of {shown(model.name)} takes no tools, and {agent.title} works by tools"


def _advice(agent: Agent, facts: Facts, config: Config) -> str:
    """Return how the context is raised."""
    if 0 < facts.trained < agent.least:
        return LONGER
    if config.sources["ctx"] != "default":
        return f"raise ctx in {config.sources['ctx']}"
    context = min(agent.advised, facts.trained or agent.advised)
    return f"end the server that runs, or start it anew: edgelm serve --ctx {context}"


def _load(agent: Agent, model: LocalModel, facts: Facts, config: Config, ctx: int | None) -> Loaded:
    """Return the model, loaded on the running server or on one that is started. Raises EdgeLMError."""
    runtime = config.places.runtime
    try:
        # A front that is started waits for this process, and for the agent that it becomes.
        note_agent(runtime)
        with lone_start(config.places):
            front = awake_front(config.places, config.library, socket_address(config.places.systemd_units))
            is_new = front is None
            front = front or _start(agent, model, facts, config, ctx)
        if not is_new:
            loaded = _load_on(front, model)
            enough = loaded.context >= (ctx or min(agent.advised, facts.trained or agent.advised))
            if enough or front.of != "launch" or agents_run(runtime, besides=os.getpid()):
                return loaded
            with lone_start(config.places):
                end_front(front)  # of an earlier launch, with a shorter context
                front = _start(agent, model, facts, config, ctx)
    except OSError as error:
        raise EdgeLMError(f"{error.filename or runtime} cannot be used: {error.strerror}") from None
    try:
        return _load_on(front, model)
    except BaseException:
        if not agents_run(runtime, besides=os.getpid()):
            end_front(front)  # the next try may need other settings
        raise


def _start(agent: Agent, model: LocalModel, facts: Facts, config: Config, ctx: int | None) -> FrontRecord:
    context = ctx if config.sources["ctx"] != "default" else _planned_context(agent, model, facts, config, ctx)
    arguments = [*([f"--ctx={context}"] if context else []), *([str(model.path)] if model.place == "given" else [])]
    return start_front(config.places, config.settings.port, arguments)


def _load_on(front: FrontRecord, model: LocalModel) -> Loaded:
    """Load a model with progress on a terminal."""
    name = str(model.path) if model.place == "given" else model.name
    console = Console(stderr=True)
    with rich_progress.Progress(console=console, transient=True, disable=not console.is_terminal) as display:
        task = display.add_task(f"loading {shown(model.name)}", total=1.0)
        return load(front, name, model.path, lambda share: display.update(task, completed=share or 0.0))


def _planned_context(agent: Agent, model: LocalModel, facts: Facts, config: Config, ctx: int | None) -> int | None:
    """Return the context that is asked for; None: the default."""
    if ctx is not None:
        return ctx
    context = min(facts.trained or agent.advised, agent.advised)
    while context >= agent.least:
        settings = replace(config.settings.without_keys, ctx=context)
        (details,) = read_each([Detail(model.path, settings)])
        memory = details.get("memory")
        if memory is not None and "error" not in memory:
            return context
        context = context // 2 if context // 2 >= agent.least or context == agent.least else agent.least
    return None


def _expected_target(
    agent: Agent,
    model: LocalModel,
    facts: Facts,
    config: Config,
    front: FrontRecord | None,
    ctx: int | None,
    *,
    in_files: bool,
) -> Target:
    """Return the target of an agent that is not started: what the server has, or else what it would get.

    The user's own files (`in_files`) get the name by which the server offers the model, not its path.
    """
    if not facts.takes_tools and agent.needs_tools:
        _warn(_no_tools(agent, model))
    context = (front and loaded_context(front, model.path)) or config.settings.ctx
    context = context or _planned_context(agent, model, facts, config, ctx) or facts.trained or LEAST_CONTEXT
    if context < agent.least:
        _warn(f"{_too_short(agent, model, context)}; {_advice(agent, facts, config)}")
    address = front.address if front else f"http://127.0.0.1:{config.settings.port}"
    name = str(model.path) if model.place == "given" else model.name
    return _target(agent, config, address, (served_name(front, model) if in_files and front else None) or name, context)


def _target(agent: Agent, config: Config, address: str, model: str, context: int) -> Target:
    digest = hashlib.sha256(os.fsencode(model)).hexdigest()[:8]  # two names may differ in what is left out here
    words = re.sub(r"[^\w.-]+", "-", model, flags=re.ASCII).strip("-.")[-MAX_FOLDER_LEN:]
    return Target(address, model, context, config.places.data / "launch" / agent.name / f"{words}-{digest}")


def _become(agent: Agent, target: Target, arguments: list[str], front: FrontRecord, config: Config) -> NoReturn:
    """Replace this process by the agent. Raises EdgeLMError if it cannot be started."""
    if front.certificate:
        _warn(f"the server speaks https: {agent.title} must trust the certificate {front.certificate}")
    setup = _setup(agent, target, config)
    keys = dict.fromkeys(agent.keys, front.key or NO_KEY)
    environment = {**config.places.environment, **setup.environment, **keys}
    sys.stdout.flush()
    try:
        os.execvpe(agent.command, [agent.command, *setup.words, *arguments], environment)  # noqa: S606
    except OSError as error:
        raise EdgeLMError(f"{agent.command} cannot be started: {error.strerror}", agent.install) from None


def _setup(agent: Agent, target: Target, config: Config) -> Setup:
    """Return the setup of an agent after writing our own files. Raises EdgeLMError."""
    setup = agent.setup(target)
    for path, text in setup.files.items():
        try:
            atomic_write(path, text.encode())
        except OSError as error:
            hint = "set EDGELM_DATA_DIR to another folder"
            raise EdgeLMError(f"{path} cannot be written: {error.strerror}", hint) from None
    return replace(setup, environment=setup.environment | past_proxies(config.places.environment))


def _key(front: FrontRecord | None, config: Config) -> str:
    """Return the text for the key in --print: a variable of the shell, or the word that stands for no key."""
    needed = front.key if front else config.settings.api_key or config.settings.api_key_file
    return KEY_IN_SHELL if needed else NO_KEY


def _print(agent: Agent, target: Target, arguments: list[str], key: str, config: Config, *, as_json: bool) -> None:
    """Print the command and the environment for a shell, or as JSON; write our own files, which they name."""
    setup = _setup(agent, target, config)
    command = [agent.command, *setup.words, *arguments]
    if as_json:
        keys: dict[str, str | None] = dict.fromkeys(agent.keys, None if key == KEY_IN_SHELL else key)
        files = {str(path): text for path, text in setup.files.items()}
        print(json.dumps({"command": command, "environment": {**setup.environment, **keys}, "files": files}))
        return
    for name, value in setup.environment.items():
        print(f"export {name}={shlex.quote(value)}")
    for name in agent.keys:
        print(f'export {name}="{key}"')
    print(shlex.join(command))
    for path in setup.files:
        print(f"# it reads {path}")


def _configure(agent: Agent, target: Target, config: Config, front: FrontRecord | None) -> None:
    """Add the model to the agent's own files."""
    from edgelm.commands.launch.files import apply
    from edgelm.commands.launch.user_files import user_config

    found = user_config(agent, target, config.places.environment)
    changed = apply(found.files, _backups(agent, config))
    for path in changed:
        print(f"{path} has the model now; `edgelm launch {agent.name} --restore` puts it back")
    if not changed:
        print("nothing changed: the model is there already")
    key = _key(front, config)
    value = "the server's key" if key == KEY_IN_SHELL else f"any text, such as {key}"
    print(f"start it with `{found.start}`, with {' and '.join(agent.keys)} set to {value}, beside `edgelm serve`")


def _restore(agent: Agent, config: Config) -> None:
    """Put the agent's own files back. Raises EdgeLMError if nothing is saved."""
    from edgelm.commands.launch.files import REPLACED, restore

    backups = _backups(agent, config)
    restored = restore(backups)
    if not restored:
        raise EdgeLMError(f"nothing is saved of {agent.title}'s files", "--config saves them before it edits")
    for path in restored:
        print(f"{path} is as it was")
    print(f"the texts until now are kept in {backups / REPLACED}")


def _backups(agent: Agent, config: Config) -> Path:
    return config.places.data / "launch" / "backups" / agent.name


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
