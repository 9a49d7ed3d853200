"""`edgelm service`: the server as a service of this user, under systemd or launchd."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from edgelm.base.config import Config, load_config
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine.wsl import is_wsl
from edgelm.base.places import home_folder, variables_of_a_shell
from edgelm.commands.flags import Flags, Json, SettingsOf
from edgelm.commands.service.launchd import Launchd
from edgelm.commands.service.system import Definition, Manager
from edgelm.commands.service.systemd import Systemd
from edgelm.server.keys import read_key_file

UNSEEN = ("--", "EDGELM_")  # sources of settings that a service does not have


def install_service(
    flags: Annotated[Flags, SettingsOf("service")],
    *,
    linger: Annotated[bool, typer.Option("--linger", help="Keep it after log-out (systemd).")] = False,
    show: Annotated[bool, typer.Option("--print", help="Show the files; write and start nothing.")] = False,
) -> None:
    """Write and start the service, or with `show` print its files. Raises EdgeLMError."""
    config = load_config(flags)
    manager, definition = _manager(config), _definition(config)
    if show:
        for path, text in manager.files(definition).items():
            print(f"# {path}\n{text}")
        return
    for line in manager.install(definition, linger=linger):
        print(line)
    host = f"[{definition.address}]" if ":" in definition.address else definition.address
    has_certificate = config.settings.tls_cert and not config.sources["tls_cert"].startswith(UNSEEN)
    scheme = "https" if has_certificate else "http"
    print(f"edgelm listens at {scheme}://{host}:{definition.port}/v1, also after the next log-in")
    if is_wsl():  # no matter what systemd runs: https://github.com/microsoft/WSL/issues/9667
        print("note: WSL ends some seconds after its last terminal closes, and the service with it")
    if lost := variables_of_a_shell(config.places.environment):
        print(f"note: the service does not see {', '.join(lost)}: `edgelm config` shows the file for settings")


def remove_service() -> None:
    """End and remove the service. Raises EdgeLMError."""
    lines = _manager(load_config({})).remove()
    print("\n".join(lines) if lines else "the service is not installed")


def show_service(*, as_json: Json = False) -> int:
    """Print the state of the service; return the exit code: 3, as systemctl's, if it is not installed."""
    states = _manager(load_config({})).state()
    if as_json:
        print(json.dumps({"installed": bool(states), "units": states}))
    elif states:
        for unit, state in states.items():
            print(f"{unit}: {state}")
    else:
        print("the service is not installed: `edgelm service install` does it")
    return 0 if states else 3


def show_logs(
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, max=100_000, help="How many of the last lines.")] = 100,
    *,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new ones.")] = False,
) -> None:
    """Become the command that shows the service's log. Raises EdgeLMError."""
    command = _manager(load_config({})).logs(lines, follow=follow)
    program = shutil.which(command[0])
    if program is None:
        raise EdgeLMError(f"there is no {command[0]} on this machine")
    sys.stdout.flush()
    os.execv(program, command)  # noqa: S606 - a command of our own


def _manager(config: Config) -> Manager:
    if sys.platform == "darwin":
        home = home_folder() / "Library"
        return Launchd(home / "LaunchAgents", home / "Logs" / "edgelm.log")
    return Systemd(config.places.systemd_units)


def _definition(config: Config) -> Definition:
    """Return the service of these settings. Raises EdgeLMError for one that could not listen."""
    settings, sources = config.settings, config.sources
    address = "127.0.0.1" if settings.host == "localhost" else settings.host
    try:
        is_local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        raise EdgeLMError(f"a service listens at an address, and {settings.host} is a name", "give --host IP") from None
    if not settings.port:
        raise EdgeLMError("a service needs a port that its clients know", "give --port N")
    command = [*_program(), "serve"]
    if settings.api_key_file is not None:
        keys = Path(settings.api_key_file).expanduser()
        read_key_file(keys)  # a service that does not start would tell it to its log only
        if sources["api_key_file"].startswith(UNSEEN):
            command += ["--api-key-file", str(keys.resolve())]
    in_file = settings.api_key is not None and not sources["api_key"].startswith(UNSEEN)
    if not is_local and not in_file and settings.api_key_file is None:
        message = f"--host {address} lets other machines in, and the service would have no key"
        raise EdgeLMError(message, "add --api-key-file FILE; keys of variables do not reach a service")
    return Definition(tuple(command), address, settings.port)


def _program() -> list[str]:
    """Return the absolute command of this installation; a link stays one, since pipx and uv replace its target."""
    started = Path(sys.argv[0])
    if started.name == "edgelm" and started.is_absolute() and os.access(started, os.X_OK):
        return [str(started)]
    if started.name == "edgelm" and (found := shutil.which(sys.argv[0])):
        return [str(Path(found).absolute())]
    return [sys.executable, "-P", "-m", "edgelm"]  # -P: no module of the current folder
