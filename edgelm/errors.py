"""What goes wrong in the user's world, as one line each.

Owns the error type that every module raises for files, memory, requests and native code. Bugs of our own are
`assert`s, not these. Knows nothing of where an error is shown.
"""


class EdgeLMError(Exception):
    """Something outside of edgelm's control failed: what happened, and what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = " ".join(message.split())
        self.hint = " ".join(hint.split())

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(EdgeLMError):
    """A flag has a value that it cannot have."""


class ModelError(EdgeLMError):
    """A model file is missing, damaged, unsupported or does not fit."""


class RequestError(EdgeLMError):
    """A request asks for what cannot be done: its own fault, other requests are not concerned."""


class BusyError(EdgeLMError):
    """The queue is full: the same request may succeed later."""


class EngineError(EdgeLMError):
    """The engine failed in the middle of its work, or its process died."""


class SnapshotError(EngineError):
    """A snapshot cannot be brought back: the step is lost, and what it was for can be computed."""
