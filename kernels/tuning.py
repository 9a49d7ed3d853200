"""The fastest configuration of each kernel on this GPU: measured once (backends/torch/tuning.py), kept in a file.

Owns the table of measured configurations. Knows nothing of what a configuration means: an op lists candidates, the
first of which is its default, and calls `TABLE.best` at each launch, which measures nothing. Candidates may round
differently, so launches that must agree to the last bit (decode and verify) share a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:  # it imports torch, and other processes read the file too
    from edgelm.kernels.gpu_target import Target


class Config(Protocol):
    """A NamedTuple of numbers: constexprs and launch options."""

    def _asdict(self) -> dict[str, Any]: ...


C = TypeVar("C", bound=Config)
Stored = dict[str, dict[str, dict[str, int]]]  # op -> key -> configuration
Launched = dict[tuple[str, str], Sequence[Config]]  # (op, key) -> candidates
FORMAT = 3  # of the files: configurations of another format are measured again
TUNED = "kernels"  # the folder of the files, within the cache folder
UNFINISHED = "unfinished"  # in place of an op: how often a measurement of an op's key has ended its process


class Table:
    """The fastest configurations by op and key, for one GPU and one version of Triton."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.stored: Stored = {}
        self._chosen: dict[tuple[str, str], Config] = {}  # the results of `best`
        self._launched: Launched | None = None

    def open(self, folder: Path, target: Target) -> None:
        """Load the configurations measured on such a GPU; `path` is their file from now on.

        Opening the same file again changes nothing: a running model keeps its configurations.
        """
        path = folder / file_name(target)
        if path != self.path:
            self.path, self.stored = path, read_table(path)
            self._chosen.clear()

    def close(self) -> None:
        """Forget the file and all configurations."""
        self.path = None
        self.stored = {}
        self._chosen.clear()

    def best(self, op: str, key: str, candidates: Callable[[], Sequence[C]]) -> C:
        """Return the fastest candidate if it was measured, else the first one.

        The key names everything that the choice depends on, such as format and shape. `candidates` is called for a new
        key only.
        """
        chosen = self._chosen.get((op, key))
        if chosen is None or self._launched is not None:
            configs = candidates()
            stored = self.stored.get(op, {}).get(key)
            chosen = next((config for config in configs if config._asdict() == stored), configs[0])
            self._chosen[op, key] = chosen
            if self._launched is not None:
                self._launched[op, key] = configs
        return chosen  # type: ignore[return-value]  # the candidates of a key are of one type

    @property
    def in_use(self) -> dict[tuple[str, str], Config]:
        """The configurations, by op and key, that this process has launched since the file was opened."""
        return dict(self._chosen)

    def is_measured(self, op: str, key: str, candidates: Sequence[Config]) -> bool:
        """Return whether one of the candidates is kept as the fastest."""
        kept = self.stored.get(op, {}).get(key)
        return any(candidate._asdict() == kept for candidate in candidates)

    def set(self, op: str, key: str, config: Config, *, stored: bool = False) -> None:
        """Use this configuration from now on; with `stored`, as the measured one."""
        self._chosen[op, key] = config
        if stored:
            self.stored.setdefault(op, {})[key] = config._asdict()

    @contextmanager
    def recording(self) -> Iterator[Launched]:
        """Record which kernels are launched in the block, with their candidates."""
        assert self._launched is None, "recording does not nest"
        launched: Launched = {}
        self._launched = launched
        try:
            yield launched
        finally:
            self._launched = None


TABLE = Table()  # one for the process, since a launch cannot be given it as an argument


def file_name(target: Target) -> str:
    """Return the name of the file for this GPU, version of Triton and format."""
    return f"{_slug(target.gpu)}-{target.num_sms}sm-triton{target.triton}-{FORMAT}.json"


def num_measured(folder: Path, gpu: str, triton: str) -> int:
    """Return how many kernels are measured on a GPU of this name, with this version of Triton."""
    own = re.compile(rf"{_slug(gpu)}-\d+sm-triton{re.escape(triton)}-{FORMAT}\.json")
    tables = [read_table(path) for path in folder.glob("*.json") if own.fullmatch(path.name)]
    return sum(len(keys) for table in tables for op, keys in table.items() if op != UNFINISHED)


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.casefold()).strip("-")


def read_table(path: Path) -> Stored:
    """Return the table in a file; an empty one if the file is missing or damaged."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return table if _is_table(table) else {}


def _is_table(table: object) -> bool:
    if not isinstance(table, dict) or not all(isinstance(keys, dict) for keys in table.values()):
        return False
    configs = [config for keys in table.values() for config in keys.values()]
    return all(
        isinstance(config, dict) and all(isinstance(value, int) for value in config.values()) for config in configs
    )
