"""A command for the user's shell, typed after `!` in an empty prompt, and its output as an attachment.

Owns the process group, which ends with the command, and the limits of time and output. Knows nothing of how it is
typed: nothing but a key may lead here.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.chats.attachments import Attachment
from edgelm.chats.knowledge.secret_files import holds_key

LIMIT_S = 60.0
MAX_OUTPUT = 256 * 2**10  # bytes
TERMINATE_S = 1.0  # after SIGTERM, and for the rest of the output
CHUNK = 2**16
NAME_LEN = 60  # characters of the command in the attachment's name
_C0 = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_OTHERS = re.compile("[\x80-\x9f\u2028-\u202e\u2066-\u2069]")  # controls, and what turns the direction of writing


async def run_shell(command: str, environment: Mapping[str, str], limit_s: float = LIMIT_S) -> Attachment:
    """Run a command in the user's shell and return its output; cancelling ends it. Raises EdgeLMError."""
    shell = environment.get("SHELL", "")
    if not Path(shell).is_absolute() or not os.access(shell, os.X_OK):
        shell = "/bin/sh"
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 - asyncio, cancelled while it starts a process, leaves its children
            (shell, "-c", command),
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            env={**environment, "TERM": "dumb", "PAGER": "cat"},
            start_new_session=True,  # a process group, which is ended as a whole
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in the command
        os.close(read_end)
        raise EdgeLMError(f"{shell} cannot run this: {error}", "set SHELL to your shell") from None
    finally:
        os.close(write_end)
    data, note = await _output(process, os.fdopen(read_end, "rb", buffering=0), limit_s)
    text = shown(data.decode("utf-8", "replace"))
    if holds_key(text):
        raise RequestError("the output holds a private key: it is not attached", "paste the part that you want to send")
    name = " ".join(shown(command).split())
    name = name if len(name) <= NAME_LEN else f"{name[:NAME_LEN]}…"
    end = "" if not text or text.endswith("\n") else "\n"
    text = f"{text}{end}[{note}]\n" if note else text or "[no output]\n"
    return Attachment(kind="text", name=f"$ {name}", text=text, size=len(data))


def shown(text: str) -> str:
    """Return a text in which control characters are seen, and do nothing."""
    return _OTHERS.sub("\ufffd", text.replace("\r\n", "\n").translate(_C0))


async def _output(process: subprocess.Popen[bytes], pipe: IO[bytes], limit_s: float) -> tuple[bytes, str]:
    """Return what a process group writes until its first process ends, and how that was, if it was not well."""
    output = bytearray()
    waiting = in_daemon_thread(process.wait)
    reading = asyncio.create_task(_read(pipe, output))
    reading.add_done_callback(lambda _: pipe.close())
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.wait((waiting, reading), return_when=asyncio.FIRST_COMPLETED)
            if len(output) <= MAX_OUTPUT:
                await asyncio.shield(waiting)
    except TimeoutError:
        pass
    finally:  # each wait here may be cancelled: Esc once more, or the end of the chat
        has_ended = waiting.done()
        try:
            if not has_ended:
                _signal(process, signal.SIGTERM)
                await asyncio.wait((waiting,), timeout=TERMINATE_S)
        finally:
            _signal(process, signal.SIGKILL)  # also what it left in the background, which would hold the pipe
            try:
                await asyncio.wait((waiting, reading), timeout=TERMINATE_S)
            finally:
                reading.cancel()
    if len(output) > MAX_OUTPUT:
        return bytes(output[:MAX_OUTPUT]), f"ended: these are the first {MAX_OUTPUT // 2**10} KiB of its output"
    if not has_ended:
        return bytes(output), f"ended after {limit_s:g} s"
    return bytes(output), f"exit code {process.returncode}" if process.returncode else ""


async def _read(pipe: IO[bytes], output: bytearray) -> None:
    """Read until the end, or until there is more than is kept."""
    reader = asyncio.StreamReader(CHUNK)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    with closing(transport):
        while len(output) <= MAX_OUTPUT and (chunk := await reader.read(CHUNK)):
            output += chunk


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
