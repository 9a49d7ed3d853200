"""Servers of tools: what they offer, what a call returns, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from edgelm.chats.tools import process
from edgelm.chats.tools.connection import Connection
from edgelm.chats.tools.failures import ToolError
from edgelm.chats.tools.settings import ToolServer

SERVER = str(Path(__file__).with_name("server.py"))
Connect = Callable[..., Connection]


@pytest.fixture
async def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    """Return a function that makes the connection to a small server; all end with the test."""
    made: list[Connection] = []
    monkeypatch.setattr(process, "LEAVE_S", 0.1)

    def make(*words: str, **values: Any) -> Connection:
        values = {"command": sys.executable, "args": ("-S", SERVER, *words), **values}
        environment = {
            "PATH": os.environ["PATH"],
            "LC_ALL": "C.UTF-8",
            "EDGELM_API_KEY": "secret",
            "HF_TOKEN": "secret",
        }
        made.append(Connection(ToolServer(name="small", **values), environment, tmp_path / "logs" / "small.log"))
        return made[-1]

    yield make
    await asyncio.gather(*(connection.close() for connection in made))


async def test_the_tools_of_all_pages_are_listed_and_those_that_cannot_be_used_are_named(connect: Connect) -> None:
    listing = await connect("greets").list_tools()
    assert [tool.name for tool in listing.tools][:2] == ["echo", "environment"]
    assert "fail" in [tool.name for tool in listing.tools]
    assert [note.partition(":")[0] for note in listing.notes] == ["huge is left out"]
    assert listing.tools[0].claims == "it only reads"


async def test_one_odd_tool_takes_no_other_with_it(connect: Connect) -> None:
    listing = await connect("odd").list_tools()
    schemas = {tool.name: tool.schema for tool in listing.tools}
    good = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert schemas["no schema"] == schemas["null"] == {"type": "object"}
    assert schemas["maybe"] == schemas["inside"] == schemas["others"] == good
    assert schemas["any"] == {"anyOf": [good], "type": "object"}
    assert "echo" in schemas
    notes = [note.partition(":")[0] for note in listing.notes]
    assert notes == ["list is left out", "'' is left out", "huge is left out"]


async def test_what_is_sent_beside_or_in_place_of_a_text_reaches_the_model(connect: Connect) -> None:
    connection = connect()
    assert await connection.call("structured", {}) == process_result('{"answer": 42}')
    assert await connection.call("blank", {}) == process_result('{"answer": 43}')
    assert await connection.call("embedded", {}) == process_result("repo://README.md:\n# Read me")


async def test_a_server_may_print_a_little_at_each_call(connect: Connect) -> None:
    connection = connect()
    for _ in range(5):  # more than MAX_WRONG_LINES together
        assert not (await connection.call("noise", {})).failed
    assert (connection.state, await connection.call("echo", {"text": "x"})) == ("ready", process_result("x"))


async def test_results_of_calls_as_texts(connect: Connect) -> None:
    connection = connect()
    assert await connection.call("echo", {"text": "Grüße\n✓"}) == process_result("Grüße\n✓")
    assert await connection.call("fail", {}) == process_result("no such thing", failed=True)
    assert (await connection.call("picture", {})).text == "[image image/png, 3 bytes: not shown to the model]"
    assert (await connection.call("escapes", {})).text == "red clip cleared\ufffd"
    long = (await connection.call("long", {})).text
    assert len(long) < 66_000
    assert long.endswith("[cut: these are the first 65,536 of 300,000 characters]")
    assert connection.state == "ready"


def process_result(text: str, *, failed: bool = False) -> Any:
    from edgelm.chats.tools.results import Result

    return Result(text, failed)


async def test_a_server_gets_a_minimal_environment_and_that_of_its_table(connect: Connect, tmp_path: Path) -> None:
    connection = connect(env={"TOKEN_OF_IT": "1"}, cwd=str(tmp_path))
    names = (await connection.call("environment", {})).text.split()
    assert set(names) == {"PATH", "LC_ALL", "TOKEN_OF_IT"}
    log = tmp_path / "logs" / "small.log"
    for _ in range(500):  # the answer and the log come by two pipes
        if log.read_text():
            break
        await asyncio.sleep(0.01)
    assert log.read_text() == "a line of the log\n"


@pytest.mark.parametrize("cwd", ["", "."])
async def test_a_server_runs_what_lies_in_the_current_folder_only_where_its_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cwd: str
) -> None:
    checkout, home, log = tmp_path / "checkout", tmp_path / "home", tmp_path / "logs" / "small.log"
    for folder, owner in ((checkout, "checkout"), (home, "home")):
        folder.mkdir()
        (folder / "tools_of.py").write_text(f"import os, sys; sys.exit('{owner} in ' + os.getcwd())")
    monkeypatch.chdir(checkout)
    server = ToolServer(name="small", command=sys.executable, args=("-S", "-m", "tools_of"), cwd=cwd)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(checkout)}
    with pytest.raises(ToolError):
        await Connection(server, environment, log).list_tools()
    assert log.read_text().split() == (["checkout", "in", str(checkout)] if cwd else ["home", "in", str(home)])


async def test_a_server_without_a_home_folder_starts_in_a_private_one(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "small.log"
    server = ToolServer(name="small", command=sys.executable, args=("-S", "-c", "import os; os.write(2, os.getcwdb())"))
    for home in ("", "relative", str(tmp_path / "gone")):
        with pytest.raises(ToolError):
            await Connection(server, {"PATH": os.environ["PATH"], "HOME": home}, log).list_tools()
        assert log.read_text() == str(tmp_path / "logs" / "small")
    assert (tmp_path / "logs" / "small").stat().st_mode & 0o777 == 0o700


async def test_a_server_that_is_stuck_in_a_call_is_started_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgelm.chats.tools.connection.STUCK_S", 0.2)
    connection = connect(timeout_s=0.3)
    await connection.list_tools()
    result = await connection.call("hang", {})
    assert result.failed
    assert result.text == "small does not answer; timeout in its table of config.toml is 0.3 s"
    await connection.list_tools()
    assert await connection.call("echo", {"text": "again"}) == process_result("again")


async def test_a_server_that_dies_in_a_call_starts_again(connect: Connect) -> None:
    connection = connect()
    result = await connection.call("die", {})
    assert (result.failed, result.text) == (True, "small: it ended with exit code 7")
    assert await connection.call("echo", {"text": "again"}) == process_result("again")


async def test_a_server_that_floods_is_ended(connect: Connect) -> None:
    connection = connect()
    result = await connection.call("flood", {})
    assert (result.failed, result.text) == (True, "small: it sent more than 16 MiB without being asked")
    assert await connection.call("echo", {"text": "again"}) == process_result("again")


async def test_servers_that_do_not_start(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.chats.tools.connection.START_S", 0.3)
    for connection, words in (
        (connect("mute", timeout_s=0.3), "small does not answer"),
        (connect("floods"), "16 MiB"),
        (connect("wrong"), r"small sent what is not MCP: tools: Input should be a valid list"),
        (connect(command="/nowhere/server"), "/nowhere/server: No such file or directory"),
        (connect(command="true"), "small: it ended with exit code 0"),
        (connect(command="", url="http://127.0.0.1:9/mcp"), "small cannot be reached"),
    ):
        with pytest.raises(ToolError, match=words):
            await connection.list_tools()


async def test_an_old_server_that_ends_at_an_unknown_message_is_spoken_to_in_the_old_way(connect: Connect) -> None:
    assert (await connect("old").list_tools()).tools


async def test_no_process_is_left_behind(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "LEAVE_S", 0.1)
    monkeypatch.setattr(process, "TERMINATE_S", 0.1)
    pids = tmp_path / "pids"
    script = f'trap "" TERM; sleep 600 & echo $$ $! > {pids}; exec {sys.executable} -S {SERVER}'
    connection = connect(command="sh", args=("-c", script))
    await connection.list_tools()
    await connection.close()
    for pid in map(int, pids.read_text().split()):
        for _ in range(500):
            if not is_running(pid):
                break
            await asyncio.sleep(0.01)
        assert not is_running(pid)


@contextlib.asynccontextmanager
async def web_server(seen: list[dict[str, str]], sessions: set[str] | None = None) -> AsyncIterator[str]:
    """Give the address of a server over HTTP, which knows these sessions; None: it has none. `seen` gets headers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                request = json.loads(body) if body else {}
                seen.append(headers)
                status, reply, more = 202, b"", ""
                if "id" in request:
                    name = request.get("params", {}).get("name", "")
                    results = {
                        "initialize": {
                            "protocolVersion": "2025-06-18",
                            "capabilities": {"tools": {}},
                            "serverInfo": {"name": "web", "version": "1"},
                        },
                        "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]},
                        "tools/call": {
                            "content": [{"type": "text", "text": "x" * (5_000_000 if name == "long" else 3)}]
                        },
                    }
                    result = results.get(request["method"])
                    outcome = {"result": result} if result else {"error": {"code": -32601, "message": "no"}}
                    status, more = 200, ""
                    if sessions is not None and request["method"] == "initialize":
                        sessions.add(f"session-{len(seen)}")
                        more = f"Mcp-Session-Id: session-{len(seen)}\r\n"
                    elif sessions is not None and headers.get("mcp-session-id", "") not in sessions:
                        status, outcome = 404, {"error": {"code": -32600, "message": "Session not found"}}
                    reply = json.dumps({"jsonrpc": "2.0", "id": request["id"], **outcome}).encode()
                kind = f"Content-Type: application/json\r\n{more}" if reply else ""
                writer.write(f"HTTP/1.1 {status} OK\r\n{kind}Content-Length: {len(reply)}\r\n\r\n".encode() + reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    server.close()


async def test_a_server_over_http_gets_the_headers_of_its_table(connect: Connect) -> None:
    seen: list[dict[str, str]] = []
    async with web_server(seen) as url:
        connection = connect(command="", args=(), url=url, headers={"Authorization": "Bearer of-it"}, timeout_s=20.0)
        assert [tool.name for tool in (await connection.list_tools()).tools] == ["echo"]
        assert await connection.call("echo", {}) == process_result("xxx")
        assert (await connection.call("long", {})).failed
        await connection.close()
    assert {headers["authorization"] for headers in seen} == {"bearer of-it"}
    assert not any("secret" in value for headers in seen for value in headers.values())


async def test_a_session_that_ended_begins_again(connect: Connect) -> None:
    """The server was started again, and knows nothing of it: nothing that was asked has run."""
    sessions: set[str] = set()
    async with web_server([], sessions) as url:
        connection = connect(command="", args=(), url=url, timeout_s=20.0)
        assert (await connection.list_tools()).tools
        sessions.clear()
        assert (await connection.list_tools()).tools
        sessions.clear()
        lost = await connection.call("echo", {})
        assert (lost.failed, "begins a new session" in lost.text) == (True, True), "it may have run, or be another tool"
        assert await connection.call("echo", {}) == process_result("xxx")
        assert connection.state == "ready"
        await connection.close()


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_closing_does_not_wait_for_a_call(connect: Connect) -> None:
    connection = connect()
    await connection.list_tools()
    hanging = asyncio.create_task(connection.call("hang", {}))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await connection.close()
    assert time.monotonic() - started < 10
    assert (await asyncio.wait_for(hanging, 10)).failed


async def test_a_server_without_tools_has_prompts_and_resources_of_all_pages(connect: Connect) -> None:
    connection = connect("pages")
    assert (await connection.list_tools()).tools == ()
    assert [offer.name for offer in await connection.list_offers()] == [
        "greet",
        "quit",
        "summarize",
        "photo",
        "the_notes",
    ]
    assert connection.state == "ready"


async def test_prompts_and_resources_of_a_server(connect: Connect) -> None:
    connection = connect("offers")
    offers = {offer.name: offer for offer in await connection.list_offers()}
    assert list(offers) == ["greet", "quit", "summarize", "photo", "the_notes"]
    assert offers["summarize"].description == "Sum a text up"
    assert (offers["summarize"].arguments, offers["summarize"].required) == (("text", "tone"), ("text",))
    assert await connection.take(offers["greet"], {"name": "Ann"}) == 'greet: {"name": "Ann"}'
    assert await connection.take(offers["the_notes"], {}) == "Buy milk.\ufffd"
    assert await connection.take(offers["photo"], {}) == "[note://2: not text, not shown]"
    assert await connect().list_offers() == ()
