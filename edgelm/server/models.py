"""The models that clients may ask for: from a name to a file, and the list with what each is.

Owns names as HTTP clients write them. Opens no model itself: a child process reads the headers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edgelm.errors import ModelError
from edgelm.library.local import LocalModel, find_local, installed, require_runnable, runs_here
from edgelm.server.api_error import ApiError

DESCRIBE = ("-P", "-m", "edgelm.library.describe")  # -P: nothing of the current folder
DESCRIBE_LIMIT_S = 60.0


class Stamp(NamedTuple):
    """A file as it was."""

    path: Path
    nbytes: int
    mtime_ns: int


class Listed(NamedTuple):
    """A model of the list."""

    name: str
    path: Path
    created: int  # seconds since 1970
    known: dict[str, Any]  # bytes, context, architecture, quantization, parameters; or error


class ModelNames:
    """What is installed, and the files named on the command line."""

    def __init__(self, hub: Path | None, given: list[Path], *, any_path: bool, folders: Sequence[Path] = ()) -> None:
        self._hub = hub
        self._given = given
        self._folders = folders
        self._any_path = any_path  # a client may name any .gguf file or folder: for this machine's own clients
        self._known: dict[Stamp, dict[str, Any]] = {}
        self._describing = asyncio.Lock()

    async def find(self, name: str) -> LocalModel:
        """Return the model that a client means. Raises ApiError where there is none."""
        return await asyncio.to_thread(self._find, name)

    async def list(self) -> list[Listed]:
        """Return the models that are there now."""
        models = await asyncio.to_thread(self._runnable)
        async with self._describing:
            stamps = {model.path: stamp for model in models if (stamp := _stamp(model.path)) is not None}
            unknown = [path for path, stamp in stamps.items() if stamp not in self._known]
            if unknown:
                for path, each in zip(unknown, await _describe_all(unknown), strict=False):
                    self._known[stamps[path]] = each
        return [
            Listed(model.name, model.path, stamp.mtime_ns // 10**9, self._known.get(stamp, {}))
            for model in models
            if (stamp := stamps.get(model.path)) is not None
        ]

    def _find(self, name: str) -> LocalModel:
        models = self._runnable()
        for path in self._given:
            if name in (path.stem, path.name, str(path)):
                return _existing(next(model for model in models if model.is_at(path)))
        for model in models:
            if model.is_called(name):
                return _existing(model)
        by_path = self._any_path and (name.endswith(".gguf") or _is_folder(name))
        try:
            return require_runnable(find_local(name, self._hub, self._folders, paths=by_path))
        except ModelError as error:
            raise _not_found(f"{error}; GET /v1/models lists the models that are here") from None

    def _runnable(self) -> Sequence[LocalModel]:
        found = installed(self._hub, self._given, self._folders)
        return [model for model in found if runs_here(model)]


def _is_folder(name: str) -> bool:
    try:
        return name.startswith("/") and Path(name).is_dir()
    except (OSError, ValueError):  # a name that no folder can have
        return False


async def _describe_all(paths: list[Path]) -> list[dict[str, Any]]:
    """Return what the models are, in order; one whose reading kills the process hides no other.

    They are fewer where the time is over; the rest is read when the list is asked for again.
    """
    described: list[dict[str, Any]] = []
    deadline = time.monotonic() + DESCRIBE_LIMIT_S
    while len(described) < len(paths) and time.monotonic() < deadline:
        described += await _describe(paths[len(described) :])
        if len(described) < len(paths):
            described.append({"error": f"{paths[len(described)].name} cannot be read; it may be changing just now"})
    return described


async def _describe(paths: list[Path]) -> list[dict[str, Any]]:
    """Read headers in a child process; a file that kills it (SIGBUS: cut while it is read) ends the list."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *DESCRIBE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(DESCRIBE_LIMIT_S):
            out, _ = await child.communicate(json.dumps([str(path) for path in paths]).encode())
    except TimeoutError:
        return []
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return [json.loads(line) for line in out.splitlines()]


def _existing(model: LocalModel) -> LocalModel:
    if not model.path.exists():
        raise _not_found(f"the file of {model.name} is gone: {model.path}")
    return model


def _not_found(message: str) -> ApiError:
    return ApiError(404, "model_not_found", message, param="model")


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(path, found.st_size, found.st_mtime_ns)
