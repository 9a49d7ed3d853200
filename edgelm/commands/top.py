"""`edgelm top`: what a running server does now, live in the terminal, or once."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import httpx2
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgelm.base.errors import EdgeLMError
from edgelm.commands.flags import Endpoint, EndpointKey, Json
from edgelm.commands.servers import chosen_server
from edgelm.library.names import shown

REQUEST_LIMIT_S = 5.0
INTERVAL_S = 1.0  # between two looks
WINDOW_S = 60.0  # of the means; the tokens a second are those since the last look
FRAME_LINES = 6  # of the screen, around the rows of the models

TITLES = ["MODEL", "RUN", "WAIT", "TOK/S", "TTFT", "HITS", "KV", "DRAFTS", "MEMORY"]
GPU_TITLE = "GPU"  # the last, where a model has memory of one

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelLine:
    """The numbers of a model now. None: not known, or there was none of it yet."""

    model: str
    state: str
    running: int | None
    waiting: int | None
    tokens_per_second: float
    time_to_first_token_s: float | None
    prefix_cache_hit_share: float | None
    kv_cache_usage: float | None
    draft_acceptance: float | None
    rss_bytes: int | None
    gpu_bytes: int | None  # predicted


def show_top(
    endpoint: Endpoint = None,
    api_key: EndpointKey = None,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print it once, over one second.")] = False,
    as_json: Json = False,
) -> None:
    """Show what the server at `endpoint`, or this user's own, does until the user quits; or once.

    Raises EdgeLMError if there is no such server.
    """
    with _connection(endpoint, api_key) as look:
        history = History(look())
        if as_json or once or not sys.stdout.isatty():
            time.sleep(INTERVAL_S)  # a speed needs two looks
            history.add(look())
            if as_json:
                print(json.dumps(history.summary(), ensure_ascii=False))
            else:
                console = Console(highlight=False, markup=False)
                console.print(frame(history, console.width))
            return
        with suppress(KeyboardInterrupt):
            _watch(history, look)


class History:
    """The answers of a server in the last WINDOW_S."""

    def __init__(self, first: Document) -> None:
        self._documents = deque([first])

    @property
    def now(self) -> Document:
        return self._documents[-1]

    def add(self, document: Document) -> None:
        if document["uptime_s"] < self.now["uptime_s"]:  # another process, whose numbers begin at zero
            self._documents.clear()
        self._documents.append(document)
        while document["time"] - self._documents[0]["time"] > WINDOW_S:
            self._documents.popleft()

    def lines(self) -> list[ModelLine]:
        """Return a line for each model, the loaded ones first."""
        lines = [self._line(model) for model in self.now["models"]]
        return sorted(lines, key=lambda line: line.state == "unloaded")

    def summary(self) -> Document:
        """Return everything as JSON has it."""
        server = {name: self.now[name] for name in ("version", "address", "uptime_s", "requests")}
        return server | {"models": [asdict(line) for line in self.lines()]}

    def _line(self, model: Document) -> ModelLine:
        name = model["model"]
        previous = self._documents[max(len(self._documents) - 2, 0)]
        before, last = _find(self._documents[0], name), _find(previous, name)
        elapsed_s = self.now["time"] - previous["time"]
        generated = _since(_generated, model, last)

        def share(part: str, whole: str) -> float | None:
            return _mean(lambda m: m["counts"][part], lambda m: m["counts"][whole], model, before)

        return ModelLine(
            name,
            model["state"],
            model["running"],
            model["waiting"],
            round(generated / elapsed_s, 2) if elapsed_s > 0 else 0.0,
            _mean(lambda m: m["first_token_s"], lambda m: m["first_tokens"], model, before),
            share("prefix_cache_hits_total", "prefix_cache_queries_total"),
            model["kv_usage"],
            share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
            model["rss_bytes"],
            model.get("gpu_bytes"),
        )


def frame(history: History, width: int, max_models: int | None = None, note: str = "") -> RenderableType:
    """Return the screen: the server, the sums, and a row for each model."""
    lines, now = history.lines(), history.now
    visible = lines[:max_models]
    table = Table(box=None, pad_edge=False, expand=False, padding=(0, 1, 0, 0))
    width_of_row = len(TITLES) + any(line.gpu_bytes for line in visible)
    rows = [row[:width_of_row] for row in ([*TITLES, GPU_TITLE], *map(_cells, visible))]
    others = sum(max(map(len, column)) + 1 for column in zip(*(row[1:] for row in rows), strict=True))
    for title in rows[0]:
        table.add_column(title, justify="left" if title == "MODEL" else "right", no_wrap=True)
    for line, (name, *numbers) in zip(visible, rows[1:], strict=True):
        name = name if len(name) <= width - others else f"{name[: max(width - others - 1, 1)]}…"
        table.add_row(name, *numbers, style="" if line.state == "ready" else "dim")
    running, waiting = (sum(getattr(line, name) or 0 for line in lines) for name in ("running", "waiting"))
    speed = sum(line.tokens_per_second for line in lines)
    parts: list[RenderableType] = [
        Text(
            f"edgelm {shown(now['version'])} at {shown(now['address'])}, up {_duration(now['uptime_s'])}", style="bold"
        ),
        Text(f"{running} running, {waiting} waiting, {speed:,.1f} tokens/s, {now['requests']:,} requests"),
        Text(),
        table if lines else Text("no model was used yet"),
    ]
    if len(visible) < len(lines):
        parts.append(Text(f"and {len(lines) - len(visible)} more", style="dim"))
    if note:
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def _watch(history: History, look: Callable[[], Document]) -> None:
    """Draw until the user presses q. Raises EdgeLMError when the server is gone."""
    console = Console(highlight=False, markup=False)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(history, console.width, max(console.height - FRAME_LINES, 1), "q quits"), refresh=True)
            if pressed(INTERVAL_S) in ("q", "Q"):
                return
            history.add(look())


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits at most so many seconds for a key, and returns it."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(limit_s: float) -> str:
        ready, _, _ = select.select([terminal], [], [], limit_s)
        return os.read(terminal, 1).decode("ascii", "replace") if ready else ""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_key(limit_s: float) -> str:
    time.sleep(limit_s)
    return ""


@contextmanager
def _connection(endpoint: str | None, api_key: str | None) -> Iterator[Callable[[], Document]]:
    """Give a function that asks the server. Raises EdgeLMError, as the function does."""
    server = chosen_server(endpoint, api_key)
    with httpx2.Client(
        timeout=REQUEST_LIMIT_S, trust_env=not server.is_own, headers=server.headers, verify=server.verify
    ) as http:
        yield lambda: _look(http, server.address)


def _look(http: httpx2.Client, address: str) -> Document:
    try:
        answer = http.get(f"{address}/edgelm/top")
        document = answer.json() if answer.status_code == 200 else None
    except httpx2.HTTPError as error:
        raise EdgeLMError(f"the server at {address} does not answer: {error}", "see its output") from None
    except ValueError:
        document = None
    if answer.status_code in (401, 403):
        raise EdgeLMError(f"the server at {address} refuses the key", "give the right --api-key, or EDGELM_API_KEY")
    if not isinstance(document, dict) or "models" not in document:
        raise EdgeLMError(f"{address} answers {answer.status_code}: is it an edgelm server of this version?")
    return document


def _find(document: Document, name: str) -> Document | None:
    return next((model for model in document["models"] if model["model"] == name), None)


def _generated(model: Document) -> float:
    count: float = model["counts"]["generation_tokens_total"]
    return count


def _since(number: Callable[[Document], float], model: Document, before: Document | None) -> float:
    return number(model) - (number(before) if before else 0)


def _mean(
    total: Callable[[Document], float], count: Callable[[Document], float], model: Document, before: Document | None
) -> float | None:
    """Return the quotient of what was added since `before`, or of all if nothing was; None: there is nothing."""
    num = _since(count, model, before)
    if num > 0:
        return round(_since(total, model, before) / num, 4)
    return round(total(model) / count(model), 4) if count(model) else None


def _cells(line: ModelLine) -> list[str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    def number(value: int | None) -> str:
        return "-" if value is None else str(value)

    def size(nbytes: int | None) -> str:
        if nbytes is None:
            return "-"
        return f"{nbytes / 2**20:,.0f}M" if nbytes < 10 * 2**30 else f"{nbytes / 2**30:,.1f}G"

    first_s = line.time_to_first_token_s
    return [
        shown(line.model if line.state == "ready" else f"{line.model} ({line.state})"),
        number(line.running),
        number(line.waiting),
        f"{line.tokens_per_second:,.1f}",
        "-" if first_s is None else f"{first_s * 1000:.0f}ms" if first_s < 1 else f"{first_s:,.1f}s",
        share(line.prefix_cache_hit_share),
        share(line.kv_cache_usage),
        share(line.draft_acceptance),
        size(line.rss_bytes),
        size(line.gpu_bytes),
    ]


def _duration(seconds: float) -> str:
    minutes, hours = seconds // 60, seconds // 3600
    if hours >= 48:
        return f"{hours // 24:.0f} days"
    return f"{hours:.0f} h {minutes % 60:.0f} min" if hours else f"{minutes:.0f} min" if minutes else f"{seconds:.0f} s"
