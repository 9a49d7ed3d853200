"""Which configuration of a kernel is the fastest on this GPU: measured once, kept in a file.

Owns the table of what was measured and its file. Knows nothing of what a configuration means: an op lists candidates,
the first of which is its default, and asks `TABLE.best` at each launch. Nothing is measured there. `TABLE.tune` runs
a call of an op, or a whole step, sees what is asked for, and times each candidate: when a model is loaded, before its
graphs are captured, or by the benchmark; never in a step. Candidates may round differently, so what must agree bit
for bit (decode and verify) shares a key.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from edgelm.kernels.target import Target


class Config(Protocol):
    """A NamedTuple of numbers: constexprs and launch options."""

    def _asdict(self) -> dict[str, Any]: ...


C = TypeVar("C", bound=Config)
Stored = dict[str, dict[str, dict[str, int]]]  # op -> key -> configuration


class Table:
    """The fastest configurations by op and key, of one GPU and one version of Triton."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._stored: Stored = {}
        self._chosen: dict[tuple[str, str], Config] = {}  # what `best` has answered
        self._asked: dict[tuple[str, str], Sequence[Config]] | None = None  # while `tune` listens

    def open(self, folder: Path, target: Target) -> None:
        """Take what was measured before on such a GPU, and keep there what is measured from now on.

        To open the same file again changes nothing: a model that runs keeps the configurations that it has.
        """
        path = folder / file_name(target)
        if path != self._path:
            self._path, self._stored = path, _read(path)
            self._chosen.clear()

    def best(self, op: str, key: str, candidates: Callable[[], Sequence[C]]) -> C:
        """Return the fastest of the candidates as far as it is known, else the first of them.

        The key names all that the choice depends on, such as format and shape. `candidates` is called for a new key.
        """
        chosen = self._chosen.get((op, key))
        if chosen is None or self._asked is not None:
            listed = candidates()
            stored = self._stored.get(op, {}).get(key)
            chosen = next((each for each in listed if each._asdict() == stored), listed[0])
            self._chosen[op, key] = chosen
            if self._asked is not None:
                self._asked[op, key] = listed
        return chosen  # type: ignore[return-value]  # the candidates of a key are of one type

    def tune(self, run: Callable[[], object], time_us: Callable[[Callable[[], object]], float]) -> None:
        """Find the best configuration of each kernel that `run` launches and that has not been measured yet.

        `time_us` returns the time of one call in microseconds, infinite where the configuration does not fit the GPU.
        """
        assert self._asked is None, "tune does not run in itself"
        assert not capturing(), "nothing is measured while a graph is captured"
        self._asked = {}
        try:
            run()
        finally:
            asked, self._asked = self._asked, None
        for (op, key), candidates in asked.items():
            if self._chosen[op, key]._asdict() != self._stored.get(op, {}).get(key):
                self._measure(op, key, candidates, lambda: time_us(run))
        self._write()

    def _measure(self, op: str, key: str, candidates: Sequence[Config], time_us: Callable[[], float]) -> None:
        times = []
        try:
            for candidate in candidates:
                self._chosen[op, key] = candidate
                times.append(time_us())
        finally:
            self._chosen[op, key] = candidates[0]
        fastest = min(times)
        if math.isfinite(fastest):
            self._chosen[op, key] = candidates[times.index(fastest)]
            self._stored.setdefault(op, {})[key] = self._chosen[op, key]._asdict()

    def _write(self) -> None:
        """Put the table into its file in one move, with what other processes have put there meanwhile.

        Where that is not allowed, the next process measures again: no reason not to run a model.
        """
        if self._path is None:
            return
        with suppress(OSError):
            self._replace(self._path)

    def _replace(self, path: Path) -> None:
        for op, keys in _read(path).items():
            self._stored[op] = keys | self._stored.get(op, {})
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(self._stored, file, indent=1, sort_keys=True)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


TABLE = Table()  # of this process: a launch has no other way to know


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def file_name(target: Target) -> str:
    """Return the name of the file for such a GPU."""
    gpu = re.sub(r"[^a-z0-9]+", "-", target.gpu.casefold()).strip("-")
    return f"{gpu}-{target.num_sms}sm-triton{target.triton}.json"


def _read(path: Path) -> Stored:
    """Return what a file holds; nothing, if it is not there or damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if _is_table(found) else {}


def _is_table(found: object) -> bool:
    if not isinstance(found, dict) or not all(isinstance(keys, dict) for keys in found.values()):
        return False
    configs = [config for keys in found.values() for config in keys.values()]
    return all(
        isinstance(config, dict) and all(isinstance(each, int) for each in config.values()) for config in configs
    )
