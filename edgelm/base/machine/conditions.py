"""On what a figure was measured: the program and its engine, the processor, the cores, and what else was computing.

Owns these facts and their one wording, for `edgelm plan`, `bench` and `eval`. Only the process that computes can tell
its own work from that of others, so a worker makes a `Measurement` and the command prints its `Conditions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from edgelm import __version__
from edgelm.base.machine.cpu import OtherLoad, processor_name, usable_cores
from edgelm.base.machine.llama_build import find_build

QUIET_CORES = 0.2  # that others keep busy: below this they are not mentioned
PACKAGES = ("torch", "triton")  # of the torch engine


@dataclass(frozen=True, slots=True)
class Conditions:
    """On what a figure was measured. JSON keeps it as `asdict` does."""

    edgelm: str  # version
    build: str  # of the engine: "llama-cpp-python 0.3.36"
    processor: str
    cores: int
    others: float | None  # cores that other processes kept busy meanwhile; None: not known

    def __str__(self) -> str:
        """Return the line: "measured with edgelm 0.6, edgelm-llama 0.3.36, on AMD EPYC with 8 cores, quiet"."""
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        load = "" if self.others is None else ", quiet"
        if self.others is not None and self.others >= QUIET_CORES:
            load = f", busy: others used {self.others:.1f} of them"
        return f"measured with edgelm {self.edgelm}, {self.build}, on {self.processor} with {cores}{load}"


def joined(several: Iterable[Conditions]) -> list[Conditions]:
    """Return conditions, those that differ only in the load once: with the largest."""
    busiest: dict[Conditions, Conditions] = {}
    for one in several:
        other = busiest.setdefault(replace(one, others=None), one)
        if (one.others or 0) > (other.others or 0):
            busiest[replace(one, others=None)] = one
    return list(busiest.values())


class Measurement:
    """A measurement of this process, from now on."""

    def __init__(self) -> None:
        self._others = OtherLoad()

    def conditions(self, engine: str) -> Conditions:
        """Return the conditions since the last call, for figures of an engine ("llama" or "torch")."""
        return conditions(engine, self._others.cores())


def conditions(engine: str, others: float | None) -> Conditions:
    """Return the conditions of a measurement during which other processes kept `others` cores busy."""
    others = None if others is None else round(others, 2)
    return Conditions(__version__, engine_build(engine), processor_name(), usable_cores().physical, others)


def engine_build(engine: str) -> str:
    """Return the packages that compute, with their versions. Raises EngineError if llama.cpp is not installed."""
    if engine == "torch":
        return ", ".join(installed(PACKAGES))
    build = find_build()
    return f"{build.package} {build.version}"


def installed(packages: Iterable[str]) -> list[str]:
    """Return the packages that are there, with their versions: "torch 2.13.0". Keys of kept files have this form."""
    found = []
    for package in packages:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found
