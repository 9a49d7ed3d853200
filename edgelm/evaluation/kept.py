"""The results of evaluations that stay on this machine, by the content of the model.

    DATA/evaluations/<identity>.json    the results of one model, the newest first, and its speed here

Owns the files, their bound and what of them is still true. A file that has changed is another model, so that a result
is never shown for other weights. Removing a model keeps its results: they help to choose what to pull again. Texts are
known by name and hash. Two evaluations that end at once may lose one of the results. Evaluates nothing.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from edgelm.base.atomic import atomic_json, read_json
from edgelm.base.kept_files import keep_newest

FOLDER = "evaluations"
FORMAT = 1  # of the files, and of the meaning of the figures
MAX_MODELS = 500
MAX_RESULTS = 40  # of one model
MAX_SPEEDS = 8
MAX_FILE_BYTES = 2**21


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResult:
    """One evaluation. `figures` is the document that `edgelm eval --json` prints."""

    key: str  # hash of all that the figures depend on
    at: str  # ISO 8601, UTC
    text: str  # name of the file
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSpeed:
    """The speed of a model on this machine, in tokens per second: the median of `prompts` and of `decodes`."""

    key: str
    at: str
    engine: str
    device: str
    kv: str
    prompts: tuple[float, ...]
    decodes: tuple[float, ...]

    @property
    def measured_at(self) -> float:
        """Seconds since 1970."""
        return datetime.fromisoformat(self.at).timestamp()

    @property
    def prompt(self) -> float:
        return _median(self.prompts)

    @property
    def decode(self) -> float:
        return _median(self.decodes)


Entry = TypeVar("Entry", KeptResult, KeptSpeed)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """The results of one model. `blobs` are the names of its files in the hub's cache: their SHA-256."""

    identity: str
    name: str
    nbytes: int
    blobs: tuple[str, ...] = ()
    results: tuple[KeptResult, ...] = ()
    speeds: tuple[KeptSpeed, ...] = ()

    def result(self, key: str) -> KeptResult | None:
        return next((result for result in self.results if result.key == key), None)

    def speed(self, key: str) -> KeptSpeed | None:
        return next((speed for speed in self.speeds if speed.key == key), None)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Restore a model. Raises KeyError, TypeError for anything that `asdict` did not make."""
        results = tuple(KeptResult(**result) for result in data["results"])
        speeds = tuple(
            KeptSpeed(**speed | {name: tuple(speed[name]) for name in ("prompts", "decodes")})
            for speed in data["speeds"]
        )
        return cls(**data | {"blobs": tuple(data["blobs"]), "results": results, "speeds": speeds})


class KeptResults:
    """The results of all models in a data folder. A folder that cannot be written loses only these."""

    def __init__(self, data: Path) -> None:
        self._folder = data / FOLDER

    def of(self, identity: str) -> KeptModel | None:
        """Return the results of a model; None: there are none."""
        model = _read(self._path(identity))
        return model if model and model.identity == identity else None

    def of_blobs(self, blobs: Collection[str]) -> KeptModel | None:
        """Return the results of the model whose files have these hashes on the hub; None: there are none."""
        return next((model for model in self._all() if model.blobs and set(model.blobs) == set(blobs)), None)

    def keep(self, model: KeptModel) -> None:
        """Add the results of a model to those that are kept; they replace older ones with the same key."""
        kept = self.of(model.identity) or KeptModel(identity=model.identity, name=model.name, nbytes=model.nbytes)
        merged = KeptModel(
            identity=model.identity,
            name=model.name,
            nbytes=model.nbytes,
            blobs=model.blobs or kept.blobs,
            results=_merged(model.results, kept.results)[:MAX_RESULTS],
            speeds=_merged(model.speeds, kept.speeds)[:MAX_SPEEDS],
        )
        atomic_json(self._path(model.identity), _signed(asdict(merged)))
        keep_newest(self._folder, MAX_MODELS, "*.json")

    def _path(self, identity: str) -> Path:
        return self._folder / f"{identity[:32]}.json"

    def _all(self) -> Iterator[KeptModel]:
        with suppress(OSError):
            for path in sorted(self._folder.glob("*.json")):
                if model := _read(path):
                    yield model


def _read(path: Path) -> KeptModel | None:
    try:
        document = read_json(path, MAX_FILE_BYTES)
        if document["format"] == FORMAT and document["sha256"] == _checksum(document["model"]):
            return KeptModel.from_json(document["model"])
    except (KeyError, TypeError):
        pass
    return None


def _merged(new: tuple[Entry, ...], old: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the new entries, and the old ones with other keys."""
    merged = {entry.key: entry for entry in new}
    for entry in old:
        merged.setdefault(entry.key, entry)
    return tuple(merged.values())


def _signed(model: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "sha256": _checksum(model), "model": model}


def _checksum(model: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


def _median(values: tuple[float, ...]) -> float:
    return statistics.median(values) if values else 0.0
