"""The models that clients can use: a name leads to a file or to another server, and the list describes each model.

Owns names as HTTP clients write them. A worker opens the models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from edgelm.base.errors import ModelError, NotSeenError
from edgelm.base.model_tables import ModelTable, owner_of, table_of
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.library.local import find_local, require_runnable, runs_here
from edgelm.library.readers import Card, Describe, read_each
from edgelm.library.scan import LocalModel, each_model, printable
from edgelm.server.api.errors import ApiError
from edgelm.server.documents import Documents, Stamp
from edgelm.server.remotes.answering import not_remote
from edgelm.server.remotes.models import RemoteModel, Remotes

DESCRIBE_LIMIT_S = 60.0
MOST_NAMES = 8  # in an error
LATEST = ":latest"  # Ollama's tag of a name without one


class Listed(NamedTuple):
    """An entry of the list."""

    name: str
    path: Path
    created: int  # seconds since 1970
    known: dict[str, Any]  # the description: bytes, context, architecture, quantization, parameters; or error
    names: tuple[str, ...] = ()  # by which config.toml may have settings for it


class ModelNames:
    """The installed models, and the files named on the command line."""

    def __init__(
        self,
        hub: Path | None,
        given: list[Path],
        *,
        folders: Sequence[Path] = (),
        tables: Sequence[ModelTable] = (),
        remotes: Remotes | None = None,
    ) -> None:
        self.remotes = remotes or Remotes()  # their names come first
        self._hub = hub
        self._given = given
        self._folders = folders
        self._tables = tables  # of config.toml, with aliases
        self._by_path: dict[tuple[int, int], LocalModel] = {}  # (device, inode): the model that was named by a path
        self._known = Documents()
        self._cards = Documents()
        self._describing = asyncio.Lock()

    async def find(self, name: str, *, paths: bool = False) -> LocalModel:
        """Return the model of that name on this machine. Raises ApiError if there is none, or another server has it.

        With `paths` it may be the path of any .gguf file or folder; without, no file outside the library is looked at.
        """
        if (remote := self.remotes.find(name)) is not None:
            raise not_remote(remote, "this")
        return await asyncio.to_thread(self._find, name, paths)

    def find_loaded(self, name: str, loaded: Sequence[LocalModel], *, exact: bool = False) -> LocalModel | None:
        """Return the loaded model of that name or path, whose file may be gone, or where no name leads to it now.

        `exact`: not one of the name without Ollama's tag.
        """
        for called in self._spellings(name)[: 1 if exact else 2]:
            for model in loaded:
                if model.is_called(called) or called in (str(model.path), printable(str(model.path))):
                    return model
        return None

    async def has(self, name: str, *, paths: bool = False) -> bool:
        """Return whether there is a model of that name."""
        if self.remotes.find(name) is not None:
            return True
        try:
            await self.find(name, paths=paths)
        except ApiError:
            return False
        return True

    async def first_given(self) -> LocalModel | None:
        """Return the first model named on the command line; None: there is none."""
        if not self._given:
            return None
        models = await asyncio.to_thread(self._runnable)
        return next((model for model in models if model.is_at(self._given[0])), None)

    async def only(self) -> LocalModel | None:
        """Return the only model here; None: there are several."""
        models = await asyncio.to_thread(lambda: list(islice(self._each(), 2)))
        return models[0] if len(models) == 1 else None

    async def card(self, model: LocalModel) -> dict[str, Any]:
        """Return the card of a model (library/card.py), or its error. Raises ApiError if its file is gone."""
        stamp = _stamp(model.path)
        if stamp is None:
            raise _gone(model)
        async with self._describing:
            if self._cards.is_due(stamp):
                cards = await in_daemon_thread(lambda: list(read_each([Card(model.path)])))
                self._cards.keep(stamp, cards[0])
        card = self._cards.get(stamp)
        if "error" in card or await asyncio.to_thread(lambda: model.projector) is None:
            return card
        return card | {"capabilities": [*card["capabilities"], "vision"]}

    async def list(self) -> Sequence[Listed]:
        """Return the models that exist now, without those that no engine can run."""
        described = await self.described(await asyncio.to_thread(self._runnable))
        listed = [model for model in described if "problem" not in model.known]
        entries = {model.name: model for model in listed}
        entries |= {alias.name: alias for model in listed for alias in self._aliases(model)}
        remote = [remote_entry(model, name) for model in self.remotes.models for name in (model.name, *model.aliases)]
        hidden = {model.name.casefold() for model in remote}
        return [*(model for model in entries.values() if model.name.casefold() not in hidden), *remote]

    async def describe(self, name: str, *, paths: bool = False) -> Listed:
        """Return the entry of the model with that name, as `find` understands it. Raises ApiError if there is none."""
        if (remote := self.remotes.find(name)) is not None:
            return remote_entry(remote, name.removesuffix(LATEST))
        model = await self.find(name, paths=paths)
        for listed in await self.described([model]):
            return listed
        raise _gone(model)

    async def not_seen(self) -> NotSeenError:
        """Return the error for a picture that a model does not read, with the names of those here that do."""
        models = await asyncio.to_thread(lambda: [model.name for model in self._runnable() if model.projector])
        names = ", ".join(sorted(set(models))[:MOST_NAMES])
        return NotSeenError(
            "this model reads no images",
            f"these here do: {names}" if names else "pull one that does, such as gemma3:4b",
        )

    async def require_engine(self, model: LocalModel) -> None:
        """Raise ApiError for a model that no engine can run, before a process is started for it.

        A GGUF that no list has read yet is not read: nearly all of them can run.
        """
        stamp = _stamp(model.path)
        if stamp is None:
            return
        if model.format != "gguf" and self._known.is_due(stamp):
            await self.described([model])  # else it does not wait for a list, which may be reading a slow drive
        if problem := self._known.get(stamp).get("problem"):
            raise ApiError(400, "model_not_supported", f"{model.name} cannot be run: {problem}", param="model")

    async def described(self, models: Sequence[LocalModel]) -> Sequence[Listed]:
        """Return the entries of models, without those whose file is gone."""
        async with self._describing:
            stamps = {model.path: stamp for model in models if (stamp := _stamp(model.path)) is not None}
            due = self._known.due(stamps.values())
            if due:
                described = await in_daemon_thread(lambda: _describe_all([stamp.path for stamp in due]))
                for stamp, description in zip(due, described, strict=False):
                    self._known.keep(stamp, description)
        seeing = await asyncio.to_thread(lambda: {model.path for model in models if model.projector})
        return [
            Listed(
                model.name,
                model.path,
                stamp.mtime_ns // 10**9,
                self._known.get(stamp) | ({"pictures": True} if model.path in seeing else {}),
                model.names,
            )
            for model in models
            if (stamp := stamps.get(model.path)) is not None
        ]

    def _find(self, alias_or_name: str, paths: bool) -> LocalModel:
        models, spellings = list[LocalModel](), self._spellings(alias_or_name)
        for model in self._each():
            if model.is_called(spellings[0]) and not self._given_as(spellings[0]):
                return _existing(model)  # no folder behind it is looked at
            models.append(model)
        for called in spellings:
            for path in self._given_as(called):
                for model in models:
                    if model.is_at(path):
                        return _existing(model)
            for model in models:
                if model.is_called(called):
                    return _existing(model)
        name = spellings[-1]
        by_path = paths and (name.endswith(".gguf") or _is_folder(name))
        try:
            model = require_runnable(find_local(name, self._hub, self._folders, paths=by_path))
            return self._known_at(model, models) if by_path else model
        except ModelError as error:
            reason = str(error)
            join = " " if reason.endswith("?") else "; "
            raise _not_found(f"{reason}{join}GET /v1/models lists the models that are here") from None

    def _given_as(self, called: str) -> Sequence[Path]:
        """Return the files of the command line that a name leads to."""
        return [path for path in self._given if called in (path.stem, path.name, str(path))]

    def _spellings(self, alias_or_name: str) -> tuple[str, str]:
        """Return the name of a model, for an alias that of its model, and the same without Ollama's tag."""
        owners = (owner_of(self._tables, name) for name in (alias_or_name, alias_or_name.removesuffix(LATEST)))
        name = next(filter(None, owners), alias_or_name)
        return name, name.removesuffix(LATEST)

    def _known_at(self, model: LocalModel, models: Sequence[LocalModel]) -> LocalModel:
        """Return the model as it was found first: all spellings of a path, and all links, lead to one engine."""
        identity = _inode(model.path)
        if identity is None:
            return model
        for known in (*models, *filter(None, [self._by_path.get(identity)])):
            if _inode(known.path) == identity:
                return known
        self._by_path[identity] = model
        return model

    def _aliases(self, model: Listed) -> Iterator[Listed]:
        """Yield the entries of a model's aliases."""
        table = table_of(self._tables, model.names)
        for alias in table.aliases if table else ():
            yield model._replace(name=alias, known={**model.known, "alias_of": model.name})

    def _runnable(self) -> Sequence[LocalModel]:
        return list(self._each())

    def _each(self) -> Iterator[LocalModel]:
        for model in each_model(self._hub, self._given, self._folders, []):
            if not model.is_superseded and runs_here(model):
                yield model


def remote_entry(model: RemoteModel, name: str) -> Listed:
    """Return the entry of a model that another server runs."""
    known: dict[str, Any] = {"remote": model.where, "kind": model.kind}
    known |= {"context": model.context} if model.context else {}
    known |= {"alias_of": model.name} if name.casefold() != model.name.casefold() else {}
    return Listed(name, Path(), 0, known)


def _is_folder(name: str) -> bool:
    try:
        return name.startswith("/") and Path(name).is_dir()
    except (OSError, ValueError):  # a name that no folder can have
        return False


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _describe_all(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the description of each model, in order.

    There are fewer when the time is over; the rest is read when the list is requested again.
    """
    described: list[dict[str, Any]] = []
    deadline = time.monotonic() + DESCRIBE_LIMIT_S
    for answer in read_each(Describe(path) for path in paths):
        described.append(answer)
        if time.monotonic() > deadline:
            break
    return described


def _existing(model: LocalModel) -> LocalModel:
    if not model.path.exists():
        raise _gone(model)
    return model


def _gone(model: LocalModel) -> ApiError:
    return _not_found(f"the file of {model.name} is gone")


def _not_found(message: str) -> ApiError:
    return ApiError(404, "model_not_found", message, param="model")


def _stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return Stamp(path, stat.st_size, stat.st_mtime_ns)
