"""Failures of a server of tools as one line: what happened, and what to do.

Owns the translation of the errors of mcp, httpx2 and the system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgelm.base.errors import EdgeLMError
from edgelm.chats.tools.results import plain_text

MAX_WORDS = 500  # characters of a server's own words


class ToolError(EdgeLMError):
    """A server of tools cannot be used, or a call failed.

    `broken`: the connection must be made again. `silent`: the server did not answer in time.
    """

    def __init__(self, message: str, hint: str = "", *, broken: bool = False, silent: bool = False) -> None:
        super().__init__(message, hint)
        self.broken, self.silent = broken, silent


@contextmanager
def explained(name: str, seconds: float, reason: Callable[[], str]) -> Iterator[None]:
    """Raise what fails in the block as ToolError. `reason` returns why the server's process ended, if it did."""
    import httpx2
    from mcp.shared.exceptions import MCPError
    from pydantic import ValidationError

    try:
        yield
    except ToolError:
        raise
    except TimeoutError:
        hint = f"timeout in its table of config.toml is {seconds:g} s"
        raise ToolError(f"{name} does not answer", hint, silent=True) from None
    except (
        MCPError,
        ValidationError,
        httpx2.HTTPError,
        httpx2.StreamError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        raise _explain(name, error, reason()) from error
    except BaseExceptionGroup as group:
        leaf = _first(group)
        if isinstance(leaf, ToolError):
            raise leaf from None
        if not isinstance(leaf, Exception):
            raise
        raise _explain(name, leaf, reason()) from group


def _explain(name: str, error: Exception, reason: str) -> ToolError:
    from mcp.shared.exceptions import MCPError
    from mcp.types import CONNECTION_CLOSED
    from pydantic import ValidationError

    if reason:
        return ToolError(f"{name}: {reason}", broken=True)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        words = plain_text(".".join(map(str, first["loc"])) + ": " + first["msg"])
        return ToolError(f"{name} sent what is not MCP: {words[:MAX_WORDS]}")
    words = " ".join(plain_text(str(error)).split())[:MAX_WORDS] or type(error).__name__
    if isinstance(error, MCPError):
        broken = error.code == CONNECTION_CLOSED or error.message == "Session terminated"
        return ToolError(f"{name}: {words}", broken=broken)
    return ToolError(f"{name} cannot be reached: {words}", broken=True)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
