"""A server of tools as a child process: messages in lines of JSON on its standard input and output.

Owns the process, its folder and environment, and the limits of its output: the length of a line, what it may send
without being asked, and the size of its log. Knows nothing of the messages.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgelm.chats.tools.failures import ToolError
from edgelm.chats.tools.listing import mend_result
from edgelm.chats.tools.settings import ToolServer

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.shared.message import SessionMessage

MAX_LINE = 4 * 2**20  # bytes of one message
MAX_UNASKED = 16 * 2**20  # bytes between two messages of ours
MAX_WRONG_LINES = 200  # that are no messages: some servers greet on their standard output
MAX_LOG = 2**20  # bytes of standard error that are kept
CHUNK = 2**16
LEAVE_S, TERMINATE_S = 1.0, 1.0  # after its input was closed, and after SIGTERM
# Those of the user's variables that a server gets; nothing of edgelm, no key and no token.
KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM")


def minimal_environment(environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server: a few variables of the user, and those of its table."""
    kept = {name: value for name, value in environment.items() if name in KEPT or name.startswith("LC_")}
    return kept | dict(own)


def working_folder(server: ToolServer, environment: Mapping[str, str], private: Path) -> str:
    """Return the folder that a server starts in: that of its table, else the user's home, else a `private` one.

    It is the current folder only where the table says so: programs such as `python -m NAME` run what lies there, and
    that may be a checkout of somebody else. Raises OSError.
    """
    if server.cwd:
        return server.cwd
    home = Path(environment.get("HOME", ""))
    if home.is_absolute() and home.is_dir():
        return str(home)
    private.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(private)


class _Protocol(SubprocessStreamProtocol):
    """asyncio's own, and an event for the end of the process alone: `Process.wait` waits for its pipes, too."""

    def __init__(self) -> None:
        super().__init__(limit=CHUNK, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class _Child:
    """A running process, as asyncio's transport has it: `Process` cannot close pipes that a child of it holds."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Protocol) -> None:
        assert protocol.stdin is not None
        assert protocol.stdout is not None
        assert protocol.stderr is not None
        self.transport = transport
        self._exited = protocol.exited
        self.stdin, self.stdout, self.stderr = protocol.stdin, protocol.stdout, protocol.stderr

    async def left(self, wait_s: float) -> bool:
        """Wait until the process has ended; return whether it has."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), wait_s)
        return self.transport.get_returncode() is not None

    async def end(self) -> None:
        """End the whole process group: first politely, then not."""
        self.stdin.close()
        await self.left(LEAVE_S)
        self._signal(signal.SIGTERM)
        await self.left(TERMINATE_S)
        self._signal(signal.SIGKILL)
        await self.left(TERMINATE_S)
        self.transport.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.transport.get_pid(), number)


class ServerProcess:
    """The process of one server, and why it is of no use any more."""

    def __init__(self, server: ToolServer, environment: Mapping[str, str], log: Path) -> None:
        self._server = server
        self._environment = environment
        self._log_file = log
        self.ended = asyncio.Event()  # it left, or its output cannot be read any more
        self.reason = ""
        self.left = False  # the process ended by itself
        self._unasked = 0  # bytes since our last message
        self._num_wrong = 0

    @asynccontextmanager
    async def streams(self) -> AsyncGenerator[Any]:
        """Start the process and yield the streams of messages from it and to it. Raises ToolError."""
        import anyio

        child = await self._start()
        from_server: MemoryObjectSendStream[SessionMessage | Exception]
        to_server: MemoryObjectReceiveStream[SessionMessage]
        from_server, received = anyio.create_memory_object_stream[Any](0)
        sent, to_server = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.create_task(self._read(child, from_server)),
            asyncio.create_task(self._write(child, to_server)),
            asyncio.create_task(self._keep_log(child)),
        ]
        try:
            yield received, sent
        finally:
            for stream in (received, sent, from_server, to_server):
                stream.close()
            tasks[0].cancel()
            tasks[1].cancel()
            await child.end()
            await asyncio.wait(tasks[2:], timeout=LEAVE_S)  # the log has what it wrote at its end
            tasks[2].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> _Child:
        server, loop = self._server, asyncio.get_running_loop()
        try:
            folder = await asyncio.to_thread(working_folder, server, self._environment, self._log_file.with_suffix(""))
            transport, protocol = await loop.subprocess_exec(
                _Protocol,
                server.command,
                *server.args,
                env=minimal_environment(self._environment, server.env),
                cwd=folder,
                start_new_session=True,  # a process group, which is ended as a whole
            )
        except OSError as error:
            place = f"{server.command} in {server.cwd}" if server.cwd else server.command
            raise ToolError(f"{place}: {error.strerror}", f'correct [tools."{server.name}"] in config.toml') from None
        return _Child(transport, protocol)

    async def _read(self, child: _Child, messages: MemoryObjectSendStream[Any]) -> None:
        buffer = bytearray()
        try:
            while chunk := await child.stdout.read(CHUNK):
                self._unasked += len(chunk)
                *lines, rest = chunk.split(b"\n")
                for line in lines:
                    buffer += line
                    await self._take(bytes(buffer), messages)
                    buffer.clear()
                buffer += rest
                if len(buffer) > MAX_LINE:
                    self._fail(f"it sent a message of more than {MAX_LINE // 2**20} MiB")
                if self._unasked > MAX_UNASKED:
                    self._fail(f"it sent more than {MAX_UNASKED // 2**20} MiB without being asked")
                if self._num_wrong > MAX_WRONG_LINES:
                    self._fail("what it writes is not MCP")
                if self.reason:
                    return
            await child.left(LEAVE_S)
            self.left = True
            self._fail(_exit_words(child.transport.get_returncode()))
        finally:
            self.ended.set()
            messages.close()  # calls that wait for an answer fail

    def _fail(self, reason: str) -> None:
        self.reason = self.reason or reason

    async def _take(self, line: bytes, messages: MemoryObjectSendStream[Any]) -> None:
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        if not line.strip():
            return
        try:
            message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            self._num_wrong += 1
            return
        mend_result(getattr(message.message, "result", None))
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            await messages.send(message)

    async def _write(self, child: _Child, messages: MemoryObjectReceiveStream[Any]) -> None:
        with suppress(OSError):
            async for message in messages:
                self._unasked = self._num_wrong = 0
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                child.stdin.write(text.encode("utf-8", "replace") + b"\n")
                await child.stdin.drain()

    async def _keep_log(self, child: _Child) -> None:
        """Read the standard error to its end; keep the beginning in a file of the user's own."""
        with suppress(OSError):
            await asyncio.to_thread(_begin_log, self._log_file)
        kept = 0
        while chunk := await child.stderr.read(CHUNK):
            if kept < MAX_LOG:
                with suppress(OSError):
                    await asyncio.to_thread(_append, self._log_file, chunk[: MAX_LOG - kept])
            kept += len(chunk)


def _begin_log(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _exit_words(code: int | None) -> str:
    if code is None:
        return "it closed its output"
    return f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
