"""Errors of the user's world, each shown as one line.

Owns the error types that all modules raise for files, memory, requests and native code. Our own bugs are `assert`s
instead. Knows nothing of where an error is shown.
"""

from __future__ import annotations

import re

# They move a terminal's cursor, write to its clipboard, or turn the text around. Line breaks are spaces by then.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

USAGE_EXIT_CODE = 2  # of a command with a wrong flag or a wrong setting: it fails again until somebody changes that


def one_line(text: str) -> str:
    """Return a text on one line, as a terminal may print it: a model's template or a server may have written it."""
    return _CONTROL.sub("\ufffd", " ".join(text.split()))


class EdgeLMError(Exception):
    """Something outside edgelm's control failed: `message` says what happened, `hint` what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = one_line(message)
        self.hint = one_line(hint)

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(EdgeLMError):
    """A flag, a variable or a file with settings says what is not allowed."""


class ModelError(EdgeLMError):
    """A model file is missing, damaged or unsupported, or does not fit in memory."""


class RequestError(EdgeLMError):
    """A request cannot be served as it is; other requests are not affected."""


class NotSeenError(RequestError):
    """The model reads no pictures."""


class BusyError(EdgeLMError):
    """The queue is full; the same request may succeed later."""


class EngineError(EdgeLMError):
    """The engine failed during its work, or its process died."""


class DeviceError(EngineError):
    """The device fails, and every later call of this process would fail too: the process ends, another may go on."""


class OutOfMemoryError(EngineError):
    """The device has less memory than a step requested. Nothing else is wrong: the process can go on."""


class DoesNotFitError(ModelError):
    """The device has less memory than the model takes, although the plan said that it fits."""


class CompiledKernelError(DeviceError):
    """A compiled kernel cannot be read from Triton's cache on disk. It says nothing about the kernel and the GPU."""


class GpuLoadError(EdgeLMError):
    """A model cannot be loaded on this GPU, but without CUDA perhaps: by a new process, which is told the message."""


class LostStepError(EngineError):
    """A step has no result, but the cache can be computed again: no request fails."""


class SnapshotError(LostStepError):
    """A snapshot cannot be loaded."""


class StillLoadingError(EdgeLMError):
    """The model is being loaded; the same request succeeds later, in about `retry_after_s` if that is known."""

    def __init__(
        self, message: str, hint: str = "", *, progress: float | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, hint)
        self.progress = progress  # 0 to 1
        self.retry_after_s = retry_after_s
