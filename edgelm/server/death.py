"""How the end of an engine process is told, in one line. Shared by all that start one."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from edgelm.errors import EngineError
from edgelm.server.model_files import ModelFiles


def engine_death(code: int, last_lines: Iterable[str], files: ModelFiles) -> EngineError:
    """Return the error for an engine process that ended with `code`; negative is a signal."""
    if files.rewritten() or (code == -signal.SIGBUS and files.changed()):
        return files.change()
    if code == -signal.SIGBUS:
        hint = "check the disk that it lies on"
        return EngineError(f"the engine process was killed by SIGBUS: a part of {files.name} could not be read", hint)
    if code == -signal.SIGKILL:
        hint = "memory may have run out: lower --ctx or close other programs"
        return EngineError("the engine process was killed by SIGKILL", hint)
    how = f"was killed by {_name(-code)}" if code < 0 else f"ended with code {code}"
    last = [*last_lines][-1:]
    said = f" ({last[0]})" if last else ""
    return EngineError(f"the engine process {how}{said}", "run it again with -v to see llama.cpp's log")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
