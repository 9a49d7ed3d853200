"""The user's own editor for a long message: $VISUAL or $EDITOR, on a private temporary file.

Owns the file and what can go wrong with it: the text is never lost. Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from edgelm.base.errors import EdgeLMError
from edgelm.tui.lines import clean

MAX_BYTES = 4 * 2**20
SET_IT = "set VISUAL or EDITOR, as in EDITOR=nano"


def editor_command(environment: Mapping[str, str]) -> list[str]:
    """Return the user's editor with its arguments. Raises EdgeLMError."""
    name = next((name for name in ("VISUAL", "EDITOR") if environment.get(name, "").strip()), None)
    if name is None:
        raise EdgeLMError("there is no editor: neither VISUAL nor EDITOR is set", SET_IT)
    try:
        command = shlex.split(environment[name])
    except ValueError as error:
        raise EdgeLMError(f"{name} is {environment[name]!r}: {error}", SET_IT) from None
    if not command or shutil.which(command[0], path=environment.get("PATH")) is None:
        raise EdgeLMError(f"{name} is {environment[name]!r}, which is no program here", SET_IT)
    return command


async def edit_text(text: str, command: list[str]) -> str:
    """Let the user edit a text; return the new one. The terminal is the editor's until then.

    Raises EdgeLMError where the editor fails or its file cannot be read; a file that was changed is kept then.
    """
    folder, file = await asyncio.to_thread(_write, text)
    kept = True
    try:
        with _left_to_the_editor():
            process = await asyncio.create_subprocess_exec(*command, str(file))
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                with suppress(ProcessLookupError):
                    process.terminate()
                raise
        edited = await asyncio.to_thread(_read, file, text, code)
        kept = False
        return edited
    except OSError as error:
        kept = False
        raise EdgeLMError(f"{command[0]} does not start: {error.strerror}", SET_IT) from None
    except _UnchangedError as error:
        kept = False
        raise EdgeLMError(error.message, error.hint) from None
    finally:
        if not kept:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class _UnchangedError(EdgeLMError):
    """There is nothing to keep in the file."""


def _write(text: str) -> tuple[Path, Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix="edgelm-"))  # private
        file = folder / "message.md"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write((text + "\n" if text else "").encode(errors="replace"))
    except OSError as error:
        raise EdgeLMError(
            f"no temporary file can be written: {error.strerror}", "free some disk, or set TMPDIR"
        ) from None
    return folder, file


def _read(file: Path, before: str, code: int) -> str:
    """Return the text of the file. Raises EdgeLMError."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise EdgeLMError(f"the text is longer than {MAX_BYTES // 2**20} MiB", f"it is kept in {file}")
        content = file.read_bytes()
    except OSError:
        raise _UnchangedError("the editor has removed its file", "the message is as it was") from None
    unchanged = content.decode(errors="replace").rstrip("\n") == before.rstrip("\n")
    if code:
        ended = f"the editor ended with exit code {code}" if code > 0 else f"the editor was ended by signal {-code}"
        if unchanged:
            raise _UnchangedError(ended, "the message is as it was")
        raise EdgeLMError(ended, f"the message is as it was; the edited text is kept in {file}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise EdgeLMError(
            "the text is not UTF-8", f"the message is as it was; the edited text is kept in {file}"
        ) from None
    return "\t".join(map(clean, text.removesuffix("\n").removesuffix("\r").split("\t")))  # a tab is text here


@contextmanager
def _left_to_the_editor() -> Iterator[None]:
    """Take no Ctrl+C: the terminal sends it to the editor and to us. A child of ours gets the default back."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
