"""The models that clients may ask for: from a name to a file, and the list with what each is.

Owns names as HTTP clients write them. Opens no model itself: a child process reads the headers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from edgelm.errors import ModelError
from edgelm.library.local import LocalModel, find_model, installed
from edgelm.server.api_error import ApiError

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

    def __init__(self, hub: Path | None, given: list[Path], *, any_path: bool) -> None:
        self._hub = hub
        self._given = given
        self._any_path = any_path  # a client may name any .gguf file: for this machine's own clients
        self._known: dict[Stamp, dict[str, Any]] = {}
        self._describing = asyncio.Lock()

    async def find(self, name: str) -> LocalModel:
        """Return the model that a client means. Raises ApiError where there is none."""
        return await asyncio.to_thread(self._find, name)

    async def list(self) -> list[Listed]:
        """Return the models that are there now."""
        models = await asyncio.to_thread(installed, self._hub, self._given)
        async with self._describing:
            stamps = {model.path: stamp for model in models if (stamp := _stamp(model.path)) is not None}
            unknown = [path for path, stamp in stamps.items() if stamp not in self._known]
            if unknown:
                described = await _describe(unknown)
                if len(described) < len(unknown):  # the first that is missing killed the process
                    described.append({"error": "the file cannot be read"})
                for path, each in zip(unknown, described, strict=False):
                    self._known[stamps[path]] = each
        return [
            Listed(*model, stamp.mtime_ns // 10**9, self._known.get(stamp, {}))
            for model in models
            if (stamp := stamps.get(model.path)) is not None
        ]

    def _find(self, name: str) -> LocalModel:
        for path in self._given:
            if name in (path.stem, path.name, str(path)):
                return _existing(path.stem, path)
        for model in installed(self._hub, self._given):
            if name.casefold() == model.name.casefold():
                return _existing(*model)
        if self._any_path and name.endswith(".gguf"):
            try:
                path = find_model(name)
            except ModelError as error:
                raise _not_found(str(error)) from None
            return LocalModel(path.stem, path)
        raise _not_found(f"there is no model {name[:200]}; GET /v1/models lists those that are here")


async def _describe(paths: list[Path]) -> list[dict[str, Any]]:
    """Read headers in a child process; a file that kills it (SIGBUS: cut while it is read) ends the list."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-P",
        "-m",
        "edgelm.library.describe",
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


def _existing(name: str, path: Path) -> LocalModel:
    if not path.is_file():
        raise _not_found(f"the file of {name} is gone: {path}")
    return LocalModel(name, path.resolve())


def _not_found(message: str) -> ApiError:
    return ApiError(404, "model_not_found", message, param="model")


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(path, found.st_size, found.st_mtime_ns)
