"""The life of a front: its socket, its runtime folder, signals, and the engines that end with it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from edgelm.base.config import Config, Settings
from edgelm.base.errors import EdgeLMError, UsageError
from edgelm.base.places import Places
from edgelm.base.runtime import FrontRecord, agents_run, announced, find_fronts
from edgelm.library.scan import installed
from edgelm.server.access import Rules, is_loopback
from edgelm.server.engines.memory import Machine
from edgelm.server.engines.process import Launcher
from edgelm.server.engines.table import EngineTable
from edgelm.server.front import Front, front_app
from edgelm.server.half_close import HalfCloseProtocol
from edgelm.server.keys import Key, Keys, check_secret, read_key_file
from edgelm.server.listener import PortTakenError, Server, address_of, bind_tcp, private_folder, socket_folder
from edgelm.server.models import ModelNames
from edgelm.server.protocol import LimitedProtocol, raise_file_limit
from edgelm.server.remotes.models import Remotes
from edgelm.server.stored import ResponseStore
from edgelm.server.tls import Tls, read_tls
from edgelm.server.upkeep import ReadAgain, Renewal, Upkeep, certificate_files, key_file

RESPONSES_FILE = "responses.sqlite"
GRACE_S = 3  # for open responses when the front ends
ASK_LIMIT_S = 2.0
AGAIN_S = 0.3  # a wrapper may pass on a Ctrl-C that this process had from the terminal: it is no second one
SILENT_S = 1.0  # saving takes this long before a line reports it
SAVING_POLL_S = 0.1
UNUSED_S = 600.0  # for a front that `edgelm launch` started, where --idle-timeout is 0
UNUSED_POLL_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The arguments of `edgelm serve`."""

    models: list[Path]
    typed_key: str | None = None  # from the terminal
    until_stdin_closes: bool = False
    until_unused: bool = False  # end when neither an agent nor a request used it for a while
    verbose: bool = False
    listener: socket.socket | None = None  # of a service manager, which has bound it
    renew: Callable[[], None] | None = None  # of `edgelm share`: makes the certificate again where it has to be


def serve(
    config: Config,
    options: ServeOptions,
    announce: Callable[[FrontRecord], None],
    on_saving: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve until a signal or the end of standard input; `announce` is called when the socket listens.

    At the end, while engines save conversations, `on_saving` is called with their number. A second signal ends that.

    Raises EdgeLMError if it cannot start, KeyboardInterrupt after SIGINT.
    """
    settings, places = config.settings, config.places
    if options.listener is not None:
        host, port = options.listener.getsockname()[:2]
        settings = replace(settings, host=host, port=port)
    keys = _keys(settings, options)
    if not is_loopback(settings.host) and not keys:
        message = f"--host {settings.host} lets other machines in, and there is no key"
        raise UsageError(message, "add --api-key-file or --ask-key, or omit --host")
    tls = _tls(settings)
    remotes = Remotes(config.models)
    raise_file_limit()
    private_folder(places.runtime)
    try:
        listener = options.listener or bind_tcp(settings.host, settings.port)
    except PortTakenError as error:
        raise _who_has_it(settings, places, error) from None
    with ExitStack() as stack:
        stack.callback(listener.close)
        listeners = [listener, *_ollama_listener(settings, stack)]
        sockets = stack.enter_context(socket_folder(places.runtime))
        address, *more = (address_of(each, "https" if tls else "http") for each in listeners)
        of_user = Key("this user", secrets.token_urlsafe(32), admin=True, of_user=True)
        certificate = str(tls.certificate) if tls else ""
        of = "chat" if options.until_stdin_closes else "launch" if options.until_unused else ""
        secret, ollama = of_user.secret if keys else "", "".join(more)
        record = FrontRecord(os.getpid(), address, secret, certificate, of, config.library, ollama)
        stack.enter_context(announced(places.runtime, record))
        accepted = Keys([*keys, of_user]) if keys else Keys()
        upkeep = Upkeep(places.runtime, record, *_followed(settings, options, accepted, tls))
        launcher = Launcher(config, sockets, verbose=options.verbose)
        rules = _rules(settings, accepted, tls)
        make_front = _front_maker(address, config, options, remotes, stack)
        ready = partial(announce, record)
        running = _serve(
            config, launcher, make_front, rules, listeners, tls, options, ready, on_saving, remotes, upkeep
        )
        ended_by = asyncio.run(running)
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def _front_maker(
    address: str, config: Config, options: ServeOptions, remotes: Remotes, stack: ExitStack
) -> Callable[[EngineTable], Front]:
    """Return what makes the front over the engines; warn of remote models that hide models of this machine."""
    places, here = config.places, {"folders": config.model_folders}
    for line in remotes.clashes(installed(places.hub, options.models, **here) if remotes.models else ()):
        log.warning("warning: %s", line)
    return partial(
        Front,
        address,
        models=ModelNames(places.hub, options.models, **here, tables=config.models, remotes=remotes),
        responses=stack.enter_context(closing(ResponseStore(places.data / RESPONSES_FILE))),
        num_slots=config.settings.parallel,
        logs_requests=config.settings.log_format == "json",
    )


async def _serve(
    config: Config,
    launcher: Launcher,
    make_front: Callable[[EngineTable], Front],
    rules: Rules,
    listeners: list[socket.socket],
    tls: Tls | None,
    options: ServeOptions,
    announce: Callable[[], None],
    on_saving: Callable[[int], None],
    remotes: Remotes,
    upkeep: Upkeep,
) -> int | None:
    """Serve; return the signal that ended it."""
    loop, settings = asyncio.get_running_loop(), config.settings
    table = EngineTable(
        launcher,
        Machine(launcher),
        idle_timeout_s=settings.idle_timeout,
        keep_alive=lambda model: config.keep_alive_of(*model.names),
        most_context=launcher.most_context,
        max_models=settings.max_models,
        limit_bytes=settings.max_memory_bytes,
    )
    async with remotes, table:
        # In TLS both sides of a connection are closed at once.
        protocol = LimitedProtocol if tls else HalfCloseProtocol
        app = front_app(make_front(table), rules)
        server = Server(app, grace_s=GRACE_S, protocol=protocol, tls=tls.context if tls else None)
        ending = _Ending(server, table, on_saving)
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a script's shell lets `&` ignore it
                loop.add_signal_handler(number, ending.begin, number)
        if options.until_stdin_closes:
            _watch_stdin(lambda: loop.call_soon_threadsafe(ending.begin))
        if options.until_unused:
            agents = partial(agents_run, config.places.runtime)
            watch = loop.create_task(wait_unused(table, agents, settings.idle_timeout))
            watch.add_done_callback(lambda done: None if done.cancelled() else ending.begin())
        announce()
        gc.freeze()  # full collections look at what requests make only
        beside = [loop.create_task(launcher.begin()), loop.create_task(upkeep.run())]
        try:
            await server.serve(sockets=listeners)
        finally:
            for task in beside:
                task.cancel()
            launcher.end_begun()
        await ending.finish()
    return ending.signal


class _Ending:
    """Ends the engines and then the server, so that open streams end with an error event. A second signal ends both
    at once.
    """

    def __init__(self, server: Server, table: EngineTable, on_saving: Callable[[int], None]) -> None:
        self.signal: int | None = None  # the first one
        self._server = server
        self._table = table
        self._on_saving = on_saving
        self._closing: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._again_at = 0.0  # from then on, another signal is a second one

    def begin(self, number: int | None = None) -> None:
        """Begin to end, by a signal or without one."""
        loop = asyncio.get_running_loop()
        if number is not None and loop.time() >= self._again_at:
            self._again_at = loop.time() + AGAIN_S
            if self.signal is not None:
                self._table.kill()
                self._server.force_exit = True
            self.signal = self.signal or number
        if self._closing is None:
            self._closing = loop.create_task(self._table.close())
            self._telling = loop.create_task(_tell_of_saving(self._table, self._on_saving))
        self._server.should_exit = True

    async def finish(self) -> None:
        """Wait until the engines are gone, if it has begun."""
        if self._closing is not None:
            await self._closing
        if self._telling is not None:
            self._telling.cancel()


async def wait_unused(table: EngineTable, agents_run: Callable[[], bool], limit_s: float) -> None:
    """Return when neither an agent ran nor a request used an engine for `limit_s`; 0: for UNUSED_S."""
    limit_s = limit_s or UNUSED_S
    clock = asyncio.get_running_loop().time
    used = clock()
    while clock() - used < limit_s:
        await asyncio.sleep(min(UNUSED_POLL_S, limit_s / 4))
        # An engine may be unloaded before this limit: the time of its last request is kept in `used`.
        used = max(used, clock() - min((slot.idle_s for slot in table.slots.values()), default=limit_s))
        if await asyncio.to_thread(agents_run):  # on macOS it asks ps
            used = clock()


async def _tell_of_saving(table: EngineTable, on_saving: Callable[[int], None]) -> None:
    """Report how many conversations the ending engines still save, and log it once if that takes long."""
    loop = asyncio.get_running_loop()
    tell_at: float | None = loop.time() + SILENT_S
    while True:
        await asyncio.sleep(SAVING_POLL_S)
        if count := table.num_saving:
            on_saving(count)
            if tell_at is not None and loop.time() >= tell_at:
                log.warning("saving %d conversation%s… (Ctrl-C again ends at once)", count, "s" if count > 1 else "")
                tell_at = None


def _ollama_listener(settings: Settings, stack: ExitStack) -> list[socket.socket]:
    """Return the second listener, for clients that know only Ollama's port. Raises EdgeLMError."""
    if settings.ollama_port is None:
        return []
    try:
        listener = bind_tcp(settings.host, settings.ollama_port)
    except PortTakenError as error:
        raise EdgeLMError(error.message, "end the program there, perhaps Ollama, or omit --ollama-port") from None
    stack.callback(listener.close)
    return [listener]


def _keys(settings: Settings, options: ServeOptions) -> list[Key]:
    """Return the keys that clients may have. Raises EdgeLMError for a key file that is not right."""
    given = {"api-key": settings.api_key, "typed": options.typed_key}
    keys = [Key(name, secret, admin=None) for name, secret in given.items() if secret is not None]  # they have no mark
    if settings.api_key is not None:
        try:
            check_secret(settings.api_key, "the key of --api-key or EDGELM_API_KEY")
        except EdgeLMError as error:  # it worked before there was a least length
            log.warning("warning: %s", error)
    if settings.api_key_file is not None:
        keys += read_key_file(Path(settings.api_key_file).expanduser())
    if keys:
        log.info("keys: %s", ", ".join(key.label for key in keys))
    return keys


def _followed(settings: Settings, options: ServeOptions, keys: Keys, tls: Tls | None) -> Iterator[Renewal | ReadAgain]:
    """Yield what may change while the server runs."""
    if options.renew is not None:
        yield Renewal(options.renew)
    if tls is not None:
        yield certificate_files(tls)
    if settings.api_key_file is not None:
        others = [key for key in keys if key.admin is None or key.of_user]  # each key of a file has a mark
        yield key_file(Path(settings.api_key_file).expanduser(), keys, others)


def _tls(settings: Settings) -> Tls | None:
    """Return the certificate of the settings; None: they have none. Raises EdgeLMError."""
    if settings.tls_cert is None:
        if settings.tls_key is not None:
            raise UsageError("there is a --tls-key, and no certificate", "add --tls-cert")
        return None
    tls = read_tls(Path(settings.tls_cert), Path(settings.tls_key) if settings.tls_key else None)
    if tls.warning:
        log.warning("warning: %s", tls.warning)
    return tls


def _rules(settings: Settings, keys: Keys, tls: Tls | None) -> Rules:
    """Return the rules of access."""
    local = is_loopback(settings.host)
    hosts = frozenset(settings.allowed_host) | (tls.names if tls else frozenset())
    if not local:  # the names by which other machines know this one, as far as it knows them itself
        short, _, _ = socket.gethostname().lower().partition(".")
        hosts |= {settings.host.lower(), socket.gethostname().lower(), short, f"{short}.local"}
    return Rules(local, keys, frozenset(settings.origin), hosts)


def _watch_stdin(on_end: Callable[[], Any]) -> None:
    def wait() -> None:
        while os.read(0, 4096):
            pass
        on_end()

    threading.Thread(target=wait, daemon=True).start()


def _who_has_it(settings: Settings, places: Places, error: PortTakenError) -> EdgeLMError:
    """Return the error, with the process that listens there if it is a front that our commands find."""
    fronts = find_fronts(places.runtime)
    front = next((front for front in fronts if front.address.endswith(f":{settings.port}")), None)
    try:
        if front is None:
            raise error
        with httpx2.Client(timeout=ASK_LIMIT_S, trust_env=False, headers=front.headers, verify=front.tls()) as client:
            pid = client.get(f"{front.address}/edgelm/ps").json()["pid"]
    except (httpx2.HTTPError, ValueError, KeyError, TypeError, EdgeLMError):
        return EdgeLMError(f"{error.message} by another program", error.hint)
    return EdgeLMError(
        f"{error.message} by edgelm serve (pid {pid})", "use it, end it, or choose another port with --port"
    )
