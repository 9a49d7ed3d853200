"""The catalogue: short names of models that people run, each with its repository, size, licence and purpose.

Owns `catalog.toml` and what a misspelt name is answered with. Knows neither the network nor what is on this disk.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from edgelm.errors import ModelError
from edgelm.library.names import CatalogName, HubReference, LocalPath, StarterName, is_quantization, parse_name

FILE = "catalog.toml"
SMALLEST, LARGEST = 5 * 10**7, 10**12  # parameters
LEAST_CONTEXT = 2048
MAX_NEAR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model of the catalogue. Numbers are those of the default quantization, `nbytes` approximately."""

    family: str
    size: str
    repository: str
    quantization: str
    parameters: int
    nbytes: int
    context: int
    licence: str  # an SPDX id, or a name
    gated: bool
    architecture: str  # as llama.cpp calls it
    good_at: str
    is_default: bool  # what the family's name alone means

    @property
    def name(self) -> str:
        return f"{self.family}:{self.size}"

    def reference(self, quantization: str | None = None) -> HubReference:
        """Return where the model is: the default quantization, or another one."""
        return HubReference(self.repository, quantization or self.quantization)


def find_entry(name: CatalogName) -> Entry:
    """Return the entry that a name means. Raises ModelError that lists the family's sizes, or names near to it."""
    family = [entry for entry in entries() if entry.family == name.family]
    for entry in family:
        if entry.size == name.size or (name.size is None and entry.is_default):
            return entry
    if family:
        sizes = ", ".join(entry.name for entry in family)
        raise ModelError(f"the catalogue has no {name.family} of size {name.size}", f"there is {sizes}")
    near = near_names(str(name))
    hint = f"did you mean {' or '.join(near)}?" if near else "`edgelm pull` shows all names"
    raise ModelError(f"there is no model {name}", hint)


def near_names(text: str, more: Iterable[str] = ()) -> list[str]:
    """Return names that resemble a text, the nearest first: of the catalogue, and `more`."""
    written = text.casefold()
    known = {entry.family: entry.name for entry in entries() if entry.is_default}
    known |= {entry.name: entry.name for entry in entries()} | {name.casefold(): name for name in more}
    begins = [name for key, name in known.items() if len(written) > 2 and key.startswith(written)]
    close = [known[key] for key in difflib.get_close_matches(written, known, MAX_NEAR, cutoff=0.65)]
    return [*dict.fromkeys(close + begins)][:MAX_NEAR]


def hub_reference(text: str) -> HubReference:
    """Return what a person wants from the hub: a name of the catalogue, or a repository.

    Raises ModelError for what is no name, is not in the catalogue, or is the starter or a path of this machine.
    """
    reference = parse_name(text)
    if isinstance(reference, StarterName):
        raise ModelError("the starter comes with edgelm", "`edgelm run starter` runs it")
    if isinstance(reference, LocalPath):
        raise ModelError(f"{reference} is a path of this machine", "name a model of the catalogue, or OWNER/NAME")
    if isinstance(reference, CatalogName):
        return find_entry(reference).reference(reference.quantization)
    return reference


def entry_of(repository: str) -> Entry | None:
    """Return the entry whose files are in a repository of the hub."""
    return _by_repository().get(repository.casefold())


def name_of(repository: str, quantization: str | None) -> str | None:
    """Return the shortest catalogue name of a quantization of a repository, None where the catalogue has it not."""
    entry = entry_of(repository)
    if entry is None or quantization is None:
        return None
    return entry.name if quantization.upper() == entry.quantization else f"{entry.name}:{quantization.upper()}"


@cache
def entries() -> tuple[Entry, ...]:
    """Return all entries, in the order of the file."""
    text = files("edgelm.library").joinpath(FILE).read_text(encoding="utf-8")
    found = [entry for family, given in tomllib.loads(text).items() for entry in _family(family, given)]
    assert len({entry.name for entry in found}) == len({entry.repository for entry in found}) == len(found)
    return tuple(found)


@cache
def _by_repository() -> dict[str, Entry]:
    return {entry.repository.casefold(): entry for entry in entries()}


def _family(family: str, given: dict[str, Any]) -> list[Entry]:
    sizes, default = given.pop("sizes"), given.pop("default")
    found = [_entry(family, default, given | size) for size in sizes]
    assert sum(entry.is_default for entry in found) == 1, f"{family}: the default is one of the sizes"
    return found


def _entry(family: str, default: str, given: dict[str, Any]) -> Entry:
    billions, gigabytes = given.pop("parameters"), given.pop("gb")
    entry = Entry(
        family=family,
        parameters=round(billions * 1e9),
        nbytes=round(gigabytes * 1e9),
        is_default=given["size"] == default,
        gated=given.pop("gated", False),
        **given,
    )
    assert parse_name(entry.name) == CatalogName(family, entry.size), entry.name
    assert parse_name(str(entry.reference())) == entry.reference(), entry.name
    assert is_quantization(entry.quantization), entry.name
    assert SMALLEST < entry.parameters < LARGEST, entry.name
    assert 0.3 < entry.nbytes / entry.parameters < 4.3, f"{entry.name}: bytes for each parameter"
    assert entry.context >= LEAST_CONTEXT, entry.name
    assert all((entry.licence, entry.architecture, entry.good_at)), entry.name
    return entry
