"""A front from its start to its end: socket, runtime folder, signals, and the engines that end with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from edgelm.config import Places, Settings
from edgelm.errors import EdgeLMError
from edgelm.executors.memory import available_memory_bytes
from edgelm.server.engine_link import Launcher
from edgelm.server.engine_table import EngineTable
from edgelm.server.front import Front, front_app
from edgelm.server.guard import Rules, is_loopback
from edgelm.server.listener import PortTakenError, Server, address_of, bind_tcp, private_folder, socket_folder
from edgelm.server.models import ModelNames
from edgelm.server.runtime import FrontRecord, announced

MEMORY_FACTOR = 1.1  # of a model's file
MEMORY_BYTES = 2**30  # KV cache, buffers
GRACE_S = 3  # for the answers that are on their way when the front ends
ASK_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How `edgelm serve` was called."""

    models: list[Path]
    until_stdin_closes: bool = False
    verbose: bool = False


def serve(settings: Settings, places: Places, options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal, or the end of standard input; `announce` gets the address once it can be called.

    Raises EdgeLMError where it cannot begin, KeyboardInterrupt after SIGINT.
    """
    local = is_loopback(settings.host)
    if not local and settings.api_key is None:
        message = f"--host {settings.host} lets other machines in, and there is no key"
        raise EdgeLMError(message, "add --api-key, or leave --host out")
    private_folder(places.runtime)
    try:
        listener = bind_tcp(settings.host, settings.port)
    except PortTakenError as error:
        raise _who_has_it(settings, error) from None
    with ExitStack() as stack:
        stack.callback(listener.close)
        sockets = stack.enter_context(socket_folder(places.runtime))
        address = address_of(listener)
        stack.enter_context(announced(places.runtime, FrontRecord(os.getpid(), address)))
        launcher = Launcher(settings, places, sockets, verbose=options.verbose)
        rules = Rules(local, settings.api_key)
        folders = [Path(each) for each in settings.model_dirs]
        names = ModelNames(places.hub, options.models, any_path=local, folders=folders)
        ended_by = asyncio.run(_serve(settings, launcher, rules, names, listener, options, lambda: announce(address)))
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(
    settings: Settings,
    launcher: Launcher,
    rules: Rules,
    names: ModelNames,
    listener: socket.socket,
    options: ServeOptions,
    announce: Callable[[], None],
) -> int | None:
    """Serve; return the number of the signal that ended it."""
    loop = asyncio.get_running_loop()
    ended_by: list[int] = []
    closing: list[asyncio.Task[None]] = []
    async with EngineTable(launcher, idle_timeout_s=settings.idle_timeout, fits=_fits) as table:
        server = Server(front_app(Front(address_of(listener), table, names), rules), grace_s=GRACE_S)

        def stop(number: int | None) -> None:
            if number is not None:
                ended_by.append(number)
            if not closing:  # the engines end first: what they were streaming ends with an error event
                closing.append(loop.create_task(table.close()))
            server.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        if options.until_stdin_closes:
            _watch_stdin(lambda: loop.call_soon_threadsafe(stop, None))
        announce()
        await server.serve(sockets=[listener])
        for task in closing:
            await task
    return ended_by[0] if ended_by else None


def _fits(path: Path) -> bool:
    """Guess whether a model can be loaded beside what is there; the engine process knows exactly, and says so."""
    try:
        files = path.glob("*.safetensors") if path.is_dir() else (path,)
        nbytes = sum(each.stat().st_size for each in files)
        return available_memory_bytes() > MEMORY_FACTOR * nbytes + MEMORY_BYTES
    except OSError:
        return True


def _watch_stdin(on_end: Callable[[], Any]) -> None:
    def wait() -> None:
        while os.read(0, 4096):
            pass
        on_end()

    threading.Thread(target=wait, daemon=True).start()


def _who_has_it(settings: Settings, error: PortTakenError) -> EdgeLMError:
    """Return the error with the process that listens there, where it is one of ours."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    headers = {} if settings.api_key is None else {"authorization": f"Bearer {settings.api_key}"}
    try:
        with httpx2.Client(timeout=ASK_LIMIT_S, trust_env=False, headers=headers) as client:
            pid = client.get(f"http://{host}:{settings.port}/edgelm/ps").json()["pid"]
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return EdgeLMError(f"{error.message} by another program", error.hint)
    return EdgeLMError(
        f"{error.message} by edgelm serve (pid {pid})", "use that one, end it, or choose another with --port"
    )
