"""`edgelm top`: what it shows of a server's numbers, how it is left, and what it says where there is no server."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edgelm.base.errors import EdgeLMError
from edgelm.commands import top
from edgelm.commands.top import History, frame, show_top
from edgelm.engine.counters import COUNTS

LIMIT_S = 60.0


def model(name: str = "m", **changes: Any) -> dict[str, Any]:
    counts = dict.fromkeys(COUNTS, 0) | changes.pop("counts", {})
    numbers = {"model": name, "state": "ready", "running": 1, "waiting": 2, "kv_usage": 0.5, "rss_bytes": 300 * 2**20}
    return numbers | {"counts": counts, "finished": {}, "first_tokens": 0, "first_token_s": 0.0} | changes


def document(at: float, *models: dict[str, Any]) -> dict[str, Any]:
    address = "http://127.0.0.1:11500"
    server = {"version": "1.2.3", "address": address, "time": 1000 + at, "uptime_s": 100 + at, "requests": 7}
    return server | {"models": list(models)}


def counted(generated: int = 0, queries: int = 0, hits: int = 0, drafted: int = 0, accepted: int = 0) -> dict[str, int]:
    return {
        "generation_tokens_total": generated,
        "prefix_cache_queries_total": queries,
        "prefix_cache_hits_total": hits,
        "spec_decode_num_draft_tokens_total": drafted,
        "spec_decode_num_accepted_tokens_total": accepted,
    }


def drawn(history: History, width: int = 60, max_models: int | None = None) -> list[str]:
    console = Console(width=width, highlight=False, markup=False, color_system=None)
    with console.capture() as capture:
        console.print(frame(history, width, max_models, "q quits"))
    return capture.get().splitlines()


# -- the numbers -------------------------------------------------------------------------------------------------------


def test_speed_is_that_since_the_last_look() -> None:
    history = History(document(0, model(counts=counted(1000))))
    history.add(document(10, model(counts=counted(1000))))
    history.add(document(12, model(counts=counted(1050))))
    (line,) = history.lines()
    assert line.tokens_per_second == 25
    history.add(document(13, model(counts=counted(1050))))
    assert history.lines()[0].tokens_per_second == 0


def test_means_are_of_the_last_minute_or_of_all() -> None:
    history = History(document(0, model(counts=counted(0, 100, 10, 50, 5), first_tokens=10, first_token_s=50.0)))
    (line,) = history.lines()
    assert (line.prefix_cache_hit_share, line.draft_acceptance, line.time_to_first_token_s) == (0.1, 0.1, 5.0)
    later = model(counts=counted(0, 200, 100, 60, 13), first_tokens=12, first_token_s=51.0)
    history.add(document(30, later))
    (line,) = history.lines()
    assert (line.prefix_cache_hit_share, line.draft_acceptance, line.time_to_first_token_s) == (0.9, 0.8, 0.5)
    history.add(document(75, later))
    history.add(document(110, later))
    (line,) = history.lines()
    assert (line.prefix_cache_hit_share, line.time_to_first_token_s) == (0.5, 4.25), "nothing came for a minute"


def test_a_model_without_requests_has_no_means() -> None:
    (line,) = History(document(0, model())).lines()
    assert (line.prefix_cache_hit_share, line.draft_acceptance, line.time_to_first_token_s) == (None, None, None)


def test_a_server_that_was_started_again_begins_at_zero() -> None:
    history = History(document(500, model(counts=counted(9000))))
    history.add(document(501, model(counts=counted(9010))))
    history.add(document(2, model(counts=counted(5))))
    assert history.lines()[0].tokens_per_second == 0
    history.add(document(3, model(counts=counted(9))))
    assert history.lines()[0].tokens_per_second == 4


def test_a_model_that_comes_later_counts_from_zero() -> None:
    history = History(document(0))
    history.add(document(1, model(counts=counted(30))))
    assert history.lines()[0].tokens_per_second == 30


# -- the picture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_columns_fit(width: int) -> None:
    busy = model("qwen3-coder-30b-a3b:q4_k_m", counts=counted(99_999, 100, 100, 9, 9), first_tokens=1, running=64)
    history = History(document(0, model("qwen3-coder-30b-a3b:q4_k_m")))
    history.add(
        document(10, busy | {"waiting": 448, "kv_usage": 1.0, "rss_bytes": 123 * 2**30, "first_token_s": 599.0})
    )
    lines = drawn(history, width)
    assert max(map(len, lines)) <= width
    (row,) = [line for line in lines if line.startswith("qwen3-")]
    assert row.split()[-8:] == ["64", "448", "9,999.9", "599.0s", "100%", "100%", "100%", "123.0G"]


def test_the_picture() -> None:
    history = History(document(0, model("starter"), model("old", state="unloaded", running=None, waiting=None)))
    now = [
        model("old", state="unloaded", running=None, waiting=None, kv_usage=None, rss_bytes=None),
        model("starter", counts=counted(87, 100, 93, 10, 7), first_tokens=4, first_token_s=0.8),
    ]
    history.add(document(1, *now))
    assert [line.rstrip() for line in drawn(history, 80)] == [
        "edgelm 1.2.3 at http://127.0.0.1:11500, up 1 min",
        "1 running, 2 waiting, 87.0 tokens/s, 7 requests",
        "",
        "MODEL          RUN WAIT TOK/S  TTFT HITS  KV DRAFTS MEMORY",
        "starter          1    2  87.0 200ms  93% 50%    70%   300M",
        "old (unloaded)   -    -   0.0     -    -   -      -      -",
        "q quits",
    ]


def test_what_does_not_fit_is_counted() -> None:
    lines = drawn(History(document(0, *(model(f"m{number}") for number in range(30)))), max_models=14)
    assert len(lines) == 20
    assert "and 16 more" in lines


def test_no_name_of_a_server_reaches_the_terminal_as_a_command() -> None:
    told = document(0, model("evil\x1b[2Jname"))
    told["version"] = "1\x1b]0;title\x07"
    shown = "".join(drawn(History(told), 100))
    assert "evil?[2Jname" in shown
    assert shown.isprintable()


def test_a_server_without_a_model() -> None:
    assert "no model was used yet" in drawn(History(document(0)))


# -- the command -------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """A server whose model writes 50 tokens in each second of its own time."""

    looks = 0
    key = ""

    def do_GET(self) -> None:
        kind = type(self)
        kind.looks += 1
        status, answer = 200, document(kind.looks, model("starter", counts=counted(50 * kind.looks)))
        if self.key and self.headers.get("authorization") != f"Bearer {self.key}":
            status, answer = 401, {"error": {"message": "no"}}
        if self.path != "/edgelm/top":
            status, answer = 404, {}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def listening(key: str = "") -> Iterator[str]:
    handler = type("Own", (Handler,), {"key": key})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a user who has nothing."""
    for name in [name for name in os.environ if name.startswith("EDGELM_")]:
        monkeypatch.delenv(name)
    for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path / kind))
    monkeypatch.setattr(top, "INTERVAL_S", 0.0)
    return tmp_path


@pytest.mark.usefixtures("places")
def test_once_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with listening() as address:
        show_top(address, None, once=False, as_json=True)
        shown = json.loads(capsys.readouterr().out)
        (line,) = shown["models"]
        assert (line["model"], line["running"], line["tokens_per_second"]) == ("starter", 1, 50.0)
        assert shown["address"] == "http://127.0.0.1:11500"
        show_top(f"{address}/v1", None, once=True, as_json=False)
        assert "50.0 tokens/s" in capsys.readouterr().out


def test_no_server_is_one_line(places: Path) -> None:
    command = [sys.executable, "-m", "edgelm", "top"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no edgelm server is running")
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("places")
def test_the_server_of_this_user_is_found(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(key="its-own-key") as address:
        (places / "RUNTIME").mkdir()
        record = {"pid": os.getpid(), "address": address, "key": "its-own-key"}
        (places / "RUNTIME" / "front.json").write_text(json.dumps(record))
        show_top(None, None, once=True, as_json=False)
        assert "starter" in capsys.readouterr().out


@pytest.mark.usefixtures("places")
def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(key="right-key") as address:
        with pytest.raises(EdgeLMError, match="refuses the key"):
            show_top(address, None, once=True, as_json=False)
        with pytest.raises(EdgeLMError, match="refuses the key"):
            show_top(address, "wrong", once=True, as_json=False)
        show_top(address, "right-key", once=True, as_json=False)
        monkeypatch.setenv("EDGELM_API_KEY", "right-key")
        show_top(address, None, once=True, as_json=False)


@pytest.mark.usefixtures("places")
def test_another_server_is_said_to_be_none() -> None:
    with listening() as address, pytest.raises(EdgeLMError, match="is it an edgelm server"):
        show_top(f"{address}/elsewhere", None, once=True, as_json=False)
    with pytest.raises(EdgeLMError, match="does not answer"):
        show_top(address, None, once=True, as_json=False)


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("quit_by", [b"q", b"\x03"])
def test_it_draws_in_a_small_terminal_until_it_is_left(quit_by: bytes) -> None:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
    before = copy.deepcopy(termios.tcgetattr(child))
    with listening() as address:
        process = subprocess.Popen(
            [sys.executable, "-m", "edgelm", "top", "--endpoint", address],
            env=os.environ | {"TERM": "xterm-256color"},
            stdin=child,
            stdout=child,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - so that Ctrl-C is a signal
        )
        try:
            screen = read_until(parent, b"50.0 tokens/s")
            assert b"starter" in screen
            assert b"q quits" in screen
            os.write(parent, quit_by)
            deadline = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < deadline:
                read_some(parent)
            assert process.returncode == 0, process.stderr and process.stderr.read()
            assert termios.tcgetattr(child) == before
        finally:
            process.kill()
            process.wait(LIMIT_S)
            assert process.stderr
            process.stderr.close()
            os.close(parent)
            os.close(child)


def read_some(terminal: int) -> bytes:
    ready, _, _ = select.select([terminal], [], [], 0.1)
    return os.read(terminal, 65_536) if ready else b""


def read_until(terminal: int, text: bytes) -> bytes:
    shown = b""
    deadline = time.monotonic() + LIMIT_S
    while text not in shown:
        assert time.monotonic() < deadline, shown
        shown += read_some(terminal)
    return shown


def test_memory_on_a_gpu_has_a_column_where_a_model_has_some() -> None:
    one = History(document(0, model("a")))
    assert "GPU" not in "\n".join(drawn(one, 100))
    both = drawn(History(document(0, model("a"), model("b", gpu_bytes=5 * 2**30))), 100)
    head, first, second = (line.split() for line in both if line.startswith(("MODEL", "a ", "b ")))
    assert head[-2:] == ["MEMORY", "GPU"]
    assert (first[-2:], second[-2:]) == (["300M", "-"], ["300M", "5,120M"])
