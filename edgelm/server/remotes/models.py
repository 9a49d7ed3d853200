"""The models that other servers run: their names, which server takes the next request, and who waits for one.

Owns what is checked before the front starts (addresses, keys, names), and which failures lead to another server: those
before the first token. Knows nothing of HTTP clients and dialects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from edgelm.base.errors import BusyError, RequestError, UsageError
from edgelm.base.model_tables import ModelTable
from edgelm.client.addresses import is_loopback, normalize_address
from edgelm.engine.counters import Counters
from edgelm.library.scan import LocalModel
from edgelm.server.api.errors import ApiError
from edgelm.server.keys import read_secret
from edgelm.server.remotes.boxes import Box, BoxError

T = TypeVar("T")
MAX_TRIES = 16  # of one request at servers that are busy
MAX_REQUESTS = 512  # of a model, open at the same time; a client alone may have half of them
CHECK_S = 30.0  # between two looks at a server that is well
TICK_S = 0.5
SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "api-key", "x-api-key"})
OWN_HEADERS = frozenset(
    {"host", "connection", "content-length", "content-type", "transfer-encoding", "accept-encoding"}
)
LATEST = ":latest"  # Ollama's tag of a name without one

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for a server."""

    tried: Collection[Box]
    turn: asyncio.Future[Box]


class RemoteModel:
    """One model, at one or several servers."""

    def __init__(self, table: ModelTable, boxes: Sequence[Box]) -> None:
        assert table.remote
        self.name = table.name
        self.aliases = table.aliases
        self.model = table.remote.model  # its name there
        self.boxes = boxes
        self.counters = Counters()
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()  # by client, in the order of their turns
        self._open: list[str] = []  # clients of all open requests

    @property
    def where(self) -> str:
        """The servers, as a person reads them."""
        return ", ".join(box.name for box in self.boxes)

    @property
    def kind(self) -> str:
        """What it is for, as far as its servers tell: text, embedding or rerank."""
        return self.boxes[0].kind

    @property
    def context(self) -> int | None:
        return min((box.context for box in self.boxes if box.context is not None), default=None)

    @property
    def num_running(self) -> int:
        return sum(box.num_open for box in self.boxes)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def state(self) -> str:
        """The word of an engine's state: ready, or failed where no server answers."""
        return "ready" if any(not box.problem for box in self.boxes) else "failed"

    @property
    def problems(self) -> list[str]:
        return [box.problem for box in self.boxes if box.problem]

    @contextlib.contextmanager
    def admitted(self, client: str) -> Any:
        """Count a request while the block runs. Raises BusyError: one more client always gets in, as to an engine."""
        free = MAX_REQUESTS - len(self._open)
        if free <= 0:
            raise BusyError(f"{len(self._open)} requests for {self.name} are open already", "try again later")
        if (num_own := self._open.count(client)) >= free:
            raise BusyError(f"{num_own} requests of this client are open already", "wait until some are answered")
        self._open.append(client)
        try:
            yield
        finally:
            self._open.remove(client)

    async def first_answer(
        self, client: str, parts_of: Callable[[Box, float], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        """Yield the parts of the answer of the first server that gives one. Raises ApiError.

        `parts_of` gets a server and the time of this moment; until it yields something, another server may be asked.
        """
        now = asyncio.get_running_loop().time
        tried: set[Box] = set()
        refusal: ApiError | None = None
        for _ in range(MAX_TRIES):  # each waits in `turn` until the server has room
            has_begun = False
            async with self.turn(client, tried) as box:
                sent_at, omitted = now(), box.omitted
                try:
                    async with aclosing(parts_of(box, sent_at)) as parts:
                        async for part in parts:
                            has_begun = True
                            yield part
                    return
                except BoxError as error:
                    refusal = error.error
                    if error.kind == "refused":
                        if box.omitted != omitted:
                            continue  # once more, without a field that it does not know
                        raise error.error from None
                    if error.kind not in ("busy", "unsupported"):
                        box.failed(error.kind, str(error))
                    if has_begun:
                        raise error.error from None
                    if not (error.kind == "busy" and box.refused(sent_at)):
                        tried.add(box)
                        if len(tried) == len(self.boxes):
                            raise error.error from None
        assert refusal
        raise refusal

    @asynccontextmanager
    async def turn(self, client: str, tried: Collection[Box]) -> AsyncIterator[Box]:
        """Give the least busy server that was not tried; clients take turns where all are busy."""
        waiting = _Waiting(tried, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, deque()).append(waiting)
        self._hand_out()
        try:
            box = await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():  # it came in the same moment
                self._give_back(waiting.turn.result())
            else:
                self._forget(client, waiting)
            raise
        try:
            yield box
        finally:
            self._give_back(box)

    def _give_back(self, box: Box) -> None:
        box.num_open -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give servers to those who wait, one to each client in turn."""
        is_moving = True
        while is_moving:
            is_moving = False
            for client, requests in list(self._waiting.items()):
                # A cancelled request stays in the queue until the next turn of the loop.
                waiting = next((request for request in requests if not request.turn.done()), None)
                if waiting is None or (box := self._least_busy(waiting.tried)) is None:
                    continue
                box.num_open += 1
                box.used_at = asyncio.get_running_loop().time()
                waiting.turn.set_result(box)
                self._forget(client, waiting)
                if client in self._waiting:
                    self._waiting.move_to_end(client)
                is_moving = True

    def _forget(self, client: str, waiting: _Waiting) -> None:
        self._waiting[client].remove(waiting)
        if not self._waiting[client]:
            del self._waiting[client]

    def _least_busy(self, tried: Collection[Box]) -> Box | None:
        """Return the server for the next request; None: all are busy. One that is down comes when no other is left."""
        left = [box for box in self.boxes if box not in tried]
        free = [box for box in [box for box in left if not box.problem] or left if box.is_free]
        return min(free, key=lambda box: (box.num_open / box.limit, box.used_at), default=None)


class Remotes:
    """All of them. A context manager: inside, their health is checked, and leaving it closes their connections.

    Raises UsageError for an address, a key or a certificate that is not right.
    """

    def __init__(self, tables: Iterable[ModelTable] = ()) -> None:
        self.models = [RemoteModel(table, boxes_of(table)) for table in tables if table.remote is not None]
        self._by_name = {name.casefold(): model for model in self.models for name in (model.name, *model.aliases)}
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self.models:
            self._keeper = asyncio.create_task(self._check_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        await asyncio.gather(*(box.close() for model in self.models for box in model.boxes))

    def find(self, name: str) -> RemoteModel | None:
        """Return the model of that name; None: no other server has it."""
        name = name.strip().casefold()
        return self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST))

    def clashes(self, installed: Iterable[LocalModel]) -> list[str]:
        """Return a line for each name that a model of this machine has too."""
        own = {name.casefold(): model.name for model in installed for name in (*model.names, *model.other_names)}
        return [
            f"{name} is the name of a model here too: requests go to {model.where}"
            for name, model in self._by_name.items()
            if name in own
        ]

    async def _check_all(self) -> None:
        """Look at each server now and then, and soon at those that are down."""
        now = asyncio.get_running_loop().time
        checked: dict[Box, float] = {}
        while True:
            due = [
                box
                for model in self.models
                for box in model.boxes
                if box not in checked or (box.is_due if box.problem else now() - checked[box] >= CHECK_S)
            ]
            ends = await asyncio.gather(*(box.check() for box in due), return_exceptions=True)
            for box, bug in zip(due, ends, strict=True):  # the other servers are still checked
                if isinstance(bug, Exception):
                    log.error("the check of %s failed", box.name, exc_info=bug)
                    box.failed("down", f"the check of {box.name} failed: {type(bug).__name__}")
            checked |= dict.fromkeys(due, now())
            await asyncio.sleep(TICK_S)


def boxes_of(table: ModelTable, key: str | None = None) -> list[Box]:
    """Return the servers of a model, with the key of its table or another one. Raises UsageError."""
    remote = table.remote
    assert remote
    bad = sorted(name for name in remote.headers if name.lower() in OWN_HEADERS)
    if bad:
        raise UsageError(f"{table.source}: headers has {bad[0]}, which the request has anyway", "remove it")
    if key is None:
        key = read_secret(Path(remote.api_key_file).expanduser()) if remote.api_key_file else ""
    has_secret = bool(key) or any(name.lower() in SECRET_HEADERS for name in remote.headers)
    boxes = []
    for endpoint in remote.endpoints:
        if "@" in urlsplit(endpoint).netloc:
            raise UsageError(f"{table.source}: an endpoint has a name or password in it", "use api_key_file")
        try:
            address = normalize_address(endpoint)
        except RequestError as error:
            raise UsageError(f"{table.source}: {error.message}", error.hint) from None
        is_plain = address.startswith("http://")
        if is_plain and has_secret and not is_loopback(address):
            message = f"{table.source}: a key would go to {endpoint} unencrypted"
            raise UsageError(message, "use https, with ca_file for a certificate of your own, or a tunnel")
        boxes.append(Box(address, table.name, remote, key, None if is_plain else _trust(remote.ca_file, table)))
    if len({box.base_url for box in boxes}) < len(boxes):
        raise UsageError(f"{table.source}: an endpoint is there twice", "remove one")
    return boxes


def _trust(ca_file: str | None, table: ModelTable) -> ssl.SSLContext:
    """Return the context of a client that trusts the system's certificates, or those of a file only."""
    try:
        return ssl.create_default_context(cafile=Path(ca_file).expanduser() if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or "no certificate in PEM form"
        raise UsageError(f"{table.source}: ca_file {ca_file} cannot be read: {reason}", "give another file") from None
